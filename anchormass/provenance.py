"""Where a number comes from: what every result file and figure records about its run.

Nothing in it changes between two equal runs on one machine: no date, no duration.
"""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from anchormass.paths import ROOT

PACKAGES = ("anchormass", "torch", "numpy", "plotly", "sentencepiece")


def provenance(profile: str, seed: int, command: str | None = None) -> dict[str, Any]:
    """Profile, seed, device, versions, commit and the command that repeats the run.

    `command`: what follows `python -m anchormass`; default: the study at this profile and seed.
    """
    command = command or f"reproduce --profile {profile} --seed {seed}"
    return {
        "profile": profile,
        "seed": seed,
        "device": device(),
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in PACKAGES},
        "commit": commit(),
        "command": f"python -m anchormass {command}",
    }


def device() -> str:
    """The processor in words; the GPU's name where there is one."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    found = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [x.split(":", 1)[1].strip() for x in found if x.startswith("model name")]
    return (
        f"{names[0] if names else platform.processor() or platform.machine()}, {len(names)} cores"
    )


def commit() -> str:
    """Short commit of the repository, `+` behind it when files differ; `unknown` without git."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", ROOT, *args], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        found = git("rev-parse", "--short=10", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "anchormass", "data")
    except FileNotFoundError:
        return "unknown"
    return (found + ("+" if changed else "")) or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
