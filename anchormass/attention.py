"""Attention: the equation first, then the fast paths that must equal it.

`reference_attention` is the specification: one dense matrix of logits per head, built from
"which query sees what". The fast paths never build it. They cut what a query sees into
*parts* (its own block, the slots of earlier blocks, the sinks), attend to each part with a
fused kernel and join the parts by their log-sum-exp, forward and backward. The same parts
serve training, chunked prefill and Standard's cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anchormass.compress import Slots, compress_blocks
from anchormass.config import Config

NEG_INF = float("-inf")
QUERY_CHUNK = 1024  # queries per call to the slots: bounds memory, as in chunked prefill


# ---------------------------------------------------------------- the equation


def reference_attention(q: Tensor, k: Tensor, v: Tensor, config: Config) -> Tensor:
    """Attention as the article writes it, dense. `q, k, v [B, H, T, D]` -> `[B, H, T, D]`.

    softmax(q·kᵀ/√d + log n + M) v, over raw tokens and slots together, where M is 0 for what
    a query sees and -inf for the rest (SPEC 1). Memory grows as T²: for tests and figures.
    """
    if config.attention == "standard":
        return _dense(q, k, v, visible_tokens(q.shape[2], q.device)[None, None].to(q.dtype).log())
    h = config.n_local
    local = _dense(
        q[:, :h], k[:, :h], v[:, :h], visible_local(q.shape[2], config, q.device).to(q.dtype).log()
    )
    k_all, v_all, bias = global_keys(k[:, h:], v[:, h:], config)
    return torch.cat((local, _dense(q[:, h:], k_all, v_all, bias)), dim=1)


def global_keys(k: Tensor, v: Tensor, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """All that Global heads can see, and how: keys, values `[B, Hg, T + N, D]` and the bias.

    The first T entries are raw tokens, the other N the slots of all complete blocks. The bias
    `[B, 1, T, T + N]` is log n where a query sees the entry, else -inf.
    """
    length = k.shape[2]
    body = max(length - config.sinks, 0) // config.block * config.block
    stop = config.sinks + body
    slots, _ = compress_body(k[:, :, config.sinks : stop], v[:, :, config.sinks : stop], config)
    t = torch.arange(length, device=k.device)
    block = torch.where(t < config.sinks, -1, (t - config.sinks) // config.block)
    raw = (t[:, None] >= t) & ((block == -1) | (block[:, None] == block))
    n = torch.arange(slots.mass.shape[1], device=k.device)
    past = block[:, None] > n // config.slots_per_block
    mass = torch.cat(
        (
            raw.to(slots.mass.dtype).expand(k.shape[0], length, length),
            past * slots.mass[:, None],
        ),
        dim=-1,
    )
    return (
        torch.cat((k, slots.k), dim=2),
        torch.cat((v, slots.v), dim=2),
        mass.log()[:, None],
    )


def visible_tokens(length: int, device: torch.device) -> Tensor:
    """Causal visibility `[T, T]`, True where row t sees column s."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def visible_local(length: int, config: Config, device: torch.device) -> Tensor:
    """Visibility of a Local head `[T, T]`: the last C tokens, the query's own included."""
    return visible_tokens(length, device).triu(1 - config.block)


