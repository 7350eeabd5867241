"""Stage 2 step by step: one text read chunk by chunk, every token's whereabouts after each chunk.

`record` reads the text through a real cache that tracks positions and keeps a snapshot per
chunk; the other functions are tables over such a `History`. Two facts make small tables exact:
slots merge whole, so the background tokens of a subgroup share one slot for ever; and what
stage 1 made of a token is known from its outlier flag, so a slot that weighs more than that
has merged since. A pass of stage 2 counts as one merge: exact as long as one round of pairs
is enough for a pass, that is unless a chunk brings more slots than can be paired at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from torch import Tensor

from anchormass.cache import DROPPED, SINK, TAIL, AnchorMassCache
from anchormass.errors import AnchorMassError
from anchormass.model import TransformerLM
from anchormass.policies import slot_energy

UNREAD = -4  # beside SINK, DROPPED, TAIL in `History.owner`: the token is still to come
MASS_EDGES = (8, 16, 32, 64)  # most tokens of each class of merged slots; the last is open
MERGED = ("merged, 2–8", "merged, 9–16", "merged, 17–32", "merged, 33–64", "merged, over 64")
PROTECTING = ("adaptive", "priority")  # the policies that leave the newest slots alone
STATES = ("sink", "tail", "outlier alone", "background", *MERGED, "dropped", "unread")


@dataclass(frozen=True)
class History:
    """What a cache held after each chunk: L layers, S snapshots, T tokens.

    `protected`: newest slots that the policy leaves alone. `seen [S]`: tokens read.
    `owner [L, S, T]`: the slot that holds a token, its place in the stream, or a code.
    `outlier [L, T]`: split off by stage 1. `born [L, T]`: mass of the slot that stage 1 put the
    token in (1 while raw). `slot_mass`, `energy`: arrays `[N]` by layer and snapshot.
    `dropped [L, S]`: mass lost so far, in tokens, as the cache counts it.
    """

    policy: str
    max_slots: int
    chunk_tokens: int
    sinks: int
    subgroup: int
    protected: int
    seen: np.ndarray
    owner: np.ndarray
    outlier: np.ndarray
    born: np.ndarray
    slot_mass: list[list[np.ndarray]] = field(repr=False)
    energy: list[list[np.ndarray]] = field(repr=False)
    dropped: np.ndarray

    def step_at(self, read: int | None) -> int:
        """The first snapshot with at least `read` tokens read, else (and for None) the last."""
        last = len(self.seen) - 1
        return last if read is None else min(int(np.searchsorted(self.seen, read)), last)

    def mass(self, layer: int) -> np.ndarray:
        """Mass of the slot that holds each token, `[S, T]`: raw 1, dropped or unread 0."""
        owner = self.owner[layer]
        mass = np.isin(owner, (SINK, TAIL)).astype(float)
        for step, slots in enumerate(self.slot_mass[layer]):
            held = owner[step] >= 0
            mass[step, held] = slots[owner[step, held]]
        return mass

    def states(self, layer: int) -> np.ndarray:
        """Index into `STATES` of each token, `[S, T]`."""
        owner, mass = self.owner[layer], self.mass(layer)
        codes = np.where(self.outlier[layer], STATES.index("outlier alone"), 0)
        codes = np.broadcast_to(np.where(codes, codes, STATES.index("background")), owner.shape)
        merged = STATES.index(MERGED[0]) + np.searchsorted(MASS_EDGES, mass)
        codes = np.where(mass > self.born[layer], merged, codes)
        for code, name in ((SINK, "sink"), (TAIL, "tail"), (DROPPED, "dropped")):
            codes = np.where(owner == code, STATES.index(name), codes)
        return np.where(owner == UNREAD, STATES.index("unread"), codes)

    def merges(self, layer: int) -> np.ndarray:
        """Passes of stage 2 in which a token's slot took in another one, `[S, T]`, so far."""
        mass = np.where(self.owner[layer] >= 0, self.mass(layer), self.born[layer])
        before = np.concatenate((self.born[layer][None], mass[:-1]))
        return (mass > np.maximum(before, self.born[layer])).cumsum(0)


