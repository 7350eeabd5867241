"""The two caches: everything (Standard) or a fixed number of slots (AnchorMass).

Both hold a list of layers that know how to attend to a chunk (`prefill`) and to one token
(`step`); the model never looks inside. Buffers are preallocated and grow in steps until the
budget is reached, so a decode step neither concatenates nor reallocates. Unused rows have
mass 0 and cannot be seen. `memory()` counts the rows in use, which is what the article's
formula counts, and reports what is allocated beyond them as `reserved`.

Rows of a batch may have different lengths: where they differ, a chunk is absorbed row by
row, so a pad is never folded into a slot.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anchormass.attention import (
    NEG_INF,
    Part,
    attend,
    compress_body,
    decode_attention,
    global_attention,
    local_attention,
)
from anchormass.compress import Slots, mass_dtype
from anchormass.config import Config
from anchormass.errors import AnchorMassError
from anchormass.paths import atomic_path
from anchormass.policies import reduce_slots

LAYOUTS = {
    "shared-mass": "K, V in the model's dtype, one float32 mass per row (ours)",
    "article-bf16": "K, V in the model's dtype, a float32 mass per row and head",
    "article": "K in the model's dtype, V in float32, a float32 mass per row and head",
}
SINK, DROPPED, TAIL = -1, -2, -3  # codes beside slot numbers in `AnchorMassCache.owner`
CACHE_SETTINGS = ("policy", "max_slots", "recent_slots", "compact")  # may differ from the model's
_FORMAT = "anchormass-cache-1"
_GROWTH = 64  # buffers grow by a quarter, rounded up to this many rows


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


class Cache:
    """What both caches share: rows, session, checks, saving. Made by `model.new_cache`."""

    def __init__(
        self,
        config: Config,
        batch_size: int,
        session_length: int,
        layout: str,
        dtype: torch.dtype,
        device: torch.device,
        track_positions: bool,
        model: str = "",
    ) -> None:
        if batch_size < 1:
            raise AnchorMassError(f"batch_size={batch_size}: must be at least 1")
        if session_length < 1:
            raise AnchorMassError(
                f"session_length={session_length}: must be at least 1 (the prompt's length)"
            )
        self.config = config
        self.batch_size = batch_size
        self.session_length = session_length
        self.layout = layout
        self.dtype = dtype
        self.device = device
        self.track_positions = track_positions
        self.model = model  # fingerprint of the weights that filled it
        self.seen = [0] * batch_size  # tokens absorbed, per row
        self.layers: list[Any] = []
        self.filled_by: object = None  # the model last checked against; not saved, not forked

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        twin = copy.copy(self)
        twin.__dict__ = {k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k != "filled_by"}
        twin.filled_by = self.filled_by
        return twin

    def advance(self, counts: list[int]) -> None:
        """Note that each row absorbed `counts` more tokens; once, after all layers did."""
        self.seen = [a + n for a, n in zip(self.seen, counts, strict=True)]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor the cache holds, by name: the buffers themselves, unused rows too."""
        return self._by_layer("tensors")

    def _by_layer(self, which: str) -> dict[str, Tensor]:
        return {
            f"{i}.{name}": tensor
            for i, layer in enumerate(self.layers)
            for name, tensor in getattr(layer, which)().items()
        }

    def memory(self) -> Memory:
        """Bytes by part. Allocated bytes are summed over the tensors that exist."""
        allocated = sum(t.numel() * t.element_size() for t in self.tensors().values())
        parts = {name: 0 for name in ("local", "sinks", "slots", "tail", "mass")}
        for layer in self.layers:
            for name, size in layer.bytes_in_use(self.seen).items():
                parts[name] += size
        return Memory(**parts, reserved=allocated - sum(parts.values()))

    def fork(self) -> Cache:
        """An independent copy: what is decoded with one does not touch the other."""
        return copy.deepcopy(self)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, atomically. `load_cache` brings it back, bit for bit."""
        from safetensors.torch import save_file

        self.trim()
        header = {
            "format": _FORMAT,
            "config": self.config.to_dict(),
            "batch_size": self.batch_size,
            "session_length": self.session_length,
            "layout": self.layout,
            "dtype": str(self.dtype).removeprefix("torch."),
            "track_positions": self.track_positions,
            "model": self.model,
            "seen": self.seen,
            "layers": [layer.state() for layer in self.layers],
        }
        everything = self.tensors() | self._by_layer("tracked")
        tensors = {name: t.contiguous() for name, t in everything.items()}
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, {"anchormass": json.dumps(header)})

    def trim(self) -> None:
        """Release reserved rows. In a batch of one the cache then holds the formula's bytes."""
        for layer in self.layers:
            layer.trim(self.seen)

    def check_model(self, config: Config, fingerprint: str) -> None:
        """Raise AnchorMassError unless this cache belongs to that model."""
        mine = self.config.to_dict()
        other = [
            k for k, v in config.to_dict().items() if v != mine[k] and k not in CACHE_SETTINGS
        ]
        if other:
            raise AnchorMassError(
                f"this cache was made for a model with another {', '.join(other)}; "
                "use model.new_cache() of the model at hand"
            )
        if fingerprint != self.model:
            raise AnchorMassError(
                "this cache was filled by a model with other weights; "
                "use model.new_cache() of the model at hand"
            )

    def _uniform(self, counts: list[int], layer: Any) -> bool:
        same = len(set(zip(self.seen, counts, strict=True))) == 1
        return same and layer.rows_alike()

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, counts: list[int]) -> Tensor:
        """Absorb `counts[b]` tokens of row b in one layer, and attend. `[B, H, T, D]` -> same.

        `counts[b]` <= T; what lies beyond is padding, never read, and its output is 0.
        """
        target = self.layers[layer]
        if self._uniform(counts, target):
            n = counts[0]
            rows = slice(0, self.batch_size)
            out = target.prefill(rows, q[:, :, :n], k[:, :, :n], v[:, :, :n], self.seen[0])
            return out if n == q.shape[2] else torch.nn.functional.pad(out, (0, 0, 0, q.shape[2] - n))
        out = torch.zeros_like(q)
        for b, n in enumerate(counts):
            if n:
                row = slice(b, b + 1)
                out[row, :, :n] = target.prefill(
                    row, q[row, :, :n], k[row, :, :n], v[row, :, :n], self.seen[b]
                )
        return out


