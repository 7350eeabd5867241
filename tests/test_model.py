"""The two models: sizes, Llama, the parallel form equal to the streaming form, bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anchormass import AnchorMassError, Config, TransformerLM, preset

Sharp = Callable[..., TransformerLM]
Tokens = Callable[..., Tensor]

BOTH = pytest.mark.parametrize("attention", ["anchormass", "standard"])
NO_LIMIT = 100_000  # a budget that no test here reaches


def assert_close(got: Tensor, want: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


# ---------------------------------------------------------------- parameters


@BOTH
def test_full_size_has_158_635_776_parameters(attention: str) -> None:
    with torch.device("meta"):
        model = TransformerLM(preset(f"{attention}-150m"))
    assert model.n_parameters() == 158_635_776
    by_hand = 2 * 28_000 * 768 + 14 * (4 * 768 * 768 + 3 * 768 * 2560 + 2 * 768) + 768
    assert by_hand == 158_635_776


def test_one_state_dict_loads_into_either(sharp: Sharp, tokens: Tokens) -> None:
    ours, standard = sharp(seed=1), sharp(attention="standard", seed=2)
    ids = tokens(200)
    want = ours(ids)
    other = sharp(attention="standard", seed=3)
    other.load_state_dict(ours.state_dict(), strict=True)
    back = sharp(seed=4)
    back.load_state_dict(other.state_dict(), strict=True)
    assert torch.equal(back(ids), want)
    assert not torch.allclose(other(ids), want)
    ours.load_state_dict(standard.state_dict(), strict=True)
    shapes = [{n: p.shape for n, p in m.named_parameters()} for m in (ours, standard)]
    assert shapes[0] == shapes[1] and list(shapes[0]) == list(shapes[1])


def test_a_variant_shares_its_weights(sharp: Sharp, tokens: Tokens) -> None:
    model = sharp()
    standard = model.variant(attention="standard")
    assert all(a is b for a, b in zip(model.parameters(), standard.parameters(), strict=True))
    ids = tokens(64)  # sinks, and less than a block: every head of either sees everything
    assert_close(model(ids), standard(ids))
    assert not torch.allclose(model(tokens(200)), standard(tokens(200)))
    with pytest.raises(AnchorMassError, match="width"):
        model.variant(width=32)


def test_fingerprints_tell_weights_apart(sharp: Sharp) -> None:
    assert sharp(seed=1).fingerprint() == sharp(seed=1).fingerprint() != sharp(seed=2).fingerprint()


# ---------------------------------------------------------------- Llama


class Float64Rotary(nn.Module):
    """Cosines and sines of position / theta^(2i/D), all in float64."""

    def __init__(self, theta: float, dim: int) -> None:
        super().__init__()
        self.frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = position_ids[..., None].double() * self.frequency
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()


def llama(model: TransformerLM, rope: dict[str, Any] | None = None) -> Any:
    """`LlamaForCausalLM` of the same shape, with the same weights and their dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = model.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.width,
        intermediate_size=c.ffn_width,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_heads,
        max_position_embeddings=c.rope_context,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_theta": c.rope_theta} | (rope or {"rope_type": "default"}),
        tie_word_embeddings=False,
        attn_implementation="sdpa",  # the eager one takes its softmax in float32
    )
    other = LlamaForCausalLM(config).to(model.dtype).eval()
    weights = {
        name if name.startswith("lm_head") else f"model.{name}": w
        for name, w in model.state_dict().items()
    }
    other.load_state_dict(weights, strict=True)
    return other


def in_float64(other: Any, theta: float, model: TransformerLM) -> None:
    """Replace what `transformers` computes in float32 even in float64 models."""
    c = model.config
    other.model.rotary_emb = Float64Rotary(theta, c.head_dim)

    def norm(old: nn.Module) -> nn.RMSNorm:
        new = nn.RMSNorm(c.width, eps=c.norm_eps, dtype=torch.float64)
        new.load_state_dict(old.state_dict())
        return new

    other.model.norm = norm(other.model.norm)
    for layer in other.model.layers:
        layer.input_layernorm = norm(layer.input_layernorm)
        layer.post_attention_layernorm = norm(layer.post_attention_layernorm)


@pytest.mark.parametrize("length", [1, 17, 300])
def test_standard_is_a_llama(length: int, sharp: Sharp, tokens: Tokens) -> None:
    """To 1e-9 in float64. `transformers` takes rotary angles and RMSNorm in float32 whatever the
    model's dtype: both are replaced here by float64 ones, with the same weights, so that the
    comparison is of the architecture and not of that rounding."""
    model = sharp(attention="standard")
    other = llama(model)
    in_float64(other, 10_000.0, model)
    ids = tokens(length, batch=2)
    with torch.no_grad():
        assert_close(model(ids), other(ids).logits, 1e-9)


