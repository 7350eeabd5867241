"""What stage 1 does to real text: one row a token, and what follows from the rows.

Notable: the candidate of a subgroup does not depend on the thresholds, so the model runs once
and every threshold is a comparison of two columns. The random baseline goes through the same
`compress_subgroups` as the model's values. Layers are numbered from 0, as in `cache.mass`.
"""

from __future__ import annotations

import functools
import itertools
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
import torch
from scipy.stats import binomtest
from torch import Tensor

from anchormass.compress import compress_subgroups
from anchormass.errors import AnchorMassError
from anchormass.model import TransformerLM
from anchormass.texts import Text

ARTICLE_HEADS, ARTICLE_DIM = 6, 64  # Global heads and head size of the article's model
KINDS = ("kanji", "hiragana", "katakana", "mixed", "latin", "digit", "punctuation", "line break")
CHOICES = ("no outlier", "any token", "largest norm", "least similar", "best possible")


def tokens(model: TransformerLM, passages: Sequence[Text]) -> pd.DataFrame:
    """Every token of every layer, with what stage 1 measures of it.

    Columns: document, layer, source ("layer 0", …), position, piece, part ("sink",
    "compressed", "tail"), and for compressed tokens subgroup (counted from the text's start),
    similarity, relative_norm, candidate (the least similar of its subgroup), and the two
    numbers that the thresholds are held against, least and largest.

    Raises:
        AnchorMassError: a model without Global heads, or a text too short to hold one block.
    """
    frames = []
    for document, text in enumerate(passages):
        stop = compressed_until(model, text)
        start = model.config.sinks
        part = np.repeat(
            ["sink", "compressed", "tail"], [start, stop - start, len(text.pieces) - stop]
        )
        for layer, (k, v) in enumerate(_subgroups(model, text)):
            frame = pd.DataFrame({"position": range(len(part)), "piece": text.pieces, "part": part})
            measured = _measure(k, v)
            measured.index = pd.RangeIndex(start, stop)
            frames.append(frame.join(measured).assign(document=document, layer=layer))
    found = pd.concat(frames, ignore_index=True)
    found["source"] = "layer " + found.layer.astype(str)
    found["candidate"] = found.candidate.eq(True)
    return found


def compressed_until(model: TransformerLM, text: Text) -> int:
    """Position after the last complete block.

    Raises:
        AnchorMassError: a model without Global heads, or a text too short to hold one block.
    """
    config = model.config
    if not config.n_global:
        raise AnchorMassError(
            f"a {config.attention} model has no Global heads: use an anchormass model"
        )
    blocks = (len(text.pieces) - config.sinks) // config.block
    if blocks < 1:
        raise AnchorMassError(
            f"the text has {len(text.pieces)} tokens, none of them compressed: give at least "
            f"{config.sinks + config.block} ({config.sinks} sinks and a block of {config.block})"
        )
    return config.sinks + blocks * config.block


def _subgroups(model: TransformerLM, text: Text) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the Global heads in each layer, `[G, H, 8, D]`."""
    start, stop = model.config.sinks, compressed_until(model, text)

    def cut(x: Tensor) -> Tensor:
        kept = x[0, model.config.n_local :, start:stop]
        return kept.unflatten(1, (-1, model.config.subgroup)).transpose(0, 1)

    return [(cut(layer.k), cut(layer.v)) for layer in model.activations(text.ids)]


def _measure(k: Tensor, v: Tensor) -> pd.DataFrame:
    """`[G, H, 8, D]` -> one row a token."""
    groups, _, size, _ = v.shape
    out = compress_subgroups(k, v, torch.ones(groups, size, dtype=v.dtype))
    place = torch.arange(size).expand(groups, size)

    def each(x: Tensor) -> np.ndarray:
        return x.expand(groups, size).flatten().numpy()

    return pd.DataFrame(
        {
            "subgroup": each(torch.arange(groups)[:, None]),
            "similarity": each(out.similarity),
            "relative_norm": each(out.relative_norm),
            "candidate": each(place == out.index[:, None]),
            "least": each(out.similarity.amin(-1, keepdim=True)),
            "largest": each(out.relative_norm.amax(-1, keepdim=True)),
        }
    )


def random_tokens(heads: int, dim: int, subgroups: int, seed: int) -> pd.DataFrame:
    """Rows as `tokens` gives them for values that are independent random directions.

    Eight orthogonal vectors of equal length have cosine 1/√8 to their mean; random directions
    in many dimensions are nearly that.
    """
    v = _random_values(heads, dim, subgroups, seed)
    found = _measure(v, v)
    return found.assign(
        document=0,
        layer=-1,
        source=f"random, {heads} heads × {dim}",
        position=range(len(found)),
        piece="",
        part="compressed",
    )


def _random_values(heads: int, dim: int, subgroups: int, seed: int, size: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(subgroups, heads, size, dim, generator=generator)


def decide(tokens: pd.DataFrame, cos_threshold: float, norm_threshold: float) -> pd.DataFrame:
    """Add `fired`, the reason for it, and each token's `state`: what stage 1 makes of it."""
    by_cos, by_norm = tokens.least < cos_threshold, tokens.largest > norm_threshold
    fired = by_cos | by_norm
    reason = np.select([by_cos & by_norm, by_cos, by_norm], ["both", "cosine", "norm"], "none")
    state = tokens.part.where(tokens.part != "compressed", "background")
    state = state.mask(fired & tokens.candidate, "outlier")
    return tokens.assign(fired=fired, reason=reason, state=state)


