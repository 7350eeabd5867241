"""The runner, figures and gallery, on tiny notebooks; then the real ones in the smoke profile."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from PIL import Image

from anchormass import __main__ as command_line
from anchormass import figures, gallery, paths, study
from anchormass.errors import AnchorMassError

PARAMETERS = """profile: str = "mini"  # size of the models
seed: int = 0
interactive: bool = True
out_dir: str = "figures"
"""
DRAW = """import pandas as pd
import plotly.graph_objects as go
from anchormass import figures
about = {"profile": profile, "seed": seed, "device": "cpu", "commit": "none", "command": "none"}
data = pd.DataFrame({"x": [1, 2, 3], "y": [2.0, 0.5, 1.0]})
fig = go.Figure(go.Scatter(x=data.x, y=data.y)).update_layout(title_text="It falls")
figures.save_figure(fig, "10_falls", out_dir, title_says="Down & up <again>.",
                    notebook="10_draws", data=data, provenance=about)
fig"""
TINY = {
    "10_draws": ["import sys; print(sys.executable, profile, seed, interactive)", DRAW],
    "20_breaks": [
        "# a comment first\nvalue = 1",
        "print('before')\nraise RuntimeError('as meant')",
    ],
    "30_dies": ["import os; os._exit(7)"],
    "40_ends": ["print(budget, text)"],
}


@pytest.fixture(scope="module")
def browser():
    """Pictures must be tested on CI; elsewhere a machine may have no browser."""
    if not figures.find_browser():
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI needs a browser. {figures.browser_advice()}")
        pytest.skip(figures.browser_advice())


def write_notebook(path: Path, sources: list[str], parameters: str = PARAMETERS) -> None:
    cells = [nbformat.v4.new_markdown_cell("# Title")]
    cells += [nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})]
    cells += [nbformat.v4.new_code_cell(source) for source in sources]
    kernel = {"name": "python3", "language": "python", "display_name": "Python 3"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with the tiny notebooks, and a study made of them without preparation."""
    folder = tmp_path_factory.mktemp("notebooks")
    for stem, sources in TINY.items():
        extra = "budget = 64\ntext = 'a'\n" if stem == "40_ends" else ""
        write_notebook(folder / f"{stem}.ipynb", sources, PARAMETERS + extra)
    with pytest.MonkeyPatch.context() as patch:
        listed = tuple(study.Notebook(stem, f"Question of {stem}?") for stem in TINY)
        patch.setattr(study, "NOTEBOOKS", listed)
        patch.setattr(study, "PREPARE_STEPS", (("nothing", lambda profile: f"for {profile}"),))
        # A kernel named python3 that is another program, first on the user's search path.
        other = folder / "jupyter" / "kernels" / "python3"
        other.mkdir(parents=True)
        spec = {"argv": ["/bin/false"], "display_name": "other", "language": "python"}
        (other / "kernel.json").write_text(json.dumps(spec))
        patch.setenv("JUPYTER_PATH", str(folder / "jupyter"))
        yield folder


def reproduce(tiny: Path, out: Path, *arguments: str) -> int:
    given = ["reproduce", "--out", str(out), *arguments]
    return study.reproduce(command_line.parser_for(given).parse_args(given), folder=tiny)


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """Everything once: exit status, what was printed, the output folder."""
    out = tmp_path_factory.mktemp("out")
    with contextlib.redirect_stdout(log := open(out / "log", "w+")):
        status = reproduce(tiny, out, "--seed", "5")
    log.seek(0)
    return status, log.read(), out


def text_of(cell) -> str:
    return "".join(o.get("text", "") for o in cell.get("outputs", []))


# ---------------------------------------------------------------- the runner

runner = pytest.mark.xdist_group("runner")


@runner
def test_failures_are_named_and_the_others_go_on(whole):
    status, printed, out = whole
    assert status == 1
    summary = json.loads((out / "reproduce.json").read_text())
    assert [n["notebook"] for n in summary["notebooks"]] == list(TINY)
    assert [n["status"] for n in summary["notebooks"]] == ["ok", "failed", "failed", "ok"]
    errors = [n["error"] for n in summary["notebooks"]]
    assert errors[1] == "20_breaks, cell 4 (print('before')): RuntimeError: as meant"
    assert errors[2].startswith("30_dies, cell 3 (import os; os._exit(7)): DeadKernelError")
    for error in errors[1:3]:
        assert f"error: {error}" in printed
    assert summary["seed"] == 5
    assert summary["profile"] == "mini"
    assert summary["command"] == "python -m anchormass reproduce --seed 5"
    assert summary["versions"]["torch"]


