"""Stage 2: keeping the compressed stream within its budget, one function per policy.

A policy only *decides*: from energies and masses it says which adjacent slots merge or
which slots go (a `Plan`). How two slots become one, and who holds which token afterwards,
is the same for all and stands below. The article names `score_merge`, `uniform_merge`,
`priority` and `fifo` without defining them; the definitions here are this project's reading.

All ties are broken towards the older slot being merged or dropped, so results repeat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from anchormass.compress import Slots
from anchormass.errors import AnchorMassError


@dataclass(frozen=True)
class Plan:
    """One round: output slot m is `first[m]` merged with `second[m]`; equal means unchanged.

    Both are int64 `[B, M]`, ascending. A slot that no entry names is dropped.
    """

    first: Tensor
    second: Tensor


PlanFunction = Callable[[Tensor, Tensor, int, int], Plan]


@dataclass(frozen=True)
class Policy:
    """A named stage-2 policy. `weight` says what merged values are weighted by."""

    name: str
    plan: PlanFunction
    weight: str
    summary: str


_POLICIES: dict[str, Policy] = {}
_BUILT_IN = ("adaptive", "score_merge", "uniform_merge", "priority", "fifo")


def register(name: str, weight: str = "energy") -> Callable[[PlanFunction], PlanFunction]:
    """Decorator: make `plan(energy [B, N], mass [B, N], budget, recent) -> Plan` selectable.

    `energy` and `mass` are those of the stream, oldest slot first, N > budget. One call need
    not reach the budget, only come closer; rounds repeat. A name of one's own may be
    registered again, so that a notebook cell can be rerun.

    Raises:
        AnchorMassError: for the name of a built-in policy, or an unknown weight.
    """
    if name in _BUILT_IN and name in _POLICIES:
        raise AnchorMassError(f"policy {name!r} is built in; choose another name")
    if weight not in ("energy", "mass"):
        raise AnchorMassError(f"weight={weight!r}: choose 'energy' or 'mass'")

    def add(plan: PlanFunction) -> PlanFunction:
        summary = (plan.__doc__ or "").strip().split("\n")[0]
        _POLICIES[name] = Policy(name, plan, weight, summary)
        return plan

    return add


def policies() -> dict[str, Policy]:
    """All policies by name, the article's first."""
    return dict(_POLICIES)


def get_policy(name: str) -> Policy:
    """The policy called `name`. Raises AnchorMassError for an unknown one."""
    if name not in _POLICIES:
        raise AnchorMassError(f"unknown policy {name!r}: choose one of {', '.join(_POLICIES)}")
    return _POLICIES[name]


# ---------------------------------------------------------------- decisions


@register("adaptive")
def adaptive(energy: Tensor, mass: Tensor, budget: int, recent: int) -> Plan:
    """Merge the adjacent pairs of least energy, older than the newest `recent` slots."""
    n = energy.shape[1]
    pairs = (n - recent) // 2
    pair_energy = energy[:, : 2 * pairs].unflatten(1, (pairs, 2)).sum(-1)
    order = pair_energy.argsort(dim=1, stable=True)
    return merge_pairs(n, order[:, : n - budget])


@register("score_merge")
def score_merge(energy: Tensor, mass: Tensor, budget: int, recent: int) -> Plan:
    """Merge the adjacent pairs of least energy, with nothing protected."""
    return adaptive(energy, mass, budget, 0)


