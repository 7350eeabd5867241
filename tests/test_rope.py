"""Rotary positions against Python's own floats, at positions where fp32 angles are wrong."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from anchormass.rope import apply_rope, rope_cos_sin, session_base

# π to 60 digits: enough to reduce the angle of any position without losing the fp64 digits.
PI = Fraction("3.14159265358979323846264338327950288419716939937510582097494459")


def rotated_by_hand(x: list[float], position: int, base: float) -> list[float]:
    """One head's features, feature i paired with i + D/2, as Llama does."""
    half = len(x) // 2
    out = [0.0] * len(x)
    for i in range(half):
        angle = position * base ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def rotate(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return apply_rope(x, *rope_cos_sin(positions, x.shape[-1], base, dtype))


@pytest.mark.parametrize(
    "session, context, head_dim, stretch",
    [
        (1, 4096, 64, 1.0),
        (4095, 4096, 64, 1.0),
        (4096, 4096, 64, 1.0),
        (4097, 4096, 64, (4097 / 4096) ** (64 / 62)),
        (8192, 4096, 64, 2 ** (64 / 62)),
        (262_144, 4096, 64, 64 ** (64 / 62)),
        (2048, 512, 32, 4 ** (32 / 30)),
        (2048, 512, 4, 16.0),
    ],
)
def test_the_base_is_stretched_beyond_the_trained_context(
    session: int, context: int, head_dim: int, stretch: float
) -> None:
    assert session_base(10_000.0, head_dim, session, context) == pytest.approx(
        10_000 * stretch, rel=1e-13
    )
    assert session_base(500.0, head_dim, session, context) == pytest.approx(500 * stretch)


@pytest.mark.parametrize("base", [10_000.0, 10_000 * 64 ** (64 / 62)])
@pytest.mark.parametrize("dim", [4, 6, 64])
def test_rotation_equals_the_formula(dim: int, base: float) -> None:
    g = torch.Generator().manual_seed(dim)
    positions = torch.tensor([0, 1, 2, 63, 64, 4095, 4096, 262_143])
    x = torch.randn(2, 3, len(positions), dim, generator=g, dtype=torch.float64)
    got = rotate(x, positions, base)
    for b in range(2):
        for h in range(3):
            for i, position in enumerate(positions.tolist()):
                want = rotated_by_hand(x[b, h, i].tolist(), position, base)
                torch.testing.assert_close(
                    got[b, h, i], torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-9
                )


@pytest.mark.parametrize("position", [0, 1, 131_071, 262_143, 999_983, 1_048_575])
def test_fp32_angles_hold_at_a_million_positions(position: int) -> None:
    """A product in fp32 is off by 0.03 rad there; here what is left is the rounding of one turn."""
    cos, sin = rope_cos_sin(torch.tensor([position]), 64, 10_000.0, torch.float32)
    for i in range(32):
        angle = Fraction(position) * Fraction(10_000.0 ** (-2 * i / 64))
        exact = float(angle - 2 * PI * (angle // (2 * PI)))
        assert float(cos[0, i]) == pytest.approx(math.cos(exact), abs=1e-6)
        assert float(sin[0, i]) == pytest.approx(math.sin(exact), abs=1e-6)


def test_a_product_depends_on_the_distance_alone() -> None:
    """What the cache relies on: a key rotated long ago meets a query rotated now."""
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 1, 1, 64, generator=g, dtype=torch.float64) for _ in range(2))
    base = session_base(10_000.0, 64, 200_000, 4096)
    for distance in (0, 1, 100, 60_000):
        products = [
            float(
                (
                    rotate(q, torch.tensor([start + distance]), base)
                    * rotate(k, torch.tensor([start]), base)
                ).sum()
            )
            for start in (0, 7, 4096, 900_000)
        ]
        assert max(products) - min(products) < 1e-8


def test_positions_per_row() -> None:
    """Rows of a ragged batch: each is rotated as it would be alone."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn(3, 2, 5, 8, generator=g, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 4], [70, 71, 72, 73, 74], [9, 8, 0, 500_000, 1]])
    got = rotate(x, positions)
    for b in range(3):
        assert torch.equal(got[b : b + 1], rotate(x[b : b + 1], positions[b]))


def test_a_table_cut_anywhere_is_the_same_table() -> None:
    """Chunks and single tokens get the angles that the whole sequence gets, to the bit."""
    whole = rope_cos_sin(torch.arange(3000), 64, 10_000.0, torch.float32)
    for start, stop in ((0, 7), (7, 107), (107, 108), (2999, 3000)):
        part = rope_cos_sin(torch.arange(start, stop), 64, 10_000.0, torch.float32)
        for a, b in zip(part, whole, strict=True):
            assert torch.equal(a, b[start:stop])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_and_norms_are_kept(dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(3)).to(dtype)
    got = rotate(x, torch.tensor([0, 1, 5000, 1_000_000]))
    assert got.dtype == dtype
    assert torch.equal(got[:, :, 0], x[:, :, 0])  # position 0 is not rotated
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    torch.testing.assert_close(
        got.double().norm(dim=-1), x.double().norm(dim=-1), rtol=tolerance, atol=0
    )


def test_gradients_rotate_back() -> None:
    x = torch.randn(1, 1, 3, 8, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([3, 1000, 7])
    weight = torch.randn(1, 1, 3, 8, generator=torch.Generator().manual_seed(4)).double()
    (grad,) = torch.autograd.grad((rotate(x, positions) * weight).sum(), x)
    torch.testing.assert_close(rotate(grad, positions), weight, rtol=0, atol=1e-13)
