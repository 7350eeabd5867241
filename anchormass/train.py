"""Training, stage 1: next-token prediction on packed text, the same batches for both models.

What a batch holds follows from the seed and the step number alone (`batch`), so there is no
loader state: a resumed run draws what an uninterrupted one would have drawn, and two models
trained from one seed see the same tokens in the same order. A running hash of those tokens
stands in every log line and checkpoint as the proof.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anchormass import corpus, tokenizer
from anchormass.checkpoints import KIND, load_weights, save_model
from anchormass.config import ATTENTIONS, preset
from anchormass.errors import AnchorMassError
from anchormass.generate import generate
from anchormass.model import TransformerLM
from anchormass.paths import ROOT, atomic_path
from anchormass.provenance import provenance
from anchormass.tensorfile import read_tensors, write_tensors


@dataclass(frozen=True)
class Recipe:
    """One stage: `context` tokens a row, `rows` rows a step, a cosine from `lr` to a tenth."""

    context: int
    rows: int
    steps: int
    lr: float
    warmup: int
    weight_decay: float = 0.1
    clip: float = 1.0


STAGE_1 = {
    "smoke": Recipe(context=128, rows=4, steps=20, lr=3e-3, warmup=5),
    "mini": Recipe(context=512, rows=8, steps=3000, lr=2e-3, warmup=100),
}


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine down to a tenth at the last step."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done)))


def batch(tokens: np.ndarray, step: int, seed: int, recipe: Recipe) -> Tensor:
    """The batch of `step`: int64 `[rows, context + 1]`, from the seed and the step alone."""
    if len(tokens) <= recipe.context + 1:
        raise AnchorMassError(
            f"the corpus has {len(tokens)} tokens, too few for rows of {recipe.context + 1}"
        )
    rng = np.random.default_rng([seed, step])
    starts = rng.integers(0, len(tokens) - recipe.context - 1, size=recipe.rows)
    rows = [tokens[s : s + recipe.context + 1].astype(np.int64) for s in starts]
    return torch.from_numpy(np.stack(rows))


def chained(digest: str, rows: Tensor) -> str:
    """The running hash after `rows`."""
    return hashlib.sha256(digest.encode() + rows.numpy().tobytes()).hexdigest()


def parameter_groups(model: TransformerLM, recipe: Recipe) -> list[dict[str, Any]]:
    """Matrices decay, norms do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def loss_of(model: TransformerLM, rows: Tensor, bf16: bool) -> Tensor:
    """Mean next-token cross-entropy in nats."""
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=bf16):
        logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def validation(model: TransformerLM, held_out: corpus.Bin, context: int, rows: int = 64) -> float:
    """Mean loss in nats per token on `rows` evenly spaced windows of held-out text."""
    starts = np.linspace(0, len(held_out.tokens) - context - 2, rows).astype(int)
    windows = np.stack([held_out.tokens[s : s + context + 1] for s in starts]).astype(np.int64)
    pieces = torch.from_numpy(windows).split(8)
    return sum(float(loss_of(model, piece, bf16=False)) * len(piece) for piece in pieces) / rows


# ---------------------------------------------------------------- state on disk


