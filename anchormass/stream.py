"""One layer of a cache: its buffers, how a chunk and a token enter them, what is seen meanwhile.

Buffers are preallocated and grow in steps until the budget is reached, so a decode step
neither concatenates nor reallocates. A row of the buffers that is not in use has mass 0 and
cannot be seen. Rows of a batch may stand at different positions; a chunk is then absorbed row
by row, so a pad is never folded into a slot.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anchormass.attention import (
    Part,
    attend,
    compress_body,
    decode_attention,
    global_attention,
    hiding,
    local_attention,
)
from anchormass.compress import Slots, Subgroups, mass_dtype
from anchormass.config import Config
from anchormass.policies import reduce_slots

_GROWTH = 64  # buffers grow by a quarter, rounded up to this many rows


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
            bias = _up_to(seen, n, q)
        return decode_attention(q, self.k[:, :, :n], self.v[:, :, :n], bias)


class AnchorMassLayer:
    """One layer's buffers.

    `local_k`, `local_v [B, Hl, C, D]`: a ring, token t at t mod C.
    `k`, `v [B, Hg, S + R + N, D]`: S sinks, R rows of the open block (the tail), N slots.
    `mass [B, S + R + N]`, or `[B, Hg, ...]` in the article's layouts: 0 where a row is unused.
    """

    def __init__(
        self,
        config: Config,
        batch: int,
        layout: str,
        dtype: torch.dtype,
        device: torch.device,
        track_positions: bool,
    ) -> None:
        self.config = config
        self.sinks, self.block = config.sinks, config.block
        self.tail_rows = config.block
        self.per_head = layout != "shared-mass"
        d = config.head_dim
        value = torch.promote_types(dtype, torch.float32) if layout == "article" else dtype

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows = self.first_slot
        self.local_k = zeros(batch, config.n_local, self.block, d)
        self.local_v = zeros(batch, config.n_local, self.block, d, dtype=value)
        self.k = zeros(batch, config.n_global, rows, d)
        self.v = zeros(batch, config.n_global, rows, d, dtype=value)
        heads = (config.n_global,) if self.per_head else ()
        self.mass = zeros(batch, *heads, rows, dtype=mass_dtype(dtype))
        self.count = [0] * batch  # slots in use, per row
        self.dropped = [0.0] * batch
        self.track = track_positions
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
        if self.k.shape[2] < self.sinks:
            return  # trimmed already
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
            self.k[rows, :, where], self.v[rows, :, where] = (
                k[:, :, :first],
                v[:, :, :first].to(self.v.dtype),
            )
            self._set_mass(rows, where, 1.0)
            place = torch.arange(s, device=q.device)
            hidden = place > seen + torch.arange(first, device=q.device)[:, None]
            bias = hiding(hidden, q.dtype)[None, None]
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
        raw_v = torch.cat((self.v[rows, :, open_rows], v.to(self.v.dtype)), dim=2)
        queries = F.pad(q, (0, 0, length, 0))

        # The open block's rows stay in the buffer but are attended to as raw tokens: hidden here.
        mass = self.row_mass()[rows].clone()
        mass[:, s : self.first_slot] = 0
        past = Slots(self.k[rows], self.v[rows], mass)
        whole = raw_k.shape[2] // self.block * self.block
        own, groups = compress_body(raw_k[:, :, :whole], raw_v[:, :, :whole], self.config)
        out = global_attention(queries, raw_k, raw_v.to(v.dtype), past, own, self.config)
        out = out[:, :, length:]

        if whole:
            self._append(rows, own, groups)
        rest = raw_k.shape[2] - whole
        where = slice(s, s + rest)
        self.k[rows, :, where] = raw_k[:, :, whole:]
        self.v[rows, :, where] = raw_v[:, :, whole:].to(self.v.dtype)
        self._set_mass(rows, slice(s, self.first_slot), 0.0)
        self._set_mass(rows, where, 1.0)
        return out

    def _append(self, rows: slice, new: Slots, groups: Subgroups) -> None:
        """Add slots to the stream, and bring it within its budget (stage 2)."""
        members = list(range(len(self.count)))[rows]
        if self.config.compact and (len(members) > 1 or not bool(new.mass.all())):
            # Rows may keep different numbers of slots, so each goes alone.
            for i, b in enumerate(members):
                kept = new.mass[i] > 0
                row = Slots(
                    new.k[i : i + 1, :, kept], new.v[i : i + 1, :, kept], new.mass[i : i + 1, kept]
                )
                self._append_alike([b], row, groups, i, kept)
            return
        self._append_alike(members, new, groups, 0, None)

    def _append_alike(
        self, members: list[int], new: Slots, groups: Subgroups, offset: int, kept: Tensor | None
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
                    self.owner[b] = torch.where(
                        old_owner < 0, old_owner, place[old_owner.clamp_min(0)]
                    )
        for b in members:
            self.count[b] = total

    def _store(self, rows: slice, at: int, slots: Slots) -> None:
        where = slice(self.first_slot + at, self.first_slot + at + slots.mass.shape[1])
        self.k[rows, :, where], self.v[rows, :, where] = slots.k, slots.v.to(self.v.dtype)
        self._set_mass(rows, where, slots.mass)

    def _track_new(
        self, b: int, groups: Subgroups, i: int, count: int, kept: Tensor | None
    ) -> None:
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
            bias = _up_to(seen, c, q)
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


def _up_to(last: list[int], n: int, q: Tensor) -> Tensor:
    """Bias `[B, 1, 1, n]` that hides from row b every place after `last[b]`."""
    places = torch.arange(n, device=q.device)
    return hiding(places > torch.tensor(last, device=q.device)[:, None, None, None], q.dtype)