# ---------------------------------------------------------------- Standard


class StandardCache(Cache):
    """Keys and values of every token."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        shape = (self.batch_size, self.config.n_heads, 0, self.config.head_dim)
        self.layers = [
            StandardLayer(torch.empty(shape, dtype=self.dtype, device=self.device))
            for _ in range(self.config.n_layers)
        ]

    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Absorb one token per row in one layer, and attend. `[B, H, 1, D]` -> same."""
        return self.layers[layer].step(q, k, v, self.seen)


class StandardLayer:
    """Preallocated `k`, `v` `[B, H, capacity, D]`."""

    def __init__(self, empty: Tensor) -> None:
        self.k, self.v = empty, empty.clone()

    def tensors(self) -> dict[str, Tensor]:
        return {"k": self.k, "v": self.v}

    def tracked(self) -> dict[str, Tensor]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.k, self.v = tensors["k"], tensors["v"]

    def bytes_in_use(self, seen: list[int]) -> dict[str, int]:
        # Counted as `slots`: one token each, none merged.
        row = 2 * self.k.shape[1] * self.k.shape[3] * self.k.element_size()
        return {"slots": sum(seen) * row}

    def rows_alike(self) -> bool:
        return True

    def trim(self, seen: list[int]) -> None:
        n = max(seen)
        if self.k.shape[2] > n:
            self.k, self.v = self.k[:, :, :n].clone(), self.v[:, :, :n].clone()

    def _reserve(self, n: int) -> None:
        if n > self.k.shape[2]:
            capacity = _grown(n)
            self.k, self.v = _resized(self.k, capacity), _resized(self.v, capacity)

    def prefill(self, rows: slice, q: Tensor, k: Tensor, v: Tensor, seen: int) -> Tensor:
        n = q.shape[2]
        self._reserve(seen + n)
        self.k[rows, :, seen : seen + n], self.v[rows, :, seen : seen + n] = k, v
        parts = [Part(k, v, blocks=1)]
        if seen:
            parts.append(Part(self.k[rows, :, :seen], self.v[rows, :, :seen]))
        return attend(q, parts)

    def step(self, q: Tensor, k: Tensor, v: Tensor, seen: list[int]) -> Tensor:
        self._reserve(max(seen) + 1)
        _write(self.k, seen, k)
        _write(self.v, seen, v)
        n = max(seen) + 1
        bias = None
        if len(set(seen)) > 1:
            last = torch.tensor(seen, device=q.device)[:, None, None, None]
            hidden = torch.arange(n, device=q.device) > last
            bias = torch.zeros(hidden.shape, device=q.device).masked_fill(hidden, NEG_INF)
        return decode_attention(q, self.k[:, :, :n], self.v[:, :, :n], bias)


