"""Attention, equation and fast paths, against one softmax per query over what it may see.

`per_query` is the reference: it lists, from the specification's table, the raw tokens and the
slots that one query of one head sees, makes the slots itself with a loop over tokens, and takes
one softmax. Autograd runs through it, so it is the reference of the gradients too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from anchormass import Config, preset
from anchormass.attention import (
    Part,
    attend,
    decode_attention,
    global_attention,
    local_attention,
    parallel_attention,
    reference_attention,
)
from anchormass.compress import Slots

SMALL = preset("anchormass-smoke").replace(width=24, n_heads=4)  # 2 Local, 2 Global, D = 6
UNEVEN = SMALL.replace(width=18, n_heads=3, local_heads=1, block=12, subgroup=4, sinks=5)
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 79, 80, 81, 128, 143, 144, 145, 200]
KERNELS = ["flash-cpu", "matmul"]  # the second is what runs on devices other than the CPU


@pytest.fixture(params=KERNELS)
def any_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("anchormass.attention.kernel", lambda device: request.param)
    return str(request.param)


def qkv(
    length: int, batch: int = 1, seed: int = 0, scale: float = 1.5, config: Config = SMALL
) -> list[Tensor]:
    """Peaked attention, and values of which about half the subgroups fire at 0.85."""
    g = torch.Generator().manual_seed(1000 * seed + length)
    shape = (batch, config.n_heads, length, config.head_dim)
    q, k, v = (scale * torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(3))
    width = config.subgroup
    group = (torch.arange(length) - config.sinks).div(width, rounding_mode="floor")
    alike = (group % 2 == 0)[None, None, :, None]
    common = torch.ones(config.head_dim, dtype=torch.float64)
    return [q, k, torch.where(alike, 0.1 * v + common, v)]


# ---------------------------------------------------------------- the reference


def slots_of_block(k: Tensor, v: Tensor, config: Config) -> list[tuple[Tensor, Tensor, int]]:
    """Stage 1 of one block `[Hg, C, D]`: key, value and mass of its slots, empty ones left out."""

    def cosine(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))

    out = []
    for start in range(0, config.block, config.subgroup):
        members = list(range(start, start + config.subgroup))
        similarity, relative = [0.0] * config.subgroup, [0.0] * config.subgroup
        for group in v[:, members].tolist():  # one head
            mean = [sum(feature) / len(group) for feature in zip(*group, strict=True)]
            norm = sum(math.hypot(*x) for x in group) / len(group)
            for i, x in enumerate(group):
                similarity[i] += cosine(x, mean) / len(v)
                relative[i] += math.hypot(*x) / norm / len(v)
        odd = similarity.index(min(similarity))
        if similarity[odd] < config.cos_threshold or max(relative) > config.norm_threshold:
            outlier = members.pop(odd)
            out.append((k[:, outlier], v[:, outlier], 1))
        out.append((k[:, members[-1]], v[:, members].mean(1), len(members)))
    return out


def softmax_over(q: Tensor, keys: Tensor, values: Tensor, mass: Sequence[float]) -> Tensor:
    """One query `[D]` over what it sees, `[N, D]` twice, and the mass of each."""
    log_mass = torch.tensor([math.log(n) for n in mass], dtype=torch.float64)
    return (keys @ q / math.sqrt(len(q)) + log_mass).softmax(0) @ values


def per_query(
    q: Tensor, k: Tensor, v: Tensor, config: Config, queries: Sequence[int] | None = None
) -> Tensor:
    """The outputs `[B, H, len(queries), D]` of these queries, of all by default."""
    batch, heads, length, dim = q.shape
    queries = range(length) if queries is None else queries
    sinks, block = config.sinks, config.block
    local = config.n_heads // 2 if config.local_heads is None else config.local_heads
    out = []
    for b in range(batch):
        slots, stop = [], [0]  # block by block, and how many there are before each block
        for start in range(sinks, length - block + 1, block):
            span = slice(start, start + block)
            slots += slots_of_block(k[b, local:, span], v[b, local:, span], config)
            stop.append(len(slots))
        nothing = k.new_zeros(heads - local, 0, dim)
        slot_k, slot_v = (
            torch.stack([s[i] for s in slots], 1) if slots else nothing for i in (0, 1)
        )
        slot_mass = [n for _, _, n in slots]
        for h in range(heads):
            for t in queries:
                past = 0
                if h < local:
                    raw = list(range(max(0, t - block + 1), t + 1))
                elif t < sinks:
                    raw = list(range(t + 1))
                else:
                    past = stop[(t - sinks) // block]
                    raw = [*range(sinks), *range(t - (t - sinks) % block, t + 1)]
                keys, values = k[b, h, raw], v[b, h, raw]
                if past:
                    keys = torch.cat((keys, slot_k[h - local, :past]))
                    values = torch.cat((values, slot_v[h - local, :past]))
                mass = [1] * len(raw) + slot_mass[:past]
                out.append(softmax_over(q[b, h, t], keys, values, mass))
    return torch.stack(out).view(batch, heads, len(queries), dim)


def assert_close(got: Tensor, want: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


# ---------------------------------------------------------------- forward


@pytest.mark.parametrize("length", LENGTHS)
def test_both_forms_equal_the_loop(length: int, any_kernel: str) -> None:
    q, k, v = qkv(length, batch=1 + length % 2)
    want = per_query(q, k, v, SMALL)
    assert_close(reference_attention(q, k, v, SMALL), want)
    assert_close(parallel_attention(q, k, v, SMALL), want)


@pytest.mark.parametrize("length", [4, 5, 6, 17, 28, 29, 30, 53, 100])
def test_other_shapes_equal_the_loop(length: int, any_kernel: str) -> None:
    """One Local head of three, blocks of 12, subgroups of 4, 5 sinks."""
    q, k, v = qkv(length, batch=2, config=UNEVEN)
    want = per_query(q, k, v, UNEVEN)
    assert_close(reference_attention(q, k, v, UNEVEN), want)
    assert_close(parallel_attention(q, k, v, UNEVEN), want)


@pytest.mark.parametrize("length", [1040, 1041, 1104, 2200])
def test_long_sequences_equal_the_loop(length: int) -> None:
    """The fast path works in chunks of queries; these lengths end around its seams."""
    q, k, v = qkv(length)
    at = [t for t in (0, 15, 16, 79, 80, 1039, 1040, 1041, 1103, 1104, 2064, length - 1)]
    at = sorted({t for t in at if t < length})
    want = per_query(q, k, v, SMALL, at)
    assert_close(parallel_attention(q, k, v, SMALL)[:, :, at], want)
    assert_close(reference_attention(q, k, v, SMALL)[:, :, at], want)


@pytest.mark.parametrize("block", [12, 48, 96, 1400])
def test_blocks_that_do_not_divide_a_query_chunk(block: int) -> None:
    config = SMALL.replace(block=block, subgroup=4)
    length = 2200 if block == 48 else 1500
    q, k, v = qkv(length, config=config)
    at = [15, 16, 1039, 1040, 1041, 1100, 1416, length - 1]
    want = per_query(q, k, v, config, at)
    assert_close(parallel_attention(q, k, v, config)[:, :, at], want)


@pytest.mark.parametrize("length", [1, 17, 80, 300, 1100])
def test_standard_is_causal_softmax_attention(length: int) -> None:
    q, k, v = qkv(length, batch=2)
    config = SMALL.replace(attention="standard")
    got = parallel_attention(q, k, v, config)
    assert_close(reference_attention(q, k, v, config), got)
    for t in {0, length // 2, length - 1}:
        for b in range(2):
            for h in range(4):
                past = slice(t + 1)
                want = softmax_over(q[b, h, t], k[b, h, past], v[b, h, past], [1] * (t + 1))
                assert_close(got[b, h, t], want)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("length", [17, 145, 300])
def test_low_precision_stays_close(
    length: int, dtype: torch.dtype, tolerance: float, any_kernel: str
) -> None:
    q, k, v = (x.to(dtype) for x in qkv(length, scale=1.0))
    want = per_query(q.double(), k.double(), v.double(), SMALL)
    got = parallel_attention(q, k, v, SMALL)
    assert got.dtype == dtype
    assert_close(got.double(), want, tolerance)


def test_rows_of_a_batch_do_not_affect_each_other() -> None:
    q, k, v = qkv(300, batch=3)
    together = parallel_attention(q, k, v, SMALL)
    for b in range(3):
        row = slice(b, b + 1)
        assert_close(parallel_attention(q[row], k[row], v[row], SMALL), together[row], 1e-14)


# ---------------------------------------------------------------- backward


def gradients(out: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).double()
    return torch.autograd.grad((out * weight).sum(), inputs)


@pytest.mark.parametrize("length", [1, 17, 81, 150])
def test_gradients_equal_autograd_through_the_loop(length: int, any_kernel: str) -> None:
    """About half of the outlier slots are empty: their -inf must not become NaN."""
    inputs = [x.requires_grad_() for x in qkv(length, batch=1)]
    found = gradients(parallel_attention(*inputs, SMALL), inputs)
    wanted = gradients(per_query(*inputs, SMALL), inputs)
    for got, want in zip(found, wanted, strict=True):
        assert bool(got.isfinite().all())
        assert_close(got, want)


@pytest.mark.parametrize("cos_threshold", [-2.0, 0.1, 2.0])  # none, some, all fire
def test_gradients_of_long_sequences_equal_those_of_the_equation(
    cos_threshold: float, any_kernel: str
) -> None:
    config = SMALL.replace(cos_threshold=cos_threshold, norm_threshold=9.0)
    inputs = [x.requires_grad_() for x in qkv(1100)]
    found = gradients(parallel_attention(*inputs, config), inputs)
    wanted = gradients(reference_attention(*inputs, config), inputs)
    for got, want in zip(found, wanted, strict=True):
        assert bool(got.isfinite().all())
        assert_close(got, want, 1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_low_precision(dtype: torch.dtype, any_kernel: str) -> None:
    inputs = [x.to(dtype).requires_grad_() for x in qkv(200, scale=1.0)]
    found = gradients(parallel_attention(*inputs, SMALL), inputs)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    wanted = gradients(reference_attention(*wide, SMALL), wide)
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == dtype
        error = (got.double() - want).norm() / want.norm()
        assert float(error) < {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]


def test_identical_values_have_finite_gradients() -> None:
    """No subgroup fires at all, the cosine is at its maximum, and every outlier slot is empty."""
    q, k, v = qkv(300)
    for value in (torch.ones_like(v), torch.zeros_like(v)):
        inputs = [q.clone().requires_grad_(), k.clone().requires_grad_(), value.requires_grad_()]
        out = parallel_attention(*inputs, SMALL)
        assert_close(out, value, 1e-14)  # a mean of equal values
        assert all(bool(g.isfinite().all()) for g in gradients(out, inputs))


# ---------------------------------------------------------------- who sees whom


@pytest.mark.parametrize("at", [16, 24, 63, 64, 65, 80, 81, 128, 144])
@pytest.mark.parametrize("attention", ["anchormass", "standard"])
@pytest.mark.parametrize("form", [parallel_attention, reference_attention])
def test_no_query_sees_what_comes_after_it(at: int, attention: str, form: object) -> None:
    """A summary that held the query's own block would carry its later tokens back to it."""
    assert callable(form)
    config = SMALL.replace(attention=attention)
    q, k, v = qkv(230)
    before = form(q, k, v, config)
    g = torch.Generator().manual_seed(at)
    for x in (q, k, v):
        x[:, :, at:] = 3 * torch.randn(x[:, :, at:].shape, generator=g, dtype=x.dtype)
    after = form(q, k, v, config)
    assert torch.equal(after[:, :, :at], before[:, :, :at])
    assert not torch.allclose(after[:, :, at], before[:, :, at])