def groups(tokens: pd.DataFrame) -> pd.DataFrame:
    """One row a subgroup: its candidate, and `text`, its eight tokens."""
    inside = tokens[tokens.part == "compressed"]
    key = ["document", "layer", "subgroup"]
    text = inside.groupby(key, sort=False).piece.agg("".join).rename("text")
    return inside[inside.candidate].join(text, on=key).reset_index(drop=True)


def firing(
    groups: pd.DataFrame, cos_thresholds: Iterable[float], norm_threshold: float
) -> pd.DataFrame:
    """Share of subgroups that fire, per source and cosine threshold."""
    rows = []
    for source, part in groups.groupby("source", sort=False):
        least, by_norm = part.least.to_numpy(), (part.largest > norm_threshold).to_numpy()
        for threshold in cos_thresholds:
            rate = float(((least < threshold) | by_norm).mean())
            rows.append((source, float(threshold), norm_threshold, rate, len(part)))
    columns = ["source", "cos_threshold", "norm_threshold", "rate", "subgroups"]
    return pd.DataFrame(rows, columns=columns)


def selecting_range(groups: pd.DataFrame, most: float = 0.95, fewest: float = 0.05) -> pd.DataFrame:
    """Between which cosine thresholds a source selects: there `fewest` … `most` would fire."""
    least = groups.groupby("source", sort=False).least
    return pd.DataFrame(
        {"low": least.quantile(fewest), "middle": least.median(), "high": least.quantile(most)}
    ).reset_index()


def histogram(tokens: pd.DataFrame, bins: int = 60) -> pd.DataFrame:
    """Similarities in equal bins, per source: of all tokens, and of each subgroup's least."""
    inside = tokens[tokens.part == "compressed"]
    edges = np.linspace(min(float(inside.similarity.min()), 0.0), 1.0, bins + 1)
    middle = (edges[1:] + edges[:-1]) / 2
    rows = []
    for source, part in inside.groupby("source", sort=False):
        for which, chosen in (("all tokens", part), ("least of eight", part[part.candidate])):
            share = np.histogram(chosen.similarity.clip(upper=1.0), edges)[0] / len(chosen)
            rows.append(
                pd.DataFrame(
                    {
                        "source": source,
                        "which": which,
                        "similarity": middle,
                        "share": share,
                        "median": float(chosen.similarity.median()),
                    }
                )
            )
    return pd.concat(rows, ignore_index=True)


# ---------------------------------------------------------------- which tokens


@functools.cache
def kind(piece: str) -> str:
    """What a token is written in: one of `KINDS`, or "other" (bytes, blanks, controls)."""
    if piece == "\n":
        return "line break"
    if (piece.startswith("<0x") or piece.startswith("<|")) and piece.endswith(">"):
        return "other"
    found = {_script(c) for c in piece if not c.isspace()}
    if len(found) == 1:
        return found.pop()
    return "mixed" if found else "other"


def _script(character: str) -> str:
    if character.isdigit():
        return "digit"
    name = unicodedata.name(character, "")
    for start, script in (
        ("HIRAGANA", "hiragana"),
        ("KATAKANA", "katakana"),
        ("CJK UNIFIED", "kanji"),
        ("IDEOGRAPHIC ITERATION", "kanji"),
        ("LATIN", "latin"),
        ("FULLWIDTH LATIN", "latin"),
    ):
        if name.startswith(start):
            return script
    return "punctuation" if unicodedata.category(character)[0] in "PS" else "other"