# ---------------------------------------------------------------- AnchorMass


class AnchorMassCache(Cache):
    """The last C tokens for Local heads; sinks, slots and the open block for Global heads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_layout(self.layout)
        self.layers = [AnchorMassLayer(self) for _ in range(self.config.n_layers)]

    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Absorb one token per row in one layer, and attend. `[B, H, 1, D]` -> same."""
        return self.layers[layer].step(q, k, v, self.seen)

    def mass(self, layer: int) -> Tensor:
        """Masses of everything the Global heads of `layer` can see, `[B, N]`.

        Sinks, then slots oldest first, then tail; 0 is an empty slot or unused row. For every
        row, sum + `dropped(layer)` == tokens absorbed.
        """
        at = self.layers[layer]
        masses = at.row_mass()
        tail = masses[:, at.sinks : at.first_slot]
        return torch.cat(
            (masses[:, : at.sinks], masses[:, at.first_slot :][:, : max(at.count)], tail), dim=1
        )

    def slot_mass(self, layer: int) -> Tensor:
        """Masses of the compressed stream alone, `[B, N]`, oldest slot first."""
        at = self.layers[layer]
        return at.row_mass()[:, at.first_slot :][:, : max(at.count)]

    def slots(self, layer: int) -> Slots:
        """Views of the compressed stream of `layer`: k, v `[B, Hg, N, D]`, mass `[B, N]`."""
        at = self.layers[layer]
        stop = at.first_slot + max(at.count)
        return Slots(
            at.k[:, :, at.first_slot : stop], at.v[:, :, at.first_slot : stop], self.slot_mass(layer)
        )

    def dropped(self, layer: int) -> Tensor:
        """Mass lost to a dropping policy, in tokens, `[B]`."""
        return torch.tensor(self.layers[layer].dropped, dtype=torch.float64)

    def owner(self, layer: int, row: int = 0) -> Tensor:
        """Where each token absorbed by `row` lives now: int64 `[tokens]`.

        A number >= 0 is a place in `slot_mass(layer)[row]`; negative are `SINK`, `DROPPED`,
        `TAIL`.

        Raises:
            AnchorMassError: unless the cache was made with `track_positions=True`.
        """
        if not self.track_positions:
            raise AnchorMassError("positions are not tracked: new_cache(track_positions=True)")
        at, seen = self.layers[layer], self.seen[row]
        owner = torch.full((seen,), TAIL, dtype=torch.long)
        owner[: at.sinks] = SINK
        absorbed = at.owner[row]
        owner[at.sinks : at.sinks + len(absorbed)] = torch.where(absorbed < 0, DROPPED, absorbed)
        return owner

    def outliers(self, layer: int, row: int = 0) -> Tensor:
        """Which absorbed tokens stage 1 split off as outliers: bool `[tokens]`."""
        owner = self.owner(layer, row)
        flags = torch.zeros(len(owner), dtype=torch.bool)
        known = self.layers[layer].fired[row]
        flags[self.config.sinks : self.config.sinks + len(known)] = known
        return flags


