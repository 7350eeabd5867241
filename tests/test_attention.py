"""Attention, equation and fast paths, against one softmax per query over what it may see."""

from __future__ import annotations

import math

import pytest
import torch

from anchormass import preset
from anchormass.attention import (
    Part,
    attend,
    compress_body,
    decode_attention,
    parallel_attention,
    reference_attention,
)

SMALL = preset("anchormass-smoke").replace(width=24, n_heads=4)  # 2 Local, 2 Global, D = 6
LENGTHS = [1, 15, 16, 17, 64, 65, 79, 80, 81, 128, 143, 144, 145, 200]


def qkv(length: int, batch: int = 1, seed: int = 0, scale: float = 1.5) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed + length)
    shape = (batch, SMALL.n_heads, length, SMALL.head_dim)
    return [scale * torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(3)]


def per_query(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Row by row, head by head: gather the keys that SPEC 1 lists, one softmax, one mean."""
    out = torch.zeros_like(q)
    batch, heads, length, dim = q.shape
    blocks = max(length - 16, 0) // 64
    slots, _ = compress_body(
        k[:, 2:, 16 : 16 + 64 * blocks], v[:, 2:, 16 : 16 + 64 * blocks], SMALL
    )
    for b in range(batch):
        for t in range(length):
            for h in range(heads):
                if h < 2:  # Local: t-63 … t
                    seen = list(range(max(0, t - 63), t + 1))
                    entries = [(k[b, h, j], v[b, h, j], 1.0) for j in seen]
                elif t < 16:
                    entries = [(k[b, h, j], v[b, h, j], 1.0) for j in range(t + 1)]
                else:
                    block = (t - 16) // 64
                    raw = [*range(16), *range(16 + 64 * block, t + 1)]
                    entries = [(k[b, h, j], v[b, h, j], 1.0) for j in raw]
                    for s in range(16 * block):
                        if (n := float(slots.mass[b, s])) > 0:
                            entries.append((slots.k[b, h - 2, s], slots.v[b, h - 2, s], n))
                logits = torch.stack(
                    [q[b, h, t] @ key / math.sqrt(dim) + math.log(n) for key, _, n in entries]
                )
                out[b, h, t] = logits.softmax(0) @ torch.stack([value for _, value, _ in entries])
    return out


@pytest.mark.parametrize("length", LENGTHS)
def test_both_forms_equal_the_loop(length: int) -> None:
    q, k, v = qkv(length, batch=1 + length % 2)
    want = per_query(q, k, v)
    assert torch.allclose(reference_attention(q, k, v, SMALL), want, atol=1e-12, rtol=0)
    assert torch.allclose(parallel_attention(q, k, v, SMALL), want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("length", [1, 63, 64, 1040, 1041, 1500, 2300])
@pytest.mark.parametrize("attention", ["anchormass", "standard"])
def test_fast_path_equals_the_equation_across_query_chunks(length: int, attention: str) -> None:
    q, k, v = qkv(length, batch=2)
    config = SMALL.replace(attention=attention)
    want = reference_attention(q, k, v, config)
    assert torch.allclose(parallel_attention(q, k, v, config), want, atol=1e-10, rtol=0)


@pytest.mark.parametrize("length", [17, 81, 200, 1300])
def test_gradients_equal_autograd_through_the_equation(length: int) -> None:
    inputs = [x.requires_grad_() for x in qkv(length, batch=2)]
    # A low threshold leaves some outlier slots empty: their -inf must not become NaN.
    config = SMALL.replace(cos_threshold=0.1, norm_threshold=9.0)
    weight = torch.randn(inputs[0].shape, dtype=torch.float64)
    found, wanted = (
        torch.autograd.grad((f(*inputs, config) * weight).sum(), inputs)
        for f in (parallel_attention, reference_attention)
    )
    for got, want in zip(found, wanted, strict=True):
        assert bool(got.isfinite().all())
        assert torch.allclose(got, want, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_low_precision_stays_close(dtype: torch.dtype, tolerance: float) -> None:
    q, k, v = (x.to(dtype) for x in qkv(300, scale=1.0))
    # Stage 1 decides by thresholds: compare on the decisions made in this dtype.
    config = SMALL.replace(cos_threshold=1.0)
    want = reference_attention(q.double(), k.double(), v.double(), config)
    got = parallel_attention(q, k, v, config)
    assert got.dtype == dtype
    assert float((got.double() - want).abs().max()) < tolerance


def test_parts_are_one_softmax() -> None:
    q, k, v = (x[:, :2] for x in qkv(96, batch=2))
    bias = torch.randn(2, 1, 96, 40, dtype=torch.float64)
    bias[:, :, :50, :] = -torch.inf  # these queries see nothing of the second part
    causal = torch.full((96, 96), -torch.inf, dtype=torch.float64)
    for i in range(96):
        causal[i, i // 32 * 32 : i + 1] = 0  # three causal blocks of 32
    shared = torch.randn(2, 1, 1, 9, dtype=torch.float64)
    parts = [
        Part(k, v, blocks=3),
        Part(k[:, :, :40] + 1, v[:, :, :40], bias),
        Part(k[:, :, :9] - 1, v[:, :, :9], shared),
    ]
    logits = torch.cat(
        [
            q @ k.mT / math.sqrt(6) + causal,
            q @ (k[:, :, :40] + 1).mT / math.sqrt(6) + bias,
            q @ (k[:, :, :9] - 1).mT / math.sqrt(6) + shared,
        ],
        dim=-1,
    )
    values = torch.cat([v, v[:, :, :40], v[:, :, :9]], dim=2)
    assert torch.allclose(attend(q, parts), logits.softmax(-1) @ values, atol=1e-12)


def test_the_matmul_path_equals_the_fused_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on devices other than the CPU, forward and backward."""
    inputs = [x.requires_grad_() for x in qkv(300, batch=2)]
    weight = torch.randn(inputs[0].shape, dtype=torch.float64)

    def both() -> list[torch.Tensor]:
        out = parallel_attention(*inputs, SMALL)
        return [out, *torch.autograd.grad((out * weight).sum(), inputs)]

    fused = both()
    monkeypatch.setattr("anchormass.attention.kernel", lambda device: "matmul")
    for got, want in zip(both(), fused, strict=True):
        assert torch.allclose(got, want, atol=1e-11, rtol=0)


def test_merging_identical_tokens_gives_the_dense_output() -> None:
    """Eight equal tokens in one slot of mass 8 are eight equal tokens."""
    q, k, v = qkv(16 + 64 * 3 + 5)
    body = torch.arange(16, 16 + 64 * 3)
    first_of_eight = body // 8 * 8
    for x in (k, v):
        x[:, :, body] = x[:, :, first_of_eight]
    dense = reference_attention(q, k, v, SMALL.replace(attention="standard"))
    got = parallel_attention(q, k, v, SMALL)
    assert torch.allclose(got[:, 2:, -69:], dense[:, 2:, -69:], atol=1e-12)


@pytest.mark.parametrize("at", [16, 24, 63, 64, 65, 80, 81, 128, 144])
def test_no_query_sees_what_comes_after_it(at: int) -> None:
    q, k, v = qkv(230)
    before = parallel_attention(q, k, v, SMALL)
    for x in (q, k, v):
        x[:, :, at:] = torch.randn_like(x[:, :, at:]) * 3
    after = parallel_attention(q, k, v, SMALL)
    assert torch.allclose(after[:, :, :at], before[:, :, :at], atol=1e-14, rtol=0)
    assert not torch.allclose(after[:, :, at], before[:, :, at])


def test_decode_is_the_last_row() -> None:
    q, k, v = qkv(50, batch=2)
    bias = torch.randn(2, 1, 1, 50, dtype=torch.float64)
    want = ((q[:, :, -1:] @ k.mT) / math.sqrt(6) + bias).softmax(-1) @ v
    assert torch.allclose(decode_attention(q[:, :, -1:], k, v, bias), want, atol=1e-13)
