"""What a cache holds and what it costs: bytes by context, what each head sees, and as what.

Notable: bytes are measured on real caches of the full-size models, although a full prefill would
take minutes. One layer takes the tokens in, without the questions of most of them (attention
leaves no bytes behind), and is copied to the other layers. Standard's tensors live on torch's
`meta` device: shapes and types, no contents, for 10.5 GiB would not fit everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from anchormass.attention import NEG_INF, compress_body, global_keys, visible_local
from anchormass.cache import Cache, make_cache
from anchormass.config import Config, preset
from anchormass.errors import AnchorMassError
from anchormass.measure.merging import STATES, History
from anchormass.memory import memory_formula
from anchormass.model import TransformerLM
from anchormass.paths import DATA
from anchormass.stream import AnchorMassLayer
from anchormass.texts import Text

ARTICLE = DATA / "article" / "cost.csv"
MIB = 2**20
CHUNK = 8192  # tokens taken in at once: how often stage 2 runs does not change the bytes
# Standard has one layout; its name in the tables.
PLAIN = "plain"
KINDS = ("standard", PLAIN), ("anchormass", "shared-mass"), ("anchormass", "article")


# ---------------------------------------------------------------- bytes by context


def sizes(contexts: Sequence[int], measured: Iterable[int], seed: int) -> pd.DataFrame:
    """Cache bytes of both full-size models in bfloat16: formula, measured, the article's.

    Columns: kind ("formula", "measured", "article"), model, layout, context, mib.

    Args:
        contexts: in tokens, of the formula's lines.
        measured: in tokens, where real caches are filled and their tensors counted.
        seed: of the random keys and values they are filled with.
    """
    frames = [article_sizes()]
    for model, layout in KINDS:
        config = preset(f"{model}-150m")
        named = "shared-mass" if layout == PLAIN else layout
        for kind, table in (
            ("formula", {n: memory_formula(config, n, named) for n in contexts}),
            ("measured", measured_bytes(config, measured, named, seed=seed)),
        ):
            frames.append(
                pd.DataFrame(
                    {
                        "kind": kind,
                        "model": model,
                        "layout": layout,
                        "context": list(table),
                        "mib": [size / MIB for size in table.values()],
                    }
                )
            )
    return pd.concat(frames, ignore_index=True)


def mismatch(table: pd.DataFrame) -> float:
    """Largest relative difference between measured and formula in a table of `sizes`."""
    by_kind = table.pivot_table("mib", ["model", "layout", "context"], "kind").dropna(
        subset=["formula", "measured"]
    )
    return float((by_kind["measured"] / by_kind["formula"] - 1).abs().max())


def article_sizes() -> pd.DataFrame:
    """The article's KV-cache sizes (its table 1), in the columns of `sizes`."""
    table = pd.read_csv(ARTICLE).query("quantity == 'kv_cache'")
    return pd.DataFrame(
        {
            "kind": "article",
            "model": table["model"],
            "layout": np.where(table["model"] == "standard", PLAIN, "article"),
            "context": table["context"].astype(int),
            "mib": table["value"],
        }
    )


