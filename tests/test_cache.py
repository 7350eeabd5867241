"""The streaming cache against a layer written from the specification, token by token.

`PlainLayer` keeps Python lists of sinks, slots and tail and takes one softmax per query; a chunk
is a loop over its tokens, after which stage 2 runs. The cache must agree for every policy, far
above its budget. The rest are promises about a cache's life: mass, sinks, owners, save and fork.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anchormass import AnchorMassError, Config, TransformerLM, generate, load_cache
from anchormass.cache import DROPPED, SINK, TAIL, AnchorMassCache, Cache, make_cache

Sharp = Callable[..., TransformerLM]
Tokens = Callable[..., Tensor]

MERGING = ("adaptive", "score_merge", "uniform_merge")
POLICIES = (*MERGING, "priority", "fifo")
# One layer, one Local head of three: the two groups of heads differ in size.
LAYER = Config(
    "anchormass",
    vocab_size=2,
    n_layers=1,
    width=12,
    ffn_width=4,
    n_heads=3,
    local_heads=1,
    cos_threshold=0.3,
    max_slots=40,
)

# ---------------------------------------------------------------- the specification, by hand


@dataclass
class Slot:
    """Key and value `[Hg, D]` and mass; `mass` 0 is an empty outlier slot."""

    k: Tensor
    v: Tensor
    mass: float

    @property
    def energy(self) -> float:
        return float(self.v.norm(dim=-1).mean()) * math.log(1 + self.mass)


def stage_one(block: list[Slot], config: Config) -> list[Slot]:
    """Section 2 of the specification: outlier, background, subgroup by subgroup."""
    out = []
    for start in range(0, len(block), config.subgroup):
        group = block[start : start + config.subgroup]
        mean = sum(t.v for t in group) / len(group)
        norms = sum(t.v.norm(dim=-1) for t in group) / len(group)
        similarity, ratio = [], []
        for t in group:
            cosine = (t.v * mean).sum(-1) / (t.v.norm(dim=-1) * mean.norm(dim=-1))
            similarity.append(float(cosine.mean()))
            ratio.append(float((t.v.norm(dim=-1) / norms).mean()))
        least = similarity.index(min(similarity))
        if similarity[least] < config.cos_threshold or max(ratio) > config.norm_threshold:
            out.append(group.pop(least))
        else:
            out.append(Slot(torch.zeros_like(mean), torch.zeros_like(mean), 0))
        out.append(Slot(group[-1].k, sum(t.v for t in group) / len(group), len(group)))
    return out


def merged(a: Slot, b: Slot, by_mass: bool) -> Slot:
    if a.mass == 0 or b.mass == 0:
        return b if a.mass == 0 else a
    wa, wb = (a.mass, b.mass) if by_mass else (a.energy, b.energy)
    value = (wa * a.v + wb * b.v) / (wa + wb)
    return Slot(b.k if b.energy >= a.energy else a.k, value, a.mass + b.mass)


def stage_two(slots: list[Slot], policy: str, budget: int, recent: int) -> list[Slot]:
    """Section 3 of the specification, in rounds until the stream fits."""
    while (excess := len(slots) - budget) > 0:
        n = len(slots)
        if policy == "fifo":
            slots = slots[excess:]
        elif policy == "priority":
            order = sorted(range(n - recent), key=lambda i: slots[i].energy)
            gone = set(order[:excess])
            slots = [s for i, s in enumerate(slots) if i not in gone]
        else:
            pairs = (n - (recent if policy == "adaptive" else 0)) // 2
            count = min(excess, pairs)
            if policy == "uniform_merge":
                chosen = {(2 * i + 1) * pairs // (2 * count) for i in range(count)}
            else:
                order = sorted(
                    range(pairs), key=lambda p: slots[2 * p].energy + slots[2 * p + 1].energy
                )
                chosen = set(order[:count])
            out = []
            for p in range(pairs):
                pair = slots[2 * p : 2 * p + 2]
                out += [merged(*pair, policy == "uniform_merge")] if p in chosen else pair
            slots = out + slots[2 * pairs :]
    return slots


class PlainLayer:
    """One row of one layer."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.local: list[tuple[Tensor, Tensor]] = []
        self.sinks: list[Slot] = []
        self.slots: list[Slot] = []
        self.tail: list[Slot] = []
        self.total = 0

    def absorb(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A chunk `[H, T, D]`, or one token; stage 2 runs at its end."""
        c, h = self.config, self.config.n_local
        out = []
        for t in range(q.shape[1]):
            self.local = [*self.local, (k[:h, t], v[:h, t])][-c.block :]
            new = Slot(k[h:, t], v[h:, t], 1)
            (self.sinks if self.total < c.sinks else self.tail).append(new)
            self.total += 1
            keys, values = (torch.stack(x, 1) for x in zip(*self.local, strict=True))
            near = self.softmax(q[:h, t], keys, values, torch.zeros(len(self.local)))
            seen = [s for s in self.sinks + self.slots + self.tail if s.mass]
            far = self.softmax(
                q[h:, t],
                torch.stack([s.k for s in seen], 1),
                torch.stack([s.v for s in seen], 1),
                torch.tensor([s.mass for s in seen]).double().log(),
            )
            out.append(torch.cat((near, far)))
            if len(self.tail) == c.block:
                made = stage_one(self.tail, c)
                self.slots += [s for s in made if s.mass] if c.compact else made
                self.tail = []
        self.slots = stage_two(self.slots, c.policy, c.max_slots, c.n_recent)
        return torch.stack(out, 1)

    @staticmethod
    def softmax(q: Tensor, k: Tensor, v: Tensor, log_mass: Tensor) -> Tensor:
        logits = torch.einsum("hd,hnd->hn", q, k) / math.sqrt(q.shape[-1]) + log_mass
        return torch.einsum("hn,hnd->hd", logits.softmax(-1), v)


# ---------------------------------------------------------------- helpers


def qkv(length: int, batch: int = 1, config: Config = LAYER, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    shape = (batch, config.n_heads, length, config.head_dim)
    q, k, v = (torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(3))
    return [2 * q, k, v + 0.5]


def one_layer(config: Config = LAYER, batch: int = 1, **changes: Any) -> AnchorMassCache:
    options: dict[str, Any] = dict(
        batch_size=batch,
        session_length=1,
        layout="shared-mass",
        dtype=torch.float64,
        device=torch.device("cpu"),
        track_positions=True,
    )
    cache = make_cache(config, **(options | changes))
    assert isinstance(cache, AnchorMassCache)
    return cache


def feed(cache: Cache, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Through layer 0 in chunks of these sizes, 0 meaning one decode step."""
    outs, at = [], 0
    for size in sizes:
        piece = [x[:, :, at : at + max(size, 1)] for x in parts]
        counts = [piece[0].shape[2]] * cache.batch_size
        outs.append(cache.prefill(0, *piece, counts) if size else cache.step(0, *piece))
        cache.advance(counts)
        at += counts[0]
    assert at == parts[0].shape[2]
    return torch.cat(outs, 2)


def life(model: TransformerLM, cache: Cache, ids: Tensor, *, chunk: int = 100) -> list[Tensor]:
    """Prefill all but the last 30 tokens, decode those; logits of every call."""
    logits = [model.prefill(ids[:, :-30], cache, chunk)]
    return logits + [model.decode(ids[:, t], cache) for t in range(ids.shape[1] - 30, ids.shape[1])]


def contents(cache: Cache) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in cache.tensors().items()}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def check_books(cache: Cache) -> None:
    """Mass, budget and owners of every layer and row, after whatever happened."""
    assert isinstance(cache, AnchorMassCache)
    c = cache.config
    for layer in range(c.n_layers):
        total = cache.mass(layer).double().sum(1) + cache.dropped(layer)
        assert total.tolist() == cache.seen
        slots = cache.slot_mass(layer)
        assert slots.shape[1] <= c.max_slots
        for row, seen in enumerate(cache.seen):
            owner = cache.owner(layer, row)
            sinks, body = min(seen, c.sinks), max(seen - c.sinks, 0)
            tail = body % c.block
            assert len(owner) == seen
            assert owner[:sinks].tolist() == [SINK] * sinks
            assert owner[seen - tail :].tolist() == [TAIL] * tail
            held = owner[sinks : seen - tail]
            assert int((held == DROPPED).sum()) == float(cache.dropped(layer)[row])
            placed = held[held >= 0]
            assert (placed >= 0).all() and (held[held < 0] == DROPPED).all()
            tokens = torch.bincount(placed, minlength=slots.shape[1])
            assert tokens.tolist() == slots[row].tolist()
            # Slots hold runs of the stream in order: a later token is never in an earlier
            # subgroup's slot (an outlier's slot stands before its own subgroup's background).
            assert len(placed) < 16 or (placed[8:] >= placed[:-8] - 1).all()


