"""Sizes and sight: bytes against real prefills, sight against a loop and real queries."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import torch

from anchormass import AnchorMassError, TransformerLM, preset
from anchormass.cache import DROPPED, SINK, TAIL, AnchorMassCache
from anchormass.measure import merging, size
from anchormass.texts import Text
from anchormass.viz import size as viz

CONFIG = preset("anchormass-smoke").replace(width=32, n_heads=4, sinks=4, block=16)


def some_text(n: int, seed: int = 0) -> Text:
    ids = torch.randint(0, CONFIG.vocab_size, (1, n), generator=torch.Generator().manual_seed(seed))
    return Text(ids, [f"[{i}]" for i in ids[0].tolist()], "random ids")


@pytest.fixture(scope="module")
def model() -> TransformerLM:
    return TransformerLM(CONFIG, seed=1)


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("layout", ["shared-mass", "article-bf16", "article"])
def test_measured_bytes_are_those_of_a_real_prefill(layout: str) -> None:
    config = CONFIG.replace(max_slots=24)
    model = TransformerLM(config).bfloat16()
    contexts = [1, 3, 4, 5, 19, 20, 36, 100, 101, 300]
    measured = size.measured_bytes(config, contexts, layout)
    assert list(measured) == contexts
    for context, found in measured.items():
        cache = model.new_cache(layout=layout)
        model.prefill(some_text(context).ids, cache, chunk_size=32)
        cache.trim()
        assert found == sum(t.numel() * t.element_size() for t in cache.tensors().values())


def test_measured_bytes_at_full_size_are_the_published_ones() -> None:
    # SPEC 4; past 32,784 tokens the budget is full, and 48 more are in the open block.
    config = preset("anchormass-150m")
    ours = size.measured_bytes(config, [4096, 32_784 + 48])
    assert [round(x / size.MIB, 2) for x in ours.values()] == [23.35, 171.07]
    article = size.measured_bytes(config, [32_784 + 48], "article")
    assert round(article[32_784 + 48] / size.MIB, 2) == 258.58
    plain = size.measured_bytes(preset("standard-150m"), [4096, 262_144])
    assert [x / size.MIB for x in plain.values()] == [168, 10_752]


def test_measured_bytes_refuse_an_empty_cache() -> None:
    with pytest.raises(AnchorMassError, match="context=0"):
        size.measured_bytes(CONFIG, [64, 0])


def test_the_article_s_table() -> None:
    table = pd.read_csv(size.ARTICLE)
    assert list(table.columns) == ["table", "context", "model", "quantity", "value", "unit"]
    one = table[table.table == "1"]
    assert len(one) == 7 * 2 * 4 and not one.duplicated(["context", "model", "quantity"]).any()
    assert one.groupby("quantity").unit.unique().str[0].to_dict() == {
        "kv_cache": "MiB", "peak_vram": "GiB", "prefill": "s", "decode": "tok/s",
    }  # fmt: skip
    value = one.set_index(["context", "model", "quantity"]).value
    assert value[262_144, "standard", "kv_cache"] == 10_752
    assert value[131_072, "anchormass", "prefill"] == 16.42
    # SPEC 7: the article's break-even lengths follow from its own speeds.
    for context, expected in ((131_072, 1036), (262_144, 603)):
        late = value[context, "anchormass", "prefill"] - value[context, "standard", "prefill"]
        slow, fast = value[context, "standard", "decode"], value[context, "anchormass", "decode"]
        assert late / (1 / slow - 1 / fast) == pytest.approx(expected, abs=1)


def test_sizes_join_formula_measurement_and_article() -> None:
    table = size.sizes([1024, 4096], [1024], seed=0)
    assert table.groupby("kind").size().to_dict() == {"article": 14, "formula": 6, "measured": 3}
    mib = table.set_index(["kind", "model", "layout", "context"]).mib.sort_index()
    assert mib["formula", "standard", "plain", 4096] == 168.0
    assert round(mib["formula", "anchormass", "article", 4096], 2) == 35.29
    assert mib["article", "anchormass", "article", 4096] == 36
    for model, layout in size.KINDS:
        assert mib["measured", model, layout, 1024] == mib["formula", model, layout, 1024]
    assert size.mismatch(table) == 0
    wrong = table.assign(mib=table.mib.where(table.kind != "measured", table.mib * 1.5))
    assert size.mismatch(wrong) == pytest.approx(0.5)


# ---------------------------------------------------------------- the head split


@pytest.mark.parametrize("length", [2, 4, 20, 61])
def test_visibility_is_what_the_article_says(model: TransformerLM, length: int) -> None:
    text = some_text(length)
    table = size.visibility(model, text, layer=1)
    values = model.activations(text.ids)[1].v[0, CONFIG.n_local :].double().numpy()  # [Hg, T, D]
    seen = {
        (head, query, token): (state, mass)
        for head, query, token, state, mass in zip(
            table["head"], table["query"], table.token, table.state, table.mass, strict=True
        )
    }
    assert len(seen) == len(table)  # nothing is seen twice by one head
    expected = {}
    for query in range(length):
        for token in range(query + 1):
            if token > query - 16:
                expected["Local", query, token] = ("local", 1)
            place = (query - 4) // 16 * 16 + 4 if query >= 4 else 0  # its block's first token
            if token < 4:
                expected["Global", query, token] = ("sink", 1)
            elif token >= place:
                expected["Global", query, token] = ("tail", 1)
            else:
                first = (token - 4) // 8 * 8 + 4
                group = values[:, first : first + 8]
                mean = group.mean(1, keepdims=True)
                cosine = (group * mean).sum(-1)
                cosine /= np.linalg.norm(group, axis=-1) * np.linalg.norm(mean, axis=-1)
                similarity = cosine.mean(0)
                assert similarity.min() < 0.85  # random values: every subgroup fires
                alone = similarity.argmin() == token - first
                expected["Global", query, token] = ("outlier", 1) if alone else ("background", 7)
    assert seen == expected
    entries = table[table["head"] == "Global"].drop_duplicates(["query", "entry"])
    assert list(entries.groupby("query").mass.sum()) == list(range(1, length + 1))
    assert list(table.piece) == [text.pieces[t] for t in table.token]


def test_visibility_of_standard_is_refused() -> None:
    with pytest.raises(AnchorMassError, match="every head sees every token"):
        size.visibility(TransformerLM(preset("standard-smoke")), some_text(8), 0)


# ---------------------------------------------------------------- seen from a distance


def history(model: TransformerLM, policy: str, length: int) -> merging.History:
    return merging.record(model, some_text(length).ids, policy, 12, 32)


@pytest.mark.parametrize("policy", ["adaptive", "fifo"])
def test_by_distance_is_what_the_queries_of_a_block_see(model: TransformerLM, policy: str) -> None:
    length, layers = 4 + 16 * 6, [0, 1]
    table = size.by_distance(history(model, policy, length), layers, CONFIG.block)

    cache = model.new_cache(
        session_length=length, track_positions=True, policy=policy, max_slots=12
    )
    assert isinstance(cache, AnchorMassCache)
    model.prefill(some_text(length).ids, cache, 32)
    counts: Counter[tuple[int, str]] = Counter()
    for query in range(length, length + 16):
        for layer in layers:  # what the cache holds when the query comes, and the query itself
            owner, alone = cache.owner(layer).tolist(), cache.outliers(layer)
            masses = cache.slot_mass(layer)[0]
            for token, slot in enumerate([*owner, TAIL]):
                mass = int(masses[slot]) if slot >= 0 else 1
                if slot in (SINK, TAIL, DROPPED):
                    state = {SINK: "sink", TAIL: "tail", DROPPED: "dropped"}[slot]
                elif mass == 1:
                    state = "outlier alone"
                elif mass == 7 and not alone[token]:
                    state = "background"
                else:
                    state = next(
                        name
                        for name, most in zip(merging.MERGED, (8, 16, 32, 64, 999), strict=True)
                        if mass <= most
                    )
                counts[query - token, state] += 1
        model.decode(torch.tensor([query]), cache)

    assert set(table.state) == {state for distance, state in counts if distance}
    assert table.pairs[table.state == "sink"].sum() == sum(
        n for (distance, _), n in counts.items() if distance
    )
    for row in table.itertuples():
        inside = [n for (d, s), n in counts.items() if row.start <= d < row.stop and s == row.state]
        assert row.share * row.pairs == pytest.approx(sum(inside))
    far = size.beyond(table, 16)
    assert far.sum() == pytest.approx(1)
    old = {s: sum(n for (d, t), n in counts.items() if d >= 16 and t == s) for s in far.index}
    assert far.to_dict() == pytest.approx({s: n / sum(old.values()) for s, n in old.items()})
    assert ("dropped" in far) == (policy == "fifo")


def test_by_distance_refuses_an_open_block(model: TransformerLM) -> None:
    with pytest.raises(AnchorMassError, match="ends at token 50"):
        size.by_distance(history(model, "adaptive", 50), [0], CONFIG.block)
    with pytest.raises(AnchorMassError, match="layers is empty"):
        size.by_distance(history(model, "adaptive", 52), [], CONFIG.block)


# ---------------------------------------------------------------- the calculator


def test_calculator_counts_a_shape_of_one_s_own() -> None:
    table = size.calculator(3, 4, 32, 256, "float32", "article-bf16", 1000)
    at = table.set_index(["kind", "model", "context"]).mib * size.MIB
    assert at["chosen", "standard", 1000] == 3 * 2 * 4 * 32 * 4 * 1000
    # 984 tokens after the sinks: 15 blocks of 16 slots, 24 in the open block; 2 + 2 heads.
    rows = 16 + 15 * 16 + 24
    assert at["chosen", "anchormass", 1000] == 3 * (2 * 2 * 32 * 4 * (64 + rows) + 2 * 4 * rows)
    assert at["line", "anchormass", 2**20] == at["line", "anchormass", 2**19]  # flat

    start = int(table.context[table.kind == "smaller from"].iloc[0])
    for context, smaller in ((start - 1, False), (start, True), (start + 500, True)):
        here = size.calculator(3, 4, 32, 256, "float32", "article-bf16", context)
        chosen = here[here.kind == "chosen"].set_index("model").mib
        assert (chosen["anchormass"] < chosen["standard"]) == smaller


def test_calculator_refuses_what_no_model_can_have() -> None:
    with pytest.raises(AnchorMassError, match="n_heads=3"):
        size.calculator(1, 3, 32, 256, "bfloat16", "article", 1000)
    with pytest.raises(AnchorMassError, match="dtype='int8'"):
        size.calculator(1, 4, 32, 256, "int8", "article", 1000)
    with pytest.raises(AnchorMassError, match="layout"):
        size.calculator(1, 4, 32, 256, "bfloat16", "mine", 1000)


# ---------------------------------------------------------------- figures


def plain_title(fig: go.Figure) -> str:
    return fig.layout.title.text.replace("<br>", " ")


def test_sizes_are_drawn_as_given() -> None:
    table = size.sizes([1024, 4096], [1024], seed=0)
    fig = viz.sizes(table, "caption")
    drawn = sorted((x, y) for t in fig.data for x, y in zip(t.x, t.y, strict=True) if x)
    assert drawn == sorted(zip(table.context, table.mib, strict=True))
    hollow = [t for t in fig.data if t.marker.symbol == "circle-open" and t.x[0]]
    assert sum(len(t.x) for t in hollow) == 14
    assert plain_title(fig) == (
        "At 4K tokens Standard's cache takes 168 MiB, AnchorMass's 23.4 MiB: 7 × less"
    )


def test_visibility_is_drawn_as_given(model: TransformerLM) -> None:
    table = size.visibility(model, some_text(61), 0)
    fig = viz.visibility(table, 99)
    local, heads = fig.data[:2]
    assert np.isfinite(local.z).sum() == (table["head"] == "Local").sum()
    for name, code in (("sink", 1), ("tail", 2), ("outlier", 3)):
        assert (np.array(heads.z) == code).sum() == (table.state == name).sum()
    assert (np.array(heads.z) >= 4).sum() == (table.state == "background").sum()
    assert np.array(heads.z)[60, 4] in (3, 4) and np.isnan(heads.z[0][1])
    # 4 sinks, 4 slots for each of 3 blocks, 9 tokens of the open one.
    assert plain_title(fig) == (
        "Token 60 sees its last 16 tokens (Local) and, through 25 keys, all 61 (Global)"
    )


def test_by_distance_is_drawn_as_given(model: TransformerLM) -> None:
    table = size.by_distance(history(model, "fifo", 4 + 16 * 6), [0, 1], CONFIG.block)
    fig = viz.by_distance(table, 16)
    assert {t.name for t in fig.data} == set(table.state)
    for trace in fig.data:
        part = table[table.state == trace.name]
        assert list(trace.x) == [*part.start, part.stop.iloc[-1]]
        np.testing.assert_array_equal(trace.y[:-1], part.share)
    assert f"{size.beyond(table, 16)['dropped']:.0%} gone" in plain_title(fig)


def test_calculator_is_drawn_as_given() -> None:
    fig = viz.calculator(size.calculator(14, 12, 64, 8192, "bfloat16", "shared-mass", 262_144))
    assert list(fig.data[1].y) == [10_752] and len(fig.data[0].x) == 17
    assert "171 MiB instead of 10.5 GiB (62.9 × less)" in plain_title(fig)
    short = viz.calculator(size.calculator(14, 12, 64, 8192, "bfloat16", "article", 64))
    assert "× more" in plain_title(short)