@pytest.mark.parametrize("at", [0, 15, 16, 23, 63, 79, 80, 127, 144, 229])
def test_global_heads_see_all_of_the_past_and_local_heads_64_tokens(at: int) -> None:
    """Read off the gradient of one output with respect to every value: zero means unseen."""
    q, k, v = qkv(230, scale=0.5)
    v.requires_grad_()
    out = parallel_attention(q, k, v, SMALL)
    (grad,) = torch.autograd.grad(out[:, :, at].sum(), v)
    seen = grad[0].abs().amax(-1) > 0  # [H, T]
    place = torch.arange(230)
    assert torch.equal(seen[:2], ((place <= at) & (place > at - 64)).expand(2, -1))
    assert torch.equal(seen[2:], (place <= at).expand(2, -1))


def test_merging_identical_tokens_gives_the_dense_output() -> None:
    """Eight equal tokens in one slot of mass 8 are eight equal tokens."""
    length = 16 + 64 * 3 + 5
    q, k, v = qkv(length)
    body = torch.arange(16, length - 5)
    for x in (k, v):
        x[:, :, body] = x[:, :, body - body % 8]
    dense = reference_attention(q, k, v, SMALL.replace(attention="standard"))
    got = parallel_attention(q, k, v, SMALL)
    assert_close(got[:, 2:, -5:], dense[:, 2:, -5:])
    split = SMALL.replace(cos_threshold=-2.0, norm_threshold=0.0)  # always fires: 1 + 7
    assert_close(parallel_attention(q, k, v, split)[:, 2:, -5:], dense[:, 2:, -5:])


