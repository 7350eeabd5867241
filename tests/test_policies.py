"""Stage 2 against the table of the specification, written out slot by slot.

`by_hand` keeps a Python list of slots and applies one policy at a time to it, with Python
floats. Streams have ties on purpose (equal slots, empty slots, zero values); a choice that
rounding alone decides (two different sums within 1e-9) has no right answer and is not asked.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import anchormass
from anchormass import AnchorMassError
from anchormass.compress import Slots
from anchormass.policies import Plan, get_policy, merge_pairs, reduce_slots, register, slot_energy

MERGING = ("adaptive", "score_merge", "uniform_merge")
DROPPING = ("priority", "fifo")
ALL = MERGING + DROPPING

# ---------------------------------------------------------------- the specification, by hand


class RoundingDecides(Exception):
    """Two different slots or pairs have energies that only rounding tells apart."""


@dataclass
class Slot:
    """`k`, `v`: one list of D floats per head; `members`: places in the stream that came in."""

    k: list[list[float]]
    v: list[list[float]]
    mass: float
    members: list[int]

    def __post_init__(self) -> None:
        norms = [math.sqrt(math.fsum(x * x for x in head)) for head in self.v]
        self.energy = math.fsum(norms) / len(norms) * math.log(1 + self.mass)
        # Equal contents have equal energies to the last bit, however they are summed.
        self.content = "nothing" if self.energy == 0 else f"{self.v} {self.mass}"


def lowest(groups: list[list[Slot]], count: int) -> set[int]:
    """Places of the `count` groups of least energy; the older of two equal ones first."""
    energy = [math.fsum(s.energy for s in group) for group in groups]
    order = sorted(range(len(groups)), key=lambda i: (energy[i], i))
    chosen = set(order[:count])
    close = {i for i in order if abs(energy[i] - energy[order[count - 1]]) < 1e-9}
    contents = {str(sorted(s.content for s in groups[i])) for i in close}
    if len(contents) > 1 and not close <= chosen:
        raise RoundingDecides
    return chosen


def merge(a: Slot, b: Slot, by_mass: bool) -> Slot:
    members = a.members + b.members
    if a.mass == 0:  # of two empty slots the later one stays, as in any tie
        return Slot(b.k, b.v, b.mass, members)
    if b.mass == 0:
        return Slot(a.k, a.v, a.mass, members)
    if by_mass or a.energy == b.energy == 0:
        share = b.mass / (a.mass + b.mass)
    else:
        share = b.energy / (a.energy + b.energy)
    v = [
        [(1 - share) * x + share * y for x, y in zip(p, q, strict=True)]
        for p, q in zip(a.v, b.v, strict=True)
    ]
    if abs(a.energy - b.energy) < 1e-9 and a.content != b.content:
        raise RoundingDecides
    return Slot(b.k if b.energy >= a.energy else a.k, v, a.mass + b.mass, members)


def one_round(slots: list[Slot], policy: str, budget: int, recent: int) -> list[Slot]:
    n, excess = len(slots), len(slots) - budget
    if policy == "fifo":
        return slots[excess:]
    if policy == "priority":
        gone = lowest([[s] for s in slots[: n - recent]], excess)
        return [s for i, s in enumerate(slots) if i not in gone]

    pairs = [[2 * p, 2 * p + 1] for p in range((n - (recent if policy == "adaptive" else 0)) // 2)]
    count = min(excess, len(pairs))
    if policy == "uniform_merge":  # the pairs at the centres of `count` equal spans
        chosen = {math.floor((i + Fraction(1, 2)) * len(pairs) / count) for i in range(count)}
    else:
        chosen = lowest([[slots[a], slots[b]] for a, b in pairs], count)
    out, i = [], 0
    while i < n:
        if i % 2 == 0 and i // 2 in chosen:
            out.append(merge(slots[i], slots[i + 1], by_mass=policy == "uniform_merge"))
            i += 2
        else:
            out.append(slots[i])
            i += 1
    return out


def by_hand(slots: list[Slot], policy: str, budget: int, recent: int) -> list[Slot]:
    while len(slots) > budget:
        slots = one_round(slots, policy, budget, recent)
    return slots


# ---------------------------------------------------------------- streams


def to_list(slots: Slots, row: int = 0) -> list[Slot]:
    return [
        Slot(
            slots.k[row, :, i].double().tolist(),
            slots.v[row, :, i].double().tolist(),
            float(slots.mass[row, i]),
            [i],
        )
        for i in range(slots.mass.shape[1])
    ]


def row_of(slots: Slots, row: int) -> Slots:
    one = slice(row, row + 1)
    return Slots(slots.k[one], slots.v[one], slots.mass[one])


def assert_same(a: Slots, b: Slots) -> None:
    assert torch.equal(a.k, b.k) and torch.equal(a.v, b.v) and torch.equal(a.mass, b.mass)


def random_stream(
    n: int, batch: int = 1, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Slots:
    """Stage-1-like: outlier slots of mass 1, some empty, and background slots of mass 7 or 8."""
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(batch, 3, n, 4, generator=g, dtype=torch.float64)
    v = torch.randn(batch, 3, n, 4, generator=g, dtype=torch.float64)
    fired = torch.rand(batch, n, generator=g) < 0.7
    outlier = torch.arange(n) % 2 == 0
    mass = torch.where(outlier, fired.double(), torch.where(fired, 7.0, 8.0).double())
    v = v * (mass > 0)[:, None, :, None]
    return Slots(k.to(dtype), v.to(dtype), mass.to(torch.promote_types(dtype, torch.float32)))


@st.composite
def streams(draw: st.DrawFn, batch: int = 1) -> Slots:
    """Any stream: values out of a small pool, so that slots repeat; masses from 0 upwards."""
    n, heads = draw(st.integers(1, 20)), draw(st.integers(1, 3))
    g = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    pool = torch.randn(draw(st.integers(1, 6)), heads, 2, generator=g, dtype=torch.float64)
    pool[0] *= draw(st.sampled_from([0.0, 1.0]))
    picks = st.lists(st.integers(0, len(pool) - 1), min_size=n, max_size=n)
    masses = st.lists(st.sampled_from([0, 0, 1, 1, 7, 8, 15, 1000]), min_size=n, max_size=n)
    v = torch.stack([pool[draw(picks)] for _ in range(batch)])  # [B, N, H, D]
    mass = torch.tensor([draw(masses) for _ in range(batch)], dtype=torch.float64)
    k = torch.randn(batch, heads, n, 2, generator=g, dtype=torch.float64)
    return Slots(k, v.transpose(1, 2).contiguous(), mass)


@st.composite
def limits(draw: st.DrawFn) -> tuple[int, int]:
    budget = draw(st.integers(1, 22))
    return budget, draw(st.integers(0, budget - 1))


# ---------------------------------------------------------------- equal to the specification


@pytest.mark.parametrize("policy", ALL)
@settings(max_examples=150, deadline=None)
@given(stream=streams(), limit=limits())
def test_equals_the_specification(policy: str, stream: Slots, limit: tuple[int, int]) -> None:
    budget, recent = limit
    try:
        want = by_hand(to_list(stream), policy, budget, recent)
    except RoundingDecides:
        assume(False)
    out, moved, dropped = reduce_slots(stream, policy, budget, recent)
    assert out.k[0].transpose(0, 1).tolist() == [s.k for s in want]
    assert out.mass[0].tolist() == [s.mass for s in want]
    values = torch.tensor([s.v for s in want], dtype=torch.float64)
    torch.testing.assert_close(out.v[0].transpose(0, 1), values, rtol=0, atol=1e-12)
    place = {i: m for m, s in enumerate(want) for i in s.members}
    assert moved[0].tolist() == [place.get(i, -1) for i in range(stream.mass.shape[1])]
    assert float(dropped[0]) == sum(
        float(stream.mass[0, i]) for i in range(len(moved[0])) if i not in place
    )


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize(
    "n, budget, recent", [(66, 64, 16), (96, 64, 16), (256, 64, 16), (65, 7, 6)]
)
def test_equals_the_specification_on_long_streams(
    policy: str, n: int, budget: int, recent: int
) -> None:
    """One round, a full round, several rounds, and a budget that leaves next to nothing."""
    stream = random_stream(n, batch=2, seed=n)
    out, moved, _ = reduce_slots(stream, policy, budget, recent)
    for row in range(2):
        want = by_hand(to_list(stream, row), policy, budget, recent)
        assert out.k[row].transpose(0, 1).tolist() == [s.k for s in want]
        assert out.mass[row].tolist() == [s.mass for s in want]
        values = torch.tensor([s.v for s in want], dtype=torch.float64)
        torch.testing.assert_close(out.v[row].transpose(0, 1), values, rtol=0, atol=1e-12)
        place = {i: m for m, s in enumerate(want) for i in s.members}
        assert moved[row].tolist() == [place.get(i, -1) for i in range(n)]


@settings(max_examples=100, deadline=None)
@given(stream=streams(batch=2))
def test_energy(stream: Slots) -> None:
    """e = mean over heads of the value's norm, times log(1 + n)."""
    energy = slot_energy(stream.v, stream.mass)
    for row in range(2):
        want = torch.tensor([s.energy for s in to_list(stream, row)], dtype=torch.float64)
        torch.testing.assert_close(energy[row], want, rtol=1e-13, atol=0)