def record(
    model: TransformerLM, ids: Tensor, policy: str, max_slots: int, chunk_tokens: int = 128
) -> History:
    """Read `ids` `[1, T]` in chunks through a cache with this policy and budget.

    The chunk is part of the result: stage 2 runs once a chunk, as in the article's prefill.

    Raises:
        AnchorMassError: a Standard model; more than one text; what `prefill` refuses.
    """
    if model.config.attention != "anchormass" or ids.shape[0] != 1:
        raise AnchorMassError(
            f"record() with a {model.config.attention!r} model and {ids.shape[0]} texts: it "
            "needs an 'anchormass' model and ids of shape [1, T]"
        )
    n_layers, total = model.config.n_layers, ids.shape[1]
    cache = model.new_cache(
        session_length=total, track_positions=True, policy=policy, max_slots=max_slots
    )
    assert isinstance(cache, AnchorMassCache)
    seen: list[int] = []
    owner: list[np.ndarray] = []
    dropped: list[list[float]] = []
    slot_mass: list[list[np.ndarray]] = [[] for _ in range(n_layers)]
    energy: list[list[np.ndarray]] = [[] for _ in range(n_layers)]

    def snapshot(tokens: int) -> None:
        seen.append(tokens)
        places = np.full((n_layers, total), UNREAD, dtype=np.int32)
        for layer in range(n_layers):
            places[layer, :tokens] = cache.owner(layer).numpy()
            slots = cache.slots(layer)
            slot_mass[layer].append(slots.mass[0].double().cpu().numpy().copy())
            energy[layer].append(slot_energy(slots.v, slots.mass)[0].cpu().numpy())
        owner.append(places)
        dropped.append([float(cache.dropped(layer)[0]) for layer in range(n_layers)])

    model.prefill(ids, cache, chunk_tokens, on_chunk=snapshot)
    sinks, size = cache.config.sinks, cache.config.subgroup
    outlier = np.stack([cache.outliers(layer).numpy() for layer in range(n_layers)])
    return History(
        policy=policy,
        max_slots=max_slots,
        chunk_tokens=chunk_tokens,
        sinks=sinks,
        subgroup=size,
        protected=cache.config.n_recent if policy in PROTECTING else 0,
        seen=np.array(seen),
        owner=np.stack(owner, axis=1),
        outlier=outlier,
        born=np.stack([_born(flags, sinks, size, total) for flags in outlier]),
        slot_mass=slot_mass,
        energy=energy,
        dropped=np.array(dropped).T,
    )


def _born(outlier: np.ndarray, sinks: int, size: int, total: int) -> np.ndarray:
    """Mass of each token's stage-1 slot: an outlier 1, the rest of its subgroup what is left."""
    born = np.ones(total)
    whole = max(total - sinks, 0) // size * size
    flags = outlier[sinks : sinks + whole].reshape(-1, size)
    left = size - flags.sum(1, keepdims=True)
    born[sinks : sinks + whole] = np.where(flags, 1, left).ravel()
    return born


class Recorder:
    """`record` that remembers, so that a slider answers at once the second time."""

    def __init__(self, model: TransformerLM, chunk_tokens: int = 128) -> None:
        self.model, self.chunk_tokens = model, chunk_tokens
        self._known: dict[tuple[bytes, str, int], History] = {}

    def __call__(self, ids: Tensor, policy: str, max_slots: int) -> History:
        """The history of this text under this policy and budget."""
        key = (ids.cpu().numpy().tobytes(), policy, max_slots)
        if key not in self._known:
            self._known[key] = record(self.model, ids, policy, max_slots, self.chunk_tokens)
        return self._known[key]

    def each(self, ids: Tensor, policies: Iterable[str], *budgets: int) -> list[History]:
        """One history for every budget and policy, in this order."""
        names = list(policies)
        return [self(ids, policy, budget) for budget in budgets for policy in names]


def subgroup_runs(histories: Iterable[History], layer: int) -> pd.DataFrame:
    """What became of each subgroup, as stretches of time in one state.

    Columns: policy, max_slots, part (`background`, or `outlier` where stage 1 split one off),
    position (of the subgroup's first token), since and until (tokens read at the first and
    last snapshot of the stretch), state, mass (tokens in the slot, at its end).
    """
    return pd.concat([_runs(h, layer) for h in histories], ignore_index=True)