# ---------------------------------------------------------------- equal to the specification

CADENCES = {
    "chunks": [100] * 6,
    "odd": [7, 9, 1, 63, 64, 65, 200, 3, 150, 38],
    "decode": [50, *[0] * 450],
    "mixed": [1, *[0] * 20, 300, *[0] * 70, 129, *[0] * 30, 50],
    "whole": [700],
}


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cadence", CADENCES)
def test_equals_the_plain_layer(policy: str, compact: bool, cadence: str) -> None:
    """Far above the budget of 40 slots: outputs, keys, values and masses of the stream."""
    sizes = CADENCES[cadence]
    config = LAYER.replace(policy=policy, compact=compact)
    parts = qkv(sum(max(n, 1) for n in sizes), config=config)
    cache, plain = one_layer(config), PlainLayer(config)
    got = feed(cache, parts, sizes)
    at, want = 0, []
    for size in sizes:
        want.append(plain.absorb(*(x[0, :, at : at + max(size, 1)] for x in parts)))
        at += max(size, 1)
    torch.testing.assert_close(got[0], torch.cat(want, 1), rtol=0, atol=1e-11)
    slots = cache.slots(0)
    assert slots.mass[0].tolist() == [s.mass for s in plain.slots]
    assert len(plain.slots) == 40 or cadence == "whole"
    k, v = (torch.stack(x, 1) for x in zip(*((s.k, s.v) for s in plain.slots), strict=True))
    torch.testing.assert_close(slots.v[0], v, rtol=0, atol=1e-12)
    full = slots.mass[0] > 0
    assert torch.equal(slots.k[0][:, full], k[:, full])  # a key is one that came in, to the bit
    fired = [s.mass for s in stage_one_of(parts, config)[::2]]
    assert 0 < sum(fired) < len(fired)  # both kinds of subgroup occur


