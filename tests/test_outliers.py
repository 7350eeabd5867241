"""Stage 1 on text: rows agree with loops written from the article, figures with the rows."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch

from anchormass import AnchorMassError, TransformerLM, preset
from anchormass.measure import outliers
from anchormass.texts import Text
from anchormass.viz import outliers as viz

CONFIG = preset("anchormass-smoke").replace(width=32, n_heads=4)  # 2 Global heads of 8


def some_text(n: int, seed: int = 0) -> Text:
    ids = torch.randint(0, CONFIG.vocab_size, (1, n), generator=torch.Generator().manual_seed(seed))
    return Text(ids, [f"[{i}]" for i in ids[0].tolist()], "random ids")


@pytest.fixture(scope="module")
def model() -> TransformerLM:
    return TransformerLM(CONFIG, seed=1)


@pytest.fixture(scope="module")
def passages() -> list[Text]:
    return [some_text(16 + 128 + 9), some_text(16 + 64, seed=1)]


@pytest.fixture(scope="module")
def rows(model: TransformerLM, passages: list[Text]) -> pd.DataFrame:
    return outliers.tokens(model, passages)


def test_rows_agree_with_a_loop_from_the_article(
    model: TransformerLM, passages: list[Text], rows: pd.DataFrame
) -> None:
    v = model.activations(passages[0].ids)[1].v[0, 2:].double()  # layer 1, Global heads
    mine = rows[(rows.document == 0) & (rows.layer == 1)].set_index("position")
    assert mine.part.value_counts().to_dict() == {"compressed": 128, "sink": 16, "tail": 9}
    for start in range(16, 144, 8):
        group = mine.loc[start : start + 7]
        similarity, norm = [0.0] * 8, [0.0] * 8
        for h in range(2):
            tokens = [v[h, start + i] for i in range(8)]
            mean = sum(tokens) / 8  # type: ignore[operator]
            lengths = [math.sqrt(float(t @ t)) for t in tokens]
            for i, token in enumerate(tokens):
                cosine = float(token @ mean) / lengths[i] / math.sqrt(float(mean @ mean))
                similarity[i] += cosine / 2
                norm[i] += lengths[i] / (sum(lengths) / 8) / 2
        np.testing.assert_allclose(group.similarity, similarity, atol=1e-5)
        np.testing.assert_allclose(group.relative_norm, norm, atol=1e-5)
        assert list(group.candidate) == [s == min(similarity) for s in similarity]
        np.testing.assert_allclose(group.least, min(similarity), atol=1e-5)
        np.testing.assert_allclose(group.largest, max(norm), atol=1e-5)
        assert set(group.subgroup) == {(start - 16) // 8}
    assert mine.loc[:15].similarity.isna().all() and mine.loc[144:].similarity.isna().all()


def test_decisions_agree_with_the_cache(
    model: TransformerLM, passages: list[Text], rows: pd.DataFrame
) -> None:
    text = passages[0]
    for threshold in (0.85, 0.3):
        changed = model.variant(cos_threshold=threshold)
        cache = changed.new_cache(1, text.ids.shape[1], track_positions=True)
        changed.prefill(text.ids, cache)
        decided = outliers.decide(rows, threshold, 2.0)
        mine = decided[(decided.document == 0) & (decided.layer == 0)]
        assert list(mine.state == "outlier") == cache.outliers(0).tolist()


def test_decide_names_the_reason() -> None:
    rows = pd.DataFrame(
        {
            "part": ["compressed"] * 4 + ["sink"],
            "candidate": [True, True, True, True, False],
            "least": [0.9, 0.2, 0.9, 0.2, np.nan],
            "largest": [1.0, 1.0, 3.0, 3.0, np.nan],
        }
    )
    decided = outliers.decide(rows, 0.85, 2.0)
    assert list(decided.reason) == ["none", "cosine", "norm", "both", "none"]
    assert list(decided.state) == ["background", "outlier", "outlier", "outlier", "sink"]


def test_firing_counts_subgroups(rows: pd.DataFrame) -> None:
    found = outliers.groups(rows)
    assert len(found) == 2 * (16 + 8)  # layers × subgroups of both texts
    assert found.text.iloc[0] == "".join(rows.piece.iloc[16:24])
    curve = outliers.firing(found, [0.0, 0.4, 1.01], norm_threshold=99.0)
    layer = curve[curve.source == "layer 1"].set_index("cos_threshold").rate
    least = found[found.layer == 1].least
    assert layer[0.4] == sum(x < 0.4 for x in least) / len(least)
    assert layer[1.01] == 1.0
    assert (outliers.firing(found, [-2.0], norm_threshold=0.0).rate == 1.0).all()
    low, high = outliers.selecting_range(found).iloc[0][["low", "high"]]
    first = found[found.layer == 0].least
    assert (first < low).mean() <= 0.1 and (first < high).mean() >= 0.9


def test_orthogonal_values_have_the_cosine_of_the_text() -> None:
    eye = torch.eye(8)[None, None]  # eight orthogonal unit vectors
    assert outliers._measure(eye, eye).similarity.tolist() == pytest.approx([8**-0.5] * 8)
    random = outliers.random_tokens(heads=2, dim=4096, subgroups=8, seed=0)
    assert random.similarity.mean() == pytest.approx(8**-0.5, abs=0.01)
    assert random.equals(outliers.random_tokens(2, 4096, 8, 0))


def test_histogram_shares_sum_to_one(rows: pd.DataFrame) -> None:
    table = outliers.histogram(rows, bins=10)
    assert table.groupby(["source", "which"]).share.sum().tolist() == pytest.approx([1.0] * 4)
    middle = table[(table.source == "layer 0") & (table.which == "all tokens")]["median"].iloc[0]
    assert middle == pytest.approx(rows[rows.layer == 0].similarity.median())


@pytest.mark.parametrize(
    ("piece", "kind"),
    [
        ("東京", "kanji"),
        ("人々", "kanji"),
        ("して", "hiragana"),
        ("データ", "katakana"),
        ("使う", "mixed"),
        (" the", "latin"),
        ("Ａ", "latin"),
        ("7", "digit"),
        ("。", "punctuation"),
        ("\n", "line break"),
        ("<0xE3>", "other"),
        (" ", "other"),
    ],
)
def test_kind(piece: str, kind: str) -> None:
    assert outliers.kind(piece) == kind


def test_kinds_counts_and_intervals() -> None:
    decided = pd.DataFrame(
        {
            "layer": 0,
            "part": "compressed",
            "piece": ["7"] * 40 + ["東"] * 40 + ["。"] * 5,
            "state": ["outlier"] * 10 + ["background"] * 75,
        }
    )
    table = outliers.kinds(decided).set_index("kind")
    assert set(table.index) == {"digit", "kanji"}  # five tokens are too few
    assert table.loc["digit", "share"] == 0.25 and table.loc["kanji", "share"] == 0.0
    # Wilson's interval of 10 in 40 from its formula, z = 1.96.
    z, n, p = 1.959964, 40, 0.25
    centre, half = p + z * z / 2 / n, z * math.sqrt(p * (1 - p) / n + z * z / 4 / n / n)
    assert table.loc["digit", "low"] == pytest.approx((centre - half) / (1 + z * z / n), abs=1e-6)
    assert table.loc["digit", "high"] == pytest.approx((centre + half) / (1 + z * z / n), abs=1e-6)


def test_left_over_agrees_with_a_loop() -> None:
    v = torch.randn(5, 2, 8, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = outliers.left_over(v)
    for g in range(5):
        values = v[g].transpose(0, 1).flatten(1)  # [8, H·D]: distances add up over heads

        def rest(members: list[int], values: torch.Tensor = values) -> float:
            mean = values[members].mean(0)
            return sum(float((values[i] - mean).square().sum()) for i in members)

        whole = rest(list(range(8)))
        single = [rest([i for i in range(8) if i != j]) / whole for j in range(8)]
        assert found["no outlier"][g] == 1.0
        assert float(found["best possible"][g]) == pytest.approx(min(single))
        # Taking any one of eight at random leaves 6/7, whatever the values are.
        assert float(found["any token"][g]) == pytest.approx(6 / 7)
        assert float(found["any token"][g]) == pytest.approx(sum(single) / 8)
        cosine = torch.cosine_similarity(v[g], v[g].mean(1, keepdim=True), dim=-1).mean(0)
        assert float(found["least similar"][g]) == pytest.approx(single[int(cosine.argmin())])
        norm = (v[g].norm(dim=-1) / v[g].norm(dim=-1).mean(1, keepdim=True)).mean(0)
        assert float(found["largest norm"][g]) == pytest.approx(single[int(norm.argmax())])


def test_mean_over_heads_narrows_as_independent_heads_would(
    model: TransformerLM, passages: list[Text]
) -> None:
    table = outliers.head_spread(model, passages, seed=0, random_groups=400)
    random = table[table.source.str.startswith("random")]
    np.testing.assert_allclose(random.spread, random.independent, rtol=0.02)
    assert list(random.heads) == [1, 2, 3, 4, 5, 6]
    both = table[(table.source == "layer 0") & (table.heads == 2)].spread.iloc[0]
    rows = outliers.tokens(model, passages)
    assert both == pytest.approx(rows[rows.layer == 0].similarity.std(), rel=1e-4)


def test_refuses_what_has_no_subgroups(model: TransformerLM) -> None:
    with pytest.raises(AnchorMassError, match=r"79 tokens.*at least 80"):
        outliers.tokens(model, [some_text(79)])
    with pytest.raises(AnchorMassError, match="standard model has no Global heads"):
        outliers.tokens(TransformerLM(preset("standard-smoke")), [some_text(90)])


# ---------------------------------------------------------------- figures


def test_text_map_shows_every_token_in_its_state(rows: pd.DataFrame) -> None:
    decided = outliers.decide(rows, rows.least.median(), 2.0)
    layer = decided[(decided.document == 0) & (decided.layer == 1)]
    fig = viz.text_map(layer, "caption", first=8, n_tokens=100)
    drawn = {trace.name: len(trace.x) for trace in fig.data}
    shown = layer[(layer.position >= 8) & (layer.position < 108)]
    outlier = (shown.state == "outlier").sum()
    assert drawn["outlier, its own slot"] == outlier
    assert drawn["sink, kept raw"] == 8 and drawn["open block, still raw"] == 0
    assert sum(drawn.values()) == 100
    waiting = shown.candidate & ~shown.fired.astype(bool)
    assert drawn["candidate that did not fire"] == waiting.sum() > 0
    every = layer[layer.candidate].fired.mean()
    assert 0 < every < 1 and f"{every:.0%} of subgroups" in fig.layout.title.text
    # No two tokens of a line overlap.
    at = pd.concat(
        [pd.DataFrame({"y": t.y, "start": t.base, "width": t.x}) for t in fig.data]
    ).sort_values(["y", "start"])
    same_line = at.y.diff() == 0
    assert (at.start - (at.start + at.width).shift())[same_line].min() > 0


def test_text_map_shows_odd_pieces() -> None:
    rows = pd.DataFrame(
        {
            "piece": ["\n", " ", "<0xE3>", "<b>"],
            "position": range(4),
            "subgroup": 0.0,
            "state": "background",
            "part": "compressed",
            "candidate": [True, False, False, False],
            "fired": False,
            "layer": 0,
            "similarity": 0.5,
            "relative_norm": 1.0,
            "least": 0.5,
            "largest": 1.0,
        }
    )
    fig = viz.text_map(rows)
    assert sorted(str(t) for trace in fig.data for t in trace.text) == sorted(
        ["⏎", "␣", "E3", "&lt;b&gt;"]
    )
    assert "0% of subgroups" in fig.layout.title.text


def test_thresholds_figure_holds_every_subgroup_and_both_lines(rows: pd.DataFrame) -> None:
    decided = outliers.decide(outliers.groups(rows), 0.2, 1.3)
    fig = viz.thresholds(decided, 0.2, 1.3)
    drawn = sorted((x, y) for trace in fig.data for x, y in zip(trace.x, trace.y, strict=True))
    assert drawn == sorted(zip(decided.least, decided.largest, strict=True))
    vertical, horizontal = fig.layout.shapes
    assert vertical.x0 == 0.2 and horizontal.y0 == 1.3
    assert f"{decided.fired.mean():.0%} of {len(decided)}" in fig.layout.title.text


def test_curves_and_histograms_are_drawn_as_given(rows: pd.DataFrame) -> None:
    both = pd.concat([rows, outliers.random_tokens(2, 8, 32, 0)])
    found = outliers.groups(both)
    curves = outliers.firing(found, [0.0, 0.4, 0.85], 2.0)
    fig = viz.firing_curves(curves, outliers.selecting_range(found), 0.4)
    for trace in fig.data:
        mine = curves[curves.source == trace.name]
        np.testing.assert_allclose(trace.y, 100 * mine.rate)
    assert fig.layout.title.text.startswith("At 0.4,")

    table = outliers.histogram(both, bins=8)
    fig = viz.similarities(table)
    assert len(fig.data) == 2 * table.source.nunique()
    np.testing.assert_allclose(fig.data[0].y, 100 * table.share[:8])


def test_tables_are_drawn_as_given(
    model: TransformerLM, passages: list[Text], rows: pd.DataFrame
) -> None:
    table = outliers.choices(model, passages, seed=0, random_groups=8)
    fig = viz.choices(table)
    for trace, choice in zip(fig.data, outliers.CHOICES, strict=True):
        np.testing.assert_allclose(trace.x, 100 * table[table.choice == choice]["median"])
    table = outliers.head_spread(model, passages, seed=0, random_groups=8)
    fig = viz.head_spread(table)
    np.testing.assert_allclose(fig.data[0].y, table[table.source == "layer 0"].spread)
    table = outliers.kinds(outliers.decide(rows.assign(piece="東"), 0.85, 2.0))
    fig = viz.kinds(table)
    assert [trace.x[0] for trace in fig.data] == pytest.approx(list(100 * table.share))
    assert "kanji" in fig.layout.title.text
