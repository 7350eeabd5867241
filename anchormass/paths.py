"""Where things are: the repository, what ships with it, and what is fetched or built.

Shipped (in the repository): `data/` (checkpoints, tokenizer, results, article tables).
Fetched or built: `cache_dir()`, `~/.cache/anchormass` unless `ANCHORMASS_CACHE` says otherwise.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
NOTEBOOKS = ROOT / "notebooks"
FIGURES = ROOT / "figures"


def cache_dir() -> Path:
    """Folder for downloads and built corpora; created on first use by whoever writes."""
    if chosen := os.environ.get("ANCHORMASS_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "anchormass"


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it replaces `path`, on any error it goes.

    Readers therefore see the old file or the new one, never half of one, whatever
    interrupts the writer (full disk, Ctrl-C, kill -9: the last leaves a `.tmp` behind).
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
