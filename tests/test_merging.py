"""Stage 2 step by step: every table agrees with a replay that keeps sets of token positions.

The replay knows nothing of the cache's own bookkeeping. It makes the stage-1 slots from the
outlier flags and follows where each round of stage 2 says that its slots went.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from anchormass import AnchorMassError, TransformerLM, preset, stream
from anchormass.measure import merging
from anchormass.viz import merging as draw

CONFIG = preset("anchormass-smoke").replace(width=32, n_heads=4)
SINKS, BLOCK, SIZE = CONFIG.sinks, CONFIG.block, CONFIG.subgroup
TOTAL, CHUNK, BUDGET = SINKS + 12 * BLOCK + 20, 100, 40
POLICIES = ("adaptive", "score_merge", "uniform_merge", "priority", "fifo")
MERGING = POLICIES[:3]
IDS = torch.randint(0, CONFIG.vocab_size, (1, TOTAL), generator=torch.Generator().manual_seed(3))
PIECES = [f"[{i}]" for i in range(TOTAL)]


@dataclass
class Step:
    """The replay after one chunk: sets of positions by slot, what is lost, growth counts."""

    slots: list[set[int]]
    dropped: set[int]
    merges: list[int]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On tensors this small, threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> TransformerLM:
    model = TransformerLM(CONFIG, seed=1)
    for name, parameter in model.named_parameters():
        if "v_proj" in name:
            parameter.data *= torch.linspace(0.1, 3, parameter.shape[0])[:, None]
    return model


@pytest.fixture(scope="module", params=POLICIES)
def both(
    request: pytest.FixtureRequest, model: TransformerLM
) -> tuple[merging.History, list[list[Step]]]:
    """A history, and the replay of the same run: `[layer][step]`."""
    rounds: list[torch.Tensor] = []
    original = stream.reduce_slots

    def spy(*args):  # type: ignore[no-untyped-def]
        out = original(*args)
        rounds.append(out[1][0])
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "reduce_slots", spy)
        history = merging.record(model, IDS, request.param, BUDGET, CHUNK)
    calls = iter(rounds)
    layers: list[list[Step]] = [[] for _ in range(CONFIG.n_layers)]
    for start in range(0, TOTAL, CHUNK):
        for layer, steps in enumerate(layers):
            steps.append(replayed(history, layer, steps, min(start + CHUNK, TOTAL), calls))
    assert next(calls, None) is None
    return history, layers


def replayed(history, layer, steps, seen, calls):  # type: ignore[no-untyped-def]
    old = steps[-1] if steps else Step([], set(), [0] * TOTAL)
    slots, dropped, merges = [set(s) for s in old.slots], set(old.dropped), list(old.merges)
    known = sum(len(s) for s in slots) + len(dropped)
    first, last = SINKS + known, SINKS + max(seen - SINKS, 0) // BLOCK * BLOCK
    for group in range(first, last, SIZE):
        members = set(range(group, group + SIZE))
        alone = {p for p in members if history.outlier[layer, p]}
        slots += [alone, members - alone]
    if len(slots) > BUDGET:
        before = {p: len(s) for s in slots for p in s}
        moved = next(calls).tolist()
        kept: list[set[int]] = [set() for _ in range(max(moved) + 1)]
        for place, members in zip(moved, slots, strict=True):
            (kept[place] if place >= 0 else dropped).update(members)
        slots = kept
        for members in slots:
            for p in members:
                merges[p] += len(members) > before[p]
    return Step(slots, dropped, merges)


def plain_state(step: Step, history: merging.History, layer: int, seen: int, p: int) -> str:
    if p >= seen:
        return "unread"
    if p < SINKS:
        return "sink"
    if p in step.dropped:
        return "dropped"
    holder = next((s for s in step.slots if p in s), None)
    if holder is None:
        return "tail"
    group = SINKS + (p - SINKS) // SIZE * SIZE
    alone = {q for q in range(group, group + SIZE) if history.outlier[layer, q]}
    if holder == alone:
        return "outlier alone"
    if holder == set(range(group, group + SIZE)) - alone:
        return "background"
    for most, name in zip((8, 16, 32, 64), merging.MERGED, strict=False):
        if len(holder) <= most:
            return name
    return merging.MERGED[-1]


def each(both):  # type: ignore[no-untyped-def]
    history, layers = both
    for layer, steps in enumerate(layers):
        for i, step in enumerate(steps):
            yield history, layer, i, step


def test_owners_masses_and_drops_agree_with_the_replay(both):  # type: ignore[no-untyped-def]
    for history, layer, i, step in each(both):
        owner = history.owner[layer, i]
        held = [set(np.flatnonzero(owner == n).tolist()) for n in range(len(step.slots))]
        assert held == step.slots
        assert history.slot_mass[layer][i].tolist() == [len(s) for s in step.slots]
        assert set(np.flatnonzero(owner == -2).tolist()) == step.dropped
        assert history.dropped[layer, i] == len(step.dropped)
        assert len(step.slots) <= BUDGET
    assert merging.imbalance(history) == 0
    assert (history.dropped[:, -1] > 0).all() == (history.policy not in MERGING)


def test_states_and_merge_counts_agree_with_the_replay(both):  # type: ignore[no-untyped-def]
    for history, layer, i, step in each(both):
        seen = history.seen[i]
        table = merging.tokens(history, layer, seen)
        plain = [plain_state(step, history, layer, seen, p) for p in range(TOTAL)]
        assert table["state"].tolist() == plain[:seen]
        assert [merging.STATES[c] for c in history.states(layer)[i]] == plain
        mass = {p: len(s) for s in step.slots for p in s}
        raw = ("sink", "tail")
        assert table["mass"].tolist() == [
            mass.get(p, float(plain[p] in raw)) for p in range(len(table))
        ]
        held = [p for p in range(seen) if plain[p] != "dropped"]
        assert table["merges"][held].tolist() == [step.merges[p] for p in held]


def test_an_outlier_rejoins_where_its_first_merge_takes_in_its_background(both):  # type: ignore[no-untyped-def]
    history, layers = both
    for layer, steps in enumerate(layers):
        table = merging.tokens(history, layer)
        for p in np.flatnonzero(table["outlier"]).tolist():
            holders = [next((s for s in step.slots if p in s), set()) for step in steps]
            first = next((s for s in holders if len(s) > 1), set())
            group = SINKS + (p - SINKS) // SIZE * SIZE
            assert table["rejoined"][p] == (set(range(group, group + SIZE)) <= first)


def test_shares_positions_and_losses_are_counts_of_the_tokens(both):  # type: ignore[no-untyped-def]
    history, layers = both
    for layer, steps in enumerate(layers):
        last = steps[-1]
        plain = [plain_state(last, history, layer, TOTAL, p) for p in range(TOTAL)]
        shares = merging.shares([history], layer)
        assert dict(zip(shares["state"], shares["tokens"], strict=True)) == {
            state: plain.count(state) for state in set(plain)
        }
        assert shares["share"].sum() == pytest.approx(1)

        table = merging.by_position([history], layer, width=BLOCK)
        assert len(table) == 12 and (table["tokens"] == BLOCK).all()
        mass = {p: len(s) for s in last.slots for p in s}
        for row in table.itertuples():
            members = range(int(row.position + 0.5) - 32, int(row.position + 0.5) + 32)
            held = [p for p in members if p in mass]
            assert row.dropped == pytest.approx(1 - len(held) / BLOCK)
            if held:
                assert row.mass == pytest.approx(sum(mass[p] for p in held) / len(held))
                assert row.merges == pytest.approx(sum(last.merges[p] for p in held) / len(held))
            else:
                assert math.isnan(row.mass)

        lost = merging.losses([history], layer).iloc[0]
        assert lost["dropped"] == pytest.approx(len(last.dropped) / TOTAL)
        for edge in (8, 16, 32):
            heavy = sum(len(s) for s in last.slots if len(s) > edge)
            assert lost[f"over_{edge}"] == pytest.approx(heavy / TOTAL)
        assert lost["largest"] == max(len(s) for s in last.slots)
        outliers = np.flatnonzero(history.outlier[layer]).tolist()
        alone = sum(plain[p] == "outlier alone" for p in outliers)
        assert lost["outliers_alone"] == pytest.approx(alone / len(outliers))
        gone = sum(p in last.dropped for p in outliers)
        assert lost["outliers_dropped"] == pytest.approx(gone / len(outliers))


def test_runs_and_their_map_spell_out_every_subgroup_at_every_step(both):  # type: ignore[no-untyped-def]
    history, _ = both
    runs = merging.subgroup_runs([history], layer=1)
    fig = draw.slot_map(runs, "a caption")
    states = history.states(1)
    starts = [*range(0, SINKS, SIZE), *range(SINKS, TOTAL, SIZE)]
    names = [None, *draw.COLOURS]
    for trace, part in zip(fig.data, ("background", "outlier"), strict=False):
        assert part in trace.name
        assert list(trace.x) == history.seen.tolist() and list(trace.y) == starts
        for row, start in enumerate(starts):
            members = range(start, min(start + SIZE, TOTAL))
            flags = [p for p in members if history.outlier[1, p]]
            others = [p for p in members if p not in flags]
            chosen = flags[:1] if part == "outlier" else others[:1]
            for step in range(len(history.seen)):
                shown = names[trace.z[row][step]]
                state = merging.STATES[states[step, chosen[0]]] if chosen else "unread"
                assert shown == (None if state == "unread" else state)
                # Slots merge whole: all background tokens of a subgroup are in one state.
                if part == "background":
                    assert len({states[step, p] for p in others if p < history.seen[step]}) <= 1
    assert "a caption" in [a.text for a in fig.layout.annotations]


def test_slots_hold_their_text_and_energy(both, model: TransformerLM):  # type: ignore[no-untyped-def]
    history, layers = both
    cache = model.new_cache(session_length=TOTAL, policy=history.policy, max_slots=BUDGET)
    model.prefill(IDS, cache, CHUNK)
    table = merging.slots(history, 1, PIECES)
    held = cache.slots(1)  # type: ignore[attr-defined]
    for row, members in zip(table.itertuples(), layers[1][-1].slots, strict=True):
        norms = [float(v.norm()) for v in held.v[0, :, row.slot]]
        energy = sum(norms) / len(norms) * math.log(1 + len(members))
        assert row.energy == pytest.approx(energy, rel=1e-5)
        assert row.mass == len(members)
        assert (row.first, row.last) == ((min(members), max(members)) if members else (-1, -1))
        assert row.text.replace("…", "") == "".join(PIECES[p] for p in sorted(members))
    guards = BUDGET // 4 if history.policy in ("adaptive", "priority") else 0
    assert table["protected"].tolist() == [False] * (len(table) - guards) + [True] * guards
    newest = [s for s in layers[1][-1].slots if s and max(s) >= SINKS + 12 * BLOCK - SIZE]
    assert all(len(s) <= SIZE for s in newest) or history.policy not in ("adaptive", "priority")


def test_bytes_of_a_split_character_and_gaps_read_well(model: TransformerLM) -> None:
    history = merging.record(model, IDS[:, : SINKS + BLOCK], "fifo", BUDGET, 64)
    pieces = ["<0xE3>", "<0x81>", "<0x82>", *"abcde"] * ((SINKS + BLOCK) // 8)
    table = merging.slots(history, 0, pieces)
    outlier = history.outlier[0, SINKS : SINKS + SIZE]
    assert outlier.sum() == 1
    whole = table["text"][1]
    if outlier.argmax() > 2:
        assert whole.startswith("あ")
    assert ("…" in whole) == (0 < outlier.argmax() < 7)


def test_recorder_remembers_and_orders(model: TransformerLM) -> None:
    recorder = merging.Recorder(model, chunk_tokens=CHUNK)
    short = IDS[:, :300]
    found = recorder.each(short, ["fifo", "adaptive"], 40, 24)
    assert [(h.policy, h.max_slots) for h in found] == [
        ("fifo", 40), ("adaptive", 40), ("fifo", 24), ("adaptive", 24),
    ]  # fmt: skip
    assert recorder(short.clone(), "adaptive", 24) is found[3]
    assert recorder(IDS[:, :301], "adaptive", 24) is not found[3]
    assert found[0].seen.tolist() == [100, 200, 300]
    assert [found[0].step_at(n) for n in (1, 100, 101, 300, 9999, None)] == [0, 0, 1, 2, 2, 2]


def test_refusals_name_the_value(model: TransformerLM) -> None:
    with pytest.raises(AnchorMassError, match="standard"):
        merging.record(TransformerLM(preset("standard-smoke")), IDS, "fifo", BUDGET)
    with pytest.raises(AnchorMassError, match="2 texts"):
        merging.record(model, IDS.expand(2, -1), "fifo", BUDGET)
    with pytest.raises(AnchorMassError, match="newest"):
        merging.record(model, IDS, "newest", BUDGET)


def test_figures_draw_the_numbers_they_are_given(model: TransformerLM) -> None:
    histories = merging.Recorder(model, CHUNK).each(IDS, POLICIES, 24, BUDGET)
    tight = histories[: len(POLICIES)]
    table = merging.by_position(tight, 0)
    for figure, column in ((draw.mass_by_position, "mass"), (draw.merges_by_position, "merges")):
        fig = figure(table, "note")
        for policy in POLICIES:
            rows = table[table["policy"] == policy]
            above, below = (t for t in fig.data if t.name == policy)
            np.testing.assert_array_equal(above.x, rows["position"])
            np.testing.assert_array_equal(above.y, rows[column])
            np.testing.assert_array_equal(below.y, rows["dropped"])
        oldest = table[table["position"] <= table["position"].quantile(0.25)]
        assert (oldest.loc[oldest["policy"] == "fifo", "dropped"] == 1).all()
        assert "fifo" not in fig.layout.title.text  # it holds nothing there to speak of

    table = merging.shares(histories, 0)
    fig = draw.shares(table)
    bars = [t for t in fig.data if t.type == "bar"]
    assert sum(sum(t.x) for t in bars) == pytest.approx(2 * len(POLICIES))
    gone = table[(table["state"] == "dropped") & (table["max_slots"] == 24)]
    for row in gone.itertuples():
        assert f"{row.policy} {row.share:.0%}" in fig.layout.title.text.replace("<br>", " ")

    table = merging.slots(tight[0], 0, ["<b>"] * TOTAL)
    fig = draw.slot_bars(table)
    bar = fig.data[0]
    np.testing.assert_array_equal(bar.y, table["mass"])
    np.testing.assert_array_equal(bar.marker.color, table["energy"])
    assert all("<b>" not in row[3] for row in bar.customdata)  # text is text, not mark-up
    assert f"{table['mass'].max():,.0f}" in fig.layout.title.text


def test_a_text_too_short_for_a_block_still_draws(model: TransformerLM) -> None:
    history = merging.record(model, IDS[:, :40], "adaptive", BUDGET)
    assert merging.shares([history], 0)["state"].tolist() == ["sink", "tail"]
    table = merging.slots(history, 0, PIECES)
    assert table.empty
    assert "no slot" in draw.slot_bars(table).layout.title.text
    draw.slot_map(merging.subgroup_runs([history], 0))
    draw.shares(merging.shares([history], 0))
