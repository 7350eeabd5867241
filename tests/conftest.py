"""Fixtures of the core's tests: models whose attention is peaked, so that errors show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from anchormass import Config, TransformerLM

# Two Local and two Global heads of size 4. Stage 1 fires for some subgroups and not for others
# at this cosine threshold; the budget is one that texts of a few hundred tokens exceed.
TINY = Config(
    "anchormass",
    vocab_size=97,
    n_layers=2,
    width=16,
    ffn_width=32,
    n_heads=4,
    rope_context=512,
    cos_threshold=-0.3,
    max_slots=64,
)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tests share the machine; results must not depend on how many threads there are anyway."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def sharp() -> Callable[..., TransformerLM]:
    """`sharp(dtype=…, seed=…, **changes of TINY)`: weights of standard deviation 0.5, not 0.02."""

    def build(dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> TransformerLM:
        model = TransformerLM(TINY.replace(**changes)).to(dtype).eval()
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                noise = torch.randn(p.shape, generator=g, dtype=torch.float64)
                p.copy_(1 + 0.3 * noise if p.dim() == 1 else 0.5 * noise)
        return model

    return build


@pytest.fixture(scope="session")
def tokens() -> Callable[..., Tensor]:
    """`tokens(length, batch=1, seed=0)`: random ids of TINY's vocabulary `[B, T]`."""

    def draw(length: int, batch: int = 1, seed: int = 0) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        return torch.randint(0, TINY.vocab_size, (batch, length), generator=g)

    return draw
