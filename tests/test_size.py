"""Notebook 00: bytes against the article and a real prefill; what is seen against plain loops."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch

from anchormass import AnchorMassError, TransformerLM, preset, texts
from anchormass.cache import DROPPED, SINK, TAIL, AnchorMassCache
from anchormass.compress import compress_subgroups
from anchormass.measure import merging, size
from anchormass.memory import memory_formula
from anchormass.viz import size as viz

MIB = 2**20
MODEL = TransformerLM(preset("anchormass-smoke")).eval()
CONFIG = MODEL.config


# ---------------------------------------------------------------- bytes


def by_hand(context: int, layout: str) -> int:
    """Bytes of the full-size cache, counted from the article's text with its own numbers."""
    key, value, masses = {"shared-mass": (2, 2, 1), "article": (2, 4, 6)}[layout]
    blocks, tail = divmod(max(context - 16, 0), 64)
    rows = min(context, 16) + min(16 * blocks, 8192) + tail
    heads = 6 * 64 * (key + value)
    return 14 * (min(context, 64) * heads + rows * (heads + 4 * masses))


@pytest.mark.parametrize(("layout", "limit"), [("shared-mass", 171.07), ("article", 258.58)])
def test_a_full_size_cache_has_the_articles_bytes(layout: str, limit: float) -> None:
    contexts = [1, 16, 17, 79, 80, 81, 1000, 4096, 2**16]
    measured = size.measured_bytes(preset("anchormass-150m"), contexts, layout)
    assert measured == {n: by_hand(n, layout) for n in contexts}
    assert measured[2**16] / MIB == pytest.approx(limit, abs=0.005)


def test_standard_holds_every_token() -> None:
    measured = size.measured_bytes(preset("standard-150m"), [1, 777, 2**18])
    assert measured == {n: 14 * 2 * 768 * n * 2 for n in (1, 777, 2**18)}
    assert measured[2**18] == 10_752 * MIB  # the article's, to the digit


def test_measured_is_what_a_real_prefill_leaves() -> None:
    contexts = [5, 16, 80, 300, 700]
    measured = size.measured_bytes(CONFIG, contexts, dtype=torch.float32)
    for n in contexts:
        cache = MODEL.new_cache(1, n)
        MODEL.prefill(torch.arange(n)[None], cache, chunk_size=100)
        cache.trim()
        assert measured[n] == sum(t.numel() * t.element_size() for t in cache.tensors().values())
    with pytest.raises(AnchorMassError, match="context=0"):
        size.measured_bytes(CONFIG, [0])


def test_sizes_put_the_article_beside_ours() -> None:
    table = size.sizes([1024, 4096], [1024], seed=0)
    keyed = table.set_index(["kind", "model", "layout", "context"]).mib
    assert keyed["formula", "standard", size.PLAIN, 4096] == 168
    assert keyed["formula", "anchormass", "article", 4096] == pytest.approx(35.29, abs=0.005)
    assert keyed["formula", "anchormass", "shared-mass", 4096] == pytest.approx(23.35, abs=0.005)
    assert keyed["article", "anchormass", "article", 4096] == 36
    assert keyed["article", "standard", size.PLAIN, 2**18] == 10_752
    for model, layout in size.KINDS:
        assert keyed["measured", model, layout, 1024] == keyed["formula", model, layout, 1024]

    fig = viz.sizes(table)
    assert "4K" in fig.layout.title.text
    hollow = [t for t in fig.data if t.marker.symbol == "circle-open" and t.x[0] is not None]
    assert sorted(len(t.x) for t in hollow) == [7, 7]
    drawn = sorted(y for t in fig.data if t.y[0] is not None for y in t.y)
    assert drawn == pytest.approx(sorted(table.mib))


def test_the_articles_table_is_whole() -> None:
    table = pd.read_csv(size.ARTICLE)
    counts = table[table.table == "1"].groupby(["model", "quantity"]).context.nunique()
    assert (counts == 7).all() and len(counts) == 8
    limits = table[table.table != "1"].set_index("quantity").value
    assert dict(limits) == {"kv_cache_limit": 258.58, "kv_cache_limit_bf16": 173.27}


# ---------------------------------------------------------------- the head split


