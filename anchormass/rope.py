"""Rotary positions with a session-fixed Dynamic NTK base, and no table.

The article fixes the base when a session starts, so that keys in the cache and later
queries never disagree, but keeps an fp32 table of S + 128 rows in every layer. Here the
angles of the positions at hand are computed once per call for all layers: in float64 and
reduced to one turn before the cosine, because an fp32 angle is off by 0.01 rad at 256K.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def session_base(theta: float, head_dim: int, session_length: int, context: int) -> float:
    """theta · (S / L0)^(D / (D - 2)) for a session of S > L0 tokens, else theta (SPEC 5)."""
    stretch = max(1.0, session_length / context)
    return theta * stretch ** (head_dim / (head_dim - 2))


def rope_cos_sin(
    positions: Tensor, head_dim: int, base: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position · base^(-2i/D).

    Args:
        positions: token positions `[T]` or `[B, T]`, integers.
        head_dim: D.
        base: from `session_base`.
        dtype: float32 or float64, the precision of the result.

    Returns:
        cos, sin: `[T, D/2]`, or `[B, 1, T, D/2]` for positions per row (1 = any head).
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    angle = positions.to(torch.float64)[..., None] * base ** -(exponent / head_dim)
    angle = torch.remainder(angle, 2 * math.pi).to(dtype)
    if positions.dim() == 2:
        angle = angle[:, None]
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` `[B, H, T, D]`; feature i pairs with i + D/2, as in Llama. Keeps x's dtype."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