def stage_one_of(parts: Sequence[Tensor], config: Config) -> list[Slot]:
    _, k, v = (x[0, config.n_local :] for x in parts)
    end = 16 + (k.shape[1] - 16) // 64 * 64
    return stage_one([Slot(k[:, t], v[:, t], 1) for t in range(16, end)], config)


@pytest.mark.parametrize("compact", [False, True])
def test_ragged_rows_equal_the_plain_layer(compact: bool) -> None:
    """Rows of 5, 150 and 400 tokens, then 90, 7 and 200 more, then 70 decoded: all apart."""
    config = LAYER.replace(compact=compact)
    parts = qkv(700, batch=3)
    cache = one_layer(config, batch=3)
    plain = [PlainLayer(config) for _ in range(3)]
    for counts in [5, 150, 400], [90, 7, 200]:
        width = max(counts)
        piece = [x.new_full((*x.shape[:2], width, x.shape[3]), 1e3) for x in parts]  # loud padding
        for b, n in enumerate(counts):
            for x, p in zip(parts, piece, strict=True):
                p[b, :, :n] = x[b, :, cache.seen[b] : cache.seen[b] + n]
        got = cache.prefill(0, *piece, counts)
        cache.advance(counts)
        for b, n in enumerate(counts):
            want = plain[b].absorb(*(p[b, :, :n] for p in piece))
            torch.testing.assert_close(got[b, :, :n], want, rtol=0, atol=1e-11)
            assert not got[b, :, n:].any()
    for _ in range(70):
        piece = [torch.stack([x[b, :, n : n + 1] for b, n in enumerate(cache.seen)]) for x in parts]
        got = cache.step(0, *piece)
        cache.advance([1, 1, 1])
        for b in range(3):
            want = plain[b].absorb(*(p[b] for p in piece))
            torch.testing.assert_close(got[b], want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("policy", MERGING)
@pytest.mark.parametrize("sizes", [[100] * 10, [50, *[0] * 950], [1000]], ids=str)
def test_merging_identical_tokens_gives_the_dense_output(policy: str, sizes: list[int]) -> None:
    """However often slots that hold equal tokens merge: n equal tokens weigh log n."""
    sizes = sizes if len(sizes) < 20 else sizes[:500]
    config = LAYER.replace(policy=policy, compact=len(sizes) == 10)
    q, k, v = qkv(sum(max(n, 1) for n in sizes), config=config)
    for x in (k, v):
        x[:, :, 16:] = x[:, :, 16:17]
    got = feed(one_layer(config), [q, k, v], sizes)
    causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    dense = (q @ k.mT / math.sqrt(4)).masked_fill(~causal, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(got[:, 1:], dense[:, 1:], rtol=0, atol=1e-12)
    window = causal.triu(-63)
    local = (q @ k.mT / math.sqrt(4)).masked_fill(~window, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(got[:, :1], local[:, :1], rtol=0, atol=1e-12)


# ---------------------------------------------------------------- books


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_token_is_accounted_for_at_every_step(
    policy: str, compact: bool, sharp: Sharp, tokens: Tokens
) -> None:
    """Ragged rows through two layers: mass + dropped == seen, owners agree with masses."""
    model = sharp(policy=policy, compact=compact)
    cache = model.new_cache(3, 100, track_positions=True, max_slots=40)
    check_books(cache)
    ids = tokens(400, batch=3)
    for lengths in [3, 17, 80], [400, 1, 150], [90, 300, 64]:
        # Chunk by chunk, so that the books are checked in between.
        for start in range(0, max(lengths), 100):
            left = [min(max(n - start, 0), 100) for n in lengths]
            if all(left):
                model.prefill(ids[:, start : start + 100], cache, 100, lengths=left)
                check_books(cache)
        for t in range(70):
            model.decode(ids[:, t], cache)
            check_books(cache)
    if policy in MERGING:
        assert not any(cache.dropped(layer).any() for layer in range(2))
    else:
        assert all((cache.dropped(layer) > 0).any() for layer in range(2))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 0, 1, 5, 16, 48, 63, 64, 65, 80, 200]), max_size=12),
    policy=st.sampled_from(POLICIES),
    budget=st.sampled_from([2, 5, 16, 17, 40]),
    compact=st.booleans(),
    batch=st.integers(1, 2),
)
def test_books_balance_for_any_cadence(
    sizes: list[int], policy: str, budget: int, compact: bool, batch: int
) -> None:
    config = LAYER.replace(policy=policy, max_slots=budget, compact=compact)
    cache = one_layer(config, batch)
    sizes = [16, *sizes]
    parts = qkv(sum(max(n, 1) for n in sizes), batch, config, seed=len(sizes))
    feed(cache, parts, sizes)
    check_books(cache)
    # The rows of a batch do not know of each other.
    alone = one_layer(config)
    feed(alone, [x[:1] for x in parts], sizes)
    n = int((alone.slot_mass(0)[0] > -1).sum())
    assert torch.equal(alone.slot_mass(0)[0], cache.slot_mass(0)[0, :n])
    torch.testing.assert_close(alone.slots(0).v[0], cache.slots(0).v[0, :, :n], rtol=0, atol=1e-12)