@runner
def test_closing_table(whole):
    _, printed, out = whole
    rows = [line.split() for line in printed.splitlines() if re.match(r"\d\d_\w+ ", line)]
    assert [row[:2] for row in rows[-4:]] == [
        ["10_draws", "ok"],
        ["20_breaks", "failed"],
        ["30_dies", "failed"],
        ["40_ends", "ok"],
    ]
    made = "1" if figures.find_browser() else "0"
    assert rows[-4][3:] == ["1", made, "1"]
    assert "prepare nothing: for mini" in printed
    assert str(out / "figures" / "index.html") in printed


@runner
def test_kernel_is_this_interpreter_and_gets_the_parameters(whole):
    copy = nbformat.read(whole[2] / "notebooks" / "10_draws.ipynb", as_version=4)
    assert f"{sys.executable} mini 5 False\n" in [text_of(cell) for cell in copy.cells]


@runner
def test_failed_notebook_keeps_its_copy(whole):
    copy = nbformat.read(whole[2] / "notebooks" / "20_breaks.ipynb", as_version=4)
    assert "before\n" in [text_of(cell) for cell in copy.cells]


@runner
def test_copies_and_figures_are_equal_from_run_to_run(tiny, whole):
    out = whole[2]
    kept = [out / "notebooks" / "10_draws.ipynb", *(out / "figures").glob("10_falls.*")]
    kept += [out / "figures" / "manifest.json", out / "figures" / "index.html"]
    before = {path: path.read_bytes() for path in kept}
    copy = json.loads(before[kept[0]])
    assert not {"papermill", "widgets"} & copy["metadata"].keys()
    assert all("papermill" not in cell["metadata"] for cell in copy["cells"])
    assert reproduce(tiny, out, "--seed", "5", "--only", "10") == 0
    for path in kept:
        assert path.read_bytes() == before[path], path.name


@runner
def test_figure_tells_how_to_repeat_it(whole):
    entry = gallery.read_manifest(whole[2] / "figures")[0]
    assert entry["provenance"]["command"] == (
        "python -m anchormass reproduce --seed 5 --only 10_draws"
    )
    assert entry["provenance"]["seed"] == 5


@runner
def test_settings_reach_the_notebook(tiny, tmp_path):
    settings = ["-p", "budget=128", "-p", "text=1, 2"]
    assert reproduce(tiny, tmp_path, "--only", "40", *settings) == 0
    copy = nbformat.read(tmp_path / "notebooks" / "40_ends.ipynb", as_version=4)
    assert text_of(copy.cells[-1]) == "128 1, 2\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "budget=1"], "10_draws has no parameter 'budget': it has none"),
        (["--only", "40", "-p", "bugdet=1"], "40_ends has no parameter 'bugdet'.*budget, text"),
        (["--only", "40", "-p", "budget=many"], "budget=many: must be of type int"),
        (["--only", "40", "-p", "budget"], "write it as name=value"),
        (["--only", "40", "-p", "seed=1"], "see --profile, --seed and --out"),
        (["--only", "99"], "no notebook starts with '99': choose from 10_draws, 20_breaks"),
        (["--timeout", "-1"], "must be above 0"),
    ],
)
@runner
def test_refusals_come_before_anything_runs(tiny, tmp_path, arguments, message):
    with pytest.raises(AnchorMassError, match=message):
        reproduce(tiny, tmp_path, *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("a = 1\nb = 2 * a", "parameter b must be a literal, not '2 \\* a'"),
        ("import os", "only NAME = LITERAL belongs in its parameters cell"),
    ],
)
def test_parameters_cell_of_other_than_literals_is_refused(tmp_path, cell, message):
    write_notebook(tmp_path / "x.ipynb", [], cell)
    with pytest.raises(AnchorMassError, match=message):
        study.declared(tmp_path / "x.ipynb")


