"""Stage 1: the plan depends on the seed alone, and resuming is exact."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from anchormass import AnchorMassError, TransformerLM, corpus, preset, train
from anchormass.checkpoints import KIND, load_model
from anchormass.paths import ROOT
from anchormass.tensorfile import read_tensors
from anchormass.train import Recipe, batch, learning_rate, validation

RECIPE = Recipe(context=96, rows=2, steps=6, lr=3e-3, warmup=2)


@pytest.fixture
def small_corpus(tmp_path: Path) -> str:
    """A corpus built from a folder of generated text, with the shipped tokenizer."""
    rng = np.random.default_rng(0)
    words = ["木曜日", "図書館", "雨", "電車", "市場", "数字", "本", "歩く", "読む", "三人", "駅"]
    source = tmp_path / "text"
    source.mkdir()
    for i in range(40):
        lines = ["".join(rng.choice(words, 12)) + f"{rng.integers(1e6)}の話。" for _ in range(30)]
        (source / f"{i}.txt").write_text("\n".join(lines), encoding="utf-8")
    out = tmp_path / "corpus"
    corpus.build(source=str(source), out=str(out))
    return str(out)


def run(out: Path, name: str, model: str = "anchormass", **options: object) -> Path:
    settings = {"recipe": RECIPE, "validate_every": 3} | options
    return train.train(model, "smoke", out, corpus_name=name, **settings)  # type: ignore[arg-type]


def lines(out: Path) -> list[dict]:
    return [json.loads(x) for x in (out / "log.jsonl").read_text().splitlines()[1:]]


def test_batches_follow_from_seed_and_step() -> None:
    tokens = np.arange(5000, dtype=np.uint16)
    rows = batch(tokens, 3, 7, RECIPE)
    assert rows.shape == (2, 97) and rows.dtype == torch.int64
    assert (rows.diff(dim=1) == 1).all()  # contiguous text
    assert torch.equal(rows, batch(tokens, 3, 7, RECIPE))
    assert not torch.equal(rows, batch(tokens, 4, 7, RECIPE))
    assert not torch.equal(rows, batch(tokens, 3, 8, RECIPE))
    with pytest.raises(AnchorMassError, match="97"):
        batch(tokens[:97], 0, 0, RECIPE)


def test_learning_rate_warms_up_and_ends_at_a_tenth() -> None:
    recipe = Recipe(context=8, rows=1, steps=100, lr=1.0, warmup=10)
    rates = [learning_rate(s, recipe) for s in range(101)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_both_models_see_the_same_tokens_and_learn(small_corpus: str, tmp_path: Path) -> None:
    hashes, losses = [], []
    for model in ("standard", "anchormass"):
        run(tmp_path / model, small_corpus, model)
        log = lines(tmp_path / model)
        hashes.append([x["hash"] for x in log])
        losses.append([x["val_loss"] for x in log if "val_loss" in x])
        assert [x["step"] for x in log] == list(range(1, 7))
    assert hashes[0] == hashes[1] and len(set(hashes[0])) == 6
    assert all(late < early for early, late in losses)


def test_validation_is_the_mean_cross_entropy(small_corpus: str) -> None:
    held_out = corpus.load(small_corpus, "val")
    model = TransformerLM(preset("standard-smoke"))
    starts = np.linspace(0, len(held_out.tokens) - 42, 5).astype(int)
    total = 0.0
    for s in starts:
        ids = torch.from_numpy(held_out.tokens[s : s + 41].astype(np.int64))
        p = model(ids[None, :-1]).detach().softmax(-1)[0]
        total -= float(p[torch.arange(40), ids[1:]].log().mean())
    assert validation(model, held_out, 40, rows=5) == pytest.approx(total / 5, abs=1e-5)


@pytest.mark.parametrize("model", ["standard", "anchormass"])
def test_killed_and_resumed_equals_uninterrupted(
    small_corpus: str, tmp_path: Path, model: str
) -> None:
    """kill -9 between two saves, then --resume: every tensor of the end is bit-equal."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    steps = 40
    recipe = Recipe(**(RECIPE.__dict__ | {"steps": steps}))
    run(whole, small_corpus, model, recipe=recipe, validate_every=100)
    code = (
        "import sys, torch; from pathlib import Path; from anchormass.train import Recipe, train;"
        "torch.set_num_threads(1);"
        f"train({model!r}, 'smoke', Path({str(broken)!r}), corpus_name={small_corpus!r},"
        f" recipe=Recipe(**{recipe.__dict__!r}), validate_every=100, save_every=0.0)"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    child = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.DEVNULL)
    log = broken / "log.jsonl"
    deadline = time.monotonic() + 60
    while not (log.is_file() and len(log.read_text().splitlines()) > 5):
        assert child.poll() is None and time.monotonic() < deadline, "the run did not start"
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    stopped_at = read_tensors(broken / "state.safetensors", KIND)[1]["step"]
    assert 0 < stopped_at < steps
    run(broken, small_corpus, model, recipe=recipe, validate_every=100, resume=True)

    one, header = read_tensors(whole / "state.safetensors", KIND)
    two, other = read_tensors(broken / "state.safetensors", KIND)
    assert header == other and one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    same = [{k: v for k, v in x.items() if k != "tokens_per_s"} for x in lines(whole)]
    assert same == [{k: v for k, v in x.items() if k != "tokens_per_s"} for x in lines(broken)]


def test_a_signal_saves_first(small_corpus: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    before = train.loss_of

    def loss_then_interrupt(*args: object) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        return before(*args)  # type: ignore[arg-type]

    train.loss_of = loss_then_interrupt  # type: ignore[assignment]
    try:
        with pytest.raises(KeyboardInterrupt, match="--resume"):
            run(out, small_corpus)
    finally:
        train.loss_of = before
    assert read_tensors(out / "state.safetensors", KIND)[1]["step"] == 1
    run(out, small_corpus, resume=True)
    model, info = load_model(out / "model.safetensors")
    assert info["tokens"] == 6 * 2 * 96 and model.config == preset("anchormass-smoke")
    result = json.loads((out / "result.json").read_text())
    assert [x["tokens"] for x in result["validation"]] == [3 * 192, 6 * 192]
    assert result["hash"] == info["hash"] and result["provenance"] == info["provenance"]


def test_refuses_what_would_spoil_a_run(small_corpus: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(AnchorMassError, match="no checkpoint"):
        run(out, small_corpus, resume=True)
    run(out, small_corpus)
    with pytest.raises(AnchorMassError, match="--resume"):
        run(out, small_corpus)
    with pytest.raises(AnchorMassError, match="another seed"):
        run(out, small_corpus, seed=5, resume=True)
    with pytest.raises(AnchorMassError, match="not built"):
        run(tmp_path / "other", str(tmp_path / "nothing"))
