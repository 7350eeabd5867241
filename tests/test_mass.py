"""Mass and attention: the views agree with the model, with loops, and the figures with both."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch

from anchormass import AnchorMassError, TransformerLM, preset
from anchormass.attention import reference_attention
from anchormass.measure import mass
from anchormass.texts import Text
from anchormass.viz import mass as viz

CONFIG = preset("anchormass-smoke").replace(width=32, n_heads=4)  # 2 Global heads of 8


def some_text(n: int, seed: int = 0) -> Text:
    ids = torch.randint(0, CONFIG.vocab_size, (1, n), generator=torch.Generator().manual_seed(seed))
    return Text(ids, [f"[{i}]" for i in ids[0].tolist()], "random ids")


@pytest.fixture(scope="module")
def model() -> TransformerLM:
    model = TransformerLM(CONFIG, seed=1).double()
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.data *= 40  # peaked attention, so that a wrong weight shows
    return model


@pytest.fixture(scope="module")
def roomy(model: TransformerLM) -> mass.Filled:
    return mass.fill(model, some_text(16 + 3 * 64 + 20), max_slots=400, chunk_size=50)


@pytest.fixture(scope="module")
def tight(model: TransformerLM) -> mass.Filled:
    return mass.fill(model, some_text(16 + 6 * 64 + 20), max_slots=24, chunk_size=64)


def test_below_the_budget_log_mass_is_what_the_model_computes(
    model: TransformerLM, roomy: mass.Filled
) -> None:
    acts = model.activations(roomy.text.ids)
    for layer, view in enumerate(roomy.views):
        q, k, v = acts[layer]
        torch.testing.assert_close(view.q, q[0, 2:, -20:], atol=1e-10, rtol=0)
        expected = reference_attention(q, k, v, model.config)[0, 2:, -20:]
        out = mass.weights(view)[mass.WITH] @ view.slot_v
        torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)


def test_true_weights_and_errors_agree_with_a_loop(tight: mass.Filled) -> None:
    view = tight.views[1]
    given, errors = mass.weights(view), mass.output_errors(view)
    for i in (0, 7, 19):
        position = len(view.entry) - 20 + i
        difference, size = 0.0, 0.0
        for h in range(2):
            logit = [float(view.q[h, i] @ view.k[h, t]) / math.sqrt(8) for t in range(position + 1)]
            largest = max(logit)
            p = np.exp(np.array(logit) - largest)
            p /= p.sum()
            full = sum(p[t] * view.v[h, t].numpy() for t in range(position + 1))
            true = np.zeros(len(view.mass))
            for t in range(position + 1):
                true[int(view.entry[t])] += p[t]
            np.testing.assert_allclose(given[mass.TRUE][h, i], true, atol=1e-12)

            visible = [n for n in range(len(view.mass)) if true[n] > 0]
            score = {n: float(view.q[h, i] @ view.slot_k[h, n]) / math.sqrt(8) for n in visible}
            most = max(score.values())
            share = {n: float(view.mass[n]) * math.exp(score[n] - most) for n in visible}
            out = sum(share[n] * view.slot_v[h, n].numpy() for n in visible) / sum(share.values())
            difference += float(((out - full) ** 2).sum())
            size += float((np.asarray(full) ** 2).sum())
        assert float(errors[mass.WITH][i]) == pytest.approx(math.sqrt(difference / size))
    for weight in given.values():
        torch.testing.assert_close(weight.sum(-1), torch.ones(2, 20, dtype=torch.float64))


def test_stream_holds_every_token_once(tight: mass.Filled) -> None:
    rows = mass.stream(tight)
    n = len(tight.text.pieces)
    for layer, part in rows.groupby("layer"):
        assert part.mass.sum() == n
        held = np.bincount(tight.views[layer].entry.numpy(), minlength=len(part))
        assert list(part.mass) == list(held)
        assert (part.state.value_counts()[["sink", "tail"]] == [16, 20]).all()
        assert ((part.state != "sink") & (part.state != "tail")).sum() <= 24
        alone = part[part.state.isin(["sink", "outlier", "tail"])]
        assert (alone.mass == 1).all() and (alone["first"] == alone["last"]).all()
        background = part[part.state == "background"]
        assert (
            background.mass.isin([7, 8]).all()
            and (background["last"] - background["first"] < 8).all()
        )
        assert (part[part.state == "merged"].mass >= 2).all()
        assert part.text.str.len().sum() == sum(map(len, tight.text.pieces))
    # Positions beside text: an entry of one token holds that token's piece.
    single = rows[rows.mass == 1]
    assert list(single.text) == [tight.text.pieces[p] for p in single["first"]]


def test_a_slot_is_merged_when_an_outlier_came_back_to_its_background() -> None:
    entry = torch.cat((torch.arange(16), torch.full((8,), 16), torch.tensor([17] * 7 + [18, 19])))
    outlier = torch.zeros(33, dtype=torch.bool)
    outlier[[18, 31]] = True
    held = torch.bincount(entry).double()
    states = mass._states(entry, held, outlier, CONFIG.replace(block=16), tail=32)
    assert states == ["sink"] * 16 + ["merged", "background", "outlier", "tail"]


def test_a_text_that_ends_with_a_block_keeps_it_open(model: TransformerLM) -> None:
    filled = mass.fill(model, some_text(16 + 2 * 64), max_slots=64, chunk_size=64)
    assert len(filled.text.pieces) == 16 + 2 * 64 - 1
    assert filled.views[0].q.shape[1] == 63
    with pytest.raises(AnchorMassError, match="80 tokens, one block and none after it"):
        mass.fill(model, some_text(80), max_slots=64, chunk_size=64)
    with pytest.raises(AnchorMassError, match="contexts=\\[4096\\]"):
        mass.errors_by_context(model, [some_text(100)], [4096])


def test_query_weights_are_one_row_of_the_weights(tight: mass.Filled) -> None:
    rows = mass.query_weights(tight, layer=1, head=1, query=4)
    given = mass.weights(tight.views[1])
    n = len(tight.views[1].mass) - 15  # the 15 younger tokens are not seen
    assert len(rows) == n and (rows.layer == 1).all()
    for name, weight in given.items():
        np.testing.assert_allclose(rows[name], weight[1, 4, :n])
    assert rows["query"].iloc[0] == 16 + 6 * 64 + 4
    assert mass.query_weights(tight, 0, 9, 99)["query"].iloc[0] == len(tight.text.pieces) - 1


def test_mass_bins() -> None:
    masses = torch.tensor([1.0, 2.0, 7.0, 8.0, 9.0, 16.0, 17.0, 64.0, 65.0])
    assert mass.mass_bins(masses).tolist() == [0, 3, 3, 3, 4, 4, 5, 6, 7]


def test_weight_ratios_sum_the_slots_of_a_bin(tight: mass.Filled) -> None:
    table = mass.weight_ratios([tight])
    view = tight.views[0]
    given = mass.weights(view)
    slot = torch.tensor([s in ("outlier", "background", "merged") for s in view.state])
    for masses, inside in (
        ("1", view.mass == 1),
        ("2–8", (view.mass > 1) & (view.mass <= 8)),
        ("17–32", (view.mass > 16) & (view.mass <= 32)),
    ):
        chosen = slot & inside
        mine = table[(table.layer == 0) & (table.masses == masses)].set_index("variant")
        assert len(mine) == (2 if chosen.any() else 0)
        for name in mine.index:
            ratio = given[name][..., chosen].sum(-1) / given[mass.TRUE][..., chosen].sum(-1)
            assert mine["median"][name] == pytest.approx(np.median(ratio.numpy()))
            assert mine["mass"][name] == pytest.approx(float(view.mass[chosen].mean()))


def test_identical_tokens_are_exact_only_with_log_mass() -> None:
    table = mass.identical_tokens(CONFIG, [0.0, 0.1], seed=0).set_index(["spread", "variant"])
    assert table["median"][0.0, mass.WITH] < 1e-12
    assert table["median"][0.0, mass.WITHOUT] > 0.1
    assert 1e-3 < table["median"][0.1, mass.WITH] < table["median"][0.1, mass.WITHOUT]
    assert table["fired"][0.0, mass.WITH] == 0.0


def test_errors_by_context_end_at_the_same_token(model: TransformerLM) -> None:
    text = some_text(16 + 6 * 64 + 20)
    table = mass.errors_by_context(model, [text], [128, 256, 4096])
    assert sorted(set(table.context)) == [128, 256]  # the text is shorter than the third
    last = Text(text.ids[:, -256:], text.pieces[-256:], "")
    view = mass.fill(model, last, 10_000, 64).views[1]
    mine = table[(table.context == 256) & (table.layer == 1)].set_index("variant")
    for name, errors in mass.output_errors(view).items():
        assert mine["median"][name] == pytest.approx(np.median(errors.numpy()))
    assert mine.tokens_per_entry.iloc[0] == pytest.approx(256 / len(view.mass))


def test_errors_by_budget_pool_the_queries_of_all_texts(model: TransformerLM) -> None:
    passages = [some_text(16 + 4 * 64 + 9), some_text(16 + 4 * 64 + 9, seed=1)]
    fills = {n: [mass.fill(model, text, n, 64) for text in passages] for n in (24, 48)}
    table = mass.errors_by_budget(fills)
    assert set(table.queries) == {18} and sorted(set(table.budget)) == [24, 48]
    pooled = torch.cat([mass.output_errors(f.views[0])[mass.WITH] for f in fills[24]])
    mine = table[(table.budget == 24) & (table.layer == 0) & (table.variant == mass.WITH)]
    assert mine["median"].iloc[0] == pytest.approx(np.median(pooled.numpy()))


# ---------------------------------------------------------------- figures


def test_along_draws_every_entry_at_its_mass(tight: mass.Filled, roomy: mass.Filled) -> None:
    rows = pd.concat([mass.stream(tight).assign(budget=24), mass.stream(roomy).assign(budget=400)])
    rows = rows[rows.layer == 0]
    fig = viz.along(rows, "caption")
    tops = [y + (t.base or 0) if t.type == "bar" else y for t in fig.data for y in t.y]
    assert sorted(tops) == sorted(rows.mass)
    assert {t.name for t in fig.data if t.showlegend} == set(rows.state)
    heaviest = rows[rows.budget == 24].mass.max()
    assert f"{heaviest:.0f} tokens in the heaviest of 24 slots" in fig.layout.title.text.replace(
        "<br>", " "
    )


def test_weights_and_ratios_are_drawn_as_given(tight: mass.Filled) -> None:
    rows = mass.query_weights(tight, 0, 0, 0)
    fig = viz.weights(rows)
    for trace in fig.data[1:]:
        np.testing.assert_array_equal(trace.x, rows[mass.TRUE])
        np.testing.assert_array_equal(trace.y, rows[trace.name])
    share = rows[rows.mass > 1][mass.WITHOUT].sum()
    assert f"{share:.0%} without" in fig.layout.title.text.replace("<br>", " ")

    table = mass.weight_ratios([tight])
    fig = viz.ratios(table)
    first = table[(table.variant == fig.data[0].name) & (table.layer == 0)]
    np.testing.assert_array_equal(fig.data[0].y, first["median"])


@pytest.mark.parametrize("by", ["context", "budget"])
def test_errors_are_drawn_as_given(tight: mass.Filled, by: str) -> None:
    fills = {24: [tight], 48: [tight]}
    table = mass.errors_by_budget(fills).rename(columns={"budget": by})
    fig = viz.errors(table, by)
    assert len(fig.data) == 3 * 2  # variants × layers
    for trace in fig.data[:3]:
        name = next(n for n in (mass.WITH, mass.WITHOUT, mass.TRUE) if trace.name.startswith(n))
        mine = table[(table.layer == 0) & (table.variant == name)]
        np.testing.assert_allclose(trace.y, 100 * mine["median"])
        assert list(trace.x) == [24, 48]


def test_identical_is_drawn_as_given() -> None:
    table = mass.identical_tokens(CONFIG, [0.0, 0.5], seed=0)
    fig = viz.identical(table)
    for trace in fig.data:
        assert list(trace.x) == ["0", "0.5"]
        np.testing.assert_array_equal(trace.y, table[table.variant == trace.name]["median"])