# ---------------------------------------------------------------- properties


@pytest.mark.parametrize("policy", ALL)
@settings(max_examples=80, deadline=None)
@given(
    stream=streams(batch=3), limit=limits(), dtype=st.sampled_from([torch.float32, torch.bfloat16])
)
def test_properties_of_every_policy(
    policy: str, stream: Slots, limit: tuple[int, int], dtype: torch.dtype
) -> None:
    budget, recent = limit
    n = stream.mass.shape[1]
    stream = Slots(stream.k.to(dtype), stream.v.to(dtype), stream.mass.float())
    before = Slots(stream.k.clone(), stream.v.clone(), stream.mass.clone())
    out, moved, dropped = reduce_slots(stream, policy, budget, recent)
    kept = out.mass.shape[1]

    assert kept == min(n, budget)  # within budget, and no more taken than needed
    assert (out.k.dtype, out.v.dtype, out.mass.dtype) == (dtype, dtype, torch.float32)
    assert_same(stream, before)  # the stream that came in is untouched

    # `moved` is consistent with the masses, keeps the order and loses what `dropped` says.
    received = torch.zeros(3, kept).scatter_add_(
        1, moved.clamp_min(0), torch.where(moved < 0, 0.0, stream.mass)
    )
    assert torch.equal(received, out.mass)
    assert torch.equal(dropped, torch.where(moved < 0, stream.mass, 0.0).sum(1))
    for row in range(3):
        there = moved[row][moved[row] >= 0]
        assert (there.diff() >= 0).all() and there.unique().tolist() == list(range(kept))
    if policy in MERGING:
        assert (moved >= 0).all() and not dropped.any()
        assert torch.equal(out.mass.sum(1), stream.mass.sum(1))
    else:
        assert all(row[row >= 0].unique().numel() == kept for row in moved)

    # A slot that was merged with nothing is what it was, to the bit.
    for row in range(3):
        for m in range(kept):
            source = (moved[row] == m).nonzero().flatten()
            if len(source) == 1:
                assert torch.equal(out.k[row, :, m], stream.k[row, :, source[0]])
                assert torch.equal(out.v[row, :, m], stream.v[row, :, source[0]])
            # Every key is a key that came in, every value lies between those it is made of.
            assert any(torch.equal(out.k[row, :, m], stream.k[row, :, i]) for i in source)
            low = stream.v[row][:, source].amin(1) - 1e-2 * stream.v.abs().max()
            high = stream.v[row][:, source].amax(1) + 1e-2 * stream.v.abs().max()
            assert ((out.v[row, :, m] >= low) & (out.v[row, :, m] <= high)).all()

    # Protected slots: the newest ones, whatever happens to the rest.
    if policy in ("adaptive", "priority", "fifo") and recent:
        safe = min(recent, n)
        assert moved[:, n - safe :].tolist() == [list(range(kept - safe, kept))] * 3
        assert torch.equal(out.k[:, :, kept - safe :], stream.k[:, :, n - safe :])
        assert torch.equal(out.v[:, :, kept - safe :], stream.v[:, :, n - safe :])
        assert torch.equal(out.mass[:, kept - safe :], stream.mass[:, n - safe :])

    # Rows do not affect each other, and the same call gives the same bits.
    again, moved_again, _ = reduce_slots(stream, policy, budget, recent)
    assert_same(out, again)
    assert torch.equal(moved, moved_again)
    for row in range(3):
        alone, moved_alone, _ = reduce_slots(row_of(stream, row), policy, budget, recent)
        assert_same(alone, row_of(out, row))
        assert torch.equal(moved_alone[0], moved[row])


