"""Mass along a real stream, and what log n does to attention.

Notable: one real prefill gives both sides of every comparison. A recording cache keeps the
queries, keys and values that each layer was given; full attention over those keys is the truth,
attention over the cache's slots is what is judged. Queries are those of the open block: they
see sinks, slots and the block's own raw tokens, as the next decode step would. Weights and
outputs are computed densely, in float64. Layers are numbered from 0, as in `cache.mass`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from anchormass.attention import NEG_INF, global_keys
from anchormass.cache import AnchorMassCache
from anchormass.config import Config
from anchormass.errors import AnchorMassError
from anchormass.measure.outliers import compressed_until
from anchormass.model import QKV, TransformerLM
from anchormass.texts import Text

WITH, WITHOUT, TRUE = "with log n", "without", "true weights"
STATES = ("sink", "outlier", "background", "merged", "tail")


class _Recorder(AnchorMassCache):
    """A cache that also keeps what each layer was given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.given: list[list[QKV]] = [[] for _ in range(self.config.n_layers)]

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, counts: list[int]) -> Tensor:
        h = self.config.n_local
        self.given[layer].append(QKV(q[0, h:], k[0, h:], v[0, h:]))
        return super().prefill(layer, q, k, v, counts)


@dataclass(frozen=True)
class View:
    """What the open block's queries see in one layer; Hg Global heads, float64.

    `q [Hg, M, D]` at `positions [M]`; `k`, `v` `[Hg, T, D]` of all tokens; `slot_k`, `slot_v`
    `[Hg, N, D]` and `mass [N]` of the N entries that hold them: sinks, slots that are not
    empty, tail. `entry [T]`: which entry holds each token. `state`: what each entry is.
    """

    q: Tensor
    positions: Tensor
    k: Tensor
    v: Tensor
    slot_k: Tensor
    slot_v: Tensor
    mass: Tensor
    entry: Tensor
    state: list[str]


@dataclass(frozen=True)
class Filled:
    """A text after its prefill: one `View` a layer."""

    text: Text
    max_slots: int
    views: list[View]


@torch.no_grad()
def fill(model: TransformerLM, text: Text, max_slots: int, chunk_size: int) -> Filled:
    """Prefill `text` through a cache of `max_slots` slots, `chunk_size` tokens at a time.

    If the text ends with a block its last token is left out: queries need an open block.

    Raises:
        AnchorMassError: a model without Global heads; a text too short to hold one block; a
            budget or a chunk size that cannot work.
    """
    stop = compressed_until(model, text)
    if stop == len(text.pieces):
        if stop == model.config.sinks + model.config.block:
            raise AnchorMassError(
                f"the text has {stop} tokens, one block and none after it to ask: give more"
            )
        text = Text(text.ids[:, :-1], text.pieces[:-1], text.source)
    ids = text.ids
    cache = _Recorder(
        model.config.replace(max_slots=max_slots),
        batch_size=1,
        session_length=ids.shape[1],
        layout="shared-mass",
        dtype=model.dtype,
        device=model.device,
        track_positions=True,
        model=model.fingerprint(),
    )
    model.prefill(ids, cache, chunk_size)
    return Filled(text, max_slots, [_view(cache, i) for i in range(model.config.n_layers)])


def _view(cache: _Recorder, layer: int) -> View:
    q, k, v = (torch.cat(x, dim=1).double() for x in zip(*cache.given[layer], strict=True))
    length, sinks, block = cache.seen[0], cache.config.sinks, cache.config.block
    tail = length - (length - sinks) % block
    slots = cache.slots(layer)
    held = slots.mass[0] > 0
    owner = cache.owner(layer)  # a slot's number, or a code below 0
    number = held.cumsum(0) - 1 + sinks  # of the slots that are not empty
    entry = torch.arange(length)
    entry[sinks:tail] = number[owner[sinks:tail]]
    entry[tail:] = sinks + int(held.sum()) + torch.arange(length - tail)

    def entries(raw: Tensor, slot: Tensor) -> Tensor:
        return torch.cat((raw[:, :sinks], slot[0, :, held].double(), raw[:, tail:]), dim=1)

    mass = torch.cat((torch.ones(sinks), slots.mass[0, held], torch.ones(length - tail))).double()
    return View(
        q=q[:, tail:],
        positions=torch.arange(tail, length),
        k=k,
        v=v,
        slot_k=entries(k, slots.k),
        slot_v=entries(v, slots.v),
        mass=mass,
        entry=entry,
        state=_states(entry, mass, cache.outliers(layer), cache.config, tail),
    )


def _states(entry: Tensor, mass: Tensor, outlier: Tensor, config: Config, tail: int) -> list[str]:
    """An outlier is alone; a background is one subgroup without it; all else was merged."""
    n = len(mass)
    outliers = torch.zeros(n).index_add(0, entry, outlier.float())
    subgroup = (torch.arange(len(entry)) - config.sinks).div(config.subgroup, rounding_mode="floor")
    first = torch.full((n,), len(entry)).scatter_reduce(0, entry, subgroup, "amin")
    last = torch.full((n,), -1).scatter_reduce(0, entry, subgroup, "amax")
    state = np.full(n, "merged", dtype=object)
    state[(outliers == 0).numpy() & (first == last).numpy()] = "background"
    state[(outliers == 1).numpy() & (mass == 1).numpy()] = "outlier"
    state[: config.sinks], state[int(entry[tail]) :] = "sink", "tail"
    return [str(s) for s in state]


