"""Stage 1 against the article, written out token by token.

`by_hand` follows the article's listing with Python floats and lists; nothing of the package is
used to say what the package should have found.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anchormass import AnchorMassError, compress_subgroups
from anchormass.compress import compress_blocks


def by_hand(
    k: Tensor,
    v: Tensor,
    mass: Tensor,
    cos_threshold: float = 0.85,
    norm_threshold: float = 2.0,
) -> dict[str, Any]:
    """One subgroup, `[H, n, D]` twice and `[n]`, by the article's listing."""
    vg, ng = v.double().tolist(), mass.double().tolist()
    heads, size, dim = v.shape

    def norm(x: list[float]) -> float:
        return math.sqrt(math.fsum(a * a for a in x))

    similarity, relative = [], []
    for i in range(size):
        cosines, ratios = [], []
        for h in range(heads):
            mean = [
                math.fsum(ng[j] * vg[h][j][d] for j in range(size)) / math.fsum(ng)
                for d in range(dim)
            ]
            dot = math.fsum(a * b for a, b in zip(vg[h][i], mean, strict=True))
            cosines.append(dot / (norm(vg[h][i]) * norm(mean)))
            norms = [norm(vg[h][j]) for j in range(size)]
            ratios.append(norms[i] / (math.fsum(norms) / size))
        similarity.append(math.fsum(cosines) / heads)
        relative.append(math.fsum(ratios) / heads)

    index = min(range(size), key=lambda i: similarity[i])
    fired = similarity[index] < cos_threshold or max(relative) > norm_threshold
    background = [i for i in range(size) if not (fired and i == index)]
    n_background = math.fsum(ng[i] for i in background)
    return {
        "similarity": similarity,
        "relative_norm": relative,
        "index": index,
        "fired": fired,
        "k_outlier": k[:, index] if fired else torch.zeros_like(k[:, 0]),
        "v_outlier": v[:, index] if fired else torch.zeros_like(v[:, 0]),
        "n_outlier": ng[index] if fired else 0.0,
        "k_background": k[:, max(background)],
        "v_background": [
            [math.fsum(ng[i] * vg[h][i][d] for i in background) / n_background for d in range(dim)]
            for h in range(heads)
        ],
        "n_background": n_background,
    }