@pytest.mark.parametrize("policy", ALL)
def test_rows_of_a_large_batch_do_not_affect_each_other(policy: str) -> None:
    stream = random_stream(600, batch=5, dtype=torch.float32)
    out, moved, _ = reduce_slots(stream, policy, 200, 50)
    for row in range(5):
        alone, moved_alone, _ = reduce_slots(row_of(stream, row), policy, 200, 50)
        assert_same(alone, row_of(out, row))
        assert torch.equal(moved_alone[0], moved[row])


@pytest.mark.parametrize("policy", MERGING)
def test_mass_is_conserved_over_a_long_life(policy: str) -> None:
    """200 chunks through a small budget, in float32: the total is the tokens that came in."""
    stream = random_stream(0, dtype=torch.float32)
    for i in range(200):
        new = random_stream(48, dtype=torch.float32, seed=i)
        whole = torch.where(new.mass[:, ::2] > 0, 7.0, 8.0)
        new.mass[:, 1::2] = whole  # a subgroup is 8 tokens: 1 + 7 or 0 + 8
        stream, _, dropped = reduce_slots(
            Slots(
                torch.cat((stream.k, new.k), 2),
                torch.cat((stream.v, new.v), 2),
                torch.cat((stream.mass, new.mass), 1),
            ),
            policy,
            100,
            25,
        )
        assert stream.mass.shape[1] <= 100 and float(dropped) == 0
        assert float(stream.mass.sum()) == 8 * 24 * (i + 1)
        assert stream.v.isfinite().all()