@register("uniform_merge", weight="mass")
def uniform_merge(energy: Tensor, mass: Tensor, budget: int, recent: int) -> Plan:
    """Merge evenly spaced adjacent pairs over the whole stream, values weighted by mass."""
    batch, n = energy.shape
    pairs = n // 2
    count = min(n - budget, pairs)
    middle = torch.arange(count, device=energy.device) * 2 + 1  # centres of `count` equal spans
    return merge_pairs(n, (middle * pairs // (2 * count)).expand(batch, count))


@register("priority")
def priority(energy: Tensor, mass: Tensor, budget: int, recent: int) -> Plan:
    """Drop the slots of least energy, older than the newest `recent` slots."""
    n = energy.shape[1]
    order = energy[:, : n - recent].argsort(dim=1, stable=True)
    return drop_slots(n, order[:, : n - budget])


@register("fifo")
def fifo(energy: Tensor, mass: Tensor, budget: int, recent: int) -> Plan:
    """Drop the oldest slots; sinks, recent slots and tail remain, as in StreamingLLM."""
    batch, n = energy.shape
    return drop_slots(n, torch.arange(n - budget, device=energy.device).expand(batch, -1))


def merge_pairs(n: int, pairs: Tensor) -> Plan:
    """Plan that merges slots (2p, 2p + 1) for every p in `pairs` `[B, P]`, of `n` slots."""
    partner = _marked(n, 2 * pairs)  # True at the left slot of each pair
    first = _kept(_marked(n, 2 * pairs + 1))
    return Plan(first, first + partner.gather(1, first))


def drop_slots(n: int, dropped: Tensor) -> Plan:
    """Plan that drops the slots `dropped` `[B, P]` of `n`."""
    first = _kept(_marked(n, dropped))
    return Plan(first, first)


def _marked(n: int, places: Tensor) -> Tensor:
    mask = torch.zeros(places.shape[0], n, dtype=torch.bool, device=places.device)
    return mask.scatter_(1, places, True)


def _kept(removed: Tensor) -> Tensor:
    # Every row removes equally many, so the kept places form a rectangle.
    return (~removed).nonzero()[:, 1].view(removed.shape[0], -1)


# ---------------------------------------------------------------- carrying them out


def slot_energy(v: Tensor, mass: Tensor) -> Tensor:
    """e = mean over Global heads of ‖v‖₂, times log(1 + n) (article, section 4).

    `v [B, H, N, D]`, `mass [B, N]` -> `[B, N]` in at least float32; an empty slot has 0.
    """
    norm = v.to(torch.promote_types(v.dtype, torch.float32)).norm(dim=-1).mean(1)
    return norm * mass.log1p()


def apply_plan(slots: Slots, energy: Tensor, plan: Plan, weight: str) -> Slots:
    """Merge and drop as the plan says.

    Value: weighted mean of the two in at least float32, by energy, or by mass where `weight`
    says so or both energies are 0. Key: that of the higher energy, on a tie the later one.
    Mass: the sum. A pair with an empty slot is the other slot, unchanged.
    """
    first, second = plan.first, plan.second
    merged = first != second
    mass_a, mass_b = slots.mass.gather(1, first), slots.mass.gather(1, second)
    energy_a, energy_b = energy.gather(1, first), energy.gather(1, second)

    use_mass = (energy_a + energy_b == 0) if weight == "energy" else torch.ones_like(merged)
    weight_a = torch.where(use_mass, mass_a.to(energy.dtype), energy_a)
    weight_b = torch.where(use_mass, mass_b.to(energy.dtype), energy_b)
    share_b = weight_b / (weight_a + weight_b).clamp_min(torch.finfo(energy.dtype).tiny)

    take_b = merged & (mass_a == 0)  # also when both are empty: then both are nothing
    mix = merged & (mass_a > 0) & (mass_b > 0)
    key_from_b = torch.where(mix, energy_b >= energy_a, take_b)
    source = torch.where(key_from_b, second, first)
    k = _rows(slots.k, source)
    v = _rows(slots.v, torch.where(take_b, second, first))
    if bool(mix.any()):
        a, b = v.to(share_b.dtype), _rows(slots.v, second).to(share_b.dtype)
        mean = torch.lerp(a, b, share_b[:, None, :, None])
        v = torch.where(mix[:, None, :, None], mean.to(v.dtype), v)
    return Slots(k, v, torch.where(merged, mass_a + mass_b, mass_a))


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """`x [B, H, N, D]` at `index [B, M]` -> `[B, H, M, D]`."""
    if x.shape[0] == 1:
        return x.index_select(2, index[0])
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def new_places(plan: Plan, n: int) -> Tensor:
    """Where each of the `n` old slots went: `[B, n]`, -1 if dropped."""
    batch, kept = plan.first.shape
    place = torch.arange(kept, device=plan.first.device).expand(batch, kept)
    moved = torch.full((batch, n), -1, dtype=torch.long, device=plan.first.device)
    return moved.scatter_(1, plan.second, place).scatter_(1, plan.first, place)


def reduce_slots(
    slots: Slots, policy: str, budget: int, recent: int
) -> tuple[Slots, Tensor, Tensor]:
    """Bring the stream within `budget` slots, in as many rounds as it takes.

    Args:
        slots: the stream, oldest first, N slots in every row.
        policy: a name in `policies()`.
        budget: most slots that may remain, M_max.
        recent: newest slots that a protecting policy leaves alone.

    Returns:
        the slots that remain; `moved [B, N]`, the new place of each old slot, -1 if dropped;
        `dropped [B]`, the mass that was lost, in tokens.

    Raises:
        AnchorMassError: when the protected slots alone exceed the budget, or the policy is
            unknown or makes no progress.
    """
    chosen = get_policy(policy)
    if not 0 <= recent < budget:
        raise AnchorMassError(
            f"budget of {budget} slots with {recent} protected recent slots: the budget must "
            "exceed them; raise max_slots or lower recent_slots"
        )
    before = slots.mass.sum(1)
    n = slots.mass.shape[1]
    moved = torch.arange(n, device=slots.mass.device).expand(slots.mass.shape[0], n)
    while (size := slots.mass.shape[1]) > budget:
        energy = slot_energy(slots.v, slots.mass)
        plan = chosen.plan(energy, slots.mass, budget, recent)
        if not 0 < plan.first.shape[1] < size:
            raise AnchorMassError(f"policy {policy!r} left {plan.first.shape[1]} of {size} slots")
        slots = apply_plan(slots, energy, plan, chosen.weight)
        step = new_places(plan, size)
        moved = torch.where(moved < 0, moved, step.gather(1, moved.clamp_min(0)))
    return slots, moved, before - slots.mass.sum(1)
