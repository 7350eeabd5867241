"""Generation: greedy or sampled, streamed as it goes, without a limit on length."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from anchormass.cache import Cache
from anchormass.errors import AnchorMassError
from anchormass.model import TransformerLM


@torch.no_grad()
def generate(
    model: TransformerLM,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop_ids: Collection[int] = (),
    lengths: list[int] | None = None,
    cache: Cache | None = None,
    session_length: int | None = None,
    chunk_size: int = 1024,
    seed: int = 0,
    on_token: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Continue prompts.

    Args:
        model: either model.
        ids: prompts `[B, T]`, padded on the right where `lengths` says so.
        max_new_tokens: most tokens per row.
        temperature: 0 takes the likeliest token; above, samples.
        top_p: sample from the smallest set of tokens with at least this probability.
        stop_ids: a row ends after producing one of these; later entries repeat it.
        lengths: tokens of each prompt; default T.
        cache: continue this one, `ids` being what comes next; default: a new one.
        session_length: S of Dynamic NTK; default the longest prompt's length.
        chunk_size: of the prefill.
        seed: of the sampling.
        on_token: called with each step's tokens `[B]` as soon as they are known.

    Returns:
        the new tokens, int64 `[B, N]`, N <= `max_new_tokens`.

    Raises:
        AnchorMassError: values out of range, or what `prefill` refuses.
    """
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise AnchorMassError(
            f"max_new_tokens={max_new_tokens}: must be a whole number, at least 1"
        )
    if not 0 <= temperature < float("inf"):
        raise AnchorMassError(f"temperature={temperature}: must be 0 or a positive number")
    if not 0 < top_p <= 1:
        raise AnchorMassError(f"top_p={top_p}: must be above 0 and at most 1")
    if ids.dim() == 2 and cache is None:
        longest = max(lengths) if lengths else ids.shape[1]
        cache = model.new_cache(
            ids.shape[0], max(longest, 1) if session_length is None else session_length
        )
    if cache is None:
        raise AnchorMassError(f"ids {list(ids.shape)}: expected [B, T]")
    generator = torch.Generator(device=ids.device).manual_seed(seed)
    stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=ids.device)
    logits = model.prefill(ids, cache, chunk_size, lengths=lengths, session_length=session_length)
    tokens: list[Tensor] = []
    done = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    while True:
        token = pick(logits, temperature, top_p, generator)
        if tokens:
            token = torch.where(done, tokens[-1], token)
        tokens.append(token)
        done |= torch.isin(token, stops)
        if on_token:
            on_token(token)
        if len(tokens) == max_new_tokens or bool(done.all()):
            return torch.stack(tokens, dim=1)
        logits = model.decode(token, cache)


def pick(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """One token per row from logits `[B, V]` -> `[B]`."""
    if temperature == 0:
        return logits.argmax(-1)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # The largest becomes 0 first, so that a tiny temperature cannot overflow.
    divisor = max(temperature, torch.finfo(wide.dtype).tiny)
    p = ((wide - wide.amax(-1, keepdim=True)) / divisor).softmax(-1)
    if top_p < 1:
        ordered, order = p.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        p = torch.zeros_like(p).scatter_(-1, order, ordered.masked_fill(before >= top_p, 0))
    return torch.multinomial(p, 1, generator=generator)[:, 0]