@pytest.mark.parametrize("policy", ALL)
def test_a_stream_within_its_budget_is_left_alone(policy: str) -> None:
    stream = random_stream(32, batch=2)
    for budget in (32, 33, 1000):
        out, moved, dropped = reduce_slots(stream, policy, budget, 4)
        assert_same(out, stream)
        assert moved.tolist() == [list(range(32))] * 2 and not dropped.any()


@pytest.mark.parametrize("policy", ALL)
def test_no_gap_in_the_number_of_rounds(policy: str) -> None:
    """From one slot over budget to a hundred times the budget."""
    for n in (9, 10, 15, 16, 17, 31, 64, 800):
        out, _, _ = reduce_slots(random_stream(n), policy, 8, 7)
        assert out.mass.shape[1] == 8


def test_the_five_policies_differ() -> None:
    stream = random_stream(96, seed=3)
    outs = {name: reduce_slots(stream, name, 64, 16)[0] for name in ALL}
    for i, a in enumerate(ALL):
        for b in ALL[i + 1 :]:
            assert not torch.equal(outs[a].k, outs[b].k), f"{a} and {b} do the same"


# ---------------------------------------------------------------- ties


@pytest.mark.parametrize("n", [*range(5, 70), 5000])
def test_equal_slots_go_oldest_first(n: int) -> None:
    """Also where a vectorised kernel ends: equal slots have equal energies at every place."""
    one = torch.tensor([0.3, -1.7, 0.9], dtype=torch.float32)
    stream = Slots(
        torch.arange(n, dtype=torch.float32).expand(1, 2, n)[..., None].repeat(1, 1, 1, 3),
        one.expand(1, 2, n, 3).clone(),
        torch.full((1, n), 7.0),
    )
    budget = n - 2
    assert slot_energy(stream.v, stream.mass).unique().numel() == 1
    for policy in ("adaptive", "score_merge"):
        out, moved, _ = reduce_slots(stream, policy, budget, 1)
        assert moved[0].tolist() == [0, 0, 1, 1, *range(2, n - 2)], policy
        assert out.mass[0].tolist() == [14.0] * 2 + [7.0] * (n - 4)
        assert out.k[0, 0, :2, 0].tolist() == [1, 3]  # a tie keeps the later key
        torch.testing.assert_close(out.v[0, 0, 0], one, rtol=1e-6, atol=0)
    for policy in DROPPING:
        _, moved, _ = reduce_slots(stream, policy, budget, 1)
        assert moved[0].tolist() == [-1, -1, *range(n - 2)], policy