def test_values_are_read_by_the_type_of_the_default():
    assert study._value("p", "true", False) is True
    assert study._value("p", "1", 0.5) == 1
    assert study._value("p", "1e-3", 0.5) == 1e-3
    assert study._value("p", "[1, 2]", [0]) == [1, 2]
    assert study._value("p", "12", "words") == "12"
    assert study._value("p", "adaptive", None) == "adaptive"
    for text, default in (("1", False), ("0.5", 3), ("None", 3)):
        with pytest.raises(AnchorMassError, match="must be of type"):
            study._value("p", text, default)


def test_time_limit_names_the_cell(tmp_path):
    write_notebook(tmp_path / "slow.ipynb", ["import time", "time.sleep(600)"])
    out = study.outputs("mini", tmp_path / "out")
    notebook = study.Notebook("slow", "?")
    (result,) = study.run([notebook], profile="mini", seed=0, out=out, timeout=3, folder=tmp_path)
    assert result.error == (
        "slow, cell 4 (time.sleep(600)): still running after the 3 s of --timeout"
    )
    assert result.seconds < 60


def test_interrupt_keeps_what_is_done(tmp_path):
    started = tmp_path / "started"
    wait = f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(600)"
    for stem, source in {"1_done": "print(1)", "2_waits": wait, "3_never": "print(3)"}.items():
        write_notebook(tmp_path / f"{stem}.ipynb", [source])
    script = f"""
import sys, pathlib
from anchormass import __main__, study
study.NOTEBOOKS = tuple(study.Notebook(s, "?") for s in ("1_done", "2_waits", "3_never"))
study.PREPARE_STEPS = ()
study.reproduce.__defaults__ = (pathlib.Path({str(tmp_path)!r}),)
sys.exit(__main__.main(["reproduce", "--out", {str(tmp_path / "out")!r}]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=paths.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 120
    while not started.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors
    assert re.search(r"1_done +ok", printed)
    assert "3_never" not in printed
    summary = json.loads((tmp_path / "out" / "reproduce.json").read_text())
    assert summary["interrupted"]
    assert (tmp_path / "out" / "notebooks" / "1_done.ipynb").is_file()
    assert not (tmp_path / "out" / "notebooks" / "2_waits.ipynb").exists()


# ---------------------------------------------------------------- without a browser


@runner
def test_missing_browser_costs_only_the_pngs(tiny, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "no-such-browser"))
    assert reproduce(tiny, tmp_path, "--only", "10", "40") == 0
    folder = tmp_path / "figures"
    assert sorted(path.name for path in folder.iterdir()) == [
        "10_falls.csv",
        "10_falls.json",
        "index.html",
        "manifest.json",
        "plotly.min.js",
    ]
    assert 'id="json-10_falls"' in (folder / "index.html").read_text()
    assert gallery.read_manifest(folder)[0]["png"] is False
    said = [line for line in capfd.readouterr().err.splitlines() if "PNGs skipped" in line]
    assert len(said) == 1
    assert "no-such-browser is not a working browser" in said[0]
    assert "apt-get install chromium" in said[0]


@pytest.mark.parametrize("program", ["/bin/true", "/bin/false", "/etc/passwd"])
def test_program_that_is_no_browser_is_not_used(monkeypatch, program):
    monkeypatch.setenv("BROWSER_PATH", program)
    assert figures.find_browser() is None


# ---------------------------------------------------------------- figures


def example_figure() -> tuple[go.Figure, pd.DataFrame]:
    data = pd.DataFrame({"context": [4096, 8192, 16384], "MiB": [23.35, 44.41, 86.52]})
    fig = go.Figure(go.Scatter(x=data["context"], y=data["MiB"], name="日本語の凡例"))
    fig.update_layout(title_text="The cache grows with the context until the budget is full 圧縮")
    return fig.update_xaxes(**figures.log2_axis(data["context"])), data


ABOUT = {"profile": "smoke", "seed": 0, "device": "cpu", "commit": "none", "command": "none"}


def save(fig: go.Figure, data: pd.DataFrame, folder: Path, **changes) -> dict[str, Path]:
    arguments = {"title_says": "It grows.", "notebook": "10_draws", "provenance": ABOUT}
    return figures.save_figure(fig, "10_example", folder, data=data, **arguments | changes)


def test_png_decodes_has_its_size_and_shows_something(tmp_path, browser):
    fig, data = example_figure()
    before = fig.to_json()
    written = save(fig, data, tmp_path, width=800, height=400)
    with Image.open(written["png"]) as picture:
        assert picture.size == (1600, 800)
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    assert len(np.unique(pixels, axis=0)) > 50
    blue = np.array([0x00, 0x72, 0xB2])  # the first colour of the palette: a line was drawn
    assert (np.abs(pixels.astype(int) - blue).max(axis=1) < 10).sum() > 500
    assert fig.to_json() == before
    first = written["png"].read_bytes()
    assert save(fig, data, tmp_path, width=800, height=400)["png"].read_bytes() == first


def test_data_and_drawing_are_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("BROWSER_PATH", "none")
    fig, data = example_figure()
    written = save(fig, data, tmp_path)
    assert written.keys() == {"csv", "json"}
    pd.testing.assert_frame_equal(pd.read_csv(written["csv"]), data)
    about = json.loads(written["json"].read_text())
    assert about["title"].startswith("The cache grows")
    assert (about["rows"], about["columns"]) == (3, ["context", "MiB"])
    assert go.Figure(about["figure"]).data[0].name == "日本語の凡例"


@pytest.mark.parametrize("changes", [{"title_says": " "}, {"name": "Bad Name"}, {"title": ""}])
def test_figures_that_do_not_speak_are_refused(tmp_path, changes):
    fig, data = example_figure()
    if "title" in changes:
        fig.update_layout(title_text=changes.pop("title"))
    name = changes.pop("name", "10_example")
    arguments = {"title_says": "s", "notebook": "n", "provenance": ABOUT, **changes}
    with pytest.raises(AnchorMassError, match=f"figure.*{name}"):
        figures.save_figure(fig, name, tmp_path, data=data, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_headline_breaks_between_words_and_japanese_characters():
    text = "a word " * 30
    lines = figures.headline(text, width=400).split("<br>")
    assert len(lines) > 3
    assert " ".join(lines).split() == text.split()
    assert max(map(len, lines)) <= 36
    japanese = "注意の質量を保存したまま圧縮する" * 5
    lines = figures.headline(japanese, width=400).split("<br>")
    assert "".join(lines) == japanese
    assert max(map(len, lines)) <= 18
    assert figures.headline("short") == "short"


def test_long_title_gets_lines_and_room_in_the_picture_only():
    fig, _ = example_figure()
    fig.update_layout(title_text="word " * 60)
    before = fig.to_json()
    picture = figures._fitted(fig, 960)
    breaks = picture.layout.title.text.count("<br>")
    assert breaks > 2
    assert picture.layout.margin.t == figures.TOP + figures.TITLE_LINE * (breaks - 1)
    assert fig.to_json() == before
    assert figures._fitted(fig.update_layout(title_text="a<br>b"), 960) == fig


def test_labels_and_colours():
    labels = [figures.context_label(n) for n in (512, 1000, 1024, 131072, 2**20)]
    assert labels == ["512", "1,000", "1K", "128K", "1M"]
    assert set(figures.MODEL_COLOURS) == {"standard", "anchormass"}
    states = {"sink", "outlier", "background", "merged", "dropped", "tail", "local"}
    assert set(figures.STATE_COLOURS) == states
    used = [*figures.MODEL_COLOURS.values(), *figures.STATE_COLOURS.values()]
    assert len(set(used)) == len(used)


# ---------------------------------------------------------------- manifest and gallery

QUESTIONS = {"10_draws": "What & why?", "20_other": "And then?"}


def test_update_drops_what_a_notebook_no_longer_makes(tmp_path, monkeypatch):
    monkeypatch.setenv("BROWSER_PATH", "none")
    fig, data = example_figure()
    for name, notebook in [("20_c", "20_other"), ("10_b", "10_draws"), ("10_a", "10_draws")]:
        figures.save_figure(
            fig, name, tmp_path, title_says="s", notebook=notebook, data=data, provenance=ABOUT
        )
    entries = gallery.update(tmp_path, QUESTIONS, {"10_draws", "20_other"})
    assert [e["name"] for e in entries] == ["10_b", "10_a", "20_c"]
    for name in ("10_a", "10_b", "20_c"):  # as in a fresh clone: committed files only
        (tmp_path / f"{name}.json").unlink()
    (tmp_path / "20_c.png").write_bytes(b"a picture")
    save(fig, data, tmp_path, notebook="10_draws")
    entries = gallery.update(tmp_path, QUESTIONS, {"10_draws"})
    assert [e["name"] for e in entries] == ["10_example", "20_c"]
    assert not (tmp_path / "10_a.csv").exists()
    assert (tmp_path / "20_c.csv").exists()
    # A run that failed takes nothing away.
    gallery.forget(tmp_path, "10_draws")
    assert len(gallery.update(tmp_path, QUESTIONS, set())) == 2


def test_damaged_manifest_is_named(tmp_path):
    (tmp_path / "manifest.json").write_text('{"figures": [')
    with pytest.raises(AnchorMassError, match="is damaged"):
        gallery.read_manifest(tmp_path)


@pytest.mark.parametrize("width", [700, 1100])
def test_gallery_works_from_disk_without_network(tmp_path, browser, width):
    from playwright.sync_api import sync_playwright

    fig, data = example_figure()
    fig.update_layout(width=1500)  # a fixed width must not make the page scroll sideways
    corner = {"xref": "paper", "x": 0, "yref": "paper", "y": 1, "yanchor": "bottom"}
    fig.add_annotation(text="A caption<br>of two lines", showarrow=False, **corner)
    save(fig, data, tmp_path, title_says="</script> & <b>not bold</b>")
    gallery.update(tmp_path, QUESTIONS, {"10_draws"})
    requests, problems = [], []
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=figures.find_browser(), args=["--no-sandbox"]
        )
        page = chromium.new_page(viewport={"width": width, "height": 900})
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: line.type == "error" and problems.append(line.text))
        page.goto((tmp_path / "index.html").as_uri())
        page.wait_for_selector(".plot .main-svg")
        drawn = page.eval_on_selector(".plot .main-svg", "svg => svg.clientWidth")
        scrolls = page.evaluate("document.documentElement.scrollWidth > innerWidth")
        shown = page.inner_text("article")
        links = page.eval_on_selector_all("article a", "all => all.map(a => a.href)")
        chromium.close()
    assert problems == []
    assert {url.partition(":")[0] for url in requests} <= {"file", "data", "blob"}
    assert 0.75 * width < drawn < width
    assert not scrolls
    assert "</script> & <b>not bold</b>" in shown
    assert "A caption of two lines" in shown
    assert [link.rpartition("/")[2] for link in links] == ["10_example.csv", "10_example.png"]
    for link in links:
        assert (tmp_path / link.rpartition("/")[2]).is_file()


# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("raised", "status", "last"),
    [
        (AnchorMassError("budget 3 is too small: use 16"), 2, "error: budget 3 is too small"),
        (FileNotFoundError(2, "No such file", "x.bin"), 2, "error: [Errno 2] No such file: 'x"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_are_one_line(monkeypatch, capsys, raised, status, last):
    def fail(args, folder=None):
        raise raised

    monkeypatch.setattr(study, "reproduce", fail)
    assert command_line.main(["reproduce"]) == status
    said = capsys.readouterr().err
    assert said.startswith(last)
    assert len(said.splitlines()) == 1
    if status == 2:
        assert command_line.main(["reproduce", "--debug"]) == 2
        assert "Traceback" in capsys.readouterr().err


def test_help_and_version(capsys):
    for arguments, text in (("--help", "examples:"), ("--version", "anchormass 0.")):
        with pytest.raises(SystemExit) as ended:
            command_line.main([arguments])
        assert ended.value.code == 0
        assert text in capsys.readouterr().out
    for command in command_line.COMMANDS:
        with pytest.raises(SystemExit):
            command_line.main([command, "--help"])
        assert f"python -m anchormass {command}" in capsys.readouterr().out


# ---------------------------------------------------------------- the real notebooks

REAL = [n for n in study.NOTEBOOKS if (paths.NOTEBOOKS / f"{n.stem}.ipynb").is_file()]


@pytest.mark.parametrize("notebook", REAL, ids=[n.stem for n in REAL])
def test_notebook_runs_in_smoke(notebook, tmp_path):
    out = study.outputs("smoke", tmp_path)
    (result,) = study.run([notebook], profile="smoke", seed=0, out=out)
    assert result.status == "ok", result.error
    assert result.figures == result.csv >= 1
    assert result.png == (result.figures if figures.find_browser() else 0)
    copy = out.notebooks / f"{notebook.stem}.ipynb"
    assert copy.stat().st_size < 1_000_000
    assert str(paths.ROOT) not in copy.read_text()
