"""The figure manifest, and the gallery: one page that works from the disk, without network.

`save_figure` leaves a `NAME.json` for each figure. `manifest.json` lists them without the
drawing itself and is committed with the PNGs and CSVs; the page is built. A figure whose
`NAME.json` is not there (a fresh clone that has run one notebook) shows as its PNG.
"""

from __future__ import annotations

import html
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import plotly

from anchormass import figures
from anchormass.errors import AnchorMassError
from anchormass.paths import atomic_path

Entry = dict[str, Any]


def read_manifest(folder: Path) -> list[Entry]:
    """What `manifest.json` lists; empty where there is none."""
    path = folder / "manifest.json"
    if not path.is_file():
        return []
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))["figures"])
    except (ValueError, KeyError, TypeError) as error:
        raise AnchorMassError(f"{path} is damaged ({error}): delete it and run again") from error


def saved(folder: Path, notebook: str) -> dict[str, Entry]:
    """The figures of a notebook that have a `NAME.json`, by name."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        if path.name != "manifest.json":
            entry = _load(path)
            if entry["notebook"] == notebook:
                found[entry["name"]] = entry
    return found


def _load(path: Path) -> Entry:
    try:
        entry = dict(json.loads(path.read_text(encoding="utf-8")))
        entry["name"], entry["notebook"], entry["figure"]
    except (ValueError, KeyError, TypeError) as error:
        raise AnchorMassError(f"{path} is damaged ({error}): delete it and run again") from error
    return entry


def forget(folder: Path, notebook: str) -> None:
    """Remove a notebook's `NAME.json` before it runs: those there afterwards are of this run."""
    for name in saved(folder, notebook):
        (folder / f"{name}.json").unlink()


def update(folder: Path, questions: Mapping[str, str], finished: set[str]) -> list[Entry]:
    """Bring manifest and page up to date after a run.

    Args:
        folder: of the figures.
        questions: every notebook of the study and what it asks, in reading order.
        finished: notebooks that ran to their end. Figures they no longer make are deleted;
            those of other notebooks stay as listed.

    Returns:
        The manifest's entries, in reading order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries: list[Entry] = []
    drawings: dict[str, Any] = {}
    listed = read_manifest(folder)
    for notebook in questions:
        old = {e["name"]: e for e in listed if e["notebook"] == notebook}
        new = saved(folder, notebook)
        if notebook in finished:
            for name in old.keys() - new.keys():
                for suffix in (".png", ".csv"):
                    (folder / f"{name}{suffix}").unlink(missing_ok=True)
            old = {}
        drawings |= {name: entry.pop("figure") for name, entry in new.items()}
        merged = old | {name: _with_png(folder, entry) for name, entry in new.items()}
        entries += sorted(merged.values(), key=lambda e: (e["order"], e["name"]))
    with atomic_path(folder / "manifest.json") as temporary:
        text = json.dumps({"figures": entries}, ensure_ascii=False, indent=1)
        temporary.write_text(text + "\n", encoding="utf-8")
    library = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    with atomic_path(folder / library.name) as temporary:
        shutil.copyfile(library, temporary)
    with atomic_path(folder / "index.html") as temporary:
        temporary.write_text(page(entries, drawings, questions), encoding="utf-8")
    return entries


def _with_png(folder: Path, entry: Entry) -> Entry:
    """Say whether the picture is of this run, of an earlier one (no browser now), or missing."""
    earlier = not entry["png"] and (folder / f"{entry['name']}.png").is_file()
    return entry | {"png": "earlier run" if earlier else entry["png"]}


# ---------------------------------------------------------------- the page

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>AnchorMass: figures</title>
<style>
body { margin: 0 auto; max-width: 1060px; padding: 1rem 1.25rem 4rem; color: #222;
  font: 16px/1.5 "DejaVu Sans", Verdana, "Noto Sans CJK JP", "Noto Sans JP", sans-serif; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 0; }
h3 { font-size: 1.05rem; margin: 0; } p { margin: .3rem 0; }
nav a { display: inline-block; margin-right: 1rem; } a { color: #0072B2; }
article { border-top: 1px solid #ddd; margin-top: 1.5rem; padding-top: 1.25rem; }
.plot, .plot img { width: 100%; } .small { color: #555; font-size: .82rem; }
</style>
<script src="plotly.min.js" defer></script>
</head>
<body>
<h1>AnchorMass: figures</h1>
"""

