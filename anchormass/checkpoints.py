"""Checkpoints: safetensors files that say what they are, written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anchormass.config import Config, preset
from anchormass.errors import AnchorMassError
from anchormass.model import TransformerLM
from anchormass.paths import DATA
from anchormass.tensorfile import read_tensors, write_tensors

CHECKPOINTS = DATA / "checkpoints"
KIND = "anchormass-checkpoint-1"


def save_model(
    path: str | Path, model: TransformerLM, info: dict[str, Any], dtype: torch.dtype
) -> None:
    """Write weights in `dtype` with the configuration and `info` (how they were trained)."""
    tensors = {name: t.to(dtype) for name, t in model.state_dict().items()}
    write_tensors(path, tensors, {"config": model.config.to_dict(), "info": info}, KIND)


def load_model(
    path: str | Path, dtype: torch.dtype = torch.float32
) -> tuple[TransformerLM, dict[str, Any]]:
    """A model and its `info` from a file of `save_model`.

    Raises:
        AnchorMassError: the file cannot be read, or its tensors do not fit its configuration.
    """
    tensors, header = read_tensors(path, KIND)
    if "config" not in header:
        raise AnchorMassError(f"{path} holds a training state, not a model")
    model = TransformerLM(Config.from_dict(header["config"])).to(dtype)
    load_weights(model, tensors, path)
    return model.eval(), header.get("info", {})


def load_weights(model: TransformerLM, tensors: dict[str, Tensor], source: str | Path) -> None:
    """Copy a state dict into `model`. Either model's weights fit the other's layers.

    Raises:
        AnchorMassError: naming the first tensor that is missing, extra or of another shape.
    """
    own = model.state_dict()
    for name in sorted(own.keys() ^ tensors.keys()):
        side = "lacks" if name in own else "has an unknown"
        raise AnchorMassError(f"{source} {side} tensor {name}: not a checkpoint of this model")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise AnchorMassError(
                f"{source}: {name} is {list(tensor.shape)}, the model's {list(own[name].shape)}"
            )
    model.load_state_dict(tensors)


def load_pretrained(name: str, dtype: torch.dtype = torch.float32) -> TransformerLM:
    """The shipped model called `name`, e.g. `"anchormass-mini"`.

    `…-smoke` has no trained weights: it comes with the random ones of seed 0, and its
    `training` says so.

    Raises:
        AnchorMassError: unknown preset, or no weights shipped for it.
    """
    config = preset(name)
    path = CHECKPOINTS / f"{name}.safetensors"
    if name.endswith("-smoke"):
        model = TransformerLM(config).to(dtype).eval()
        model.training_info = {"stage": "none", "tokens": 0, "note": "random weights, seed 0"}
        return model
    if not path.is_file():
        train = (
            f"train them with `python -m anchormass train --model {config.attention} "
            "--profile mini`, or "
        )
        raise AnchorMassError(
            f"no trained weights for {name} in {path.parent.name}/: "
            f"{train if name.endswith('-mini') else ''}give a file of your own to load_model"
        )
    model, info = load_model(path, dtype)
    model.training_info = info
    return model
