"""TransformerLM: Standard and AnchorMass, one class, the same parameters and names.

Pre-RMSNorm, SwiGLU, no biases, untied embeddings, rotary positions; parameter names are
Llama's, so weights move between the two models and `transformers` as they are. Three ways
through the same layers, which differ only in how a layer attends: `forward` (parallel),
`prefill` (chunks into a cache) and `decode` (one token).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anchormass.attention import parallel_attention
from anchormass.cache import CACHE_SETTINGS, Cache, make_cache
from anchormass.compress import mass_dtype
from anchormass.config import Config
from anchormass.errors import AnchorMassError
from anchormass.rope import apply_rope, rope_cos_sin, session_base

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class QKV(NamedTuple):
    """Queries and keys (both rotated) and values of one layer, each `[B, H, T, D]`."""

    q: Tensor
    k: Tensor
    v: Tensor


class SelfAttention(nn.Module):
    """Projections around attention; which keys a head sees is decided elsewhere."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, config.width, bias=False)
        self.v_proj = nn.Linear(config.width, config.width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> QKV:
        """`[B, T, W]` -> three times `[B, H, T, D]`."""
        q, k, v = (
            projection(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return QKV(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)

    def out(self, heads: Tensor) -> Tensor:
        """`[B, H, T, D]` -> `[B, T, W]`."""
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.ffn_width, bias=False)
        self.up_proj = nn.Linear(config.width, config.ffn_width, bias=False)
        self.down_proj = nn.Linear(config.ffn_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """`[B, T, W]` -> same; `attend` maps q, k, v `[B, H, T, D]` to the heads' outputs."""
        x = x + self.self_attn.out(attend(*self.self_attn.qkv(self.input_layernorm(x), cos, sin)))
        return x + self.mlp(self.post_attention_layernorm(x))


class TransformerLM(nn.Module):
    """A language model with Standard or AnchorMass attention.

    Args:
        config: shapes and constants; see `preset`.
        seed: of the initial weights (normal, 0.02, residual outputs scaled by 1/√(2·layers)).
    """

    def __init__(self, config: Config, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.training_info: dict[str, object] = {"stage": "none", "tokens": 0}
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / math.sqrt(2 * config.n_layers) if last else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)

    # ------------------------------------------------------------ about the model

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def n_parameters(self) -> int:
        """How many numbers the model has."""
        return sum(p.numel() for p in self.parameters())

    def variant(self, **changes: object) -> TransformerLM:
        """The same weights (shared, not copied) under a configuration with some fields changed.

        Raises:
            AnchorMassError: for a change of shape.
        """
        config = self.config.replace(**changes)
        for name in ("vocab_size", "n_layers", "width", "ffn_width"):
            if getattr(config, name) != getattr(self.config, name):
                raise AnchorMassError(f"variant({name}=…) would change a weight's shape")
        other = TransformerLM.__new__(TransformerLM)
        nn.Module.__init__(other)
        other.config, other.training_info = config, self.training_info
        for name, child in self.named_children():
            other.add_module(name, child)
        return other

    def fingerprint(self) -> str:
        """A short hash of a sample of every weight: tells models apart, cheaply."""
        digest = hashlib.sha256()
        for parameter in self.parameters():
            flat = parameter.detach().flatten()
            sample = flat[:: max(1, flat.numel() // 16)].to("cpu", torch.float64)
            digest.update(sample.numpy().tobytes())
        return digest.hexdigest()[:16]

    # ------------------------------------------------------------ the layers

    def _positions(self, positions: Tensor, session_length: int) -> tuple[Tensor, Tensor]:
        base = session_base(
            self.config.rope_theta, self.config.head_dim, session_length, self.config.rope_context
        )
        return rope_cos_sin(positions, self.config.head_dim, base, mass_dtype(self.dtype))

    def _run(self, ids: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Token ids `[B, T]` -> normalised hidden states `[B, T, W]`."""
        x = self.embed_tokens(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, partial(attend, i))
        return self.norm(x)

    # ------------------------------------------------------------ parallel form

    def hidden(self, ids: Tensor, session_length: int | None = None) -> Tensor:
        """Final hidden states `[B, T, W]` of the parallel form; `lm_head` makes logits of them."""
        self._check_ids(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)
        cos, sin = self._positions(positions, _session(session_length, ids))
        return self._run(ids, cos, sin, lambda i, q, k, v: parallel_attention(q, k, v, self.config))

    def forward(self, ids: Tensor, session_length: int | None = None) -> Tensor:
        """Logits of a whole sequence, no cache and no slot budget.

        Args:
            ids: int64 `[B, T]`, T >= 1. Padding on the right does not change what is before it.
            session_length: S of Dynamic NTK, default T.

        Returns:
            logits `[B, T, V]` in the model's dtype.

        Raises:
            AnchorMassError: for an empty or misshapen input, or an id outside the vocabulary.
        """
        return self.lm_head(self.hidden(ids, session_length))

    @torch.no_grad()
    def activations(self, ids: Tensor, session_length: int | None = None) -> list[QKV]:
        """What each layer's attention is given, in the parallel form: for looking inside."""
        self._check_ids(ids)
        found: list[QKV] = []

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found.append(QKV(q, k, v))
            return parallel_attention(q, k, v, self.config)

        positions = torch.arange(ids.shape[1], device=ids.device)
        self._run(ids, *self._positions(positions, _session(session_length, ids)), attend)
        return found

    # ------------------------------------------------------------ streaming form

    def new_cache(
        self,
        batch_size: int = 1,
        session_length: int = 1,
        *,
        layout: str = "shared-mass",
        track_positions: bool = False,
        **settings: object,
    ) -> Cache:
        """An empty cache for this model.

        Args:
            batch_size: rows B.
            session_length: S of Dynamic NTK in tokens, fixed for the cache's life: the
                prompt's length, or the longest that is planned.
            layout: `"shared-mass"`, `"article-bf16"` or `"article"` (see `cache.LAYOUTS`).
            track_positions: also record which slot holds which token (`cache.owner`).
            settings: `policy`, `max_slots`, `recent_slots`, `compact`; default: the model's.

        Raises:
            AnchorMassError: unknown layout, policy or setting; a budget that its protected
                slots alone exceed.
        """
        unknown = sorted(set(settings) - set(CACHE_SETTINGS))
        if unknown:
            raise AnchorMassError(
                f"new_cache has no setting {', '.join(unknown)}: use {', '.join(CACHE_SETTINGS)}"
            )
        return make_cache(
            self.config.replace(**settings),
            batch_size=batch_size,
            session_length=session_length,
            layout=layout,
            dtype=self.dtype,
            device=self.device,
            track_positions=track_positions,
            model=self.fingerprint(),
        )

    @torch.no_grad()
    def prefill(
        self,
        ids: Tensor,
        cache: Cache,
        chunk_size: int = 1024,
        *,
        lengths: list[int] | None = None,
        all_logits: bool = False,
        session_length: int | None = None,
        on_chunk: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Absorb prompts into `cache`, chunk by chunk through all layers.

        Above the slot budget the result depends on `chunk_size`: stage 2 runs once a chunk.

        Args:
            ids: int64 `[B, T]`; rows shorter than T are padded on the right, with any
                id of the vocabulary.
            cache: of this model; may already hold tokens.
            chunk_size: tokens per chunk.
            lengths: tokens of each row, 1 … T; default T.
            all_logits: return those of every position, not only of each row's last.
            session_length: refused unless it is the cache's own: a check for callers.
            on_chunk: called after each chunk with the tokens absorbed so far, for progress.

        Returns:
            logits `[B, V]` after each row's last token, or `[B, T, V]`.

        Raises:
            AnchorMassError: bad ids, lengths or chunk size; a cache of another model, batch
                size or session length.
        """
        self._check_ids(ids)
        batch, total = ids.shape
        if chunk_size < 1:
            raise AnchorMassError(f"chunk_size={chunk_size}: must be at least 1")
        lengths = [total] * batch if lengths is None else list(lengths)
        if len(lengths) != batch or not all(n in range(1, total + 1) for n in lengths):
            raise AnchorMassError(
                f"lengths={lengths}: expected {batch} whole numbers from 1 to {total} (ids' shape)"
            )
        self._check_cache(cache, batch, session_length)
        last = self.embed_tokens.weight.new_zeros(batch, self.config.width)
        logits = []
        for start in range(0, max(lengths), chunk_size):
            piece = ids[:, start : start + chunk_size]
            counts = [min(max(n - start, 0), piece.shape[1]) for n in lengths]
            hidden = self._absorb(piece, cache, counts)
            for b, n in enumerate(counts):
                if n and start + n == lengths[b]:
                    last[b] = hidden[b, n - 1]
            if all_logits:
                logits.append(self.lm_head(hidden))
            if on_chunk:
                on_chunk(start + max(counts))
        return torch.cat(logits, dim=1) if all_logits else self.lm_head(last)

    def _absorb(self, ids: Tensor, cache: Cache, counts: list[int]) -> Tensor:
        offset = torch.arange(ids.shape[1], device=ids.device)
        if len(set(cache.seen)) == 1:
            positions = cache.seen[0] + offset
        else:
            positions = torch.tensor(cache.seen, device=ids.device)[:, None] + offset
        cos, sin = self._positions(positions, cache.session_length)
        hidden = self._run(ids, cos, sin, lambda i, q, k, v: cache.prefill(i, q, k, v, counts))
        cache.advance(counts)
        return hidden

    @torch.no_grad()
    def decode(self, next_ids: Tensor, cache: Cache) -> Tensor:
        """Absorb one token per row; logits `[B, V]` for the one after it.

        Args:
            next_ids: int64 `[B]` or `[B, 1]`.
            cache: of this model, not empty.

        Raises:
            AnchorMassError: bad ids; a cache that is empty, or of another model or batch size.
        """
        ids = next_ids[:, None] if next_ids.dim() == 1 else next_ids
        if ids.dim() != 2 or ids.shape[1] != 1:
            raise AnchorMassError(f"next_ids {list(next_ids.shape)}: expected [B] or [B, 1]")
        self._check_ids(ids)
        if cache.batch_size != ids.shape[0] or (cache.filled_by, cache.dtype) != (self, self.dtype):
            self._check_cache(cache, ids.shape[0], None)
        if min(cache.seen) < 1:
            raise AnchorMassError("the cache is empty: prefill a prompt first")
        positions = torch.tensor(cache.seen, device=ids.device)
        positions = positions[:1] if len(set(cache.seen)) == 1 else positions[:, None]
        cos, sin = self._positions(positions, cache.session_length)
        hidden = self._run(ids, cos, sin, cache.step)
        cache.advance([1] * ids.shape[0])
        return self.lm_head(hidden[:, 0])

    # ------------------------------------------------------------ checks

    def _check_ids(self, ids: Tensor) -> None:
        if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise AnchorMassError(
                f"ids {list(ids.shape)} {ids.dtype}: expected int64 or int32 of shape [B, T]"
            )
        if ids.numel() == 0:
            raise AnchorMassError(f"ids {list(ids.shape)}: the prompt is empty")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.config.vocab_size:
            bad = low if low < 0 else high
            raise AnchorMassError(
                f"token id {bad} is outside the vocabulary of {self.config.vocab_size}"
            )

    def _check_cache(self, cache: Cache, batch: int, session_length: int | None) -> None:
        cache.check_model(self.config, self.fingerprint(), self.dtype)
        if cache.batch_size != batch:
            raise AnchorMassError(
                f"the cache has {cache.batch_size} rows, the input {batch}: "
                f"use new_cache(batch_size={batch})"
            )
        if session_length not in (None, cache.session_length):
            raise AnchorMassError(
                f"session_length={session_length}, but the cache's session was fixed at "
                f"{cache.session_length} tokens; start a new cache"
            )
        cache.filled_by = self


def _session(session_length: int | None, ids: Tensor) -> int:
    """S of Dynamic NTK: as given, else the length of `ids`."""
    if session_length is None:
        return ids.shape[1]
    if session_length < 1:
        raise AnchorMassError(f"session_length={session_length}: must be at least 1")
    return session_length