def test_visibility_equals_plain_loops() -> None:
    block, sinks, length = 16, 4, 61
    model, text = MODEL.variant(block=block, sinks=sinks), texts.example("smoke", length)
    table = size.visibility(model, text, layer=1)

    given, h = model.activations(text.ids)[1], model.config.n_local
    alone = set()
    for start in range(sinks, sinks + (length - sinks) // block * block, 8):
        k, v = given.k[0, h:, start : start + 8], given.v[0, h:, start : start + 8]
        out = compress_subgroups(k[None], v[None], torch.ones(1, 8))
        if out.fired[0]:
            alone.add(start + int(out.index[0]))
    expected = set()
    for query in range(length):
        for token in range(query + 1):
            if query - token < block:
                expected.add(("Local", query, token, "local"))
            if token < sinks:
                state = "sink"
            elif (token - sinks) // block == (query - sinks) // block:
                state = "tail"
            else:
                state = "outlier" if token in alone else "background"
            expected.add(("Global", query, token, state))
    found = table[["head", "query", "token", "state"]].itertuples(index=False, name=None)
    assert len(table) == len(expected) and set(found) == expected

    entries = table[table["head"] == "Global"].drop_duplicates(["query", "entry"])
    # Conservation: whatever stands for them, a query's keys weigh as much as all its tokens.
    np.testing.assert_allclose(entries.groupby("query").mass.sum(), np.arange(1, length + 1))


def test_visibility_is_drawn_cell_by_cell() -> None:
    text = texts.example("smoke", 40)
    table = size.visibility(MODEL.variant(block=16, sinks=4), text, layer=0)
    fig = viz.visibility(table, query=30)
    for head, trace in zip(("Local", "Global"), fig.data[:2], strict=True):
        seen = ~np.isnan(np.array(trace.z, dtype=float))
        part = table[table["head"] == head]
        assert seen.sum() == len(part)
        assert seen[part["query"], part.token].all()
    assert "Token 30" in fig.layout.title.text and "all 31" in fig.layout.title.text


def test_every_standard_head_sees_all() -> None:
    standard = TransformerLM(preset("standard-smoke"))
    with pytest.raises(AnchorMassError, match="Standard"):
        size.visibility(standard, texts.example("smoke", 20), layer=0)


# ---------------------------------------------------------------- seen from a distance


def state_of_each_token(cache: AnchorMassCache, layer: int) -> list[str]:
    owner, mass = cache.owner(layer).tolist(), cache.slot_mass(layer)[0].tolist()
    alone = cache.outliers(layer).tolist()
    states = []
    for i, place in enumerate(owner):
        if place in (SINK, TAIL, DROPPED):
            states.append({SINK: "sink", TAIL: "tail", DROPPED: "dropped"}[place])
            continue
        first = CONFIG.sinks + (i - CONFIG.sinks) // 8 * 8
        born = 1 if alone[i] else 8 - any(alone[first : first + 8])
        if mass[place] == born:
            states.append("outlier alone" if alone[i] else "background")
        else:
            above = sum(mass[place] > edge for edge in merging.MASS_EDGES)
            states.append(merging.MERGED[above])
    return states


@pytest.mark.parametrize("policy", ["adaptive", "fifo"])
def test_by_distance_equals_a_count_over_a_real_cache(policy: str) -> None:
    block, length = CONFIG.block, CONFIG.sinks + 20 * CONFIG.block
    text, layers = texts.example("smoke", length), range(CONFIG.n_layers)
    history = merging.record(MODEL, text.ids, policy, 64, 128)
    table = size.by_distance(history, layers, block)

    cache = MODEL.new_cache(1, length, track_positions=True, policy=policy, max_slots=64)
    MODEL.prefill(text.ids, cache, chunk_size=128)
    assert isinstance(cache, AnchorMassCache)
    counts: dict[int, Counter[str]] = {}
    for layer in layers:
        states = state_of_each_token(cache, layer)
        for query in range(length, length + block):
            for token in range(query):
                state = states[token] if token < length else "tail"
                counts.setdefault(query - token, Counter())[state] += 1
    for (start, stop), part in table.groupby(["start", "stop"]):
        total = sum((counts[d] for d in range(start, stop)), Counter())
        assert (part.pairs == total.total()).all()
        expected = [total[state] / total.total() for state in part.state]
        np.testing.assert_allclose(part.share, expected, atol=1e-12)
        assert part.share.sum() == pytest.approx(1)
    assert ("dropped" in set(table.state)) == (policy == "fifo")

    far: Counter[str] = Counter()
    for distance, counted in counts.items():
        if distance >= block:
            far += counted
    for state, share in size.beyond(table, block).items():
        assert share == pytest.approx(far[str(state)] / far.total())

    fig = viz.by_distance(table, block)
    drawn = {trace.name: list(trace.y[:-1]) for trace in fig.data}
    for state, part in table.groupby("state"):
        assert drawn[str(state)] == pytest.approx(list(part.sort_values("start").share))


def test_by_distance_wants_whole_blocks() -> None:
    ids = texts.example("smoke", CONFIG.sinks + CONFIG.block + 3).ids
    history = merging.record(MODEL, ids, "adaptive", 64, 128)
    with pytest.raises(AnchorMassError, match="must end with a block"):
        size.by_distance(history, [0], CONFIG.block)


# ---------------------------------------------------------------- the calculator


@pytest.mark.parametrize(
    "shape",
    [
        (14, 12, 64, 8192, "bfloat16", "article", 2**18),
        (1, 2, 4, 64, "float32", "article", 100),
        (40, 64, 128, 32_768, "float16", "shared-mass", 1000),
    ],
)
def test_calculator(shape: tuple) -> None:
    layers, heads, head_size, budget, dtype, layout, context = shape
    table = size.calculator(*shape)
    width = heads * head_size
    both = {
        name: preset(f"{name}-150m").replace(
            n_layers=layers, n_heads=heads, width=width, max_slots=budget
        )
        for name in ("standard", "anchormass")
    }

    def need(name: str, n: int) -> int:
        return memory_formula(both[name], n, layout, getattr(torch, dtype))

    for row in table.itertuples():
        assert row.mib == need(row.model, row.context) / MIB
    assert set(table[table.kind == "chosen"].context) == {context}
    (start,) = set(table[table.kind == "smaller from"].context)
    assert need("anchormass", start - 1) >= need("standard", start - 1)
    assert all(need("anchormass", n) < need("standard", n) for n in range(start, start + 9000))

    fig = viz.calculator(table)
    assert f"from {start:,} tokens" in fig.layout.title.text
    lines = [trace for trace in fig.data if trace.mode == "lines"]
    assert [y for trace in lines for y in trace.y] == list(table[table.kind == "line"].mib)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"heads": 7}, "n_heads=7"), ({"dtype": "int8"}, "int8"), ({"layout": "x"}, "layout 'x'")],
)
def test_calculator_refuses(change: dict, message: str) -> None:
    good = dict(layers=2, heads=8, head_size=64, budget=64, dtype="bfloat16", layout="article")
    with pytest.raises(AnchorMassError, match=message):
        size.calculator(**good | {"context": 4096} | change)