def stream(filled: Filled) -> pd.DataFrame:
    """One row per layer and entry: state, mass, the positions it spans and the text it holds."""
    frames = []
    for layer, view in enumerate(filled.views):
        tokens = pd.DataFrame(
            {
                "entry": view.entry.numpy(),
                "piece": filled.text.pieces,
                "position": range(len(view.entry)),
            }
        )
        held = tokens.groupby("entry").agg(
            first=("position", "min"), last=("position", "max"), text=("piece", "".join)
        )
        frame = held.assign(layer=layer, state=view.state, mass=view.mass.numpy())
        frames.append(frame.reset_index())
    return pd.concat(frames, ignore_index=True)


# ---------------------------------------------------------------- weights


def weights(view: View) -> dict[str, Tensor]:
    """Attention weights `[Hg, M, N]` of each entry: with log n, without, and the true ones.

    The true weight of an entry is what full attention gives to all the tokens it holds.
    """
    scale = view.q.shape[-1] ** 0.5
    token = torch.arange(len(view.entry))
    full = (view.q @ view.k.mT) / scale
    full = full.masked_fill(token > view.positions[:, None], NEG_INF).softmax(-1)
    true = torch.zeros(*full.shape[:2], len(view.mass), dtype=full.dtype)
    true.index_add_(2, view.entry, full)

    logits = (view.q @ view.slot_k.mT) / scale
    last = len(view.mass) - len(view.positions)  # the open block's own tokens come last
    own = torch.arange(len(view.mass)) - last
    hidden = own > (view.positions - view.positions[0])[:, None]
    logits = logits.masked_fill(hidden, NEG_INF)
    return {
        WITH: (logits + view.mass.log()).softmax(-1),
        WITHOUT: logits.softmax(-1),
        TRUE: true,
    }


def query_weights(filled: Filled, layer: int, head: int, query: int) -> pd.DataFrame:
    """`stream` of one layer with the three weights that one query gives each entry.

    `head` counts the Global heads, `query` the open block's tokens, both from 0 and the last
    one where there are fewer.
    """
    view = filled.views[layer]
    head, query = min(head, view.q.shape[0] - 1), min(query, view.q.shape[1] - 1)
    rows = stream(Filled(filled.text, filled.max_slots, [view])).assign(layer=layer)
    for name, weight in weights(view).items():
        rows[name] = weight[head, query].numpy()
    position = int(view.positions[query])
    rows = rows.assign(head=head, query=position, query_piece=filled.text.pieces[position])
    return rows[rows["first"] <= position].reset_index(drop=True)


def mass_bins(mass: Tensor) -> Tensor:
    """1 -> 0, 2 … 8 -> 3, and from there the power of two at or above: 16 -> 4, 17 -> 5, …"""
    return torch.where(mass > 1, mass.log2().ceil().clamp_min(3), 0).long()


def weight_ratios(fills: Sequence[Filled]) -> pd.DataFrame:
    """What slots get, as a multiple of their true weight, by the mass they have.

    For each query and head the weights of all slots of a mass range are summed, and the sum
    divided by the true one. Columns: layer, masses ("1", "2–8", "9–16", …), mass (their mean),
    variant, low, median, high (quartiles over queries, heads and texts), queries.
    """
    found: dict[tuple[int, int, str], list[Tensor]] = {}
    masses: dict[tuple[int, int], list[Tensor]] = {}
    for filled in fills:
        for layer, view in enumerate(filled.views):
            slot = torch.tensor([s not in ("sink", "tail") for s in view.state])
            which = mass_bins(view.mass).masked_fill(~slot, -1)
            given = weights(view)
            for b in which[slot].unique().tolist():
                inside = which == b
                true = given[TRUE][..., inside].sum(-1)
                masses.setdefault((layer, b), []).append(view.mass[inside])
                for name in (WITH, WITHOUT):
                    ratio = given[name][..., inside].sum(-1) / true
                    found.setdefault((layer, b, name), []).append(ratio.flatten())
    rows = []
    for (layer, b, name), ratios in sorted(found.items()):
        pooled = torch.cat(ratios).numpy()
        low, middle, high = np.quantile(pooled, [0.25, 0.5, 0.75])
        label = {0: "1", 3: "2–8"}.get(b, f"{2 ** (b - 1) + 1}–{2**b}")
        mean = float(torch.cat(masses[layer, b]).mean())
        rows.append((layer, label, mean, name, low, middle, high, len(pooled)))
    columns = ["layer", "masses", "mass", "variant", "low", "median", "high", "queries"]
    return pd.DataFrame(rows, columns=columns)


# ---------------------------------------------------------------- outputs