class AnchorMassLayer:
    """One layer's buffers.

    `local_k`, `local_v [B, Hl, C, D]`: a ring, token t at t mod C.
    `k`, `v [B, Hg, S + R + N, D]`: S sinks, R rows of the open block (the tail), N slots.
    `mass [B, S + R + N]`, or `[B, Hg, ...]` in the article's layouts: 0 where a row is unused.
    """

    def __init__(self, cache: AnchorMassCache) -> None:
        self.config = config = cache.config
        self.sinks, self.block = config.sinks, config.block
        self.tail_rows = config.block
        self.per_head = cache.layout != "shared-mass"
        batch, d = cache.batch_size, config.head_dim
        value = cache.dtype
        if cache.layout == "article":
            value = torch.promote_types(cache.dtype, torch.float32)

        def zeros(*shape: int, dtype: torch.dtype = cache.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=cache.device)

        rows = self.first_slot
        self.local_k = zeros(batch, config.n_local, self.block, d)
        self.local_v = zeros(batch, config.n_local, self.block, d, dtype=value)
        self.k = zeros(batch, config.n_global, rows, d)
        self.v = zeros(batch, config.n_global, rows, d, dtype=value)
        heads = (config.n_global,) if self.per_head else ()
        self.mass = zeros(batch, *heads, rows, dtype=mass_dtype(cache.dtype))
        self.count = [0] * batch  # slots in use, per row
        self.dropped = [0.0] * batch
        self.track = cache.track_positions
        self.owner = [torch.zeros(0, dtype=torch.long)] * batch if self.track else []
        self.fired = [torch.zeros(0, dtype=torch.bool)] * batch if self.track else []

    @property
    def first_slot(self) -> int:
        return self.sinks + self.tail_rows

    def row_mass(self) -> Tensor:
        """`[B, rows]`; the heads of a layer share their masses."""
        return self.mass[:, 0] if self.per_head else self.mass

    def _set_mass(self, rows: slice, where: slice, mass: Tensor | float) -> None:
        if self.per_head and isinstance(mass, Tensor):
            mass = mass[:, None]
        self.mass[rows, ..., where] = mass

    # ------------------------------------------------------------ bookkeeping

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("local_k", "local_v", "k", "v", "mass")}

    def tracked(self) -> dict[str, Tensor]:
        """Who holds which position: beside the cache proper, and not counted in its memory."""
        owner = {f"owner.{b}": x for b, x in enumerate(self.owner)}
        return owner | {f"fired.{b}": x for b, x in enumerate(self.fired)}

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "dropped": self.dropped, "tail_rows": self.tail_rows}

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        for name in self.tensors():
            setattr(self, name, tensors[name])
        self.count, self.dropped = list(state["count"]), list(state["dropped"])
        self.tail_rows = state["tail_rows"]
        self.owner = [tensors[f"owner.{b}"].cpu() for b in range(len(self.owner))]
        self.fired = [tensors[f"fired.{b}"].cpu() for b in range(len(self.fired))]

    def bytes_in_use(self, seen: list[int]) -> dict[str, int]:
        def head_bytes(k: Tensor, v: Tensor) -> int:
            return k.shape[1] * k.shape[3] * (k.element_size() + v.element_size())

        local, row = head_bytes(self.local_k, self.local_v), head_bytes(self.k, self.v)
        sinks = sum(min(n, self.sinks) for n in seen)
        tail = sum(self._tail_length(n) for n in seen)
        slots = sum(self.count)
        masses = self.mass.shape[1] if self.per_head else 1
        return {
            "local": sum(min(n, self.block) for n in seen) * local,
            "sinks": sinks * row,
            "slots": slots * row,
            "tail": tail * row,
            "mass": (sinks + slots + tail) * masses * self.mass.element_size(),
        }

    def rows_alike(self) -> bool:
        return len(set(self.count)) == 1

    def _tail_length(self, seen: int) -> int:
        return max(seen - self.sinks, 0) % self.block

    def trim(self, seen: list[int]) -> None:
        """Shrink the stream's buffers to the longest row, and the local ring before it fills."""
        self._resize(max(self._tail_length(n) for n in seen), max(self.count))
        held = min(max(seen), self.block)
        if held < self.local_k.shape[2]:
            self.local_k = self.local_k[:, :, :held].clone()
            self.local_v = self.local_v[:, :, :held].clone()
        kept = min(max(seen), self.sinks)
        if kept < self.sinks and not max(self.count):
            self.k, self.v = self.k[:, :, :kept].clone(), self.v[:, :, :kept].clone()
            self.mass = self.mass[..., :kept].clone()

    def _restore_rows(self, n_slots: int) -> None:
        """Make room again after `trim`, and for `n_slots` slots."""
        if self.local_k.shape[2] < self.block:
            self.local_k = _resized(self.local_k, self.block)
            self.local_v = _resized(self.local_v, self.block)
        if self.k.shape[2] < self.sinks:
            self.k, self.v = _resized(self.k, self.sinks), _resized(self.v, self.sinks)
            self.mass = _resized(self.mass, self.sinks, dim=-1)
            self.tail_rows = 0
        capacity = self.k.shape[2] - self.first_slot
        if n_slots > capacity:
            capacity = min(_grown(n_slots), max(n_slots, self.config.max_slots))
        if self.tail_rows < self.block or capacity > self.k.shape[2] - self.first_slot:
            self._resize(self.block, capacity)

    def _resize(self, tail_rows: int, n_slots: int) -> None:
        """New buffers of exactly these sizes; what fits is copied, the rest is zero."""
        if tail_rows == self.tail_rows and n_slots == self.k.shape[2] - self.first_slot:
            return
        old, new = self.first_slot, self.sinks + tail_rows

        def moved(x: Tensor, dim: int) -> Tensor:
            tail = x.narrow(dim, self.sinks, self.tail_rows)
            head = _resized(tail, tail_rows, dim)
            slots = _resized(x.narrow(dim, old, x.shape[dim] - old), n_slots, dim)
            return torch.cat((x.narrow(dim, 0, self.sinks), head, slots), dim=dim)

        self.k, self.v = moved(self.k, 2), moved(self.v, 2)
        self.mass = moved(self.mass, self.mass.dim() - 1)
        self.tail_rows = new - self.sinks

    # ------------------------------------------------------------ absorbing

    def prefill(self, rows: slice, q: Tensor, k: Tensor, v: Tensor, seen: int) -> Tensor:
        """Absorb a chunk in rows that stand at the same position, and attend."""
        h = self.config.n_local
        self._restore_rows(0)
        local = self._prefill_local(rows, q[:, :h], k[:, :h], v[:, :h], seen)
        return torch.cat((local, self._prefill_global(rows, q[:, h:], k[:, h:], v[:, h:], seen)), 1)

    def _prefill_local(self, rows: slice, q: Tensor, k: Tensor, v: Tensor, seen: int) -> Tensor:
        c, held, n = self.block, min(seen, self.block), k.shape[2]
        turn = -(seen % c) if seen >= c else 0  # brings the ring's oldest token to the front
        past_k = self.local_k[rows].roll(turn, dims=2)[:, :, :held]
        past_v = self.local_v[rows].roll(turn, dims=2)[:, :, :held].to(v.dtype)
        out = local_attention(q, k, v, past_k, past_v, self.config)
        newest = torch.arange(max(seen, seen + n - c), seen + n, device=k.device) % c
        self.local_k[rows] = self.local_k[rows].index_copy(2, newest, k[:, :, -c:])
        self.local_v[rows] = self.local_v[rows].index_copy(
            2, newest, v[:, :, -c:].to(self.local_v.dtype)
        )
        return out

    def _prefill_global(self, rows: slice, q: Tensor, k: Tensor, v: Tensor, seen: int) -> Tensor:
        n, s = q.shape[2], self.sinks
        outs = []
        first = min(max(s - seen, 0), n)  # tokens of this chunk that are sinks
        if first:
            where = slice(seen, seen + first)
            self.k[rows, :, where], self.v[rows, :, where] = k[:, :, :first], v[:, :, :first].to(self.v.dtype)
            self._set_mass(rows, where, 1.0)
            place = torch.arange(s, device=q.device)
            hidden = place > seen + torch.arange(first, device=q.device)[:, None]
            bias = torch.zeros(hidden.shape, dtype=self.mass.dtype, device=q.device)
            bias = bias.masked_fill(hidden, NEG_INF)[None, None]
            sinks = Part(self.k[rows, :, :s], self.v[rows, :, :s].to(q.dtype), bias)
            outs.append(attend(q[:, :, :first], [sinks]))
        if first < n:
            body = slice(first, n)
            outs.append(
                self._prefill_body(rows, q[:, :, body], k[:, :, body], v[:, :, body], seen + first)
            )
        return torch.cat(outs, dim=2)

    def _prefill_body(self, rows: slice, q: Tensor, k: Tensor, v: Tensor, seen: int) -> Tensor:
        s, length = self.sinks, self._tail_length(seen)
        open_rows = slice(s, s + length)
        # Raw tokens from the open block's first one; its earlier queries are not asked again.
        raw_k = torch.cat((self.k[rows, :, open_rows], k), dim=2)
        raw_v = torch.cat((self.v[rows, :, open_rows].to(v.dtype), v), dim=2)
        queries = torch.nn.functional.pad(q, (0, 0, length, 0))

        # The open block's rows stay in the buffer but are attended to as raw tokens: hidden here.
        mass = self.row_mass()[rows].clone()
        mass[:, s : self.first_slot] = 0
        past = Slots(self.k[rows], self.v[rows], mass)
        whole = raw_k.shape[2] // self.block * self.block
        own, groups = compress_body(raw_k[:, :, :whole], raw_v[:, :, :whole], self.config)
        out = global_attention(queries, raw_k, raw_v, past, own, self.config)[:, :, length:]

        if whole:
            self._append(rows, own, groups)
        rest = raw_k.shape[2] - whole
        where = slice(s, s + rest)
        self.k[rows, :, where] = raw_k[:, :, whole:]
        self.v[rows, :, where] = raw_v[:, :, whole:].to(self.v.dtype)
        self._set_mass(rows, slice(s, self.first_slot), 0.0)
        self._set_mass(rows, where, 1.0)
        return out

    def _append(self, rows: slice, new: Slots, groups: Any) -> None:
        """Add slots to the stream, and bring it within its budget (stage 2)."""
        members = list(range(len(self.count)))[rows]
        if self.config.compact and (len(members) > 1 or not bool(new.mass.all())):
            # Rows may keep different numbers of slots, so each goes alone.
            for i, b in enumerate(members):
                kept = new.mass[i] > 0
                row = Slots(new.k[i : i + 1, :, kept], new.v[i : i + 1, :, kept], new.mass[i : i + 1, kept])
                self._append_alike([b], row, groups, i, kept)
            return
        self._append_alike(members, new, groups, 0, None)

    def _append_alike(
        self, members: list[int], new: Slots, groups: Any, offset: int, kept: Tensor | None
    ) -> None:
        rows = slice(members[0], members[-1] + 1)
        count, budget = self.count[members[0]], self.config.max_slots
        total = count + new.mass.shape[1]
        if self.track:
            for i, b in enumerate(members):
                self._track_new(b, groups, offset + i, count, kept)
        if total <= budget:
            self._restore_rows(total)
            self._store(rows, count, new)
        else:
            stop = self.first_slot + count
            old = slice(self.first_slot, stop)
            stream = Slots(
                torch.cat((self.k[rows, :, old], new.k), dim=2),
                torch.cat((self.v[rows, :, old], new.v.to(self.v.dtype)), dim=2),
                torch.cat((self.row_mass()[rows, old], new.mass), dim=1),
            )
            reduced, moved, dropped = reduce_slots(
                stream, self.config.policy, budget, self.config.n_recent
            )
            total = reduced.mass.shape[1]
            self._restore_rows(total)
            self._store(rows, 0, reduced)
            self._set_mass(rows, slice(self.first_slot + total, None), 0.0)
            for i, b in enumerate(members):
                self.dropped[b] += float(dropped[i])
                if self.track:
                    place = moved[i].cpu()
                    old_owner = self.owner[b]
                    self.owner[b] = torch.where(old_owner < 0, old_owner, place[old_owner.clamp_min(0)])
        for b in members:
            self.count[b] = total

    def _store(self, rows: slice, at: int, slots: Slots) -> None:
        where = slice(self.first_slot + at, self.first_slot + at + slots.mass.shape[1])
        self.k[rows, :, where], self.v[rows, :, where] = slots.k, slots.v.to(self.v.dtype)
        self._set_mass(rows, where, slots.mass)

    def _track_new(self, b: int, groups: Any, i: int, count: int, kept: Tensor | None) -> None:
        fired, index = groups.fired[i].cpu(), groups.index[i].cpu()  # [G]
        size = self.config.subgroup
        alone = (torch.arange(size) == index[:, None]) & fired[:, None]  # [G, 8]
        slot = 2 * torch.arange(len(fired))[:, None] + (~alone).long()
        if kept is not None:  # empty slots are not stored: count only those before
            slot = (kept.cpu().long().cumsum(0) - 1)[slot]
        self.owner[b] = torch.cat((self.owner[b], slot.flatten() + count))
        self.fired[b] = torch.cat((self.fired[b], alone.flatten()))

    # ------------------------------------------------------------ one token

    def step(self, q: Tensor, k: Tensor, v: Tensor, seen: list[int]) -> Tensor:
        """Absorb one token per row, whatever each row's position, and attend."""
        h, c, s = self.config.n_local, self.block, self.sinks
        self._restore_rows(0)
        _write(self.local_k, [n % c for n in seen], k[:, :h])
        _write(self.local_v, [n % c for n in seen], v[:, :h])
        bias = None
        if min(seen) < c - 1:  # the ring is not full yet
            last = torch.tensor(seen, device=q.device)[:, None, None, None]
            hidden = torch.arange(c, device=q.device) > last
            bias = torch.zeros(hidden.shape, dtype=self.mass.dtype, device=q.device)
            bias = bias.masked_fill(hidden, NEG_INF)
        local = decode_attention(q[:, :h], self.local_k, self.local_v, bias)

        place = [n if n < s else s + self._tail_length(n) for n in seen]
        _write(self.k, place, k[:, h:])
        _write(self.v, place, v[:, h:])
        for b, row in enumerate(place):
            self.mass[b, ..., row] = 1.0
        log_mass = self.row_mass().log()[:, None, None]
        out = torch.cat((local, decode_attention(q[:, h:], self.k, self.v, log_mass)), dim=1)
        self._close_blocks(seen, q.dtype)
        return out

    def _close_blocks(self, seen: list[int], dtype: torch.dtype) -> None:
        """Compress the open block of every row whose newest token completed it."""
        full = [b for b, n in enumerate(seen) if n >= self.sinks and self._tail_length(n + 1) == 0]
        if not full:
            return
        together = len(full) == len(seen) and self.rows_alike()
        for rows in [slice(0, len(seen))] if together else [slice(b, b + 1) for b in full]:
            where = slice(self.sinks, self.first_slot)
            k, v = self.k[rows, :, where], self.v[rows, :, where]
            own, groups = compress_body(k, v, self.config)
            self._set_mass(rows, where, 0.0)
            self._append(rows, own, groups)


