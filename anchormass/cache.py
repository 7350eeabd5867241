"""The two caches: everything (Standard) or a fixed number of slots (AnchorMass).

Both hold a list of layers (`stream.py`) that know how to attend to a chunk (`prefill`) and to
one token (`step`); the model never looks inside. `memory()` counts the rows in use, which is
what the article's formula counts, and reports what is allocated beyond them as `reserved`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anchormass.compress import Slots
from anchormass.config import Config
from anchormass.errors import AnchorMassError
from anchormass.memory import Memory, check_layout
from anchormass.stream import AnchorMassLayer, StandardLayer
from anchormass.tensorfile import read_tensors, write_tensors

SINK, DROPPED, TAIL = -1, -2, -3  # codes beside slot numbers in `AnchorMassCache.owner`
CACHE_SETTINGS = ("policy", "max_slots", "recent_slots", "compact")  # may differ from the model's
_KIND = "anchormass-cache-1"


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
        if not isinstance(batch_size, int) or batch_size < 1:
            raise AnchorMassError(f"batch_size={batch_size}: must be a whole number, at least 1")
        if not isinstance(session_length, int) or session_length < 1:
            raise AnchorMassError(
                f"session_length={session_length}: must be a whole number, at least 1 "
                "(the prompt's length)"
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
        twin.__dict__ = {
            k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k != "filled_by"
        }
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
        """Write a file, atomically; `load_cache` brings the cache back, bit for bit."""
        header = {
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
        write_tensors(path, self.tensors() | self._by_layer("tracked"), header, _KIND)

    def trim(self) -> None:
        """Release reserved rows. In a batch of one the cache then holds the formula's bytes."""
        for layer in self.layers:
            layer.trim(self.seen)

    def check_model(self, config: Config, fingerprint: str, dtype: torch.dtype) -> None:
        """Raise AnchorMassError unless this cache belongs to that model."""
        mine = self.config.to_dict()
        other = [k for k, v in config.to_dict().items() if v != mine[k] and k not in CACHE_SETTINGS]
        if other:
            raise AnchorMassError(
                f"this cache was made for a model with another {', '.join(other)}; "
                "use model.new_cache() of the model at hand"
            )
        if dtype != self.dtype:
            raise AnchorMassError(
                f"this cache is {self.dtype}, the model {dtype}; use model.new_cache() of the model"
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
            return out if n == q.shape[2] else F.pad(out, (0, 0, 0, q.shape[2] - n))
        out = torch.zeros_like(q)
        for b, n in enumerate(counts):
            if n:
                row = slice(b, b + 1)
                out[row, :, :n] = target.prefill(
                    row, q[row, :, :n], k[row, :, :n], v[row, :, :n], self.seen[b]
                )
        return out

    def step(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Absorb one token per row in one layer, and attend. `[B, H, 1, D]` -> same."""
        return self.layers[layer].step(q, k, v, self.seen)


class StandardCache(Cache):
    """Keys and values of every token."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        shape = (self.batch_size, self.config.n_heads, 0, self.config.head_dim)
        self.layers = [
            StandardLayer(torch.empty(shape, dtype=self.dtype, device=self.device))
            for _ in range(self.config.n_layers)
        ]


class AnchorMassCache(Cache):
    """The last C tokens for Local heads; sinks, slots and the open block for Global heads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_layout(self.layout)
        self.layers = [
            AnchorMassLayer(
                self.config,
                self.batch_size,
                self.layout,
                self.dtype,
                self.device,
                self.track_positions,
            )
            for _ in range(self.config.n_layers)
        ]

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
            at.k[:, :, at.first_slot : stop],
            at.v[:, :, at.first_slot : stop],
            self.slot_mass(layer),
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
    tensors, header = read_tensors(path, _KIND)
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    try:
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
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AnchorMassError(f"{path} does not hold a whole cache: {error}") from None
    return cache