def subgroups(
    leading: tuple[int, ...], heads: int = 3, size: int = 8, dim: int = 4, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Keys and values, from nearly parallel values to unrelated ones, so that some fire."""
    g = torch.Generator().manual_seed(seed)
    shape = (*leading, heads, size, dim)
    k = torch.randn(shape, generator=g, dtype=torch.float64)
    common = torch.randn((*leading, heads, 1, dim), generator=g, dtype=torch.float64)
    noise = torch.rand((*leading, 1, 1, 1), generator=g, dtype=torch.float64)
    v = common + noise * torch.randn(shape, generator=g, dtype=torch.float64)
    return k, v


def ones(k: Tensor) -> Tensor:
    return torch.ones(*k.shape[:-3], k.shape[-2], dtype=k.dtype)


def parallel_values(norms: list[float], heads: int = 2) -> Tensor:
    """`[H, 8, 4]`: values along one axis, with these norms."""
    v = torch.zeros(heads, len(norms), 4, dtype=torch.float64)
    v[:, :, 0] = torch.tensor(norms, dtype=torch.float64)
    return v


@pytest.mark.parametrize("leading", [(), (40,), (2, 3, 5)])
@pytest.mark.parametrize("heads, size, dim", [(3, 8, 4), (1, 8, 2), (2, 5, 6), (4, 2, 4)])
def test_equals_the_articles_listing(
    leading: tuple[int, ...], heads: int, size: int, dim: int
) -> None:
    k, v = subgroups(leading, heads, size, dim)
    g = torch.Generator().manual_seed(1)
    mass = torch.randint(1, 6, (*leading, size), generator=g).double()
    for weights in (ones(k), mass):
        out = compress_subgroups(k, v, weights)
        flat = [x.reshape(-1, *x.shape[len(leading) :]) for x in (k, v, weights)]
        for i, one in enumerate(zip(*flat, strict=True)):
            want = by_hand(*one)
            for name, expected in want.items():
                got = getattr(out, name)
                got = got.reshape(-1, *got.shape[len(leading) :])[i]
                torch.testing.assert_close(
                    got,
                    torch.as_tensor(expected, dtype=got.dtype),
                    rtol=0,
                    atol=0 if name.startswith("k_") or name == "index" else 1e-12,
                    msg=lambda text, name=name, i=i: f"{name} of subgroup {i}: {text}",
                )


def test_the_examples_fire_and_do_not_fire() -> None:
    """The comparison above would prove little if all its subgroups went one way."""
    k, v = subgroups((40,))
    fired = compress_subgroups(k, v, ones(k)).fired
    assert 5 < int(fired.sum()) < 35


@pytest.mark.parametrize("cos_threshold, norm_threshold", [(-1.1, 1.4), (0.5, 9.0), (0.95, 1.2)])
def test_other_thresholds(cos_threshold: float, norm_threshold: float) -> None:
    k, v = subgroups((40,), seed=4)
    out = compress_subgroups(k, v, ones(k), cos_threshold, norm_threshold)
    want = [
        by_hand(k[i], v[i], torch.ones(8), cos_threshold, norm_threshold)["fired"]
        for i in range(40)
    ]
    assert out.fired.tolist() == want
    assert 0 < sum(want) < 40


def test_identical_tokens_do_not_fire() -> None:
    k, v = subgroups((), heads=2)
    v = v[:, :1].expand_as(v)
    out = compress_subgroups(k, v, ones(k))
    assert not out.fired
    assert (float(out.n_outlier), float(out.n_background)) == (0, 8)
    assert not out.k_outlier.any() and not out.v_outlier.any()
    torch.testing.assert_close(out.v_background, v[:, 0], rtol=0, atol=1e-15)
    assert torch.equal(out.k_background, k[:, 7])


@pytest.mark.parametrize("outlier", range(8))
def test_the_anchor_is_the_last_token_of_the_background(outlier: int) -> None:
    k, _ = subgroups((), heads=2)
    v = parallel_values([1.0] * 8)
    v[:, outlier] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    out = compress_subgroups(k, v, ones(k))
    assert out.fired and int(out.index) == outlier
    assert torch.equal(out.k_outlier, k[:, outlier])
    assert torch.equal(out.v_outlier, v[:, outlier])
    assert torch.equal(out.k_background, k[:, 6 if outlier == 7 else 7])
    assert (float(out.n_outlier), float(out.n_background)) == (1, 7)


def test_a_large_norm_fires_but_the_least_similar_token_goes() -> None:
    k, _ = subgroups((), heads=2)
    v = parallel_values([1.0, 1.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0])
    v[:, 2, 1] = 0.1  # the least similar, by far above 0.85
    out = compress_subgroups(k, v, ones(k))
    assert float(out.similarity.min()) > 0.99
    assert float(out.relative_norm[5]) > 2
    assert out.fired and int(out.index) == 2
    assert torch.equal(out.v_outlier, v[:, 2])


def test_a_norm_of_exactly_the_threshold_does_not_fire() -> None:
    v = parallel_values([3.0] * 7 + [7.0])  # 7 over a mean of 3.5
    k, _ = subgroups((), heads=2)
    out = compress_subgroups(k, v, ones(k))
    assert float(out.relative_norm.max()) == 2.0
    assert not out.fired
    assert compress_subgroups(k, v, ones(k), norm_threshold=1.999).fired


def test_the_heads_decide_together() -> None:
    """Token 1 is the odd one in two heads of three, token 4 in the third: the mean says 1."""
    k, _ = subgroups((), heads=3)
    v = parallel_values([1.0] * 8, heads=3)
    v[:2, 1] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    v[2, 4] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    out = compress_subgroups(k, v, ones(k))
    assert out.fired.shape == out.index.shape == ()
    assert int(out.index) == 1
    assert torch.equal(out.k_outlier, k[:, 1])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    zeros=st.lists(st.integers(0, 7), max_size=8),
    copies=st.lists(st.integers(0, 7), max_size=8),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
)
def test_masses_sum_to_eight_exactly(
    seed: int, dtype: torch.dtype, zeros: list[int], copies: list[int], scale: float
) -> None:
    k, v = subgroups((3,), seed=seed)
    v = v * scale
    v[:, :, copies] = v[:, :, :1]
    v[:, :, zeros] = 0
    out = compress_subgroups(k.to(dtype), v.to(dtype), torch.ones(3, 8, dtype=dtype))
    assert (out.n_outlier + out.n_background).tolist() == [8] * 3
    assert out.n_outlier.tolist() == out.fired.tolist()
    for x in (out.k_outlier, out.v_outlier, out.k_background, out.v_background):
        assert x.dtype == dtype and x.isfinite().all()
    # Mass times value is conserved too: nothing is lost, nothing counted twice.
    total = out.v_outlier.double() + out.v_background.double() * out.n_background[:, None, None]
    total = torch.where(out.fired[:, None, None], total, out.v_background.double() * 8)
    bound = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
    error = (total - v.to(dtype).double().sum(-2)).abs().max()
    assert float(error) <= 8 * bound * float(v.abs().max()) + 1e-30


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), row=st.integers(0, 3))
def test_subgroups_do_not_affect_each_other(seed: int, row: int) -> None:
    k, v = subgroups((4,), seed=seed)
    together = compress_subgroups(k, v, ones(k))
    alone = compress_subgroups(k[row], v[row], ones(k[row]))
    for name in ("fired", "index", "k_outlier", "v_outlier", "k_background", "n_background"):
        assert torch.equal(getattr(together, name)[row], getattr(alone, name)), name
    torch.testing.assert_close(together.v_background[row], alone.v_background, rtol=0, atol=1e-15)


def test_the_mean_is_taken_in_float32() -> None:
    """In bfloat16 arithmetic 256 + 0.5 is 256: seven of them would be lost."""
    k = torch.zeros(1, 8, 4, dtype=torch.bfloat16)
    v = torch.full((1, 8, 4), 0.5, dtype=torch.bfloat16)
    v[:, 0] = 256
    out = compress_subgroups(k, v, torch.ones(8), norm_threshold=100.0)
    assert not out.fired
    # 259.5 / 8 = 32.4375, and bfloat16 has steps of 0.25 there.
    assert out.v_background.tolist() == [[32.5] * 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_the_dtype_of_the_masses_does_not_limit_the_mean(dtype: torch.dtype) -> None:
    k, v = subgroups((20,), seed=9)
    out = compress_subgroups(k, v, torch.ones(20, 8, dtype=dtype))
    exact = compress_subgroups(k, v, ones(k))
    torch.testing.assert_close(out.v_background, exact.v_background, rtol=0, atol=1e-14)
    assert torch.equal(out.fired, exact.fired)


def test_gradients_reach_every_token_once() -> None:
    """Each output is a copy or a mean, so its gradient can be written down."""
    k, v = subgroups((12,), seed=7)
    v[3] = v[3, :, :1]  # identical tokens: an empty outlier slot
    v[4] = 0
    mass = torch.randint(1, 4, (12, 8), generator=torch.Generator().manual_seed(2)).double()
    k.requires_grad_()
    v.requires_grad_()
    out = compress_subgroups(k, v, mass)
    assert 0 < int(out.fired.sum()) < 12
    names = ("k_outlier", "v_outlier", "k_background", "v_background")
    g = torch.Generator().manual_seed(3)
    given_grad = {
        name: torch.randn(getattr(out, name).shape, generator=g, dtype=torch.float64)
        for name in names
    }
    torch.autograd.backward([getattr(out, name) for name in names], list(given_grad.values()))

    want_k, want_v = torch.zeros_like(k), torch.zeros_like(v)
    for i in range(12):
        fired, index = bool(out.fired[i]), int(out.index[i])
        members = [j for j in range(8) if not (fired and j == index)]
        weight = sum(float(mass[i, j]) for j in members)
        for j in members:
            want_v[i, :, j] += given_grad["v_background"][i] * float(mass[i, j]) / weight
        want_k[i, :, members[-1]] += given_grad["k_background"][i]
        if fired:
            want_k[i, :, index] += given_grad["k_outlier"][i]
            want_v[i, :, index] += given_grad["v_outlier"][i]
    assert k.grad is not None and v.grad is not None
    torch.testing.assert_close(k.grad, want_k, rtol=0, atol=1e-14)
    torch.testing.assert_close(v.grad, want_v, rtol=0, atol=1e-14)


def test_stream_order_is_outlier_then_background() -> None:
    k, v = (x.squeeze(0) for x in subgroups((1, 2), size=24, seed=5))  # [B, H, L, D]
    slots, groups = compress_blocks(k, v, subgroup=8, cos_threshold=0.85, norm_threshold=2.0)
    assert slots.mass.shape == (2, 6) and slots.k.shape == slots.v.shape == (2, 3, 6, 4)
    for b in range(2):
        for g in range(3):
            span = slice(8 * g, 8 * g + 8)
            want = by_hand(k[b, :, span], v[b, :, span], torch.ones(8))
            assert bool(groups.fired[b, g]) == want["fired"]
            assert slots.mass[b, 2 * g : 2 * g + 2].tolist() == [
                want["n_outlier"],
                want["n_background"],
            ]
            assert torch.equal(slots.k[b, :, 2 * g], want["k_outlier"])
            assert torch.equal(slots.k[b, :, 2 * g + 1], want["k_background"])
            assert torch.equal(slots.v[b, :, 2 * g], want["v_outlier"])
            torch.testing.assert_close(
                slots.v[b, :, 2 * g + 1],
                torch.tensor(want["v_background"], dtype=torch.float64),
                rtol=0,
                atol=1e-14,
            )


def test_no_tokens_make_no_slots() -> None:
    empty = torch.zeros(2, 3, 0, 4)
    slots, _ = compress_blocks(empty, empty, subgroup=8, cos_threshold=0.85, norm_threshold=2.0)
    assert slots.k.shape == (2, 3, 0, 4) and slots.mass.shape == (2, 0)


@pytest.mark.parametrize(
    "k, v, mass, named",
    [
        ((3, 8, 4), (3, 8, 5), (8,), "[3, 8, 5]"),
        ((3, 8, 4), (3, 8, 4), (7,), "mass [7]"),
        ((2, 3, 8, 4), (2, 3, 8, 4), (8,), "mass [8]"),
        ((2, 3, 8, 4), (2, 3, 8, 4), (2, 3, 8), "mass [2, 3, 8]"),
        ((8, 4), (8, 4), (8,), "k [8, 4]"),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(
    k: tuple[int, ...], v: tuple[int, ...], mass: tuple[int, ...], named: str
) -> None:
    with pytest.raises(AnchorMassError) as refused:
        compress_subgroups(torch.ones(k), torch.ones(v), torch.ones(mass))
    assert named in str(refused.value) and "expected" in str(refused.value)
