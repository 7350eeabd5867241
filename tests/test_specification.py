"""Both models against the specification written again in plain lists (`plain.py`).

The package works with buffers, masks, chunks and kernels; the plain model appends to lists. They
must agree to rounding in all three ways through the model, beyond the slot budget too, and about
what the cache holds: masses, who holds which token, what was dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import PlainModel
from torch import Tensor

from anchormass import TransformerLM
from anchormass.cache import DROPPED, SINK, TAIL, AnchorMassCache

Model = Callable[..., TransformerLM]
Tokens = Callable[..., Tensor]

POLICIES = ["adaptive", "score_merge", "uniform_merge", "priority", "fifo"]
# Blocks of 16 tokens and a budget of 24 slots: short texts pass through everything. Of the
# thresholds neither decides alone: some subgroups fire and some do not.
SMALL: dict[str, Any] = dict(
    block=16,
    subgroup=4,
    sinks=4,
    max_slots=24,
    recent_slots=6,
    rope_context=100,
    cos_threshold=-0.1,
    norm_threshold=1.6,
)
ALL_FIRE = SMALL | {"cos_threshold": 0.85}


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.detach(), want, rtol=0, atol=1e-10)


def assert_holds(cache: AnchorMassCache, plain: PlainModel, row: int = 0) -> None:
    """The cache's account of itself, against the lists: slots, masses, owners, losses."""
    for i, layer in enumerate(plain.layers):
        masses = [slot.mass for slot in layer.slots]
        held = cache.slot_mass(i)[row].tolist()
        assert held[: len(masses)] == masses and not any(held[len(masses) :])
        assert float(cache.dropped(i)[row]) == layer.dropped
        slots = cache.slots(i)
        for n, slot in enumerate(layer.slots):
            if slot.mass:
                assert_close(slots.k[row, :, n], slot.k)
                assert_close(slots.v[row, :, n], slot.v)

        seen, sinks, block = len(layer.raw), plain.config.sinks, plain.config.block
        owner = torch.full((seen,), DROPPED)
        owner[:sinks] = SINK
        owner[seen - max(seen - sinks, 0) % block :] = TAIL
        for n, slot in enumerate(layer.slots):
            owner[slot.holds] = n
        assert cache.owner(i, row).tolist() == owner.tolist()


# ---------------------------------------------------------------- the parallel form


@pytest.mark.parametrize("attention", ["anchormass", "standard"])
@pytest.mark.parametrize("changes", [SMALL, ALL_FIRE, {}])
def test_parallel_form(
    sharp: Model, tokens: Tokens, changes: dict[str, Any], attention: str
) -> None:
    model = sharp(**changes, attention=attention)
    ids = tokens(model.config.sinks + 2 * model.config.block + 9)
    plain = PlainModel(model, session_length=ids.shape[1], max_slots=10_000)
    assert_close(model(ids)[0], plain.absorb(ids[0].tolist()))


@pytest.mark.parametrize("session_length", [1, 100, 101, 5000])
def test_parallel_form_in_a_session_of_another_length(
    sharp: Model, tokens: Tokens, session_length: int
) -> None:
    """Beyond `rope_context` = 100 the base is stretched, by the session and not by the text."""
    model = sharp(**SMALL)
    ids = tokens(60)
    plain = PlainModel(model, session_length, max_slots=10_000)
    assert_close(model(ids, session_length=session_length)[0], plain.absorb(ids[0].tolist()))


def test_some_subgroups_fire_and_some_do_not(sharp: Model, tokens: Tokens) -> None:
    """Else the comparisons here would leave half of stage 1 out."""
    plain = PlainModel(sharp(**SMALL), 200, max_slots=10_000)
    plain.absorb(tokens(200)[0].tolist())
    for layer in plain.layers:
        assert {slot.mass for slot in layer.slots} == {0.0, 1.0, 3.0, 4.0}


# ---------------------------------------------------------------- the streaming form


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_streaming_beyond_the_budget(
    sharp: Model, tokens: Tokens, policy: str, compact: bool
) -> None:
    """Chunks of uneven size, then single tokens; the budget of 24 slots is passed at once."""
    model = sharp(**SMALL, policy=policy)
    ids = tokens(200)
    cache = model.new_cache(1, 150, compact=compact, track_positions=True)
    plain = PlainModel(model, 150, compact=compact)
    for start, end in ((0, 2), (2, 41), (41, 140), (140, 150)):
        got = model.prefill(ids[:, start:end], cache, all_logits=True)
        assert_close(got[0], plain.absorb(ids[0, start:end].tolist()))
        assert_holds(cache, plain)
    for t in range(150, 200):
        assert_close(model.decode(ids[:, t], cache)[0], plain.absorb([int(ids[0, t])])[0])
    assert_holds(cache, plain)
    if policy in ("priority", "fifo"):
        assert plain.layers[0].dropped > 50
    else:
        assert max(slot.mass for slot in plain.layers[0].slots) > 4


def test_stage_2_runs_once_a_chunk(sharp: Model, tokens: Tokens) -> None:
    """The cadence is part of the result: other chunks, other slots."""
    model = sharp(**SMALL)
    ids = tokens(150)
    found = []
    for size in (30, 75):
        cache = model.new_cache(1, 150, track_positions=True)
        model.prefill(ids, cache, chunk_size=size)
        plain = PlainModel(model, 150)
        for start in range(0, 150, size):
            plain.absorb(ids[0, start : start + size].tolist())
        assert_holds(cache, plain)
        found.append(cache.slot_mass(0).tolist())
    assert found[0] != found[1]


@pytest.mark.parametrize("compact", [False, True])
def test_rows_of_different_lengths_are_each_alone(
    sharp: Model, tokens: Tokens, compact: bool
) -> None:
    """Two ragged turns and single tokens, beyond the budget, against one list per row."""
    model = sharp(**SMALL)
    turns = [(tokens(120, 3, seed=1), [120, 37, 84]), (tokens(40, 3, seed=2), [5, 40, 17])]
    cache = model.new_cache(3, 120, compact=compact, track_positions=True)
    rows = [PlainModel(model, 120, compact=compact) for _ in range(3)]
    for ids, lengths in turns:
        got = model.prefill(ids, cache, chunk_size=32, lengths=lengths)
        for b, n in enumerate(lengths):
            for start in range(0, n, 32):
                want = rows[b].absorb(ids[b, start : min(start + 32, n)].tolist())
            assert_close(got[b], want[-1])
            assert_holds(cache, rows[b], b)
    ids = tokens(20, 3, seed=3)
    for t in range(20):
        got = model.decode(ids[:, t], cache)
        for b in range(3):
            assert_close(got[b], rows[b].absorb([int(ids[b, t])])[0])
    for b in range(3):
        assert_holds(cache, rows[b], b)


def test_standard_keeps_every_token(sharp: Model, tokens: Tokens) -> None:
    model = sharp(**SMALL, attention="standard")
    ids = tokens(70, 2)
    cache = model.new_cache(2, 50)
    rows = [PlainModel(model, 50) for _ in range(2)]
    got = model.prefill(ids[:, :50], cache, chunk_size=16, lengths=[50, 33])
    for b, n in enumerate((50, 33)):
        assert_close(got[b], rows[b].absorb(ids[b, :n].tolist())[-1])
    for t in range(50, 70):
        got = model.decode(ids[:, t], cache)
        for b in range(2):
            assert_close(got[b], rows[b].absorb([int(ids[b, t])])[0])