def hiding(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias that is -inf where `hidden` is True, else 0, for inputs of `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    return torch.zeros(hidden.shape, dtype=wide, device=hidden.device).masked_fill(hidden, NEG_INF)


def compress_body(k: Tensor, v: Tensor, config: Config) -> tuple[Slots, Any]:
    """`compress_blocks` with the thresholds of `config`."""
    return compress_blocks(
        k,
        v,
        subgroup=config.subgroup,
        cos_threshold=config.cos_threshold,
        norm_threshold=config.norm_threshold,
    )


def _dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return ((q @ k.mT) / q.shape[-1] ** 0.5 + bias).softmax(-1) @ v


# ---------------------------------------------------------------- parts joined by log-sum-exp


class Part(NamedTuple):
    """Keys and values that queries attend to in one call.

    `k`, `v`: `[B, H, N, D]`. `bias`: added to the logits, broadcastable to `[B, 1, T, N]`,
    carries no gradient. `blocks` > 0 instead: N = T, cut into that many equal blocks, causal
    inside each.
    """

    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    blocks: int = 0


def attend(q: Tensor, parts: list[Part]) -> Tensor:
    """Attention of `q [B, H, T, D]` over the union of `parts`, as one softmax.

    A query must see at least one key in some part. Differentiable in q, k and v.
    """
    flags = [(part.bias, part.blocks) for part in parts]
    tensors = [x for part in parts for x in (part.k, part.v)]
    return _Attend.apply(q, flags, *tensors)


def kernel(device: torch.device) -> str:
    """Which implementation `attend` runs on `device`: `"flash-cpu"` or `"matmul"`."""
    return "flash-cpu" if device.type == "cpu" else "matmul"


class _Attend(torch.autograd.Function):
    """Each part's forward alone, then one softmax over all; backward part by part.

    The gradient of a part needs only the *joint* output and log-sum-exp, since
    P = exp(logit - lse) is then that part's share of the joint softmax. It also avoids the
    NaN that autograd makes of rows with nothing but -inf.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, flags: list[tuple[Tensor | None, int]], *kv: Tensor) -> Tensor:
        outs, lses = [], []
        for i, (bias, blocks) in enumerate(flags):
            out, lse = _part_forward(*_shaped(q, kv[2 * i], kv[2 * i + 1], blocks), bias, blocks)
            outs.append(out.reshape(q.shape))
            lses.append(lse.reshape(q.shape[:3]))
        if len(outs) == 1:
            out, lse = outs[0], lses[0]
        else:
            stacked = torch.stack(lses)  # [P, B, H, T]
            lse = stacked.logsumexp(0)
            share = (stacked - lse).exp()[..., None]
            mixed = outs[0] * share[0]
            for i in range(1, len(outs)):
                mixed = torch.addcmul(mixed, outs[i].to(mixed.dtype), share[i])
            out = mixed.to(q.dtype)
        ctx.flags = flags
        ctx.save_for_backward(q, out, lse, *kv)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, out, lse, *kv = ctx.saved_tensors
        grad_q = None
        grads = []
        for i, (bias, blocks) in enumerate(ctx.flags):
            k, v = kv[2 * i], kv[2 * i + 1]
            qs, ks, vs = _shaped(q, k, v, blocks)
            dq, dk, dv = _part_backward(
                grad.reshape(qs.shape),
                qs,
                ks,
                vs,
                out.reshape(qs.shape),
                lse.reshape(qs.shape[:3]),
                bias,
                blocks,
            )
            grad_q = dq.reshape(q.shape) if grad_q is None else grad_q + dq.reshape(q.shape)
            grads += [dk.reshape(k.shape), dv.reshape(v.shape)]
        return (grad_q, None, *grads)


def _shaped(q: Tensor, k: Tensor, v: Tensor, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks become extra heads: `[B, H, T, D]` -> `[B, H·blocks, T/blocks, D]`."""
    if blocks <= 1:
        return q, k, v
    shape = (q.shape[0], q.shape[1] * blocks, q.shape[2] // blocks, q.shape[3])
    return q.reshape(shape), k.reshape(shape), v.reshape(shape)


def _part_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, blocks: int
) -> tuple[Tensor, Tensor]:
    if kernel(q.device) == "flash-cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=blocks > 0, attn_mask=_cpu_mask(q, bias)
        )
    else:
        logits = _logits(q, k, bias, blocks)
        lse = logits.logsumexp(-1)
        out = (logits - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None]).exp().to(v.dtype) @ v
    if bias is not None and bias.shape[-2] == 1:
        return out, lse  # a bias shared by all queries never hides every key from one
    return out, _nothing_seen(lse, bias)


def _nothing_seen(lse: Tensor, bias: Tensor | None) -> Tensor:
    """The CPU kernel reports log-sum-exp 0 for a query that sees nothing; it is -inf."""
    if bias is None:
        return lse
    return lse.masked_fill((bias == NEG_INF).all(-1), NEG_INF)


def _part_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    blocks: int,
) -> tuple[Tensor, Tensor, Tensor]:
    if kernel(q.device) == "flash-cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, blocks > 0, attn_mask=_cpu_mask(q, bias)
        )
    p = (_logits(q, k, bias, blocks) - lse[..., None]).exp()
    g, o = grad.to(p.dtype), out.to(p.dtype)
    ds = p * (g @ v.to(p.dtype).mT - (g * o).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    dq = ds @ k.to(p.dtype)
    return dq.to(q.dtype), (ds.mT @ q.to(p.dtype)).to(k.dtype), (p.mT @ g).to(v.dtype)


def _logits(q: Tensor, k: Tensor, bias: Tensor | None, blocks: int) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = (q @ k.mT).to(wide) / q.shape[-1] ** 0.5
    if blocks:
        return logits.masked_fill(~visible_tokens(q.shape[2], q.device), NEG_INF)
    return logits if bias is None else logits + bias


def _cpu_mask(q: Tensor, bias: Tensor | None) -> Tensor | None:
    """The kernel takes a float32 mask beside bf16 inputs, else one of the inputs' dtype."""
    if bias is None:
        return None
    return bias.to(torch.promote_types(q.dtype, torch.float32))


# ---------------------------------------------------------------- fast paths


def parallel_attention(q: Tensor, k: Tensor, v: Tensor, config: Config) -> Tensor:
    """The parallel form: a whole sequence from position 0, `[B, H, T, D]` -> `[B, H, T, D]`.

    Equal to `reference_attention`; memory grows with T · 1,024 / 4 instead of T².
    """
    if config.attention == "standard":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    h = config.n_local
    empty = k[:, :h, :0]
    local = local_attention(q[:, :h], k[:, :h], v[:, :h], empty, empty, config)
    return torch.cat((local, _parallel_global(q[:, h:], k[:, h:], v[:, h:], config)), dim=1)


def local_attention(
    q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor, config: Config
) -> Tensor:
    """Sliding window: each query sees itself and the C - 1 keys before it.

    `q, k, v [B, Hl, T, D]` are new; `past_k, past_v [B, Hl, P, D]`, P <= C, are the tokens just
    before. Blocks of C queries attend to windows of 2C keys, which overlap without a copy.
    """
    c, (batch, heads, length, dim), past = config.block, q.shape, past_k.shape[2]
    blocks = -(-length // c)
    pad = blocks * c - length
    q = F.pad(q, (0, 0, 0, pad))
    k = F.pad(torch.cat((past_k, k), dim=2), (0, 0, c - past, pad))
    v = F.pad(torch.cat((past_v, v), dim=2), (0, 0, c - past, pad))

    i = torch.arange(c, device=q.device)[:, None]
    j = torch.arange(2 * c, device=q.device)
    seen = ((j > i) & (j <= i + c))[None, None]  # the same for every window but the first
    if past < c:
        seen = seen.repeat(blocks, 1, 1, 1)
        seen[0, :, :, : c - past] = False
        seen = seen.repeat(batch, 1, 1, 1)
    bias = hiding(~seen, q.dtype)

    def windows(x: Tensor) -> Tensor:  # [B, H, (n + 1)·C, D] -> [B·n, H, 2C, D]
        return x.unfold(2, 2 * c, c).permute(0, 2, 1, 4, 3).flatten(0, 1)

    out = F.scaled_dot_product_attention(
        q.unflatten(2, (blocks, c)).transpose(1, 2).flatten(0, 1),
        windows(k),
        windows(v),
        attn_mask=bias,
    )
    out = out.view(batch, blocks, heads, c, dim).transpose(1, 2).flatten(2, 3)
    return out[:, :, :length]


def _parallel_global(q: Tensor, k: Tensor, v: Tensor, config: Config) -> Tensor:
    s, c, length = config.sinks, config.block, q.shape[2]
    sinks = F.scaled_dot_product_attention(q[:, :, :s], k[:, :, :s], v[:, :, :s], is_causal=True)
    if length <= s:
        return sinks
    stop = s + (length - s) // c * c
    slots, _ = compress_body(k[:, :, s:stop], v[:, :, s:stop], config)
    sink_mass = slots.mass.new_ones(q.shape[0], s)
    outs = [sinks]
    step = max(1, QUERY_CHUNK // c) * c  # whole blocks
    for start in range(s, length, step):
        end = min(start + step, length)
        n_past = (start - s) // c * config.slots_per_block
        n_own = (end - s) // c * config.slots_per_block
        past = Slots(
            torch.cat((k[:, :, :s], slots.k[:, :, :n_past]), dim=2),
            torch.cat((v[:, :, :s], slots.v[:, :, :n_past]), dim=2),
            torch.cat((sink_mass, slots.mass[:, :n_past]), dim=1),
        )
        own = Slots(
            slots.k[:, :, n_past:n_own], slots.v[:, :, n_past:n_own], slots.mass[:, n_past:n_own]
        )
        region = slice(start, end)
        outs.append(
            global_attention(q[:, :, region], k[:, :, region], v[:, :, region], past, own, config)
        )
    return torch.cat(outs, dim=2)


def global_attention(
    q: Tensor, k: Tensor, v: Tensor, past: Slots, own: Slots, config: Config
) -> Tensor:
    """Global heads over raw tokens that start at a block's first token.

    Args:
        q, k, v: `[B, Hg, L, D]`, whole blocks and perhaps an open one at the end.
        past: what all these queries see: sinks and the slots of earlier blocks (mass 0 =
            hidden).
        own: the slots of the complete blocks among these tokens; a query sees those of the
            blocks before its own.
    """
    c, length = config.block, q.shape[2]
    blocks = -(-length // c)
    pad = (0, 0, 0, blocks * c - length)
    q, k, v = F.pad(q, pad), F.pad(k, pad), F.pad(v, pad)
    parts = [Part(k, v, blocks=blocks)]
    # A cache may hold values in a wider dtype than the model's.
    past, own = (Slots(x.k.to(q.dtype), x.v.to(q.dtype), x.mass) for x in (past, own))
    past_bias = past.mass.log()[:, None, None]  # [B, 1, 1, P]
    if blocks == 1 or own.mass.shape[1] == 0:
        parts.append(Part(past.k, past.v, past_bias))
        return attend(q, parts)[:, :, :length]

    block_of_query = torch.arange(blocks * c, device=q.device) // c
    block_of_slot = torch.arange(own.mass.shape[1], device=q.device) // config.slots_per_block
    seen = block_of_query[:, None] > block_of_slot
    own_bias = (seen * own.mass[:, None]).log()[:, None]  # [B, 1, L, N]
    if past.mass.shape[1] <= c:  # little past: one call for both is cheaper than two
        both = torch.cat((past_bias.expand(-1, -1, blocks * c, -1), own_bias), dim=-1)
        parts.append(
            Part(torch.cat((past.k, own.k), dim=2), torch.cat((past.v, own.v), dim=2), both)
        )
    else:
        parts.append(Part(past.k, past.v, past_bias))
        parts.append(Part(own.k, own.v, own_bias))
    return attend(q, parts)[:, :, :length]


def decode_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """One query per row, by two matrix products: a fused kernel is slower at one row on a CPU.

    `q [B, H, 1, D]`, `k`, `v` `[B, H, N, D]`, `bias` broadcastable to `[B, 1, 1, N]`.
    """
    logits = _logits(q, k, bias, blocks=0)
    return logits.softmax(-1).to(q.dtype) @ v.to(q.dtype)
