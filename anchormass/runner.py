"""One notebook through papermill: kernel, time limit, the cell that failed, the copy kept.

Notable: the kernel is this very interpreter, away from the user's Jupyter and IPython
settings; Ctrl-C ends the run and not just the kernel; executed copies lose everything that
differs between two runs of the same thing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchormass import paths

PAPERMILL_TAGS = {"injected-parameters", "papermill-error-cell-tag"}


@dataclass
class Result:
    notebook: str
    status: str  # ok or failed
    seconds: float
    figures: int = 0  # interactive ones: each has its page entry
    png: int = 0
    csv: int = 0
    error: str = ""


@contextlib.contextmanager
def kernel_environment() -> Iterator[None]:
    """Environment that kernels inherit; put back afterwards."""
    from ipykernel.kernelspec import write_kernel_spec

    from anchormass import figures

    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="anchormass-") as scratch:
        # JUPYTER_PATH comes before every other place, so that `python3` is this interpreter
        # even where the user has a kernel of that name for another.
        (kernels := Path(scratch) / "kernels").mkdir()
        # Else each prints that it talks over TCP (on this machine only, and signed), and
        # a traceback of its own at Ctrl-C; what a cell raises is reported all the same.
        write_kernel_spec(kernels / "python3", extra_arguments=["--log-level=CRITICAL"])
        os.environ |= {
            "JUPYTER_PATH": scratch,
            "IPYTHONDIR": scratch,  # no start-up files, no history
            "PLOTLY_RENDERER": "plotly_mimetype" + ("+png" if figures.find_browser() else ""),
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # else every kernel prints a debugger warning
            "PYTHONHASHSEED": "0",
        }
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def run_notebook(
    source: Path, parameters: dict[str, Any], copies: Path, figures: Path, timeout: float
) -> Result:
    """Run `source` with `parameters`; its executed copy goes to the folder `copies`.

    Args:
        figures: where it saves figures; those of an earlier run count no more.
        timeout: seconds for the whole notebook.
    """
    import papermill

    from anchormass import gallery

    stem = source.stem
    figures.mkdir(parents=True, exist_ok=True)
    gallery.forget(figures, stem)
    watch = _Watch()
    start = time.monotonic()
    error = ""
    with tempfile.TemporaryDirectory(prefix="anchormass-") as scratch:
        copy = Path(scratch) / source.name
        try:
            papermill.execute_notebook(
                source,
                copy,
                parameters,
                kernel_name="python3",
                cwd=paths.ROOT,
                progress_bar={"desc": stem, "leave": False, "disable": None},
                timeout_func=lambda _: max(1, timeout - (time.monotonic() - start)),
                on_cell_start=watch.cell_starts,
                record_timing=False,
                coalesce_streams=True,
            )
        # CancelledError is how asyncio reports the interrupt, where the kernel did not first.
        except (Exception, asyncio.CancelledError) as raised:
            if watch.interrupted:
                raise KeyboardInterrupt from None
            error = _explain(raised, source, watch.cell, timeout)
        if copy.is_file():
            write_copy(copy, copies / source.name)
    made = gallery.saved(figures, stem)
    return Result(
        stem,
        "failed" if error else "ok",
        round(time.monotonic() - start, 1),
        len(made),
        sum(1 for entry in made.values() if entry["png"]),
        sum(1 for name in made if (figures / f"{name}.csv").is_file()),
        error,
    )


@dataclass
class _Watch:
    """What nbclient's hook sees of a running notebook."""

    cell: int | None = None  # counted in the executed copy, from 0
    interrupted: bool = False

    def cell_starts(self, *, cell_index: int, **_: Any) -> None:
        """Note the cell, and make Ctrl-C end the run: nbclient's own handler ends the kernel."""
        self.cell = cell_index
        task = asyncio.current_task()

        def interrupt() -> None:
            self.interrupted = True
            if task:
                task.cancel()

        # A thread that is not the main one and Windows have no such handlers.
        with contextlib.suppress(RuntimeError, ValueError, NotImplementedError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)


def _explain(raised: BaseException, source: Path, executing: int | None, timeout: float) -> str:
    """One line: notebook, cell as counted in the source from 1, its first line, the error."""
    import nbformat
    from nbclient.exceptions import CellTimeoutError
    from papermill.exceptions import PapermillExecutionError

    if isinstance(raised, PapermillExecutionError):
        what = f"{raised.ename}: {raised.evalue}"
    elif isinstance(raised, CellTimeoutError):
        what = f"still running after the {timeout:g} s of --timeout"
    else:
        what = f"{type(raised).__name__}: {raised}"
    where = source.stem
    if executing is not None:
        cells = nbformat.read(source, as_version=4).cells
        tagged = [i for i, c in enumerate(cells) if "parameters" in c.metadata.get("tags", [])]
        index = executing - (executing > tagged[0])  # papermill adds a cell after the tagged one
        first = next((x.strip() for x in cells[index].source.splitlines() if x.strip()), "")
        where += f", cell {index + 1} ({first})"
    return f"{where}: {' '.join(what.split())}"


def write_copy(executed: Path, target: Path) -> None:
    """The executed notebook without what differs from run to run: times, paths, random ids."""
    import nbformat

    notebook = nbformat.read(executed, as_version=4)
    for key in ("papermill", "widgets"):
        notebook.metadata.pop(key, None)
    for index, cell in enumerate(notebook.cells):
        cell.metadata.pop("papermill", None)
        cell.metadata.pop("execution", None)
        if set(cell.metadata.get("tags", [])) & PAPERMILL_TAGS:
            cell.id = f"papermill-{index}"
        if not cell.metadata.get("tags"):  # papermill gives every cell an empty list
            cell.metadata.pop("tags", None)
    # Not by nbformat, whose indentation makes a tenth of the size.
    text = json.dumps(notebook, ensure_ascii=False, sort_keys=True)
    with paths.atomic_path(target) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