def measured_bytes(
    config: Config,
    contexts: Iterable[int],
    layout: str = "shared-mass",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> dict[int, int]:
    """Bytes of the tensors that a real cache holds after so many tokens, by context.

    Raises:
        AnchorMassError: unknown layout, or a context below 1.
    """
    standard = config.attention == "standard"
    cache = make_cache(
        config,
        batch_size=1,
        session_length=1,
        layout=layout,
        dtype=dtype,
        device=torch.device("meta" if standard else "cpu"),
        track_positions=False,
    )
    first = cache.layers[0]
    if not standard:
        first = _Absorbing(config, 1, layout, dtype, cache.device, track_positions=False)
        cache.layers[0] = first
    generator = torch.Generator().manual_seed(seed)
    found: dict[int, int] = {}
    for context in sorted(set(contexts)):
        if context < 1:
            raise AnchorMassError(f"context={context}: must be at least 1")
        _fill(cache, context, generator)
        for layer in cache.layers[1:]:
            layer.restore({n: t.clone() for n, t in first.tensors().items()}, first.state())
        found[context] = sum(t.numel() * t.element_size() for t in cache.tensors().values())
    return found


class _Absorbing(AnchorMassLayer):
    """A layer that can take in whole blocks without being asked anything about them."""

    def absorb(self, k: Tensor, v: Tensor) -> None:
        """Stages 1 and 2 on Global keys and values `[1, Hg, blocks · C, D]`."""
        own, groups = compress_body(k, v, self.config)
        self._append(slice(0, 1), own, groups)


def _fill(cache: Cache, context: int, generator: torch.Generator) -> None:
    """Bring the first layer to `context` tokens, and release what it does not need.

    The sinks, the end of an open block and the last tokens go through `prefill`, so that
    sinks, Local window and tail are what they always are; whole blocks between are absorbed.
    """
    config, layer, seen = cache.config, cache.layers[0], cache.seen[0]

    def random(what: int, heads: int, n: int) -> Tensor:
        shape = (what, 1, heads, n, config.head_dim)
        if cache.device.type == "meta":
            return torch.empty(shape, dtype=cache.dtype, device=cache.device)
        return torch.randn(shape, generator=generator).to(cache.dtype)

    def prefill(n: int) -> None:
        nonlocal seen
        layer.prefill(slice(0, 1), *random(3, config.n_heads, n), seen)
        seen += n

    if isinstance(layer, _Absorbing):
        start = config.sinks + -(-max(seen - config.sinks, 0) // config.block) * config.block
        blocks = (context - config.block - start) // config.block
        if blocks > 0:
            if start > seen:
                prefill(start - seen)
            left = blocks * config.block
            k, v = random(2, config.n_global, min(CHUNK, left))
            while left:  # the same tokens again and again: they do not change the bytes
                n = min(CHUNK, left)
                layer.absorb(k[:, :, :n], v[:, :, :n])
                seen, left = seen + n, left - n
    prefill(context - seen)
    cache.seen = [context]
    layer.trim(cache.seen)


# ---------------------------------------------------------------- the head split


def visibility(model: TransformerLM, text: Text, layer: int) -> pd.DataFrame:
    """As what each query sees each token, for a Local and for a Global head.

    From the equation's own keys and bias (`attention.global_keys`). Columns: head, query, token
    (positions), state ("local", "sink", "tail", "outlier", "background"), entry (what is seen:
    tokens that share a number are one slot), mass (of that entry), query_piece, piece. One row
    for every pair that is seen.

    Raises:
        AnchorMassError: a Standard model.
    """
    config = model.config
    if config.attention != "anchormass":
        raise AnchorMassError("visibility() of a Standard model: every head sees every token")
    length = text.ids.shape[1]
    given = model.activations(text.ids)[layer]
    k, v = given.k[:, config.n_local :], given.v[:, config.n_local :]
    local = visible_local(length, config, k.device)
    bias = global_keys(k, v, config)[2][0, 0]  # [T, T + N]
    slot, alone = _slots_of_tokens(k, v, config)
    token = torch.arange(length)
    behind = torch.where(slot < 0, token, length + slot)  # what may stand for each token

    seen = bias > NEG_INF
    raw = seen[:, :length]
    through = seen[:, behind] & (slot >= 0)
    frames = []
    for head, mask, state, entry in (
        ("Local", local, np.full(length, "local"), token),
        ("Global", raw, np.where(token < config.sinks, "sink", "tail"), token),
        ("Global", through, np.where(alone, "outlier", "background"), behind),
    ):
        query, column = mask.nonzero(as_tuple=True)
        frames.append(
            pd.DataFrame(
                {
                    "head": head,
                    "query": query,
                    "token": column,
                    "state": state[column],
                    "entry": entry[column],
                    "mass": 1.0 if head == "Local" else bias[query, entry[column]].exp().round(),
                    "query_piece": [text.pieces[i] for i in query.tolist()],
                    "piece": [text.pieces[i] for i in column.tolist()],
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def _slots_of_tokens(k: Tensor, v: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """Which slot of the stream stands for each token (-1: none), and whether it is there alone."""
    length = k.shape[2]
    body = slice(
        config.sinks,
        config.sinks + max(length - config.sinks, 0) // config.block * config.block,
    )
    slot = torch.full((length,), -1)
    alone = torch.zeros(length, dtype=torch.bool)
    _, groups = compress_body(k[:, :, body], v[:, :, body], config)
    index = groups.index[0].masked_fill(~groups.fired[0], -1)
    apart = index[:, None] == torch.arange(config.subgroup)  # [G, 8]
    alone[body] = apart.flatten()
    slot[body] = (2 * torch.arange(len(index))[:, None] + (~apart).long()).flatten()
    return slot, alone


# ---------------------------------------------------------------- seen from a distance


def by_distance(history: History, layers: Iterable[int], block: int) -> pd.DataFrame:
    """As what a token is seen by the Global heads, by its distance from the query.

    `history` must end with a complete block. While the next one is open nothing in the cache
    changes, so what its `block` queries see follows from that one snapshot and their own tokens.
    Shares are means over those queries and over `layers`.

    Columns: start, stop (distances of the class, `stop` excluded), state (of
    `merging.STATES`), share, pairs (queries × tokens × layers behind it).

    Raises:
        AnchorMassError: the history ends inside a block.
    """
    length = int(history.seen[-1])
    if (length - history.sinks) % block or length <= history.sinks:
        raise AnchorMassError(
            f"the history ends at token {length}: it must end with a block of {block} tokens, "
            f"at {history.sinks} + a multiple of {block}"
        )
    counts = np.zeros((len(STATES), length + block))
    number = 0
    for layer in layers:
        states, number = history.states(layer)[-1], number + 1
        for query in range(length, length + block):
            counts[states, query - np.arange(length)] += 1
            counts[STATES.index("tail"), 1 : query - length + 1] += 1
    if not number:
        raise AnchorMassError("layers is empty: name at least one")
    edges = _distance_classes(length + block)
    frames = []
    for start, stop in itertools.pairwise(edges):
        inside = counts[:, start:stop].sum(1)
        frames.append(
            pd.DataFrame(
                {
                    "start": start,
                    "stop": stop,
                    "state": STATES,
                    "share": inside / inside.sum(),
                    "pairs": int(inside.sum()),
                }
            )
        )
    table = pd.concat(frames, ignore_index=True)
    return table[table.groupby("state")["share"].transform("max") > 0].reset_index(drop=True)


def beyond(table: pd.DataFrame, window: int) -> pd.Series:
    """Share of each state among the tokens at least `window` back, from a `by_distance` table."""
    far = table[table.start >= window]
    weight = (far.share * far.pairs).groupby(far.state).sum()
    return weight / weight.sum()


def _distance_classes(end: int) -> list[int]:
    """1, 2, 4, … 16, then four classes to an octave; the last one ends at `end`."""
    steps = [2**i for i in range(5)] + [round(16 * 2 ** (i / 4)) for i in range(1, 80)]
    return [*(step for step in steps if step < end), end]


# ---------------------------------------------------------------- the calculator


def calculator(
    layers: int,
    heads: int,
    head_size: int,
    budget: int,
    dtype: str,
    layout: str,
    context: int,
) -> pd.DataFrame:
    """Cache sizes of any shape by the formula, batch of one.

    Columns: kind ("line" at powers of two, 16 … 1M tokens; "chosen" at `context`; "smaller from",
    the context from which AnchorMass needs less), model, context, mib.

    Raises:
        AnchorMassError: a shape or budget that no model can have, an unknown dtype or layout.
    """
    if dtype not in ("bfloat16", "float16", "float32"):
        raise AnchorMassError(f"dtype={dtype!r}: choose bfloat16, float16 or float32")
    configs = {
        model: preset(f"{model}-150m").replace(
            n_layers=layers, n_heads=heads, width=heads * head_size, max_slots=budget
        )
        for model in ("standard", "anchormass")
    }

    def size(model: str, tokens: int) -> int:
        return memory_formula(configs[model], tokens, layout, getattr(torch, dtype))

    # Slots take a quarter of the tokens' room: a few blocks on, AnchorMass has won for good.
    few = range(1, 64 * configs["anchormass"].block)
    start = 1 + max(n for n in few if size("anchormass", n) >= size("standard", n))
    points = [("line", 2**i) for i in range(4, 21)]
    points += [("chosen", context), ("smaller from", start)]
    return pd.DataFrame(
        [
            (kind, model, tokens, size(model, tokens) / MIB)
            for model in configs
            for kind, tokens in points
        ],
        columns=["kind", "model", "context", "mib"],
    )