def test_standard_is_a_llama_untouched_in_float32(sharp: Sharp, tokens: Tokens) -> None:
    """Nothing replaced, at a tolerance for float32: logits here are of size 5."""
    model = sharp(torch.float32, attention="standard")
    ids = tokens(300, batch=2)
    with torch.no_grad():
        assert_close(model(ids), llama(model)(ids).logits, 5e-3)


@pytest.mark.parametrize("length", [100, 101, 350])
def test_dynamic_ntk_is_that_of_llama(length: int, sharp: Sharp, tokens: Tokens) -> None:
    """Sessions longer than L0 = 100: `rope_type: dynamic`, in both precisions."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    dynamic = {"rope_type": "dynamic", "factor": 1.0}
    model = sharp(torch.float32, attention="standard", rope_context=100)
    ids = tokens(length)
    with torch.no_grad():
        other = llama(model, dynamic)
        assert_close(model(ids), other(ids).logits, 5e-3)
        if length == 350:  # the stretch matters: without it the logits are others
            assert not torch.allclose(model(ids), model(ids, session_length=100), atol=0.05)
    frequency, _ = ROPE_INIT_FUNCTIONS["dynamic"](other.config, torch.device("cpu"), length)
    theta = float(frequency[1].double()) ** -2.0  # D = 4: the second of two is base^(-1/2)

    wide = sharp(attention="standard", rope_context=100)
    base = 10_000.0 * (length / 100) ** (4 / 2)
    assert theta == pytest.approx(base, rel=1e-5)
    other = llama(wide, dynamic)
    in_float64(other, base, wide)
    with torch.no_grad():
        assert_close(wide(ids), other(ids).logits, 1e-9)


# ---------------------------------------------------------------- parallel = streaming

SHORT = [1, 2, 15, 16, 17, 63, 64, 65, 79, 80, 81, 144, 150]


@BOTH
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("chunk_size", [1, 7, 64, 100, 1024])
def test_parallel_equals_streaming_at_short_lengths(
    attention: str, batch: int, chunk_size: int, sharp: Sharp, tokens: Tokens
) -> None:
    model = sharp(attention=attention, max_slots=NO_LIMIT)
    for length in SHORT if chunk_size > 1 else SHORT[2::3]:
        ids = tokens(length, batch)
        cache = model.new_cache(batch, length)
        got = model.prefill(ids, cache, chunk_size, all_logits=True)
        with torch.no_grad():
            assert_close(got, model(ids))
        assert cache.seen == [length] * batch


@BOTH
@pytest.mark.parametrize(
    ("length", "batch", "chunk_size"),
    [
        (400, 1, 1),
        (900, 1, 7),
        (1040, 3, 64),
        (3000, 1, 64),
        (1041, 3, 100),
        (3000, 1, 100),
        (3000, 3, 1024),
        (1024, 1, 1024),
        (3000, 1, 3000),
    ],
)
def test_parallel_equals_streaming_at_length(
    attention: str, length: int, batch: int, chunk_size: int, sharp: Sharp, tokens: Tokens
) -> None:
    """Sessions above L0 = 512 tokens are stretched, in both forms alike."""
    model = sharp(attention=attention, max_slots=NO_LIMIT)
    ids = tokens(length, batch)
    got = model.prefill(ids, model.new_cache(batch, length), chunk_size, all_logits=True)
    with torch.no_grad():
        assert_close(got, model(ids))


@BOTH
def test_decoding_equals_the_parallel_form(attention: str, sharp: Sharp, tokens: Tokens) -> None:
    """One token at a time from the third on, through the sinks and three blocks."""
    model = sharp(attention=attention, max_slots=NO_LIMIT)
    ids = tokens(230, batch=2)
    cache = model.new_cache(2, 600)
    got = [model.prefill(ids[:, :2], cache)]
    for t in range(2, 230):  # both shapes that decode takes
        got.append(model.decode(ids[:, t] if t % 2 else ids[:, t : t + 1], cache))
    with torch.no_grad():
        assert_close(torch.stack(got, 1), model(ids, session_length=600)[:, 1:])


@BOTH
@pytest.mark.parametrize("compact", [False, True])
def test_ragged_prompts_equal_each_row_alone(
    attention: str, compact: bool, sharp: Sharp, tokens: Tokens
) -> None:
    """A prompt, decoding, and a second prompt on top; padding is never absorbed."""
    model = sharp(attention=attention, max_slots=NO_LIMIT, compact=compact)
    first, second = [300, 9, 80], [17, 200, 64]
    ids, more, steps = tokens(300, 3), tokens(200, 3, seed=1), tokens(70, 3, seed=2)
    cache = model.new_cache(3, 600)
    got = [model.prefill(ids, cache, 100, lengths=first)]
    got += [model.decode(steps[:, t], cache) for t in range(70)]
    everything = model.prefill(more, cache, 64, lengths=second, all_logits=True)
    got.append(model.decode(steps[:, 0], cache))
    for b in range(3):
        n, m = first[b], second[b]
        row = torch.cat((ids[b, :n], steps[b], more[b, :m], steps[b, :1]))
        with torch.no_grad():
            want = model(row[None], session_length=600)[0]
        assert_close(torch.stack(got)[:-1, b], want[n - 1 : n + 70])
        assert_close(everything[b, :m], want[n + 70 : n + 70 + m])
        assert_close(got[-1][b], want[-1])
        assert cache.seen[b] == len(row)


def test_padding_is_not_read(sharp: Sharp, tokens: Tokens) -> None:
    model = sharp()
    ids, lengths = tokens(300, 2), [300, 130]
    other = ids.clone()
    other[1, 130:] = 5
    for chunk_size in (50, 300):
        outs = []
        for x in (ids, other):
            cache = model.new_cache(2, 300)
            model.prefill(x, cache, chunk_size, lengths=lengths)
            outs.append(model.decode(ids[:, 0], cache))
        assert torch.equal(*outs)


def test_progress_is_reported(sharp: Sharp, tokens: Tokens) -> None:
    model, seen = sharp(), []
    model.prefill(tokens(250), model.new_cache(1, 250), 100, on_chunk=seen.append)
    assert seen == [100, 200, 250]


def test_the_session_length_is_fixed_when_it_starts(sharp: Sharp, tokens: Tokens) -> None:
    """A cache that outgrows S keeps S, so that no key goes out of phase."""
    model = sharp(max_slots=NO_LIMIT, rope_context=32)
    ids = tokens(150)
    cache = model.new_cache(1, 100)
    got = model.prefill(ids, cache, 60)
    assert cache.session_length == 100
    with torch.no_grad():
        assert_close(got, model(ids, session_length=100)[:, -1])
        assert not torch.allclose(got, model(ids)[:, -1])


# ---------------------------------------------------------------- causality


@BOTH
@pytest.mark.parametrize("at", [16, 24, 63, 64, 65, 80, 81, 128])
def test_no_logit_sees_a_later_token(attention: str, at: int, sharp: Sharp, tokens: Tokens) -> None:
    """Through two layers: a summary that held its own block would carry the suffix back."""
    model = sharp(attention=attention)
    ids = tokens(230)
    other = ids.clone()
    other[:, at:] = tokens(230 - at, seed=9)
    other[:, at] = (ids[:, at] + 1) % 97
    with torch.no_grad():
        before, after = model(ids), model(other)
    assert torch.equal(before[:, :at], after[:, :at])
    assert not torch.allclose(before[:, at], after[:, at])
    streamed = [
        model.prefill(x, model.new_cache(1, 230, max_slots=NO_LIMIT), 50, all_logits=True)
        for x in (ids, other)
    ]
    assert_close(streamed[0][:, :at], streamed[1][:, :at], 1e-12)


@BOTH
def test_gradients_reach_every_weight(attention: str, sharp: Sharp, tokens: Tokens) -> None:
    model = sharp(torch.float32, attention=attention)
    model(tokens(200)).logsumexp(-1).sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and bool(p.grad.isfinite().all()) and bool(p.grad.any()), name


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        (torch.tensor([[3, 97]]), "97 is outside the vocabulary of 97"),
        (torch.tensor([[-1, 3]]), "-1 is outside"),
        (torch.tensor([[1.0, 2.0]]), "float32"),
        (torch.tensor([[True]]), "bool"),
        (torch.tensor([[1]], dtype=torch.uint8), "uint8"),
        (torch.tensor([1, 2]), r"\[2\]"),
        (torch.zeros(1, 1, 1, dtype=torch.long), r"\[1, 1, 1\]"),
        (torch.zeros(1, 0, dtype=torch.long), "empty"),
        (torch.zeros(0, 5, dtype=torch.long), "empty"),
    ],
    ids=str,
)
def test_bad_ids_are_named(ids: Tensor, named: str, sharp: Sharp) -> None:
    model = sharp()
    cache = model.new_cache(1, 5)
    for call in (model, model.activations, lambda x: model.prefill(x, cache)):
        with pytest.raises(AnchorMassError, match=named):
            call(ids)
    assert cache.seen == [0]


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        (torch.tensor([97]), "97 is outside"),
        (torch.tensor([0.5]), "float32"),
        (torch.tensor([[1, 2]]), r"\[1, 2\].*\[B\] or \[B, 1\]"),
        (torch.tensor(3), r"\[\]"),
        (torch.tensor([1, 2]), "1 rows, the input 2"),
    ],
    ids=str,
)
def test_bad_next_ids_are_named(ids: Tensor, named: str, sharp: Sharp, tokens: Tokens) -> None:
    model = sharp()
    cache = model.new_cache(1, 5)
    model.prefill(tokens(5), cache)
    with pytest.raises(AnchorMassError, match=named):
        model.decode(ids, cache)
    assert cache.seen == [5]


def test_decoding_needs_a_prompt(sharp: Sharp) -> None:
    for attention in ("anchormass", "standard"):
        model = sharp(attention=attention)
        with pytest.raises(AnchorMassError, match="empty: prefill"):
            model.decode(torch.tensor([1]), model.new_cache())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(chunk_size=0), "chunk_size=0"),
        (dict(lengths=[10]), r"lengths=\[10\].*2 whole numbers from 1 to 10"),
        (dict(lengths=[10, 11]), r"lengths=\[10, 11\]"),
        (dict(lengths=[0, 10]), r"lengths=\[0, 10\]"),
        (dict(lengths=[-1, 10]), r"lengths=\[-1, 10\]"),
        (dict(session_length=11), "session_length=11.*10 tokens"),
    ],
)
def test_bad_prefills_are_named(
    options: dict[str, Any], named: str, sharp: Sharp, tokens: Tokens
) -> None:
    model = sharp()
    cache = model.new_cache(2, 10)
    with pytest.raises(AnchorMassError, match=named):
        model.prefill(tokens(10, 2), cache, **options)
    assert cache.seen == [0, 0]


@pytest.mark.parametrize("length", [0, -5])
def test_bad_session_lengths_are_named(length: int, sharp: Sharp, tokens: Tokens) -> None:
    model = sharp()
    for call in (model, model.activations):
        with pytest.raises(AnchorMassError, match=f"session_length={length}"):
            call(tokens(3), session_length=length)


def test_a_cache_belongs_to_one_model(sharp: Sharp, tokens: Tokens) -> None:
    model = sharp()
    cache = model.new_cache(1, 20)
    model.prefill(tokens(20), cache)
    others = {
        "other weights": sharp(seed=1),
        "norm_threshold": sharp(norm_threshold=1.5),
        "rope_theta": sharp(rope_theta=500.0),
        "attention": sharp(attention="standard"),
        "n_heads": sharp(n_heads=2),
        "n_layers": sharp(n_layers=1),
    }
    for named, other in others.items():
        for call in (
            lambda m: m.decode(torch.tensor([1]), cache),
            lambda m: m.prefill(tokens(5), cache),
        ):
            with pytest.raises(AnchorMassError, match=named):
                call(other)
    assert cache.seen == [20]
    # The same weights elsewhere in memory are the same model, even after a stranger asked.
    assert model.decode(torch.tensor([1]), cache).shape == (1, 97)
    assert sharp().decode(torch.tensor([1]), cache).shape == (1, 97)
    # In another precision it is not.
    with pytest.raises(AnchorMassError, match=r"float64.*float32"):
        sharp().float().decode(torch.tensor([1]), cache)
    # Weights that changed since are not.
    changed = sharp()
    with torch.no_grad():
        changed.norm.weight += 1
    with pytest.raises(AnchorMassError, match="other weights"):
        changed.decode(torch.tensor([1]), cache)


def test_a_cache_has_one_batch_size(sharp: Sharp, tokens: Tokens) -> None:
    model = sharp()
    with pytest.raises(AnchorMassError, match=r"2 rows, the input 3.*batch_size=3"):
        model.prefill(tokens(5, 3), model.new_cache(2, 5))


def test_odd_heads_cannot_be_halved() -> None:
    shape: dict[str, Any] = dict(vocab_size=9, n_layers=1, width=12, ffn_width=4)
    with pytest.raises(AnchorMassError, match="n_heads=3"):
        Config("anchormass", n_heads=3, **shape)
    assert TransformerLM(Config("standard", n_heads=3, **shape)).n_parameters() > 0


@pytest.mark.parametrize("seed", [0, 5])
def test_equal_tokens_in_a_subgroup_do_not_part_the_two_forms(seed: int) -> None:
    """Ties in layer 0 are broken by position, not by how a chunk's matrix product rounds."""
    config = Config("anchormass", 64, 2, 32, 48, 4, rope_context=512, max_slots=4096)
    model = TransformerLM(config).double()
    g = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.5, generator=g)
    ids = torch.randint(0, 64, (3, 3000), generator=g)
    streamed = model.prefill(ids, model.new_cache(3, 3000), 7, all_logits=True)
    torch.testing.assert_close(streamed, model(ids), rtol=0, atol=1e-10)
