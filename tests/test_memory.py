"""Bytes: the table of the specification, a count from first principles, and real tensors.

Caches of full size are filled through their own prefill with random keys and values; only the
attention that a prefill also computes is left out, for time: no byte depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from anchormass import AnchorMassError, Config, TransformerLM, memory_formula, preset
from anchormass.cache import AnchorMassCache, Cache, make_cache
from anchormass.memory import LAYOUTS

Sharp = Callable[..., TransformerLM]
Tokens = Callable[..., Tensor]

MIB = 2**20
FULL = preset("anchormass-150m")
# Section 4 of the specification: MiB by layout and context.
CONTEXTS = [4096, 8192, 16_384, 32_768, 65_536]
TABLE = {
    "article": [35.29, 67.12, 130.77, 258.09, 258.58],
    "article-bf16": [23.64, 44.97, 87.62, 172.94, 173.27],
    "shared-mass": [23.35, 44.41, 86.52, 170.74, 171.07],
}
STANDARD = [168.0, 336.0, 672.0, 1344.0, 2688.0]


def in_mib(size: int) -> float:
    return size / MIB


def counted(config: Config, context: int, layout: str, dtype: torch.dtype) -> int:
    """The bytes of one row, by counting every number that has to be there, one by one."""
    number = torch.finfo(dtype).bits // 8
    wide = max(number, 4)
    d = config.width // config.n_heads
    total = 0
    for _ in range(config.n_layers):
        if config.attention == "standard":
            total += sum(2 * config.n_heads * d * number for _ in range(context))
            continue
        local = config.n_local
        far = config.n_heads - local
        value = wide if layout == "article" else number
        total += min(context, config.block) * local * d * (number + value)
        # The life of a stream: the open block fills up, becomes slots, the budget cuts them.
        sinks = tail = slots = 0
        for t in range(context):
            if t < config.sinks:
                sinks += 1
                continue
            tail += 1
            if tail == config.block:
                slots += 2 * (config.block // config.subgroup)
                slots, tail = min(slots, config.max_slots), 0
        rows = sinks + slots + tail
        total += rows * far * d * (number + value)
        total += rows * wide * (1 if layout == "shared-mass" else far)
    return total


# ---------------------------------------------------------------- the formula


@pytest.mark.parametrize("layout", TABLE)
def test_the_table_of_the_specification(layout: str) -> None:
    for context, want in zip(CONTEXTS, TABLE[layout], strict=True):
        assert in_mib(memory_formula(FULL, context, layout)) == pytest.approx(want, abs=0.005)
    for context in (2**17, 2**18, 2**20):  # what is left to vary is the tail, 48 tokens in each
        assert memory_formula(FULL, context, layout) == memory_formula(FULL, 65_536, layout)


def test_the_table_for_standard() -> None:
    standard = preset("standard-150m")
    for context, want in zip(CONTEXTS, STANDARD, strict=True):
        assert in_mib(memory_formula(standard, context)) == want
        assert memory_formula(standard, context, "article") == memory_formula(standard, context)
    assert in_mib(memory_formula(standard, 2**18)) == 4 * 2688


def test_ours_is_the_default() -> None:
    assert memory_formula(FULL, 9999) == memory_formula(FULL, 9999, "shared-mass")
    assert sorted(LAYOUTS) == sorted(TABLE)


@pytest.mark.parametrize("layout", TABLE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_formula_counts_every_number(layout: str, dtype: torch.dtype) -> None:
    odd = Config(
        "anchormass",
        vocab_size=5,
        n_layers=3,
        width=30,
        ffn_width=7,
        n_heads=5,
        local_heads=2,
        block=24,
        subgroup=4,
        sinks=3,
        max_slots=50,
    )
    for config in (odd, preset("anchormass-smoke"), preset("standard-smoke")):
        for context in [
            0,
            1,
            2,
            3,
            4,
            15,
            16,
            17,
            26,
            27,
            28,
            63,
            64,
            65,
            79,
            80,
            81,
            99,
            500,
            999,
        ]:
            want = counted(config, context, layout, dtype)
            assert memory_formula(config, context, layout, dtype) == want, context


def test_full_size_counted_too() -> None:
    for context in (4096, 32_784, 33_000):
        for layout in TABLE:
            one = FULL.replace(n_layers=1)
            want = counted(one, context, layout, torch.bfloat16)
            assert memory_formula(one, context, layout) == want
            assert memory_formula(FULL, context, layout) == 14 * want


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((FULL, 10, "fp8"), "'fp8'.*shared-mass"),
        ((FULL, 10, ""), "unknown layout ''"),
        ((FULL, -1), "context=-1"),
        ((FULL.replace(compact=True), 10), "compact"),
        ((preset("standard-150m"), 10, "fp8"), "'fp8'"),
        ((preset("standard-150m"), -3), "context=-3"),
    ],
)
def test_bad_questions_are_named(arguments: tuple[Any, ...], named: str) -> None:
    with pytest.raises(AnchorMassError, match=named):
        memory_formula(*arguments)


# ---------------------------------------------------------------- real tensors


@pytest.fixture
def no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill stores what it stores, and returns the queries instead of attending."""
    for name in ("local_attention", "global_attention"):
        monkeypatch.setattr(f"anchormass.stream.{name}", lambda q, *rest: q)
    monkeypatch.setattr("anchormass.stream.attend", lambda q, parts: q)


