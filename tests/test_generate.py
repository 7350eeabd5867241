"""Generation: the same tokens as recomputing, honest sampling, no limit on length."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from anchormass import AnchorMassError, TransformerLM, generate, memory_formula
from anchormass.generate import pick

Model = Callable[..., TransformerLM]
Tokens = Callable[..., Tensor]
BOTH = pytest.mark.parametrize("attention", ["anchormass", "standard"])


def greedy(model: TransformerLM, prompt: list[int], count: int, session_length: int) -> list[int]:
    """Each token from the parallel form over everything before it: no cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]), session_length=session_length)[0, -1].argmax()))
    return ids[len(prompt) :]


# ---------------------------------------------------------------- greedy


@BOTH
def test_greedy_equals_recomputing_from_the_start(
    sharp: Model, tokens: Tokens, attention: str
) -> None:
    model = sharp(attention=attention)
    ids = tokens(70)
    got = generate(model, ids, 24)
    assert got.shape == (1, 24) and got.dtype == torch.int64
    assert got[0].tolist() == greedy(model, ids[0].tolist(), 24, session_length=70)
    assert len(set(got[0].tolist())) > 5  # a model that repeats itself would prove little


@BOTH
def test_prompts_of_different_lengths(sharp: Model, tokens: Tokens, attention: str) -> None:
    """Every row as if alone, in the session of the longest; what pads them does not matter."""
    model = sharp(attention=attention)
    ids, lengths = tokens(90, batch=3), [90, 1, 41]
    got = generate(model, ids, 8, lengths=lengths)
    for b, n in enumerate(lengths):
        assert got[b].tolist() == greedy(model, ids[b, :n].tolist(), 8, session_length=90)
        ids[b, n:] = 0
    assert torch.equal(generate(model, ids, 8, lengths=lengths), got)
    assert torch.equal(generate(model, ids, 8, lengths=lengths, chunk_size=7), got)


def test_the_session_is_the_longest_prompt_or_as_said(sharp: Model, tokens: Tokens) -> None:
    model = sharp(rope_context=20)
    ids = tokens(60, batch=2)
    found = [generate(model, ids, 6, lengths=[60, 50])]
    for session_length in (60, 500):
        found.append(generate(model, ids, 6, lengths=[60, 50], session_length=session_length))
        for b, n in enumerate((60, 50)):
            want = greedy(model, ids[b, :n].tolist(), 6, session_length)
            assert found[-1][b].tolist() == want
    assert torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def test_five_thousand_tokens(sharp: Model, tokens: Tokens) -> None:
    """Far beyond the budget, the article's table of S + 128 rows and `rope_context`."""
    model = sharp()
    ids = tokens(100)
    cache = model.new_cache(1, session_length=100)
    sizes: list[tuple[int, int, int]] = []

    def note(token: Tensor) -> None:
        memory = cache.memory()
        sizes.append((cache.seen[0], memory.total, memory.allocated))

    new = generate(model, ids, 5000, cache=cache, on_token=note)
    assert new.shape == (1, 5000)
    assert [seen for seen, _, _ in sizes] == list(range(100, 5100))

    # The budget of 64 slots is full after 16 sinks and 4 blocks of 64 tokens.
    for seen, total, _ in sizes[::50]:
        assert total == memory_formula(model.config, seen, dtype=torch.float64)
    full = 16 + 4 * 64
    assert len({allocated for seen, _, allocated in sizes if seen >= full}) == 1
    # What is in use differs by the open block alone: 0 … 63 tokens, the same every time.
    by_tail: dict[int, set[int]] = {}
    for seen, total, _ in sizes:
        if seen >= full:
            by_tail.setdefault((seen - 16) % 64, set()).add(total)
    assert len(by_tail) == 64 and all(len(totals) == 1 for totals in by_tail.values())
    for layer in range(2):
        assert float(cache.mass(layer).sum()) == 5099  # the last token was not absorbed

    # Below the budget (until a fifth block is complete) nothing was lost: recompute it all.
    stop = 16 + 5 * 64
    everything = torch.cat((ids, new), dim=1)
    logits = model(everything[:, :stop], session_length=100)[0]
    assert logits[99:].argmax(-1).tolist() == everything[0, 100 : stop + 1].tolist()
    for at in (100, 143, 144, 145, 272, 335):
        last = model(everything[:, :at], session_length=100)[0, -1]
        assert int(last.argmax()) == int(everything[0, at])


