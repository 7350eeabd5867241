"""Bytes of a cache: the article's formula from sizes alone, and the record of what is held."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anchormass.compress import mass_dtype
from anchormass.config import Config
from anchormass.errors import AnchorMassError

LAYOUTS = {
    "shared-mass": "K, V in the model's dtype, one float32 mass per row (ours)",
    "article-bf16": "K, V in the model's dtype, a float32 mass per row and head",
    "article": "K in the model's dtype, V in float32, a float32 mass per row and head",
}


def check_layout(layout: str) -> None:
    """Raise AnchorMassError unless `layout` is one of `LAYOUTS`."""
    if layout not in LAYOUTS:
        raise AnchorMassError(f"unknown layout {layout!r}: choose one of {', '.join(LAYOUTS)}")


def memory_formula(
    config: Config, context: int, layout: str = "shared-mass", dtype: torch.dtype = torch.bfloat16
) -> int:
    """Bytes of the cache after `context` tokens, one row, from sizes alone (SPEC 4).

    Args:
        config: of either model; `layout` matters to AnchorMass only.
        context: tokens absorbed.
        layout: a key of `LAYOUTS`.
        dtype: of the model.

    Raises:
        AnchorMassError: unknown layout, negative context, or a compact cache, whose size
            depends on the text.
    """
    check_layout(layout)
    if context < 0:
        raise AnchorMassError(f"context={context}: must not be negative")
    if config.compact:
        raise AnchorMassError("a compact cache has no formula: its size depends on the text")
    if config.attention == "standard":
        return config.n_layers * 2 * config.width * context * dtype.itemsize
    blocks, tail = divmod(max(context - config.sinks, 0), config.block)
    slots = min(blocks * config.slots_per_block, config.max_slots)
    rows = min(context, config.sinks) + slots + tail
    per_key, per_value, per_mass = _row_bytes(config, layout, dtype)
    local = min(context, config.block) * config.n_local * (per_key + per_value)
    stream = rows * (config.n_global * (per_key + per_value) + per_mass)
    return config.n_layers * (local + stream)


def _row_bytes(config: Config, layout: str, dtype: torch.dtype) -> tuple[int, int, int]:
    """Bytes of one key, of one value (each of one head), and of the mass of one row."""
    value = torch.promote_types(dtype, torch.float32) if layout == "article" else dtype
    masses = 1 if layout == "shared-mass" else config.n_global
    d = config.head_dim
    return d * dtype.itemsize, d * value.itemsize, masses * mass_dtype(dtype).itemsize


@dataclass(frozen=True)
class Memory:
    """Bytes of a cache by part. `total` is what the formula counts: rows in use.

    `reserved` is allocated beyond that: room to grow, the open block's unused rows and, in a
    batch, what shorter rows leave empty.
    """

    local: int
    sinks: int
    slots: int
    tail: int
    mass: int
    reserved: int

    @property
    def total(self) -> int:
        return self.local + self.sinks + self.slots + self.tail + self.mass

    @property
    def allocated(self) -> int:
        return self.total + self.reserved