# ---------------------------------------------------------------- the pieces


def some_parts(q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Part], Tensor, Tensor, Tensor]:
    """Three parts, and the same as one set of keys, values and bias."""
    g = torch.Generator().manual_seed(2)
    bias = torch.randn(2, 1, 96, 40, generator=g, dtype=torch.float64)
    bias[:, :, :50, :] = -torch.inf  # these queries see nothing of the second part
    bias[:, :, 60:, ::3] = -torch.inf
    causal = torch.full((2, 1, 96, 96), -torch.inf, dtype=torch.float64)
    for i in range(96):
        causal[:, :, i, i // 32 * 32 : i + 1] = 0  # three causal blocks of 32
    shared = torch.randn(2, 1, 1, 9, generator=g, dtype=torch.float64)
    shared[0, :, :, 4] = -torch.inf
    parts = [
        Part(k, v, blocks=3),
        Part(k[:, :, :40] + 1, v[:, :, :40], bias),
        Part(k[:, :, :9] - 1, v[:, :, :9], shared),
    ]
    keys, values = (torch.cat([getattr(p, name) for p in parts], 2) for name in ("k", "v"))
    return parts, keys, values, torch.cat((causal, bias, shared.expand(-1, -1, 96, -1)), -1)


def test_parts_are_one_softmax(any_kernel: str) -> None:
    inputs = [x[:, :2].requires_grad_() for x in qkv(96, batch=2)]
    parts, keys, values, bias = some_parts(*inputs)
    want = (inputs[0] @ keys.mT / math.sqrt(6) + bias).softmax(-1) @ values
    got = attend(inputs[0], parts)
    assert_close(got, want)
    for x, y in zip(gradients(got, inputs), gradients(want, inputs), strict=True):
        assert_close(x, y)


def test_a_part_that_one_query_sees_alone(any_kernel: str) -> None:
    """One part hidden from the first query, the other from the second."""
    q, k, v = (x[:, :1, :2] for x in qkv(4))
    hidden = torch.tensor([[[[-torch.inf], [0.0]]]], dtype=torch.float64)
    parts = [Part(k[:, :, :1], v[:, :, :1], hidden), Part(k[:, :, 1:], v[:, :, 1:], hidden.flip(2))]
    assert_close(attend(q, parts), v.flip(2))


def test_a_mass_stands_for_that_many_tokens(any_kernel: str) -> None:
    q, k, v = (x[:, :2] for x in qkv(5))
    times = torch.tensor([1, 3, 1, 8, 200])
    bias = times.double().log()[None, None, None]
    repeated = torch.arange(5).repeat_interleave(times)
    want = (q @ k[:, :, repeated].mT / math.sqrt(6)).softmax(-1) @ v[:, :, repeated]
    assert_close(attend(q, [Part(k, v, bias)]), want)


@pytest.mark.parametrize("past", [0, 1, 63, 64])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_the_local_window_reaches_into_the_past(past: int, length: int) -> None:
    q, k, v = (x[:, :2] for x in qkv(past + length, batch=2))
    got = local_attention(
        q[:, :, past:], k[:, :, past:], v[:, :, past:], k[:, :, :past], v[:, :, :past], SMALL
    )
    for t in sorted({past, past + length // 2, past + length - 1}):
        raw = slice(max(0, t - 63), t + 1)
        ones = [1] * (raw.stop - raw.start)
        for b in range(2):
            for h in range(2):
                want = softmax_over(q[b, h, t], k[b, h, raw], v[b, h, raw], ones)
                assert_close(got[b, h, t - past], want)


@pytest.mark.parametrize("n_past", [3, 200])
@pytest.mark.parametrize("length", [1, 64, 100, 192])
def test_hidden_slots_are_hidden(n_past: int, length: int, any_kernel: str) -> None:
    """A slot of mass 0 changes nothing, whatever its key and value hold."""
    q, k, v = (x[:, 2:] for x in qkv(length, batch=2))
    g = torch.Generator().manual_seed(5)
    shape = (2, 2, n_past, 6)
    mass = torch.randint(0, 3, (2, n_past), generator=g).double()
    mass[:, 0] = 1
    past_k, past_v = (torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(2))
    n_own = length // 64 * SMALL.slots_per_block
    own_mass = torch.randint(0, 8, (2, n_own), generator=g).double()
    own_k, own_v = (torch.randn(2, 2, n_own, 6, generator=g, dtype=torch.float64) for _ in range(2))
    own = Slots(own_k, own_v, own_mass)
    got = global_attention(q, k, v, Slots(past_k, past_v, mass), own, SMALL)
    for t in sorted({0, length // 2, length - 1}):
        for b in range(2):
            for h in range(2):
                raw = slice(t // 64 * 64, t + 1)
                seen = [(k[b, h, raw], v[b, h, raw], torch.ones(raw.stop - raw.start))]
                there = mass[b] > 0
                seen.append((past_k[b, h, there], past_v[b, h, there], mass[b, there]))
                there = (own_mass[b] > 0) & (torch.arange(n_own) < t // 64 * 16)
                seen.append((own_k[b, h, there], own_v[b, h, there], own_mass[b, there]))
                keys, values, masses = (torch.cat(x) for x in zip(*seen, strict=True))
                want = softmax_over(q[b, h, t], keys, values, masses.tolist())
                assert_close(got[b, h, t], want)
    loud = mass == 0
    past_k[loud[:, None].expand(-1, 2, -1)] = 1e6
    past_v[loud[:, None].expand(-1, 2, -1)] = 1e6
    assert torch.equal(global_attention(q, k, v, Slots(past_k, past_v, mass), own, SMALL), got)


def test_one_query_alone() -> None:
    q, k, v = qkv(50, batch=2)
    bias = torch.randn(2, 1, 1, 50, generator=torch.Generator().manual_seed(1)).double()
    bias[:, :, :, ::4] = -torch.inf
    last = q[:, :, -1:]
    want = ((last @ k.mT) / math.sqrt(6) + bias).softmax(-1) @ v
    assert_close(decode_attention(last, k, v, bias), want)
    free = ((last @ k.mT) / math.sqrt(6)).softmax(-1) @ v
    assert_close(decode_attention(last, k, v, None), free)
    half = decode_attention(*(x.bfloat16() for x in (last, k, v)), bias.float())
    assert half.dtype == torch.bfloat16
    assert_close(half.double(), want, 5e-2)