def output_errors(view: View) -> dict[str, Tensor]:
    """‖o − o_full‖ / ‖o_full‖ of each query, all Global heads together: `[M]` per variant.

    With "true weights" each entry gets exactly what its tokens deserve, which no cache can know:
    what is left then comes from averaging values, not from weighing slots.
    """
    token = torch.arange(len(view.entry))
    logits = (view.q @ view.k.mT) / view.q.shape[-1] ** 0.5
    full = logits.masked_fill(token > view.positions[:, None], NEG_INF).softmax(-1) @ view.v
    norm = full.transpose(0, 1).flatten(1).norm(dim=-1)
    return {
        name: (weight @ view.slot_v - full).transpose(0, 1).flatten(1).norm(dim=-1) / norm
        for name, weight in weights(view).items()
    }


def _error_rows(fills: Sequence[Filled]) -> pd.DataFrame:
    """Median and quartiles of `output_errors` over the queries of several texts, per layer."""
    rows = []
    for layer in range(len(fills[0].views)):
        views = [filled.views[layer] for filled in fills]
        per_entry = float(np.mean([len(view.entry) / len(view.mass) for view in views]))
        errors = [output_errors(view) for view in views]
        for name in (WITHOUT, WITH, TRUE):
            error = torch.cat([e[name] for e in errors]).numpy()
            low, middle, high = np.quantile(error, [0.25, 0.5, 0.75])
            rows.append((layer, name, per_entry, low, middle, high, len(error)))
    columns = ["layer", "variant", "tokens_per_entry", "low", "median", "high", "queries"]
    return pd.DataFrame(rows, columns=columns)


def errors_by_context(
    model: TransformerLM, passages: Sequence[Text], contexts: Iterable[int]
) -> pd.DataFrame:
    """Output error of stage 1 alone, against the tokens that came before the same queries.

    Every context ends at the same token; one longer than the text is left out. In one chunk,
    with room for all slots: without stage 2 chunks make no difference.

    Raises:
        AnchorMassError: every text is shorter than every context.
    """
    frames = []
    for context in contexts:
        fills = [
            fill(model, _last(text, context), max(context, model.config.max_slots), context)
            for text in passages
            if len(text.pieces) >= context
        ]
        if fills:
            frames.append(_error_rows(fills).assign(context=context))
    if not frames:
        raise AnchorMassError(f"no text is as long as the shortest of contexts={list(contexts)}")
    return pd.concat(frames, ignore_index=True)


def errors_by_budget(fills: Mapping[int, Sequence[Filled]]) -> pd.DataFrame:
    """Output error after both stages, against the slots that were allowed: the keys of `fills`."""
    frames = [_error_rows(filled).assign(budget=budget) for budget, filled in fills.items()]
    return pd.concat(frames, ignore_index=True)


def _last(text: Text, n: int) -> Text:
    return Text(text.ids[:, -n:], text.pieces[-n:], text.source)


def identical_tokens(config: Config, spreads: Iterable[float], seed: int) -> pd.DataFrame:
    """Output error where the tokens of a subgroup differ by a chosen amount, 0 included.

    Random keys and values, the same for all tokens of a subgroup, plus noise of standard
    deviation `spread`; the equation's own keys and bias (`attention.global_keys`), float64.
    Columns: spread, variant, median error over the open block's queries, fired.
    """
    heads, d, size = config.n_global, config.head_dim, config.subgroup
    blocks, tail = 4, config.block - size
    body = blocks * config.block
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(1, heads, *shape, d, generator=generator, dtype=torch.float64)

    def same(n: int) -> Tensor:
        return random(n // size).repeat_interleave(size, dim=2)

    q = random(tail)
    sinks_k, sinks_v, tail_k, tail_v = (random(n) for n in (config.sinks,) * 2 + (tail,) * 2)
    body_k, body_v, noise_k, noise_v = same(body), same(body), random(body), random(body)
    rows = []
    for spread in spreads:
        k = torch.cat((sinks_k, body_k + spread * noise_k, tail_k), dim=2)
        v = torch.cat((sinks_v, body_v + spread * noise_v, tail_v), dim=2)
        k_all, v_all, bias = global_keys(k, v, config)
        seen = bias[:, :, -tail:]
        causal = torch.ones(tail, k.shape[2], dtype=torch.bool).tril(k.shape[2] - tail)
        full = _attention(q, k, v, causal.double().log())
        hidden = seen == NEG_INF
        for name, used in ((WITH, seen), (WITHOUT, torch.zeros_like(seen))):
            out = _attention(q, k_all, v_all, used.masked_fill(hidden, NEG_INF))
            error = (out - full).norm(dim=(1, 3)) / full.norm(dim=(1, 3))
            fired = float((v_all[0, 0, k.shape[2] :: 2] != 0).any(-1).double().mean())
            rows.append((float(spread), name, float(error.median()), fired))
    return pd.DataFrame(rows, columns=["spread", "variant", "median", "fired"])


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return ((q @ k.mT) / q.shape[-1] ** 0.5 + bias).softmax(-1) @ v
