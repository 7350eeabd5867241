"""Stage 1: a subgroup of 8 tokens becomes one protected outlier and one weighted mean.

Which token stands apart is decided in value space, once for all Global heads of a layer
(article, section 2). Nothing is lost: the two masses always sum to the mass that came in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from anchormass.errors import AnchorMassError


@dataclass(frozen=True)
class Subgroups:
    """What `compress_subgroups` made of each subgroup; leading dimensions as they came in.

    `fired [...]` bool: an outlier was split off. `index [...]`: the candidate i*, fired or not.
    `similarity`, `relative_norm [..., 8]`: head means that the two thresholds are held against.
    `k_*`, `v_*` `[..., H, D]` and `n_* [...]`: key, value and mass of the two slots; an outlier
    slot that did not fire is all zero.
    """

    fired: Tensor
    index: Tensor
    similarity: Tensor
    relative_norm: Tensor
    k_outlier: Tensor
    v_outlier: Tensor
    n_outlier: Tensor
    k_background: Tensor
    v_background: Tensor
    n_background: Tensor


def compress_subgroups(
    k: Tensor,
    v: Tensor,
    mass: Tensor,
    cos_threshold: float = 0.85,
    norm_threshold: float = 2.0,
) -> Subgroups:
    """Split each subgroup into an outlier and a background slot (SPEC 2).

    Args:
        k: rotated keys `[..., H, 8, D]`.
        v: values, same shape. Means are taken in at least float32.
        mass: `[..., 8]`, positive.
        cos_threshold: fires when the least similar token's mean cosine is below this.
        norm_threshold: fires when the largest mean norm ratio is above this.

    Raises:
        AnchorMassError: for shapes that do not belong together.
    """
    if k.shape != v.shape or k.dim() < 3 or mass.shape != k.shape[:-3] + k.shape[-2:-1]:
        raise AnchorMassError(
            f"k {list(k.shape)}, v {list(v.shape)}, mass {list(mass.shape)}: expected "
            "[..., H, 8, D] twice and [..., 8]"
        )
    size = k.shape[-2]
    wide = torch.promote_types(v.dtype, torch.float32)
    values = v.to(wide)
    weight = mass.to(wide)[..., None, :, None]  # [..., 1, 8, 1]

    with torch.no_grad():  # the choice is discrete; only means and copies carry gradients
        mean = (values * weight).sum(-2, keepdim=True) / weight.sum(-2, keepdim=True)
        similarity = F.cosine_similarity(values, mean, dim=-1).mean(-2)  # [..., 8]
        norm = values.norm(dim=-1)  # [..., H, 8]
        relative = norm / norm.mean(-1, keepdim=True).clamp_min(torch.finfo(wide).tiny)
        relative_norm = relative.mean(-2)
        # Equal tokens have equal values in layer 0, up to the rounding of a matrix product whose
        # shape differs between chunks: among ties within it, the first token is the candidate.
        least = similarity.amin(-1)
        tied = similarity <= least[..., None] + 64 * torch.finfo(wide).eps
        index = tied.long().argmax(-1)
        fired = (least < cos_threshold) | (relative_norm.amax(-1) > norm_threshold)

        place = torch.arange(size, device=k.device)
        is_outlier = (place == index[..., None]) & fired[..., None]  # [..., 8]
        last = size - 1 - is_outlier[..., -1].long()  # the last token of the background

    def token(x: Tensor, i: Tensor) -> Tensor:
        return x.take_along_dim(i[..., None, None, None], dim=-2).squeeze(-2)

    outlier_mass = torch.where(is_outlier, mass, 0).sum(-1)
    background = torch.where(is_outlier, 0, mass)
    share = background.to(wide)[..., None, :, None]
    share = share / share.sum(-2, keepdim=True)
    keep = fired[..., None, None]
    return Subgroups(
        fired=fired,
        index=index,
        similarity=similarity,
        relative_norm=relative_norm,
        k_outlier=torch.where(keep, token(k, index), 0),
        v_outlier=torch.where(keep, token(v, index), 0),
        n_outlier=outlier_mass,
        k_background=token(k, last),
        v_background=(values * share).sum(-2).to(v.dtype),
        n_background=background.sum(-1),
    )


@dataclass(frozen=True)
class Slots:
    """A run of slots: `k`, `v` `[B, H, N, D]`, `mass [B, N]` (0 = empty), in stream order."""

    k: Tensor
    v: Tensor
    mass: Tensor


def compress_blocks(
    k: Tensor, v: Tensor, *, subgroup: int, cos_threshold: float, norm_threshold: float
) -> tuple[Slots, Subgroups]:
    """Compress raw tokens `[B, H, L, D]`, L a multiple of `subgroup`, into 2·L/subgroup slots.

    Stream order is subgroup by subgroup, the outlier slot before the background slot.
    """
    batch, heads, length, dim = k.shape
    groups = length // subgroup
    shape = (batch, heads, groups, subgroup, dim)
    out = compress_subgroups(
        k.reshape(shape).transpose(1, 2),  # [B, G, H, 8, D]
        v.reshape(shape).transpose(1, 2),
        torch.ones(batch, groups, subgroup, dtype=mass_dtype(v.dtype), device=v.device),
        cos_threshold,
        norm_threshold,
    )

    def interleave(outlier: Tensor, background: Tensor) -> Tensor:  # [B, G, H, D] -> [B, H, 2G, D]
        pair = torch.stack((outlier, background), dim=2)  # [B, G, 2, H, D]
        return pair.flatten(1, 2).transpose(1, 2)

    slots = Slots(
        k=interleave(out.k_outlier, out.k_background),
        v=interleave(out.v_outlier, out.v_background),
        mass=torch.stack((out.n_outlier, out.n_background), dim=2).flatten(1),
    )
    return slots, out


def mass_dtype(dtype: torch.dtype) -> torch.dtype:
    """Masses are float32 (whole numbers exact to 16.7 M tokens), float64 beside float64."""
    return torch.promote_types(dtype, torch.float32)
