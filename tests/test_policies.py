"""Stage 2: the five policies against plain loops, and the properties they owe.

The reference below is written from the article and SPEC section 3, slot by slot, and shares
nothing with the package.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anchormass import AnchorMassError, policies, register
from anchormass.compress import Slots
from anchormass.policies import reduce_slots, slot_energy

MERGING = ("adaptive", "score_merge", "uniform_merge")
ALL = (*MERGING, "priority", "fifo")


def reference(slots: list[dict], policy: str, budget: int, recent: int) -> list[dict]:
    """`slots`: dicts k, v `[H][D]`, n, ids. Rounds until the stream fits."""

    def energy(s: dict) -> float:
        norms = [math.sqrt(sum(x * x for x in head)) for head in s["v"]]
        return sum(norms) / len(norms) * math.log(1 + s["n"])

    def merge(a: dict, b: dict, by_mass: bool) -> dict:
        if a["n"] == 0 or b["n"] == 0:
            return (b if a["n"] == 0 else a) | {"ids": a["ids"] + b["ids"]}
        ea, eb = energy(a), energy(b)
        wa, wb = (a["n"], b["n"]) if by_mass or ea + eb == 0 else (ea, eb)
        v = [
            [(wa * x + wb * y) / (wa + wb) for x, y in zip(p, q, strict=True)]
            for p, q in zip(a["v"], b["v"], strict=True)
        ]
        key = b["k"] if eb >= ea else a["k"]
        return {"k": key, "v": v, "n": a["n"] + b["n"], "ids": a["ids"] + b["ids"]}

    while len(slots) > budget:
        need, n = len(slots) - budget, len(slots)
        if policy == "fifo":
            return slots[need:]
        if policy == "priority":
            old = sorted(range(n - recent), key=lambda i: (energy(slots[i]), i))
            gone = set(old[:need])
            return [s for i, s in enumerate(slots) if i not in gone]
        guarded = recent if policy == "adaptive" else 0
        pairs = (n - guarded) // 2
        if policy == "uniform_merge":
            count = min(need, pairs)
            chosen = {int((i + 0.5) * pairs / count) for i in range(count)}
            assert len(chosen) == count
        else:
            sums = [energy(slots[2 * p]) + energy(slots[2 * p + 1]) for p in range(pairs)]
            chosen = set(sorted(range(pairs), key=lambda p: (sums[p], p))[:need])
        out, i = [], 0
        while i < n:
            if i % 2 == 0 and i // 2 in chosen:
                out.append(merge(slots[i], slots[i + 1], policy == "uniform_merge"))
                i += 2
            else:
                out.append(slots[i])
                i += 1
        slots = out
    return slots


def stream(n: int, seed: int, batch: int = 1, ties: bool = False) -> Slots:
    """Random slots; about a fifth are empty, and with `ties` many energies coincide."""
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(batch, 2, n, 3, generator=g, dtype=torch.float64)
    v = torch.randn(batch, 2, n, 3, generator=g, dtype=torch.float64)
    if ties:
        v = v.sign()
    mass = torch.randint(0, 5, (batch, n), generator=g).double()
    return Slots(k * (mass > 0)[:, None, :, None], v * (mass > 0)[:, None, :, None], mass)


sizes = st.tuples(st.integers(2, 40), st.integers(1, 30), st.integers(0, 20), st.integers(0, 9999))


@pytest.mark.parametrize("policy", ALL)
@given(size=sizes, ties=st.booleans())
@settings(max_examples=60, deadline=None)
def test_equals_the_plain_loop(policy: str, size: tuple, ties: bool) -> None:
    n, budget, recent, seed = size
    recent = min(recent, budget - 1)
    given_slots = stream(n, seed, ties=ties)
    plain = [
        {
            "k": given_slots.k[0, :, i].tolist(),
            "v": given_slots.v[0, :, i].tolist(),
            "n": float(given_slots.mass[0, i]),
            "ids": [i],
        }
        for i in range(n)
    ]
    expected = reference(plain, policy, budget, recent)
    got, moved, dropped = reduce_slots(given_slots, policy, budget, recent)

    assert got.mass.shape[1] == len(expected) <= max(budget, 0)
    assert got.mass[0].tolist() == [s["n"] for s in expected]
    for i, s in enumerate(expected):
        assert got.k[0, :, i].tolist() == s["k"]
        assert torch.allclose(got.v[0, :, i], torch.tensor(s["v"], dtype=torch.float64), atol=1e-13)
        assert [j for j in range(n) if moved[0, j] == i] == s["ids"]
    lost = given_slots.mass.sum() - got.mass.sum()
    assert float(dropped[0]) == float(lost)
    if policy in MERGING:
        assert float(lost) == 0


@pytest.mark.parametrize("policy", ["adaptive", "priority"])
@given(size=sizes)
@settings(max_examples=40, deadline=None)
def test_protected_slots_are_bit_identical(policy: str, size: tuple) -> None:
    n, budget, recent, seed = size
    recent = min(recent, budget - 1, n)
    before = stream(n, seed)
    after, _, _ = reduce_slots(before, policy, budget, recent)
    if recent:
        assert torch.equal(after.k[:, :, -recent:], before.k[:, :, -recent:])
        assert torch.equal(after.v[:, :, -recent:], before.v[:, :, -recent:])
        assert torch.equal(after.mass[:, -recent:], before.mass[:, -recent:])


@pytest.mark.parametrize("policy", ALL)
def test_rows_do_not_affect_each_other_and_results_repeat(policy: str) -> None:
    both = stream(37, 3, batch=3, ties=True)
    got, moved, dropped = reduce_slots(both, policy, 11, 4)
    again, _, _ = reduce_slots(both, policy, 11, 4)
    assert torch.equal(got.v, again.v)
    for b in range(3):
        row = slice(b, b + 1)
        alone, moved_alone, dropped_alone = reduce_slots(
            Slots(both.k[row], both.v[row], both.mass[row]), policy, 11, 4
        )
        for name in ("k", "v", "mass"):
            assert torch.equal(getattr(got, name)[row], getattr(alone, name))
        assert torch.equal(moved[row], moved_alone) and torch.equal(dropped[row], dropped_alone)


def test_the_five_differ() -> None:
    before = stream(64, 5)
    kept = [reduce_slots(before, p, 20, 5)[0].v for p in ALL]
    for i in range(5):
        for j in range(i):
            assert not torch.equal(kept[i], kept[j]), (ALL[i], ALL[j])


def test_bf16_values_are_averaged_in_float32() -> None:
    k = torch.zeros(1, 1, 2, 4, dtype=torch.bfloat16)
    v = torch.tensor([[[[1.0] * 4, [1.0078125] * 4]]], dtype=torch.bfloat16)
    mass = torch.tensor([[8.0, 8.0]])
    wide = Slots(k.float(), v.float(), mass)
    exact = reduce_slots(wide, "adaptive", 1, 0)[0].v.bfloat16()
    assert torch.equal(reduce_slots(Slots(k, v, mass), "adaptive", 1, 0)[0].v, exact)


def test_energy_is_mean_norm_times_log_of_one_plus_mass() -> None:
    s = stream(6, 8)
    for i in range(6):
        norm = sum(float(s.v[0, h, i].norm()) for h in range(2)) / 2
        expected = norm * math.log(1 + float(s.mass[0, i]))
        assert float(slot_energy(s.v, s.mass)[0, i]) == pytest.approx(expected, abs=1e-12)


def test_refusals() -> None:
    with pytest.raises(AnchorMassError, match=r"'nearest'.*adaptive"):
        reduce_slots(stream(8, 0), "nearest", 4, 1)
    with pytest.raises(AnchorMassError, match="4 slots with 4 protected"):
        reduce_slots(stream(8, 0), "adaptive", 4, 4)
    with pytest.raises(AnchorMassError, match="built in"):
        register("adaptive")
    with pytest.raises(AnchorMassError, match="weight='age'"):
        register("mine", weight="age")


def test_a_policy_of_ones_own() -> None:
    from anchormass.policies import _POLICIES, drop_slots

    @register("test_newest_go")
    def newest_go(energy: torch.Tensor, mass: torch.Tensor, budget: int, recent: int):
        """Drop the newest slots."""
        n = energy.shape[1]
        return drop_slots(n, torch.arange(budget, n).expand(energy.shape[0], -1))

    try:
        before = stream(9, 1)
        after, _, _ = reduce_slots(before, "test_newest_go", 4, 0)
        assert torch.equal(after.k, before.k[:, :, :4])
        assert policies()["test_newest_go"].summary == "Drop the newest slots."
    finally:
        del _POLICIES["test_newest_go"]