def save_state(
    path: Path, model: TransformerLM, optimizer: torch.optim.Optimizer, header: dict[str, Any]
) -> None:
    """Weights, AdamW moments and the place in the plan, in one atomic file."""
    tensors = {f"model.{n}": t for n, t in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    write_tensors(path, tensors, header, KIND)


def load_state(
    path: Path, model: TransformerLM, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """The inverse of `save_state`; returns the header."""
    tensors, header = read_tensors(path, KIND)
    weights = {n[6:]: t for n, t in tensors.items() if n.startswith("model.")}
    load_weights(model, weights, path)
    for name, parameter in model.named_parameters():
        prefix = f"optimizer.{name}."
        found = {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}
        optimizer.state[parameter] = found
    return header


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM are noted, not raised, so that the step ends and its state is saved."""
    seen: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(s, lambda number, _: seen.append(number)) for s in signals]
    try:
        yield seen
    finally:
        for s, handler in zip(signals, before, strict=True):
            signal.signal(s, handler)


# ---------------------------------------------------------------- the loop


def train(
    attention: str,
    profile: str,
    out: Path,
    *,
    recipe: Recipe | None = None,
    seed: int = 0,
    corpus_name: str = "debian-mini",
    bf16: bool = True,
    resume: bool = False,
    save_every: float = 120.0,
    validate_every: int = 250,
) -> Path:
    """Train stage 1 into the folder `out`.

    It then holds `model.safetensors` (bf16 weights), `result.json` (losses),
    `state.safetensors` (to resume) and `log.jsonl` (a line a step).

    Args:
        attention: `"standard"` or `"anchormass"`.
        profile: `"smoke"` or `"mini"`.
        out: the run's folder.
        recipe: default: the profile's.
        seed: of weights and batches.
        corpus_name: built by `python -m anchormass data build`.
        bf16: matrix products in bfloat16 (autocast); weights and moments stay float32.
        resume: continue from `out/state.safetensors`, exactly.
        save_every: seconds between saved states.
        validate_every: steps between validations.

    Raises:
        AnchorMassError: no corpus; a folder that holds another run; nothing to resume.
        KeyboardInterrupt: stopped by Ctrl-C or SIGTERM, with the state saved.
    """
    from tqdm.auto import tqdm

    recipe = recipe or STAGE_1[profile]
    training = corpus.load(corpus_name, "train")
    held_out = corpus.load(corpus_name, "val")
    model = TransformerLM(preset(f"{attention}-{profile}"), seed=seed)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, recipe), lr=recipe.lr, betas=(0.9, 0.95), fused=True
    )
    state, log = out / "state.safetensors", out / "log.jsonl"
    run = {
        "stage": "1",
        "model": f"{attention}-{profile}",
        "recipe": asdict(recipe),
        "seed": seed,
        "corpus": training.sidecar["corpus_sha256"],
        "bf16": bf16,
    }
    header: dict[str, Any] = {"run": run, "step": 0, "hash": ""}
    if resume:
        header = load_state(state, model, optimizer)
        if header["run"] != run:
            other = [k for k, v in run.items() if header["run"].get(k) != v]
            raise AnchorMassError(f"{state} is a run with another {', '.join(other)}")
        _cut_log(log, header["step"])
    elif state.is_file():
        raise AnchorMassError(f"{out} holds a run already: --resume continues it, or choose --out")
    else:
        out.mkdir(parents=True, exist_ok=True)
        made = provenance(profile, seed, f"train --stage 1 --model {attention}")
        log.write_text(json.dumps(run | {"provenance": made}) + "\n")

    step, digest = header["step"], header["hash"]
    tokens_per_step = recipe.rows * recipe.context
    saved = time.monotonic()
    prompt = torch.from_numpy(held_out.tokens[:64].astype(np.int64))[None]
    tok = tokenizer.load()

    def save() -> None:
        save_state(state, model, optimizer, {"run": run, "step": step, "hash": digest})

    bar = tqdm(total=recipe.steps, initial=step, desc=run["model"], unit="step", mininterval=1)
    with stop_requests() as stopped, open(log, "a", encoding="utf-8") as lines, bar:
        while step < recipe.steps:
            began = time.monotonic()
            rows = batch(training.tokens, step, seed, recipe)
            digest = chained(digest, rows)
            rate = learning_rate(step, recipe)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = loss_of(model, rows, bf16)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            line: dict[str, Any] = {
                "step": step,
                "tokens": step * tokens_per_step,
                "loss": round(float(loss.detach()), 5),
                "lr": rate,
                "grad_norm": round(float(norm), 4),
                "tokens_per_s": round(tokens_per_step / (time.monotonic() - began)),
                "hash": digest[:16],
            }
            if step % validate_every == 0 or step == recipe.steps:
                line["val_loss"] = round(validation(model, held_out, recipe.context), 5)
                line["sample"] = tok.decode(generate(model, prompt, 48)[0].tolist())
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")
            lines.flush()
            bar.update()
            bar.set_postfix(loss=f"{line['loss']:.3f}", tok_s=line["tokens_per_s"])
            if stopped or time.monotonic() - saved > save_every:
                save()
                saved = time.monotonic()
            if stopped:
                raise KeyboardInterrupt(f"stopped at step {step}; --resume continues {out}")
    save()
    info = {
        "stage": "1",
        "tokens": step * tokens_per_step,
        "val_loss": validation(model, held_out, recipe.context),
        "hash": digest,
        "seed": seed,
        "recipe": asdict(recipe),
        "corpus_sha256": run["corpus"],
        "provenance": provenance(profile, seed, f"train --stage 1 --model {attention}"),
    }
    save_model(out / "model.safetensors", model, info, torch.bfloat16)
    logged = [json.loads(x) for x in log.read_text(encoding="utf-8").splitlines()[1:]]
    curve = [{k: x[k] for k in ("tokens", "val_loss")} for x in logged if "val_loss" in x]
    with atomic_path(out / "result.json") as temporary:
        result = {"model": run["model"]} | info | {"validation": curve}
        temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return out / "model.safetensors"


def _cut_log(log: Path, step: int) -> None:
    """Drop log lines after `step`: steps that ran after the state was saved run again."""
    kept = log.read_text(encoding="utf-8").splitlines()
    kept = kept[:1] + [x for x in kept[1:] if x.endswith("}") and json.loads(x)["step"] <= step]
    with atomic_path(log) as temporary:
        temporary.write_text("\n".join(kept) + "\n", encoding="utf-8")


def add_parser(subparsers: Any) -> None:
    """Add the command `train`."""
    parser = subparsers.add_parser(
        "train",
        help="train a model (stage 1)",
        description="Train stage 1 on a built corpus. Ctrl-C saves; --resume continues exactly.",
        epilog="example: python -m anchormass train --model anchormass --profile mini --threads 1",
    )
    parser.add_argument("--stage", choices=["1"], default="1", help="training stage")
    parser.add_argument("--model", choices=ATTENTIONS, required=True)
    parser.add_argument("--profile", choices=sorted(STAGE_1), default="mini")
    parser.add_argument("--steps", type=int, help="instead of the profile's number of steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus", default="debian-mini", help="name of a built corpus")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument("--out", type=Path, help="run folder (default: runs/NAME)")
    parser.set_defaults(run=_command)


def _command(args: argparse.Namespace) -> None:
    if args.threads:
        torch.set_num_threads(args.threads)
    recipe = STAGE_1[args.profile]
    if args.steps is not None:
        if args.steps < 1:
            raise AnchorMassError(f"--steps {args.steps}: must be at least 1")
        recipe = Recipe(**(asdict(recipe) | {"steps": args.steps}))
    out = args.out or ROOT / "runs" / f"{args.model}-{args.profile}-stage1"
    path = train(
        args.model,
        args.profile,
        out,
        recipe=recipe,
        seed=args.seed,
        corpus_name=args.corpus,
        bf16=args.precision == "bf16",
        resume=args.resume,
    )
    print(f"wrote {path}")
