"""How figures look, and `save_figure`, the only way one reaches the disk.

Importing this module registers the plotly template `anchormass` and makes it the default.
PNGs come from one Chromium for each process: starting it takes seconds, a picture a fifth
of one. Without a browser the data and the interactive figure are written all the same.
"""

from __future__ import annotations

import functools
import html
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import plotly.io as pio

from anchormass import paths
from anchormass.errors import AnchorMassError

# Okabe and Ito's palette: told apart under every common colour blindness.
BLACK, GREY = "#000000", "#999999"
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
PALETTE = (BLUE, VERMILION, GREEN, ORANGE, SKY, PURPLE, BLACK, YELLOW)

MODEL_COLOURS = {"standard": BLUE, "anchormass": VERMILION}
# What became of a token; none is a model's colour.
STATE_COLOURS = {
    "sink": BLACK,
    "outlier": PURPLE,
    "background": SKY,
    "merged": GREEN,
    "dropped": GREY,
    "tail": ORANGE,
    "local": YELLOW,
}
# The article's values beside ours: `go.Scatter(marker=ARTICLE_MARKER | {"color": ...})`.
ARTICLE_MARKER = {"symbol": "circle-open", "size": 12, "line": {"width": 2}}

FONT = (
    "DejaVu Sans, Verdana, Noto Sans CJK JP, Noto Sans JP, "
    "Hiragino Sans, Yu Gothic, Meiryo, sans-serif"
)
WIDTH, HEIGHT, SCALE = 960, 540, 2
TITLE_SIZE, TITLE_LINE, CAPTION_LINE = 17, 22, 16  # pixels
TOP = 84  # above the plot: a title of two lines, or one and the panels' headings
# The runner says here, to its kernels, what repeats this notebook alone with its settings.
COMMAND_VARIABLE = "ANCHORMASS_COMMAND"
PNG_SECONDS = 120  # for one picture, the browser's start included

_AXIS = {
    "automargin": True,
    "gridcolor": "#E6E6E6",
    "linecolor": "#888888",
    "showline": True,
    "ticks": "outside",
    "title": {"standoff": 10},
    "zeroline": False,
}
TEMPLATE = go.layout.Template(
    layout={
        "colorway": list(PALETTE),
        "colorscale": {"sequential": "Viridis", "diverging": "RdBu"},
        "font": {"family": FONT, "size": 13, "color": "#222222"},
        "hoverlabel": {"font": {"family": FONT}},
        # Under the plot, where it meets neither a title of two lines nor the right edge.
        "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
        "margin": {"l": 70, "r": 30, "t": TOP, "b": 60},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        # No automargin: with a title of two lines it pushes the first one off the picture.
        "title": {
            "font": {"size": TITLE_SIZE},
            "pad": {"t": 28},
            "x": 0.01,
            "xanchor": "left",
            "y": 1,
            "yanchor": "top",
            "yref": "container",
        },
        "xaxis": _AXIS,
        "yaxis": _AXIS,
    },
    # A trace picks its scale by itself unless told here.
    data={
        "heatmap": [{"colorscale": "Viridis", "colorbar": {"outlinewidth": 0, "thickness": 14}}],
    },
)
pio.templates["anchormass"] = TEMPLATE
pio.templates.default = "anchormass"
pio.defaults.default_width, pio.defaults.default_height = WIDTH, HEIGHT
pio.defaults.headers = None  # else plotly warns about them at every picture


def context_label(tokens: int) -> str:
    """`4096` -> `4K`, `1048576` -> `1M`; other numbers as they are."""
    for size, letter in ((2**20, "M"), (2**10, "K")):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{letter}"
    return f"{tokens:,}"


def log2_axis(contexts: Iterable[int], title: str = "context length (tokens)") -> dict[str, Any]:
    """Arguments for `fig.update_xaxes`: a log axis with a tick at each context length."""
    ticks = sorted(set(contexts))
    return {
        "type": "log",
        "tickvals": ticks,
        "ticktext": [context_label(t) for t in ticks],
        "title_text": title,
    }


def headline(text: str, width: int = WIDTH, size: int = TITLE_SIZE) -> str:
    """`text` with a `<br>` wherever a title of `width` pixels must break."""
    room = int((width - 40) / (0.6 * size))  # an average letter is 0.6 of the font size wide
    lines, used = [""], 0
    # A Japanese character is as wide as two letters, and a line may break after any of them.
    for piece in re.findall(r"[^\s\u3000-\u9fff\uff00-\uffef]+\s*|.", text):
        columns = sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in piece.rstrip())
        if used and used + columns > room:
            lines.append("")
            used = 0
        lines[-1] += piece
        used += columns + len(piece) - len(piece.rstrip())
    return "<br>".join(line.rstrip() for line in lines)


def plain(text: str) -> str:
    """`text` without the mark-up that plotly allows in titles."""
    return html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"<br\s*/?>", " ", text))).strip()


# ---------------------------------------------------------------- the browser behind PNGs


def find_browser() -> str | None:
    """Path of a Chromium or Chrome that runs: `BROWSER_PATH` if set, else the usual places."""
    return _working_browser(os.environ.get("BROWSER_PATH"), os.environ.get("PATH"))