def kinds(decided: pd.DataFrame, at_least: int = 20) -> pd.DataFrame:
    """Share of each kind of token that became an outlier, per layer, with a 95 % interval.

    Kinds with fewer than `at_least` tokens in the layer are left out.
    """
    inside = decided[decided.part == "compressed"]
    inside = inside.assign(kind=inside.piece.map(kind))
    rows = []
    for (layer, name), part in inside.groupby(["layer", "kind"]):
        if name not in KINDS or len(part) < at_least:
            continue
        outliers = int((part.state == "outlier").sum())
        interval = binomtest(outliers, len(part)).proportion_ci(method="wilson")
        rows.append(
            (layer, name, len(part), outliers, outliers / len(part), interval.low, interval.high)
        )
    columns = ["layer", "kind", "tokens", "outliers", "share", "low", "high"]
    return pd.DataFrame(rows, columns=columns)


# ---------------------------------------------------------------- why


def _values(
    model: TransformerLM, passages: Sequence[Text], random_groups: int, seed: int
) -> dict[str, Tensor]:
    """Values `[G, H, 8, D]` by source: each layer's, and random ones of the article's shape."""
    by_passage = [_subgroups(model, text) for text in passages]
    found = {
        f"layer {i}": torch.cat([layers[i][1] for layers in by_passage])
        for i in range(model.config.n_layers)
    }
    random = _random_values(ARTICLE_HEADS, ARTICLE_DIM, random_groups, seed, model.config.subgroup)
    return found | {f"random, {ARTICLE_HEADS} heads × {ARTICLE_DIM}": random}


def head_spread(
    model: TransformerLM, passages: Sequence[Text], seed: int, random_groups: int = 512
) -> pd.DataFrame:
    """How the mean over heads narrows similarities: averages over all sets of 1, 2, … heads.

    Columns: source, heads, spread (standard deviation over tokens), independent (what it would
    be if heads were independent: that of one head / √heads), least (mean of the subgroups'
    least similarity).
    """
    rows = []
    for source, v in _values(model, passages, random_groups, seed).items():
        ones = torch.ones(v.shape[0], v.shape[2], dtype=v.dtype)
        single = torch.stack(
            [compress_subgroups(one, one, ones).similarity for one in v.split(1, dim=1)]
        )  # [H, G, 8]
        n_heads = len(single)
        alone = 0.0
        for heads in range(1, n_heads + 1):
            means = [single[list(s)].mean(0) for s in itertools.combinations(range(n_heads), heads)]
            spread = float(np.mean([float(m.std()) for m in means]))
            alone = alone or spread
            least = float(np.mean([float(m.amin(-1).mean()) for m in means]))
            rows.append((source, heads, spread, alone / heads**0.5, least))
    return pd.DataFrame(rows, columns=["source", "heads", "spread", "independent", "least"])


def left_over(v: Tensor) -> dict[str, Tensor]:
    """How much values `[G, H, 8, D]` differ from their slot, by which token is split off.

    The sum of squared distances to the background's mean, as a share of that with no outlier
    split off: `[G]` for each of `CHOICES`. "any token" is the mean over all eight.
    """
    size = v.shape[2]
    wide = v.double()
    total = wide.sum(2, keepdim=True)
    square = wide.square().sum(-1)  # [G, H, 8]
    nothing = (square.sum(-1) - total.square().sum(-1)[..., 0] / size).sum(1)  # [G]
    rest = square.sum(-1, keepdim=True) - square
    without = (rest - (total - wide).square().sum(-1) / (size - 1)).sum(1)  # [G, 8]
    ones = torch.ones(v.shape[0], size, dtype=v.dtype)
    measured = compress_subgroups(v, v, ones)
    picked = {
        "no outlier": nothing,
        "any token": without.mean(-1),
        "largest norm": _at(without, measured.relative_norm.argmax(-1)),
        "least similar": _at(without, measured.index),
        "best possible": without.amin(-1),
    }
    return {choice: picked[choice] / nothing for choice in CHOICES}


def _at(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index[:, None])[:, 0]


def choices(
    model: TransformerLM, passages: Sequence[Text], seed: int, random_groups: int = 512
) -> pd.DataFrame:
    """`left_over` per source and choice: median, quartiles (low, high) over subgroups."""
    rows = []
    for source, v in _values(model, passages, random_groups, seed).items():
        for choice, share in left_over(v).items():
            low, middle, high = np.nanquantile(share.numpy(), [0.25, 0.5, 0.75])
            rows.append((source, choice, low, middle, high, len(share)))
    return pd.DataFrame(rows, columns=["source", "choice", "low", "median", "high", "subgroups"])
