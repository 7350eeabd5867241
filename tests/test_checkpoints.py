"""Checkpoints: what is written comes back, or one clear error does."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from anchormass import AnchorMassError, Config, TransformerLM, preset
from anchormass.checkpoints import KIND, load_model, load_pretrained, load_weights, save_model
from anchormass.tensorfile import read_tensors, write_tensors

Model = Callable[..., TransformerLM]
Tokens = Callable[..., Tensor]


def same_weights(a: TransformerLM, b: TransformerLM) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize("attention", ["anchormass", "standard"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_model_comes_back(
    sharp: Model, tokens: Tokens, tmp_path: Path, attention: str, dtype: torch.dtype
) -> None:
    model = sharp(dtype=dtype, attention=attention, norm_threshold=1.7).train()
    info = {"stage": 1, "tokens": 1_000, "corpus": "日本語", "loss": [1.5, 0.25]}
    save_model(tmp_path / "deep" / "er" / "model", model, info, dtype)
    again, told = load_model(tmp_path / "deep" / "er" / "model", dtype)
    assert same_weights(again, model) and again.dtype == dtype
    assert again.config == model.config and told == info
    assert not again.training
    assert torch.equal(again(tokens(100)), model(tokens(100)))


def test_it_is_stored_and_loaded_in_the_precision_asked_for(sharp: Model, tmp_path: Path) -> None:
    model = sharp(dtype=torch.float32)
    save_model(tmp_path / "half", model, {}, torch.bfloat16)
    save_model(tmp_path / "full", model, {}, torch.float32)
    assert os.path.getsize(tmp_path / "half") < 0.6 * os.path.getsize(tmp_path / "full")
    again, _ = load_model(tmp_path / "half")
    assert again.dtype == torch.float32 and model.dtype == torch.float32
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight.bfloat16().float())
    assert load_model(tmp_path / "full", torch.float64)[0].dtype == torch.float64


def test_weights_of_either_model_fit_the_other(sharp: Model, tokens: Tokens) -> None:
    standard, anchormass = sharp(attention="standard"), sharp(seed=1)
    assert not torch.equal(standard(tokens(40)), anchormass(tokens(40)))
    load_weights(anchormass, standard.state_dict(), "there")
    assert same_weights(anchormass, standard)
    # In 64 tokens no block is complete and the window is not left: both see everything.
    torch.testing.assert_close(anchormass(tokens(64)), standard(tokens(64)), rtol=0, atol=1e-11)


def test_any_tensors_and_header_come_back(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6).view(2, 3).t(),  # not contiguous
        "b": torch.zeros(0, 4),
        "c": torch.tensor(2.5, requires_grad=True),
        "d": torch.tensor([True, False]),
    }
    write_tensors(tmp_path / "x", tensors, {"step": 3, "名": "値"}, KIND)
    found, header = read_tensors(tmp_path / "x", KIND)
    assert header["step"] == 3 and header["名"] == "値"
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        assert torch.equal(found[name], x) and found[name].dtype == x.dtype


# ---------------------------------------------------------------- files that are not right


@pytest.fixture
def file(sharp: Model, tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_model(path, sharp(dtype=torch.float32), {"stage": 1}, torch.float32)
    return path


def refused(path: Path) -> str:
    with pytest.raises(AnchorMassError) as error:
        load_model(path)
    assert path.name in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def test_a_flipped_bit_anywhere(file: Path) -> None:
    good = file.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    places = [*range(0, header, 29), *range(header, len(good), 997), len(good) - 1]
    for i in places:
        bad = bytearray(good)
        bad[i] ^= 1 << i % 7  # bit 7 would be caught as bad text
        file.write_bytes(bad)
        refused(file)
    file.write_bytes(good)
    load_model(file)


def test_a_file_cut_short_or_too_long(file: Path) -> None:
    good = file.read_bytes()
    for length in (0, 1, 7, 8, 9, 500, len(good) // 2, len(good) - 1):
        file.write_bytes(good[:length])
        assert "truncated or corrupt" in refused(file)
    file.write_bytes(good + b"\0")
    refused(file)


@pytest.mark.parametrize("content", ["noise", "text", "zeros", "pickle"])
def test_a_file_that_is_something_else(tmp_path: Path, content: str) -> None:
    path = tmp_path / "model"
    if content == "pickle":
        torch.save({"embed_tokens.weight": torch.zeros(3)}, path)
    else:
        noise = random.Random(0).randbytes(5000)
        path.write_bytes(
            {"noise": noise, "text": b"# Notes\n" * 600, "zeros": bytes(5000)}[content]
        )
    assert "truncated or corrupt" in refused(path)


def test_a_file_of_another_kind(sharp: Model, tokens: Tokens, tmp_path: Path) -> None:
    safetensors.torch.save_file({"x": torch.zeros(3)}, tmp_path / "plain")
    assert "not a checkpoint of this version" in refused(tmp_path / "plain")
    model = sharp()
    cache = model.new_cache(1, 5)
    model.prefill(tokens(20), cache)
    cache.save(tmp_path / "cache")
    assert "not a checkpoint of this version" in refused(tmp_path / "cache")
    write_tensors(tmp_path / "state", {"x": torch.zeros(3)}, {"step": 7}, KIND)
    assert "training state, not a model" in refused(tmp_path / "state")


def test_no_file(tmp_path: Path) -> None:
    assert "no checkpoint at" in refused(tmp_path / "nothing")
    (tmp_path / "folder").mkdir()
    assert "no checkpoint at" in refused(tmp_path / "folder")


def test_tensors_that_do_not_fit(sharp: Model, tmp_path: Path) -> None:
    model = sharp()
    path = tmp_path / "model"

    def write(tensors: dict[str, Tensor]) -> None:
        write_tensors(path, tensors, {"config": model.config.to_dict(), "info": {}}, KIND)

    weights = model.state_dict()
    write({name: x for name, x in weights.items() if name != "norm.weight"})
    assert "lacks tensor norm.weight" in refused(path)
    write(weights | {"layers.9.extra": torch.zeros(2)})
    assert "unknown tensor layers.9.extra" in refused(path)
    write(weights | {"norm.weight": torch.zeros(5)})
    assert "norm.weight is [5], the model's [16]" in refused(path)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"attention": "linear"}, "linear"),
        ({"max_slots": 3, "recent_slots": 3}, "max_slots=3"),
        ({"policy": "magic"}, "magic"),
        ({"colour": 3}, "colour"),
        ({"width": None}, "width=None"),
        ({"width": "wide"}, "width='wide'"),
        ({"max_slots": 64.5}, "max_slots=64.5"),
    ],
)
def test_a_configuration_that_cannot_be(
    sharp: Model, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    model = sharp()
    config = model.config.to_dict() | change
    write_tensors(tmp_path / "model", model.state_dict(), {"config": config}, KIND)
    with pytest.raises(AnchorMassError, match=named):
        load_model(tmp_path / "model")


def test_a_missing_field_of_the_configuration(sharp: Model, tmp_path: Path) -> None:
    model = sharp()
    config = model.config.to_dict()
    del config["vocab_size"]
    write_tensors(tmp_path / "model", model.state_dict(), {"config": config}, KIND)
    with pytest.raises(AnchorMassError, match="vocab_size"):
        load_model(tmp_path / "model")


# ---------------------------------------------------------------- writing that fails


def full(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def half_a_file(tensors: Any, path: Any, metadata: Any) -> None:
    Path(path).write_bytes(b"half a file")
    full()


@pytest.mark.parametrize("where", ["os.replace", "os.fsync", "safetensors.torch.save_file"])
def test_a_failing_write_leaves_the_old_file(
    sharp: Model, file: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    before = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(where, half_a_file if "safetensors" in where else full)
        with pytest.raises(OSError, match="No space left"):
            save_model(file, sharp(seed=1), {}, torch.float32)
    assert file.read_bytes() == before
    assert [x.name for x in file.parent.iterdir()] == [file.name]
    save_model(file, sharp(seed=1), {}, torch.float64)
    assert same_weights(load_model(file, torch.float64)[0], sharp(seed=1))


# ---------------------------------------------------------------- shipped models


@pytest.mark.parametrize("attention", ["anchormass", "standard"])
def test_the_smoke_model_says_that_it_is_random(attention: str) -> None:
    model = load_pretrained(f"{attention}-smoke")
    assert same_weights(model, TransformerLM(preset(f"{attention}-smoke"), seed=0))
    assert model.training_info["tokens"] == 0 and "random" in str(model.training_info["note"])
    assert not model.training
    assert load_pretrained(f"{attention}-smoke", torch.bfloat16).dtype == torch.bfloat16


def test_a_shipped_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("anchormass.checkpoints.CHECKPOINTS", tmp_path)
    with pytest.raises(AnchorMassError, match="no trained weights for standard-mini") as error:
        load_pretrained("standard-mini")
    assert "--model standard --profile mini" in str(error.value)

    model = TransformerLM(preset("standard-mini"), seed=5)
    info = {"stage": 1, "tokens": 123}
    save_model(tmp_path / "standard-mini.safetensors", model, info, torch.float32)
    again = load_pretrained("standard-mini")
    assert same_weights(again, model) and again.training_info == info


@pytest.mark.parametrize("name", ["mini", "anchormass-huge", "gpt-mini", "", "anchormass-"])
def test_an_unknown_model(name: str) -> None:
    with pytest.raises(AnchorMassError, match=f"unknown preset '{name}'") as error:
        load_pretrained(name)
    assert "anchormass-mini" in str(error.value)


def test_random_weights_differ_by_seed_and_repeat() -> None:
    config: Config = preset("anchormass-smoke")
    assert same_weights(TransformerLM(config, seed=4), TransformerLM(config, seed=4))
    assert not same_weights(TransformerLM(config, seed=4), TransformerLM(config, seed=5))