@pytest.mark.parametrize("policy", POLICIES)
def test_sinks_never_change(policy: str, sharp: Sharp, tokens: Tokens) -> None:
    model = sharp(policy=policy)
    cache = model.new_cache(1, 600)
    ids = tokens(600)
    model.prefill(ids[:, :16], cache)
    first = [(x.k[:, :, :16].clone(), x.v[:, :, :16].clone()) for x in cache.layers]
    made = model.activations(ids[:, :16], session_length=600)
    for (k, v), at in zip(first, made, strict=True):
        torch.testing.assert_close(k, at.k[:, 2:], rtol=0, atol=1e-12)
        torch.testing.assert_close(v, at.v[:, 2:], rtol=0, atol=1e-12)
    model.prefill(ids[:, 16:500], cache, 100)
    for t in range(500, 600):
        model.decode(ids[:, t], cache)
        for (k, v), layer in zip(first, cache.layers, strict=True):
            assert torch.equal(layer.k[:, :, :16], k) and torch.equal(layer.v[:, :, :16], v)
            assert (layer.row_mass()[:, :16] == 1).all()


def test_a_slot_holds_what_its_owners_say(sharp: Sharp, tokens: Tokens) -> None:
    """Below the budget: value = mean of its tokens, key = that of the last of them."""
    model = sharp(max_slots=1000)
    cache = model.new_cache(1, 500, track_positions=True)
    assert isinstance(cache, AnchorMassCache)
    ids = tokens(500)
    model.prefill(ids, cache, 77)
    kinds = set()
    for layer, (_, k, v) in enumerate(model.activations(ids)):
        owner, slots = cache.owner(layer), cache.slots(layer)
        alone = cache.outliers(layer)
        for place, mass in enumerate(slots.mass[0].tolist()):
            members = (owner == place).nonzero().flatten()
            assert len(members) == mass
            kinds.add((place % 2, mass))
            if mass:
                mean = v[0, 2:, members].mean(1)
                torch.testing.assert_close(slots.v[0, :, place], mean, rtol=0, atol=1e-11)
                last = k[0, 2:, members[-1]]
                torch.testing.assert_close(slots.k[0, :, place], last, rtol=0, atol=1e-11)
                assert alone[members].tolist() == [place % 2 == 0] * len(members)
    assert kinds == {(0, 0.0), (0, 1.0), (1, 7.0), (1, 8.0)}


