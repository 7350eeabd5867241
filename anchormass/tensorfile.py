"""Tensors with a JSON header in one safetensors file: written whole, read whole or refused.

safetensors has no checksum, so a flipped byte would load; a sha256 over header and tensors,
kept beside the header, catches it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anchormass.errors import AnchorMassError
from anchormass.paths import atomic_path


def write_tensors(
    path: str | Path, tensors: dict[str, Tensor], header: dict[str, Any], kind: str
) -> None:
    """Write atomically. `kind` names what the file is, and its version."""
    from safetensors.torch import save_file

    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    text = json.dumps({"format": kind} | header)
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, {"anchormass": text, "sha256": _digest(tensors, text)})


def read_tensors(path: str | Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The inverse of `write_tensors`, on the CPU.

    Raises:
        AnchorMassError: the file is missing, truncated, corrupt, or of another kind.
    """
    from safetensors import SafetensorError, safe_open

    path, what = Path(path), kind.split("-")[1]
    if not path.is_file():
        raise AnchorMassError(f"no {what} at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = metadata.get("anchormass", "{}")
        header = json.loads(text)
    except (SafetensorError, OSError, ValueError) as error:
        raise AnchorMassError(f"{path} is truncated or corrupt: {error}") from None
    if not isinstance(header, dict) or header.get("format") != kind:
        raise AnchorMassError(f"{path} is not a {what} of this version ({kind})")
    if metadata.get("sha256") != _digest(tensors, text):
        raise AnchorMassError(f"{path} is corrupt: its contents do not match their checksum")
    return tensors, header


def _digest(tensors: dict[str, Tensor], header: str) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