@BOTH
def test_a_cache_is_continued(sharp: Model, tokens: Tokens, attention: str) -> None:
    """The last token of a call was not absorbed: the next call begins with it."""
    model = sharp(attention=attention)
    ids = tokens(200, batch=2)
    want = generate(model, ids, 150)
    cache = model.new_cache(2, 200)
    first = generate(model, ids, 90, cache=cache)
    assert cache.seen == [289, 289]
    second = generate(model, first[:, -1:], 60, cache=cache)
    assert torch.equal(torch.cat((first, second), dim=1), want)


def test_generation_leaves_no_trace(sharp: Model, tokens: Tokens) -> None:
    model = sharp(dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    ids = tokens(20)
    copy = ids.clone()
    out = generate(model, ids, 5, temperature=1.0)
    assert not out.requires_grad and torch.equal(ids, copy)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


# ---------------------------------------------------------------- streaming and stopping


def test_tokens_arrive_one_step_at_a_time(sharp: Model, tokens: Tokens) -> None:
    """Before the model has run on them: the cache holds the prompt and what came earlier."""
    model = sharp()
    cache = model.new_cache(3, 30)
    seen: list[tuple[int, Tensor]] = []
    out = generate(
        model,
        tokens(30, batch=3),
        7,
        cache=cache,
        on_token=lambda token: seen.append((cache.seen[0], token.clone())),
    )
    assert [n for n, _ in seen] == list(range(30, 37))
    assert torch.equal(torch.stack([token for _, token in seen], dim=1), out)


def test_stop_ids(sharp: Model, tokens: Tokens) -> None:
    """A row ends with the stop token and repeats it; the others do not notice."""
    model = sharp()
    ids = tokens(50, batch=3)
    free = generate(model, ids, 30).tolist()
    stops = {free[0][4], free[1][9]}
    ends = [next((i for i, t in enumerate(row) if t in stops), 29) for row in free]
    assert ends[0] <= 4 and ends[1] <= 9
    got = generate(model, ids, 30, stop_ids=stops).tolist()
    for row, end, found in zip(free, ends, got, strict=True):
        assert found[: end + 1] == row[: end + 1]
        assert set(found[end:]) == {row[end]} if end < 29 else found == row
    # All rows done: generation ends with the last of them.
    alone = generate(model, ids[:2], 30, stop_ids=stops)
    assert alone.shape == (2, max(ends[:2]) + 1)


def test_a_stop_token_at_once(sharp: Model, tokens: Tokens) -> None:
    model = sharp()
    first = generate(model, tokens(20), 1)
    assert first.shape == (1, 1)
    assert torch.equal(generate(model, tokens(20), 9, stop_ids=[int(first)]), first)


# ---------------------------------------------------------------- sampling


def draws(probabilities: list[float], count: int, temperature: float, top_p: float) -> list[float]:
    logits = torch.tensor([probabilities], dtype=torch.float64).log().expand(count, -1)
    picked = pick(logits, temperature, top_p, torch.Generator().manual_seed(0))
    assert picked.shape == (count,)
    return (torch.bincount(picked, minlength=len(probabilities)) / count).tolist()


@pytest.mark.parametrize(
    "temperature, top_p, kept",
    [
        (1.0, 1.0, [0, 1, 2, 3]),
        (0.5, 1.0, [0, 1, 2, 3]),
        (2.0, 1.0, [0, 1, 2, 3]),
        (1.0, 0.97, [0, 1, 2, 3]),
        (1.0, 0.9, [0, 1, 3]),
        (1.0, 0.79, [1, 3]),
        (1.0, 0.49, [3]),
        (1.0, 1e-9, [3]),
        # Temperature comes first: at 2 the likeliest holds 0.37 and does not suffice for 0.49.
        (2.0, 0.49, [1, 3]),
    ],
)
def test_sampling_frequencies(temperature: float, top_p: float, kept: list[int]) -> None:
    p = [0.15, 0.3, 0.05, 0.5]
    weights = [x ** (1 / temperature) if i in kept else 0.0 for i, x in enumerate(p)]
    got = draws(p, 40_000, temperature, top_p)
    for i, weight in enumerate(weights):
        want = weight / sum(weights)
        assert abs(got[i] - want) <= 5 * math.sqrt(want * (1 - want) / 40_000)


def test_rows_sample_for_themselves() -> None:
    logits = torch.full((2, 4), -50.0)
    logits[0, 1] = logits[1, 3] = 0
    assert pick(logits, 1.0, 0.9, torch.Generator().manual_seed(0)).tolist() == [1, 3]


def test_seeds_repeat(sharp: Model, tokens: Tokens) -> None:
    model = sharp()
    ids = tokens(30, batch=2)

    def sample(seed: int) -> list[list[int]]:
        return generate(model, ids, 20, temperature=1.0, seed=seed).tolist()

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert sample(1)[0] != sample(1)[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1e-4, 1e-40, 1e-310])
def test_a_vanishing_temperature_is_greedy(
    sharp: Model, tokens: Tokens, dtype: torch.dtype, temperature: float
) -> None:
    model = sharp(dtype=dtype)
    want = generate(model, tokens(30), 5)
    assert torch.equal(generate(model, tokens(30), 5, temperature=temperature), want)
    assert torch.equal(generate(model, tokens(30), 5, temperature=1.0, top_p=1e-6), want)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": -3}, "max_new_tokens=-3"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_p": math.nan}, "top_p=nan"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"session_length": -1}, "session_length=-1"),
        ({"session_length": 0}, "session_length=0"),
        ({"lengths": [10]}, "lengths=[10]: expected 2"),
        ({"lengths": [10, 11]}, "lengths=[10, 11]"),
        ({"lengths": [0, 10]}, "lengths=[0, 10]"),
        ({"lengths": []}, "lengths=[]"),
        ({"ids": torch.zeros(2, 0, dtype=torch.long)}, "prompt is empty"),
        ({"ids": torch.zeros(0, 3, dtype=torch.long)}, "batch_size=0"),
        ({"ids": torch.zeros(7, dtype=torch.long)}, "[7]"),
        ({"ids": torch.zeros(2, 7)}, "float32"),
        ({"ids": torch.tensor([[1, 97]])}, "token id 97 is outside the vocabulary of 97"),
        ({"ids": torch.tensor([[1, -2]])}, "token id -2"),
    ],
)
def test_bad_input(sharp: Model, tokens: Tokens, arguments: dict[str, Any], named: str) -> None:
    given = {"ids": tokens(10, batch=2), "max_new_tokens": 3} | arguments
    with pytest.raises(AnchorMassError) as refused:
        generate(sharp(), **given)
    assert named in str(refused.value)


def test_a_cache_that_does_not_fit(sharp: Model, tokens: Tokens) -> None:
    model = sharp()
    with pytest.raises(AnchorMassError, match="the cache has 3 rows, the input 2"):
        generate(model, tokens(10, batch=2), 3, cache=model.new_cache(3, 10))
    with pytest.raises(AnchorMassError, match=r"session_length=11, .* fixed at 10"):
        generate(model, tokens(10), 3, cache=model.new_cache(1, 10), session_length=11)
    with pytest.raises(AnchorMassError, match="other weights"):
        generate(model, tokens(10), 3, cache=sharp(seed=1).new_cache(1, 10))