# ---------------------------------------------------------------- helpers and loading


def _grown(n: int) -> int:
    """Capacity for `n` rows with room: a quarter more, in whole steps."""
    return -(-(n + n // 4) // _GROWTH) * _GROWTH


def _resized(x: Tensor, n: int, dim: int = 2) -> Tensor:
    """A copy of `x` with `n` entries along `dim`: cut, or filled up with zeros."""
    dim = dim % x.dim()
    kept = x.narrow(dim, 0, min(n, x.shape[dim]))
    shape = list(x.shape)
    shape[dim] = n
    out = x.new_zeros(shape)
    out.narrow(dim, 0, kept.shape[dim]).copy_(kept)
    return out


def _write(buffer: Tensor, places: list[int], x: Tensor) -> None:
    """Write one token per row: `buffer [B, H, N, D]` at `places[b]` from `x [B, H, 1, D]`."""
    x = x.to(buffer.dtype)
    if len(set(places)) == 1:
        buffer[:, :, places[0]] = x[:, :, 0]
    else:
        for b, place in enumerate(places):
            buffer[b, :, place] = x[b, :, 0]


def make_cache(config: Config, **kwargs: Any) -> Cache:
    """An empty cache of the kind that `config.attention` calls for."""
    check_layout(kwargs["layout"])
    kind = AnchorMassCache if config.attention == "anchormass" else StandardCache
    return kind(config, **kwargs)


def load_cache(path: str | Path, device: str | torch.device = "cpu") -> Cache:
    """Bring back what `Cache.save` wrote.

    Raises:
        AnchorMassError: the file is missing, truncated, corrupt, or no cache of this version.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise AnchorMassError(f"no cache file at {path}")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            header = json.loads((file.metadata() or {}).get("anchormass", "{}"))
            if header.get("format") != _FORMAT:
                raise AnchorMassError(f"{path} is not a cache of this version ({_FORMAT})")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        cache = make_cache(
            Config.from_dict(header["config"]),
            batch_size=header["batch_size"],
            session_length=header["session_length"],
            layout=header["layout"],
            dtype=getattr(torch, header["dtype"]),
            device=torch.device(device),
            track_positions=header["track_positions"],
            model=header["model"],
        )
        cache.seen = list(header["seen"])
        for i, (layer, state) in enumerate(zip(cache.layers, header["layers"], strict=True)):
            mine = {n.removeprefix(f"{i}."): t for n, t in tensors.items() if n.startswith(f"{i}.")}
            layer.restore(mine, state)
    except AnchorMassError:
        raise
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise AnchorMassError(f"{path} is truncated or corrupt: {error}") from None
    return cache