@functools.cache
def _working_browser(chosen: str | None, search_path: str | None) -> str | None:
    """The arguments are what the answer depends on, so that it is looked up once for each."""
    from choreographer.browsers.chromium import Chromium

    path = shutil.which(chosen) if chosen else Chromium.find_browser(skip_local=False)
    if path is None or sys.platform == "win32":  # there `--version` opens a window
        return path
    # Asked first because kaleido waits for ever for a program that is no browser.
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return path if re.search("chrom|edge|brave|vivaldi", said.stdout, re.IGNORECASE) else None


def browser_advice() -> str:
    """One line for people whose pictures were skipped."""
    chosen = os.environ.get("BROWSER_PATH")
    found = f"BROWSER_PATH={chosen} is not a working browser" if chosen else "no browser found"
    return (
        f"PNGs skipped: {found}. Install Chromium or Chrome (Debian, Ubuntu: apt-get install "
        "chromium), or set BROWSER_PATH to one. Everything else was written."
    )


@functools.cache
def _say_once(line: str) -> None:
    print(line, file=sys.stderr)


def _png(fig: go.Figure, width: int, height: int) -> bytes | None:
    """The picture, or None where no browser works (said once)."""
    browser = find_browser()
    if browser is None:
        _say_once(browser_advice())
        return None
    import kaleido

    # Stopped at exit by kaleido. MathJax would be fetched from the network.
    kaleido.start_sync_server(path=browser, mathjax=False, silence_warnings=True)
    pictures: list[bytes] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            pictures.append(fig.to_image(format="png", width=width, height=height, scale=SCALE))
        except Exception as error:
            errors.append(error)

    # In a thread because a browser that dies leaves kaleido waiting without a time limit.
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(PNG_SECONDS)
    if pictures:
        return pictures[0]
    why = errors[0] if errors else f"no picture within {PNG_SECONDS} s"
    raise AnchorMassError(
        f"{browser} failed to draw a figure ({why}): set BROWSER_PATH to another browser, "
        "or BROWSER_PATH=none to do without PNGs"
    )


# ---------------------------------------------------------------- saving

# A kernel runs one notebook: figures are listed in the order in which it saves them.
_ORDER = itertools.count(1)


def save_figure(
    fig: go.Figure,
    name: str,
    out_dir: str | Path,
    *,
    title_says: str,
    notebook: str,
    data: pd.DataFrame,
    provenance: Mapping[str, Any],
    width: int = WIDTH,
    height: int | None = None,
) -> dict[str, Path]:
    """Write `NAME.csv`, `NAME.json` and, where there is a browser, `NAME.png`.

    Args:
        fig: left as it is; its title must say the finding.
        name: lower-case letters, digits and `_`, starting with the notebook's number.
        out_dir: a relative one counts from the repository root.
        title_says: one sentence that reads the figure, shown beside it in the gallery.
        notebook: stem of the notebook that made it.
        data: every number drawn, one tidy table; its index is not written.
        provenance: from `provenance(profile, seed)`.
        width, height: of the picture in CSS pixels; the PNG has twice as many.

    Returns:
        The files written, by kind: `csv`, `json`, `png`.
    """
    if not re.fullmatch(r"[a-z0-9_]+", name):
        raise AnchorMassError(f"figure name {name!r}: use lower-case letters, digits and _")
    title = plain(fig.layout.title.text or "")
    if not title or not title_says.strip():
        raise AnchorMassError(f"figure {name}: give it a title and a sentence that reads it")
    height = height or fig.layout.height or HEIGHT
    folder = paths.ROOT / out_dir
    written = {"csv": folder / f"{name}.csv"}
    with paths.atomic_path(written["csv"]) as temporary:
        # Nine digits keep float32 exact and hide the noise in the last bits of float64.
        data.to_csv(temporary, index=False, float_format="%.9g", lineterminator="\n")

    if png := _png(_fitted(fig, width), width, height):
        written["png"] = folder / f"{name}.png"
        with paths.atomic_path(written["png"]) as temporary:
            temporary.write_bytes(png)

    command = os.environ.get(COMMAND_VARIABLE)
    written["json"] = folder / f"{name}.json"
    about = {
        "name": name,
        "notebook": notebook,
        "order": next(_ORDER),
        "title": title,
        "says": title_says,
        "width": width,
        "height": height,
        "png": "png" in written,
        "rows": len(data),
        "columns": [str(c) for c in data.columns],
        "provenance": {**provenance, "command": command or provenance["command"]},
        "figure": json.loads(fig.to_json()),
    }
    with paths.atomic_path(written["json"]) as temporary:
        temporary.write_text(json.dumps(about, ensure_ascii=False) + "\n", encoding="utf-8")
    return written


def _fitted(fig: go.Figure, width: int) -> go.Figure:
    """A copy whose title fits a picture of this width; one with its own breaks stays so."""
    text = fig.layout.title.text
    broken = text if "<br" in text else headline(text, width)
    margin = fig.layout.margin.t
    top = (TOP if margin is None else margin) + TITLE_LINE * max(0, broken.count("<br>") - 1)
    changed = {} if broken == text else {"title_text": broken, "margin_t": top}
    return go.Figure(fig).update_layout(**changed)