# Drawn when scrolled near: a page of fifty figures opens as fast as one of two.
_TAIL = """<script>
addEventListener("DOMContentLoaded", () => {
  const draw = (box) => {
    const figure = JSON.parse(document.getElementById("json-" + box.id).textContent);
    Plotly.newPlot(box, figure.data, figure.layout, {responsive: true, displaylogo: false});
  };
  const seen = new IntersectionObserver((boxes) => boxes.forEach((entry) => {
    if (entry.isIntersecting) { seen.unobserve(entry.target); draw(entry.target); }
  }), {rootMargin: "600px"});
  document.querySelectorAll(".plot[id]").forEach((box) => seen.observe(box));
});
</script>
</body>
</html>
"""


def page(
    entries: list[Entry], drawings: Mapping[str, dict[str, Any]], questions: Mapping[str, str]
) -> str:
    """The gallery as HTML; everything but `plotly.min.js`, PNGs and CSVs is inside it."""
    notebooks = [n for n in questions if any(e["notebook"] == n for e in entries)]
    links = "\n".join(f'<a href="#{n}">{html.escape(n)}</a>' for n in notebooks)
    parts = [_HEAD, f"<nav>{links}</nav>\n"]
    for notebook in notebooks:
        title = f"{html.escape(notebook)}: {html.escape(questions[notebook])}"
        parts.append(f'<h2 id="{notebook}">{title}</h2>\n')
        own = [e for e in entries if e["notebook"] == notebook]
        parts += [_article(e, drawings.get(e["name"])) for e in own]
    return "".join([*parts, _TAIL])


def _article(entry: Entry, drawing: dict[str, Any] | None) -> str:
    name, about = entry["name"], entry["provenance"]
    files = [f'<a href="{name}.csv">data (CSV)</a>']
    if entry["png"]:
        files.append(f'<a href="{name}.png">picture (PNG)</a>')
    made = (
        f"profile {about['profile']}, seed {about['seed']}, {about['device']}, "
        f"commit {about['commit']}, <code>{html.escape(about['command'])}</code>"
    )
    if drawing is not None:
        plot = _plot(name, drawing, entry["height"])
    elif entry["png"]:
        plot = f'<div class="plot"><img src="{name}.png" alt="{html.escape(entry["title"])}"></div>'
    else:
        plot = (
            f'<p class="small">Not drawn here: run <code>{html.escape(about["command"])}</code></p>'
        )
    return (
        f"<article>\n<h3>{html.escape(entry['title'])}</h3>\n{plot}\n"
        f"<p>{html.escape(entry['says'])}</p>\n"
        f'<p class="small">{" · ".join(files)} · {made}</p>\n</article>\n'
    )


def _plot(name: str, drawing: dict[str, Any], height: int) -> str:
    """A box that follows the page's width.

    Text that does not break by itself is the page's and not the drawing's: the title, and
    captions. The room that they took above the plot goes.
    """
    layout = {**drawing["layout"], "autosize": True}
    layout.pop("width", None)
    annotations = layout.get("annotations", [])
    captions = [a["text"] for a in annotations if _is_caption(a)]
    layout["annotations"] = [a for a in annotations if not _is_caption(a)]
    title = layout["title"]["text"]
    margin = layout.get("margin", {})
    top = margin.get("t", figures.TOP)
    spare = 28 + figures.TITLE_LINE * (1 + title.count("<br>"))
    spare += sum(figures.CAPTION_LINE * (1 + text.count("<br>")) for text in captions)
    layout["title"] = {"text": ""}
    layout["margin"] = {**margin, "t": max(36, top - spare)}
    layout["height"] = height - top + layout["margin"]["t"]
    text = json.dumps({"data": drawing["data"], "layout": layout}, ensure_ascii=False)
    # Inside a script element only `</` could end it, and `<!--` change how it is read.
    text = text.replace("<", "\\u003c")
    words = "".join(f'<p class="small">{html.escape(figures.plain(c))}</p>\n' for c in captions)
    return (
        f'{words}<div class="plot" id="{name}" style="height: {layout["height"]}px"></div>\n'
        f'<script type="application/json" id="json-{name}">{text}</script>'
    )


def _is_caption(annotation: Mapping[str, Any]) -> bool:
    """Text that stands on the top left corner of the plot."""
    place = {"xref": "paper", "x": 0, "yref": "paper", "y": 1, "yanchor": "bottom"}
    return all(annotation.get(key) == value for key, value in place.items())