def full_size(config: Config, layout: str) -> Cache:
    return make_cache(
        config,
        batch_size=1,
        session_length=1,
        layout=layout,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        track_positions=False,
    )


def chunks(config: Config, stops: list[int], longest: int = 8192) -> Iterator[tuple[int, bool]]:
    """Sizes of chunks that end at each of `stops`, and whether one of them is reached."""
    at = 0
    for stop in stops:
        while at < stop:
            size = min(longest, stop - at)
            at += size
            yield size, at == stop


def fill(cache: Cache, stops: list[int]) -> Iterator[int]:
    """Absorb random keys and values; yields at each of `stops`."""
    c = cache.config
    g = torch.Generator().manual_seed(0)
    for size, stopped in chunks(c, stops):
        x = torch.randn(1, c.n_heads, size, c.head_dim, generator=g, dtype=cache.dtype)
        for layer in range(c.n_layers):
            cache.prefill(layer, x, x.roll(1, 2), x.roll(layer, 2), [size])
        cache.advance([size])
        if stopped:
            yield cache.seen[0]


def held(cache: Cache) -> int:
    return sum(t.numel() * t.element_size() for t in cache.tensors().values())


@pytest.mark.parametrize("layout", TABLE)
def test_a_full_size_cache_holds_exactly_the_formula(layout: str, no_attention: None) -> None:
    """14 layers in bf16, at 4K and just above the budget (512 blocks)."""
    cache = full_size(FULL, layout)
    for context in fill(cache, [4096, 33_808]):
        trimmed = cache.fork() if context == 4096 else cache
        trimmed.trim()
        want = memory_formula(FULL, context, layout)
        assert held(trimmed) == want
        memory = cache.memory()
        assert (memory.total, memory.allocated) == (want, held(cache))
        if context == 4096:
            assert in_mib(want) == pytest.approx(TABLE[layout][0], abs=0.005)
            assert {t.dtype for t in cache.tensors().values()} == {torch.bfloat16, torch.float32}
        del trimmed
    # 33,808 tokens leave no tail; what the table gives for 64K and more has a tail of 48.
    assert isinstance(cache, AnchorMassCache)
    heads = FULL.n_global * 64 * (4 if layout != "article" else 6)
    row = heads + 4 * (1 if layout == "shared-mass" else FULL.n_global)
    assert in_mib(held(cache) + 14 * 48 * row) == pytest.approx(TABLE[layout][-1], abs=0.005)
    masses = [cache.mass(layer).sum().item() for layer in range(14)]
    assert masses == [33_808] * 14
    assert all(cache.slot_mass(layer).shape == (1, 8192) for layer in range(14))


def test_a_full_size_standard_cache_holds_exactly_the_formula(no_attention: None) -> None:
    config = preset("standard-150m")
    cache = full_size(config, "shared-mass")
    for context in fill(cache, [1, 1000, 4096]):
        trimmed = cache.fork()
        trimmed.trim()
        assert held(trimmed) == memory_formula(config, context)
        assert cache.memory().total == memory_formula(config, context)
    assert in_mib(memory_formula(config, 4096)) == 168