def _runs(history: History, layer: int) -> pd.DataFrame:
    starts, background, outlier = _subgroups(history, layer)
    states, masses = history.states(layer), history.mass(layer)
    tables = []
    for part, tokens in (("background", background), ("outlier", outlier)):
        chosen = tokens >= 0
        state, mass = states[:, tokens[chosen]], masses[:, tokens[chosen]]  # [S, G]
        ends = np.ones(state.shape, dtype=bool)
        ends[:-1] = state[1:] != state[:-1]
        begins = np.concatenate((np.ones((1, state.shape[1]), dtype=bool), ends[:-1]))
        group, last = ends.T.nonzero()  # ordered by subgroup, then time, like `begins`
        tables.append(
            pd.DataFrame(
                {
                    "policy": history.policy,
                    "max_slots": history.max_slots,
                    "part": part,
                    "position": starts[chosen][group],
                    "since": history.seen[begins.T.nonzero()[1]],
                    "until": history.seen[last],
                    "state": np.array(STATES)[state[last, group]],
                    "mass": mass[last, group],
                }
            )
        )
    table = pd.concat(tables, ignore_index=True)
    return table[table["state"] != "unread"].reset_index(drop=True)


def _subgroups(history: History, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First token, a background token and the outlier (-1: none) of each subgroup, `[G]`.

    Sinks and tail are cut like the rest; their tokens are raw, so any one stands for them.
    """
    size, total = history.subgroup, history.owner.shape[2]
    cuts = [*range(0, history.sinks, size), *range(history.sinks, total, size)]
    starts = np.array([start for start in cuts if start < total])
    flags = np.zeros((len(starts), size), dtype=bool)
    for row, start in enumerate(starts):
        part = history.outlier[layer, start : start + size]
        flags[row, : len(part)] = part
    background = starts + flags[:, 0]  # the second token where the first is the outlier
    return starts, background, np.where(flags.any(1), starts + flags.argmax(1), -1)


def tokens(history: History, layer: int, read: int | None = None) -> pd.DataFrame:
    """One row per token, once `read` tokens are read (default: all).

    Columns: policy, max_slots, position, outlier, state, mass (of its slot, 0 if dropped),
    merges (passes in which its slot grew), rejoined (an outlier whose first merge was with its
    own background, from which stage 1 had split it).
    """
    step = history.step_at(read)
    owner = history.owner[layer, step]
    table = pd.DataFrame(
        {
            "policy": history.policy,
            "max_slots": history.max_slots,
            "position": np.arange(len(owner)),
            "outlier": history.outlier[layer] & (owner != UNREAD) & (owner != TAIL),
            "state": np.array(STATES)[history.states(layer)[step]],
            "mass": history.mass(layer)[step],
            "merges": history.merges(layer)[step],
            "rejoined": _rejoined(history, layer, step),
        }
    )
    return table[: history.seen[step]]


def _rejoined(history: History, layer: int, step: int) -> np.ndarray:
    """Outliers whose slot held their own background at the end of the pass that merged it first."""
    _, background, outlier = _subgroups(history, layer)
    background, outlier = background[outlier >= 0], outlier[outlier >= 0]
    owner, mass = history.owner[layer, : step + 1], history.mass(layer)[: step + 1]
    merged = mass[:, outlier] > 1
    first = merged.argmax(0)
    flags = np.zeros(owner.shape[1], dtype=bool)
    flags[outlier] = merged.any(0) & (owner[first, outlier] == owner[first, background])
    return flags


def by_position(
    histories: Iterable[History], layer: int, read: int | None = None, width: int = 64
) -> pd.DataFrame:
    """Means over stretches of `width` tokens, sinks and tail left out.

    Columns: policy, max_slots, position (the stretch's middle), tokens, dropped (share),
    mass and merges (means over the tokens that are still held; NaN where none is).
    """
    tables = []
    for history in histories:
        table = tokens(history, layer, read)
        table = table[~table["state"].isin(("sink", "tail"))]
        held = table["state"] != "dropped"
        rows = pd.DataFrame(
            {
                "position": table["position"],
                "dropped": (~held).astype(float),
                "mass": table["mass"].where(held),
                "merges": table["merges"].where(held),
            }
        )
        grouped = rows.groupby((table["position"] - history.sinks) // width)
        means = grouped.mean()
        means.insert(0, "tokens", grouped.size())
        means.insert(0, "max_slots", history.max_slots)
        means.insert(0, "policy", history.policy)
        tables.append(means)
    columns = ["policy", "max_slots", "position", "tokens", "dropped", "mass", "merges"]
    return pd.concat(tables, ignore_index=True)[columns]


def shares(histories: Iterable[History], layer: int, read: int | None = None) -> pd.DataFrame:
    """How the tokens read so far are kept: share of each state that occurs.

    Columns: policy, max_slots, state, tokens, share.
    """
    tables = []
    for history in histories:
        step = history.step_at(read)
        codes = history.states(layer)[step, : history.seen[step]]
        counts = np.bincount(codes, minlength=len(STATES))
        tables.append(
            pd.DataFrame(
                {
                    "policy": history.policy,
                    "max_slots": history.max_slots,
                    "state": STATES,
                    "tokens": counts,
                    "share": counts / counts.sum(),
                }
            )[counts > 0]
        )
    return pd.concat(tables, ignore_index=True)


def losses(
    histories: Iterable[History],
    layer: int,
    read: int | None = None,
    edges: Sequence[int] = (8, 16, 32),
) -> pd.DataFrame:
    """What each policy gave up, one row each.

    Columns: policy, max_slots, slots (in use), dropped (share of the tokens read), over_8, …
    (share of them in slots of more tokens than that), largest (mass of the heaviest slot),
    outliers_alone, outliers_dropped (shares of the outliers that stage 1 split off), rejoined
    (share of the merged outliers whose first merge was with their own background), imbalance
    (largest |held + dropped - read| over layers and snapshots: 0 if no mass is missing).
    """
    rows = []
    for history in histories:
        table = tokens(history, layer, read)
        apart = table[table["outlier"]]
        slots = history.slot_mass[layer][history.step_at(read)]
        rows.append(
            {
                "policy": history.policy,
                "max_slots": history.max_slots,
                "slots": len(slots),
                "dropped": (table["state"] == "dropped").mean(),
                **{f"over_{edge}": (table["mass"] > edge).mean() for edge in edges},
                "largest": slots.max(initial=0),
                "outliers_alone": (apart["state"] == "outlier alone").mean(),
                "outliers_dropped": (apart["state"] == "dropped").mean(),
                "rejoined": apart.loc[apart["mass"] > 1, "rejoined"].mean(),
                "imbalance": imbalance(history),
            }
        )
    return pd.DataFrame(rows)


def imbalance(history: History) -> float:
    """Largest |mass held + mass dropped - tokens read| over layers and snapshots."""
    worst = 0.0
    for layer, snapshots in enumerate(history.slot_mass):
        for step, slots in enumerate(snapshots):
            raw = np.isin(history.owner[layer, step], (SINK, TAIL)).sum()
            held = slots.sum() + raw + history.dropped[layer, step]
            worst = max(worst, abs(held - history.seen[step]))
    return worst


def slots(
    history: History, layer: int, pieces: Sequence[str], read: int | None = None
) -> pd.DataFrame:
    """The compressed stream once `read` tokens are read, one row per slot, oldest first.

    Columns: slot (place in the stream), mass, energy, first and last (token positions, -1 for
    an empty slot), text (its tokens, a gap marked by …), protected (as one of the newest).
    """
    step = history.step_at(read)
    owner, mass = history.owner[layer, step], history.slot_mass[layer][step]
    order = np.argsort(owner, kind="stable")
    bounds = np.searchsorted(owner[order], np.arange(len(mass) + 1))
    members = [order[a:b] for a, b in itertools.pairwise(bounds)]
    return pd.DataFrame(
        {
            "slot": np.arange(len(mass)),
            "mass": mass,
            "energy": history.energy[layer][step],
            "first": [int(m[0]) if len(m) else -1 for m in members],
            "last": [int(m[-1]) if len(m) else -1 for m in members],
            "text": [_reading(m, pieces) for m in members],
            "protected": np.arange(len(mass)) >= len(mass) - history.protected,
        }
    )


def _reading(positions: np.ndarray, pieces: Sequence[str]) -> str:
    """Text of the tokens at `positions`; byte tokens of a split character are put together."""
    raw = bytearray()
    for n, place in enumerate(positions):
        if n and place != positions[n - 1] + 1:
            raw += "…".encode()
        piece = pieces[place]
        is_byte = len(piece) == 6 and piece.startswith("<0x")
        raw += bytes.fromhex(piece[3:5]) if is_byte else piece.encode()
    return raw.decode("utf-8", errors="replace")