def test_owners_cost_nothing_when_off(sharp: Sharp, tokens: Tokens) -> None:
    model = sharp()
    plain, tracked = (model.new_cache(1, 200, track_positions=t) for t in (False, True))
    for cache in (plain, tracked):
        model.prefill(tokens(200), cache)
    assert plain.memory() == tracked.memory()
    assert_equal(contents(plain), contents(tracked))
    assert isinstance(plain, AnchorMassCache)
    with pytest.raises(AnchorMassError, match="track_positions=True"):
        plain.owner(0)


# ---------------------------------------------------------------- compact layout


def test_compact_equals_full_below_the_budget(sharp: Sharp, tokens: Tokens) -> None:
    full, compact = sharp(max_slots=1000), sharp(max_slots=1000, compact=True)
    ids = tokens(500, batch=2)
    caches = [m.new_cache(2, 500) for m in (full, compact)]
    for a, b in zip(life(full, caches[0], ids), life(compact, caches[1], ids), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    for layer in range(2):
        masses = [c.mass(layer) for c in caches if isinstance(c, AnchorMassCache)]
        for row in range(2):
            a, b = (m[row][m[row] > 0].tolist() for m in masses)
            assert a == b
        lengths = [x.count for x in (caches[0].layers[layer], caches[1].layers[layer])]
        assert all(fewer < more for more, fewer in zip(*lengths, strict=True))
    assert caches[1].memory().slots < caches[0].memory().slots


# ---------------------------------------------------------------- sessions


@pytest.mark.parametrize("compact", [False, True])
def test_sessions_leave_nothing_behind(compact: bool, sharp: Sharp, tokens: Tokens) -> None:
    """A long, a short and a long session again: the first and the third are equal."""
    model = sharp(compact=compact)
    outs = []
    for length in (700, 9 + 30, 700):  # S = 700 stretches the base, S = 39 does not
        outs.append(life(model, model.new_cache(1, length), tokens(length)))
    for a, b in zip(outs[0], outs[2], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("attention", ["anchormass", "standard"])
def test_a_fork_does_not_touch_its_parent(attention: str, sharp: Sharp, tokens: Tokens) -> None:
    model = sharp(attention=attention)
    parent = model.new_cache(2, 300, track_positions=True)
    ids = tokens(400, batch=2)
    model.prefill(ids[:, :300], parent, lengths=[300, 250])
    before, books = contents(parent), (list(parent.seen), parent.memory())
    states = str([x.state() for x in parent.layers])
    child = parent.fork()
    assert_equal(contents(child), before)
    shared = {x.data_ptr() for x in parent.tensors().values()}
    assert not shared & {x.data_ptr() for x in child.tensors().values()}

    for t in range(300, 400):
        model.decode(ids[:, t], child)
    assert_equal(contents(parent), before)
    assert books == (list(parent.seen), parent.memory())
    assert states == str([x.state() for x in parent.layers])
    if isinstance(parent, AnchorMassCache) and isinstance(child, AnchorMassCache):
        assert [len(parent.owner(1, b)) for b in range(2)] == [300, 250]
        assert [len(child.owner(1, b)) for b in range(2)] == [400, 350]
    after = contents(child)
    # The parent goes where the child went; a grandchild of the same is the same.
    again = parent.fork()
    for cache in (parent, again):
        for t in range(300, 400):
            model.decode(ids[:, t], cache)
        assert_equal(contents(cache), after)


def test_the_same_calls_give_the_same_bits(sharp: Sharp, tokens: Tokens) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = sharp(dtype)
        caches = [model.new_cache(1, 400) for _ in range(2)]
        a, b = (life(model, cache, tokens(400)) for cache in caches)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert_equal(contents(caches[0]), contents(caches[1]))


# ---------------------------------------------------------------- save and load

STOPS = [1, 15, 16, 17, 79, 80, 81, 300]


@pytest.mark.parametrize("layout", ["shared-mass", "article-bf16", "article"])
@pytest.mark.parametrize("compact", [False, True])
def test_save_and_load_equal_not_stopping(
    layout: str, compact: bool, sharp: Sharp, tokens: Tokens, tmp_path: Path
) -> None:
    """Stopped anywhere, one session goes on from the file and one never stopped."""
    model = sharp(torch.float32, compact=compact)
    ids = tokens(450)
    for stop in STOPS:
        cache = model.new_cache(1, 450, layout=layout, track_positions=True)
        model.prefill(ids[:, :stop], cache, 100)
        stopped = cache.fork()
        stopped.save(tmp_path / "cache")
        loaded = load_cache(tmp_path / "cache")
        assert (loaded.seen, loaded.session_length) == ([stop], 450)
        assert loaded.layout == layout and loaded.config == cache.config
        for t in range(stop, stop + 3):
            logits = [model.decode(ids[:, t], c) for c in (cache, loaded, stopped)]
            assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
        rest = [model.prefill(ids[:, stop + 3 :], c, 100) for c in (cache, loaded, stopped)]
        assert torch.equal(rest[0], rest[1]) and torch.equal(rest[0], rest[2])
        assert isinstance(cache, AnchorMassCache) and isinstance(loaded, AnchorMassCache)
        for layer in range(2):
            assert torch.equal(cache.mass(layer), loaded.mass(layer))
            assert torch.equal(cache.owner(layer), loaded.owner(layer))
            assert torch.equal(cache.outliers(layer), loaded.outliers(layer))
            assert torch.equal(cache.dropped(layer), loaded.dropped(layer))


@pytest.mark.parametrize("policy", POLICIES)
def test_ragged_rows_survive_saving(
    policy: str, sharp: Sharp, tokens: Tokens, tmp_path: Path
) -> None:
    model = sharp(torch.bfloat16, policy=policy)
    ids = tokens(300, batch=3)
    cache = model.new_cache(3, 300, track_positions=True, max_slots=40)
    model.prefill(ids, cache, lengths=[2, 130, 300])
    cache.fork().save(tmp_path / "cache")
    loaded = load_cache(tmp_path / "cache")
    assert loaded.dtype == torch.bfloat16 and loaded.seen == [2, 130, 300]
    for t in range(70):
        logits = [model.decode(ids[:, t], c) for c in (cache, loaded)]
        assert torch.equal(*logits)
    check_books(loaded)
    assert isinstance(cache, AnchorMassCache) and isinstance(loaded, AnchorMassCache)
    for layer in range(2):
        assert torch.equal(cache.dropped(layer), loaded.dropped(layer))


def test_standard_survives_saving(sharp: Sharp, tokens: Tokens, tmp_path: Path) -> None:
    model = sharp(attention="standard")
    ids = tokens(200, batch=2)
    cache = model.new_cache(2, 200)
    model.prefill(ids[:, :100], cache, lengths=[100, 40])
    cache.fork().save(tmp_path / "cache")
    loaded = load_cache(tmp_path / "cache")
    for t in range(100, 110):
        assert torch.equal(model.decode(ids[:, t], cache), model.decode(ids[:, t], loaded))
    rest = [model.prefill(ids[:, 110:], c, lengths=[90, 20]) for c in (cache, loaded)]
    assert torch.equal(*rest)


def test_an_empty_cache_survives_saving(sharp: Sharp, tokens: Tokens, tmp_path: Path) -> None:
    for attention in ("anchormass", "standard"):
        model = sharp(attention=attention)
        cache = model.new_cache(1, 90)
        cache.save(tmp_path / "empty")
        outs = [model.prefill(tokens(90), c) for c in (cache, load_cache(tmp_path / "empty"))]
        assert torch.equal(*outs)


# ---------------------------------------------------------------- files that are not right


@pytest.fixture
def saved(sharp: Sharp, tokens: Tokens, tmp_path: Path) -> Path:
    model = sharp(torch.float32)
    cache = model.new_cache(1, 120)
    model.prefill(tokens(120), cache)
    cache.save(tmp_path / "session.cache")
    return tmp_path / "session.cache"


def refuse(path: Path) -> None:
    with pytest.raises(AnchorMassError, match=path.name):
        load_cache(path)


def test_missing_empty_and_foreign_files_are_refused(saved: Path) -> None:
    refuse(saved.with_name("nowhere.cache"))
    folder = saved.with_name("folder.cache")
    folder.mkdir()
    refuse(folder)
    for content in (b"", b"\0", b"\xff" * 4096, os.urandom(4096), b"{}", b"PK\x03\x04" * 100):
        saved.write_bytes(content)
        refuse(saved)


def test_truncated_files_are_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    for n in [1, 7, 8, 9, 100, 1000, len(whole) // 2, len(whole) - 8, len(whole) - 1]:
        saved.write_bytes(whole[:n])
        refuse(saved)
    saved.write_bytes(whole + b"\0" * 8)
    refuse(saved)


def test_a_flipped_bit_anywhere_is_refused(saved: Path) -> None:
    """In the header's length, in the header, and in the tensors: nothing may load half right."""
    whole = saved.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    header = range(0, start, 41)
    body = range(start, len(whole), (len(whole) - start) // 60)
    for at in [*header, *body, len(whole) - 1]:
        broken = bytearray(whole)
        broken[at] ^= 0x11
        saved.write_bytes(broken)
        refuse(saved)
    saved.write_bytes(whole)
    load_cache(saved)


def test_a_checkpoint_is_no_cache(sharp: Sharp, tmp_path: Path) -> None:
    from anchormass.checkpoints import load_model, save_model

    model = sharp(torch.float32)
    save_model(tmp_path / "model.file", model, {}, torch.float32)
    refuse(tmp_path / "model.file")
    model.new_cache().save(tmp_path / "cache.file")
    with pytest.raises(AnchorMassError, match=r"cache\.file"):
        load_model(tmp_path / "cache.file")


@pytest.mark.parametrize("broken", ["write", "replace"])
def test_a_failed_write_leaves_the_old_file(
    broken: str, saved: Path, sharp: Sharp, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    before = saved.read_bytes()
    model = sharp(torch.float32)
    cache = model.new_cache(1, 50)
    model.prefill(tokens(50, seed=1), cache)

    def full_disk(*args: Any, **kwargs: Any) -> None:
        if broken == "write":  # half of the file was written when the disk filled up
            Path(args[1]).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    if broken == "write":
        monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    else:
        monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        cache.save(saved)
    monkeypatch.undo()
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]  # no debris
    cache.save(saved)  # and the cache is as good as before
    assert load_cache(saved).seen == [50]


def test_a_cache_cannot_be_saved_to_a_folder(sharp: Sharp, tmp_path: Path) -> None:
    cache = sharp().new_cache()
    with contextlib.suppress(OSError):
        cache.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(batch_size=0), "batch_size=0"),
        (dict(session_length=0), "session_length=0"),
        (dict(session_length=-5), "session_length=-5"),
        (dict(layout="fancy"), "fancy"),
        (dict(policy="lru"), "lru"),
        (dict(max_slots=0), "max_slots=0"),
        (dict(max_slots=8, recent_slots=8), "max_slots=8"),
        (dict(max_slots=8, recent_slots=9), "9 protected"),
        (dict(recent_slots=-1), "-1"),
        (dict(budget=100), "budget"),
        (dict(width=32), "width"),
    ],
)
def test_bad_settings_are_named(options: dict[str, Any], named: str, sharp: Sharp) -> None:
    with pytest.raises(AnchorMassError, match=named):
        sharp().new_cache(**options)


def test_a_new_budget_brings_its_own_protection(sharp: Sharp, tokens: Tokens) -> None:
    model = sharp()
    cache = model.new_cache(1, 300, max_slots=20)
    assert cache.config.recent_slots == 5 and model.config.max_slots == 64
    model.prefill(tokens(300), cache)
    assert isinstance(cache, AnchorMassCache) and cache.slot_mass(0).shape[1] == 20
    assert generate(model, tokens(5), 3, cache=cache).shape == (1, 3)