@pytest.mark.parametrize("layout", TABLE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_small_caches_at_every_length(
    layout: str, dtype: torch.dtype, sharp: Sharp, tokens: Tokens
) -> None:
    """One decode step at a time, past the budget; a trimmed copy holds the formula's bytes."""
    model = sharp(dtype, max_slots=24)
    ids = tokens(230)
    cache = model.new_cache(1, 230, layout=layout)
    assert cache.memory().total == 0
    for t in range(230):
        if t:
            model.decode(ids[:, t], cache)
        else:
            model.prefill(ids[:, :1], cache)
        want = memory_formula(cache.config, t + 1, layout, dtype)
        memory = cache.memory()
        assert memory.total == want
        assert memory.allocated == held(cache) == want + memory.reserved
        assert memory.reserved >= 0
        if t % 16 in (0, 14, 15):
            trimmed = cache.fork()
            trimmed.trim()
            assert held(trimmed) == want and trimmed.memory().reserved == 0
    if dtype == torch.float64:  # in bf16 other buffer sizes round otherwise, and that spreads
        cache, trimmed = cache.fork(), cache.fork()
        trimmed.trim()
        a, b = (model.prefill(ids[:, :150], c) for c in (cache, trimmed))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_parts_are_what_they_are_called(sharp: Sharp, tokens: Tokens) -> None:
    """Two layers of 2 Local and 2 Global heads of size 4, in float64: 64 bytes a head and row."""
    model = sharp(max_slots=24)
    cache = model.new_cache(1, 100)
    model.prefill(tokens(16 + 64 + 5), cache)
    memory = cache.memory()
    row = 2 * 2 * 2 * 4 * 8  # layers, heads, K and V, features, bytes
    assert memory.local == 64 * row
    assert memory.sinks == 16 * row
    assert memory.slots == 16 * row
    assert memory.tail == 5 * row
    assert memory.mass == 2 * (16 + 16 + 5) * 8
    model.prefill(tokens(64), cache)
    assert cache.memory().slots == 24 * row


def test_rows_of_a_batch_count_each(sharp: Sharp, tokens: Tokens) -> None:
    for attention in ("anchormass", "standard"):
        model = sharp(torch.float32, attention=attention)
        lengths = [3, 100, 400]
        cache = model.new_cache(3, 400)
        model.prefill(tokens(400, batch=3), cache, lengths=lengths)
        want = sum(memory_formula(model.config, n, dtype=torch.float32) for n in lengths)
        assert cache.memory().total == want
        cache.trim()
        longest = memory_formula(model.config, 400, dtype=torch.float32)
        tails = 0
        if attention == "anchormass":  # the longest tail and the most slots are of two rows
            tail = max((n - 16) % 64 for n in lengths if n > 16) - (400 - 16) % 64
            tails = tail * 2 * (2 * 2 * 4 * 4 + 4)
        assert held(cache) == 3 * (longest + tails)


# ---------------------------------------------------------------- very long streams


@pytest.mark.parametrize("policy", ["adaptive", "score_merge", "uniform_merge", "priority", "fifo"])
def test_bytes_stay_flat_over_a_million_tokens(policy: str, no_attention: None) -> None:
    """In float32, where masses of merging policies must still add up to every token."""
    config = preset("anchormass-smoke").replace(n_layers=1, width=8, policy=policy)
    cache = make_cache(
        config,
        batch_size=1,
        session_length=1,
        layout="shared-mass",
        dtype=torch.float32,
        device=torch.device("cpu"),
        track_positions=False,
    )
    assert isinstance(cache, AnchorMassCache)
    g = torch.Generator().manual_seed(0)
    size = 65_536
    x = torch.randn(1, 2, size, 4, generator=g)
    sizes = set()
    for _ in range(16):
        cache.prefill(0, x, x, x, [size])
        cache.advance([size])
        sizes.add((cache.memory(), held(cache)))
        assert float(cache.mass(0).double().sum() + cache.dropped(0)) == cache.seen[0]
    assert len(sizes) == 1  # the tail is 48 tokens each time
    assert cache.memory().total == memory_formula(config, cache.seen[0], dtype=torch.float32)
    allocated = held(cache)
    for t in range(200):
        cache.step(0, *(x[:, :, t : t + 1] for _ in range(3)))
        cache.advance([1])
        assert held(cache) == allocated
        assert cache.memory().total == memory_formula(config, cache.seen[0], dtype=torch.float32)
    assert cache.seen[0] == 16 * size + 200