def test_the_chosen_pairs_of_uniform_merge_are_evenly_spaced() -> None:
    for n in range(4, 60):
        for budget in range(n - n // 2, n):
            _, moved, _ = reduce_slots(random_stream(n, seed=n), "uniform_merge", budget, 0)
            left = [i for i in range(n - 1) if moved[0, i] == moved[0, i + 1]]
            assert len(left) == n - budget and all(i % 2 == 0 for i in left)
            gaps = [b // 2 - a // 2 for a, b in pairwise(left)]
            # The ends too: what lies before the first and after the last is half a gap.
            assert not gaps or max(gaps) - min(gaps) <= 1
            ends = (left[0] // 2, n // 2 - 1 - left[-1] // 2)
            assert abs(ends[0] - ends[1]) <= 1


# ---------------------------------------------------------------- the merge itself, in numbers


def pair(v: list[float], mass: list[float], dtype: torch.dtype = torch.float64) -> Slots:
    """A stream of one-head, two-feature slots with values along one axis."""
    n = len(v)
    values = torch.zeros(1, 1, n, 2, dtype=dtype)
    values[0, 0, :, 0] = torch.tensor(v, dtype=dtype)
    keys = torch.arange(1, n + 1, dtype=dtype)[None, None, :, None].repeat(1, 1, 1, 2)
    return Slots(keys, values, torch.tensor([mass], dtype=torch.float64))


@pytest.mark.parametrize(
    "v, mass, policy, value, key",
    [
        # energies 1·log 2 and 3·log 8 = 9·log 2: shares 1/10 and 9/10
        ([1.0, 3.0], [1, 7], "score_merge", 2.8, 2),
        ([3.0, 1.0], [7, 1], "score_merge", 2.8, 1),
        ([1.0, 3.0], [1, 7], "uniform_merge", 2.75, 2),
        # the key follows the energy, also where the value follows the mass
        ([9.0, 1.0], [1, 7], "uniform_merge", 2.0, 1),
        ([2.0, 2.0], [3, 3], "score_merge", 2.0, 2),
        ([0.0, 0.0], [3, 1], "score_merge", 0.0, 2),
        ([0.0, 4.0], [1000, 1], "score_merge", 4.0, 2),
        ([5.0, 0.0], [1, 8], "score_merge", 5.0, 1),
        # an empty slot leaves the other as it is, whatever its buffers hold
        ([5.0, 7.0], [0, 8], "score_merge", 7.0, 2),
        ([5.0, 7.0], [8, 0], "score_merge", 5.0, 1),
        ([5.0, 7.0], [0, 8], "uniform_merge", 7.0, 2),
        ([5.0, 7.0], [8, 0], "uniform_merge", 5.0, 1),
    ],
)
def test_merging_a_pair(
    v: list[float], mass: list[float], policy: str, value: float, key: int
) -> None:
    out, _, _ = reduce_slots(pair(v, mass), policy, 1, 0)
    assert float(out.v[0, 0, 0, 0]) == pytest.approx(value, rel=1e-14, abs=0)
    assert float(out.k[0, 0, 0, 0]) == key
    assert float(out.mass[0, 0]) == sum(mass)


def test_values_that_are_opposite_average_by_mass_only_without_energy() -> None:
    """Two values of no norm have no energy; the mean of their zeros must not be 0 / 0."""
    out, _, _ = reduce_slots(pair([0.0, 0.0, 1.0, -1.0], [2, 6, 1, 1]), "score_merge", 2, 0)
    assert out.v.tolist() == [[[[0.0, 0.0], [0.0, 0.0]]]]
    assert out.mass.tolist() == [[8.0, 2.0]]


def test_an_empty_pair_stays_empty() -> None:
    out, moved, _ = reduce_slots(pair([0.0, 0.0, 1.0], [0, 0, 8]), "adaptive", 2, 1)
    assert out.mass.tolist() == [[0.0, 8.0]] and moved.tolist() == [[0, 0, 1]]
    assert out.v.isfinite().all()


def test_values_are_averaged_in_float32() -> None:
    """A bfloat16 mean is the exact mean, rounded once."""
    stream = random_stream(400, dtype=torch.bfloat16)
    stream = Slots(stream.k, stream.v, torch.full((1, 400), 8.0))
    out, _, _ = reduce_slots(stream, "uniform_merge", 200, 0)
    exact = stream.v.double().unflatten(2, (200, 2)).mean(3)
    assert torch.equal(out.v, exact.to(torch.bfloat16))  # equal masses: exact in float32


def test_masses_stay_exact_where_they_are_large() -> None:
    stream = pair([1.0, 2.0, 3.0, 4.0], [2**23 - 1, 2**22 + 1, 1, 1])
    stream = Slots(stream.k, stream.v, stream.mass.float())
    out, _, dropped = reduce_slots(stream, "score_merge", 1, 0)
    assert float(out.mass) == 2**23 + 2**22 + 2 and float(dropped) == 0


# ---------------------------------------------------------------- names, and what is refused


def test_the_five_are_registered_the_articles_first() -> None:
    names = list(anchormass.policies())
    assert names[:5] == list(ALL)
    for name in ALL:
        policy = anchormass.policies()[name]
        assert policy.name == name and policy.summary.endswith(".")
        assert policy.weight == ("mass" if name == "uniform_merge" else "energy")
    anchormass.policies().clear()  # a copy: the registry cannot be emptied by accident
    assert list(anchormass.policies())[:5] == list(ALL)


def test_an_unknown_policy_is_refused() -> None:
    for ask in (get_policy, lambda name: reduce_slots(random_stream(4), name, 2, 0)):
        with pytest.raises(AnchorMassError, match=r"'adaptve'.*adaptive.*fifo"):
            ask("adaptve")


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("budget, recent", [(16, 16), (16, 17), (0, 0), (8, -1)])
def test_a_budget_that_protected_slots_exceed_is_refused(
    policy: str, budget: int, recent: int
) -> None:
    with pytest.raises(AnchorMassError) as refused:
        reduce_slots(random_stream(64), policy, budget, recent)
    assert f"budget of {budget} slots" in str(refused.value)
    assert f"{recent} protected" in str(refused.value)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names registered in a test are gone after it."""
    # The package's attribute `policies` is the function, so the module is asked for by name.
    module = importlib.import_module("anchormass.policies")
    monkeypatch.setattr(module, "_POLICIES", dict(anchormass.policies()))


@pytest.mark.usefixtures("registry")
def test_a_policy_of_ones_own() -> None:
    for _ in range(2):  # a notebook cell may be run again

        @register("merge_oldest", weight="mass")
        def merge_oldest(energy: Tensor, mass: Tensor, budget: int, recent: int) -> Plan:
            """Merge the oldest pairs."""
            n = energy.shape[1]
            pairs = torch.arange(min(n - budget, n // 2)).expand(energy.shape[0], -1)
            return merge_pairs(n, pairs)

    assert anchormass.policies()["merge_oldest"].summary == "Merge the oldest pairs."
    out, moved, dropped = reduce_slots(random_stream(10), "merge_oldest", 8, 0)
    assert moved[0].tolist() == [0, 0, 1, 1, 2, 3, 4, 5, 6, 7]
    assert out.mass.shape == (1, 8) and float(dropped) == 0


@pytest.mark.usefixtures("registry")
def test_a_policy_that_makes_no_progress_is_refused() -> None:
    @register("lazy")
    def lazy(energy: Tensor, mass: Tensor, budget: int, recent: int) -> Plan:
        """Do nothing."""
        all_slots = torch.arange(energy.shape[1])[None]
        return Plan(all_slots, all_slots)

    @register("greedy")
    def greedy(energy: Tensor, mass: Tensor, budget: int, recent: int) -> Plan:
        """Drop everything."""
        none = torch.zeros(1, 0, dtype=torch.long)
        return Plan(none, none)

    for name, left in (("lazy", "left 10 of 10"), ("greedy", "left 0 of 10")):
        with pytest.raises(AnchorMassError, match=f"'{name}' {left}"):
            reduce_slots(random_stream(10), name, 8, 0)


@pytest.mark.usefixtures("registry")
def test_a_built_in_name_or_an_unknown_weight_is_refused() -> None:
    with pytest.raises(AnchorMassError, match="'adaptive' is built in"):
        register("adaptive")
    with pytest.raises(AnchorMassError, match="weight='size'"):
        register("mine", weight="size")
    assert "mine" not in anchormass.policies()
