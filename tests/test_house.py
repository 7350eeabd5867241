"""What keeps the repository in order: notebooks, packaging, committed figures, no stray paths."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib

import nbformat
import numpy as np
import pandas as pd
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image

from anchormass import figures, gallery, paths, study

NOTEBOOKS = sorted(paths.NOTEBOOKS.glob("*.ipynb"))
PROJECT = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]


def code_lines(source: str) -> list[str]:
    """Lines that are neither empty nor comments."""
    lines = (line.strip() for line in source.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


# ---------------------------------------------------------------- notebooks


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_rules(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = notebook.cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata
    assert len(cells) <= 25
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    assert sum(len(code_lines(cell.source)) for cell in code) <= 130
    definitions = 0
    for cell in code:
        assert cell.outputs == []
        assert cell.execution_count is None
        assert len(cell.source.splitlines()) <= 20, cell.source
        tree = ast.parse(cell.source)
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        assert not any(isinstance(node, ast.ClassDef) for node in found)
        definitions += len(found)
    assert definitions <= 1, "one callback at most: the rest belongs in the package"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_parameters(path):
    known = study.declared(path)
    assert list(known)[:4] == list(study.STANDARD_PARAMETERS)
    assert known["profile"] == "mini"
    assert known["interactive"] is True
    assert known["out_dir"] == "figures"
    cells = nbformat.read(path, as_version=4).cells
    (cell,) = [c for c in cells if "parameters" in c.metadata.get("tags", [])]
    for line in code_lines(cell.source):
        assert re.match(r"\w+(: .+)? = .+  # .+", line), f"say what it is for: {line}"


def test_every_notebook_is_in_the_study():
    assert {path.stem for path in NOTEBOOKS} <= {n.stem for n in study.NOTEBOOKS}


# ---------------------------------------------------------------- packaging


def test_environment_lists_what_the_package_needs():
    environment = yaml.safe_load((paths.ROOT / "environment.yml").read_text())
    python, pip, listed = environment["dependencies"]
    assert environment["channels"] == ["conda-forge"]
    assert python == f"python{PROJECT['requires-python']}"
    assert pip == "pip"
    options = [line for line in listed["pip"] if line.startswith("-")]
    assert options == ["-c constraints.txt", "-e ."]
    assert [line for line in listed["pip"] if line not in options] == PROJECT["dependencies"]


def test_constraints_pin_every_direct_dependency():
    lines = (paths.ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pairs}
    assert not any("+" in version for version in pins.values()), "no local versions like +cpu"
    for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]:
        needed = Requirement(line)
        assert needed.specifier.contains(pins[canonicalize_name(needed.name)]), line
    assert pins["torch"] == "2.13.0"


# ---------------------------------------------------------------- committed files


def committed() -> list[str]:
    listed = subprocess.run(
        ["git", "-C", paths.ROOT, "ls-files", "-z"], capture_output=True, text=True
    )
    return [name for name in listed.stdout.split("\0") if name]


def test_no_path_of_one_machine_is_committed():
    pattern = re.compile(rb"(?<![\w.])/(?:root|home/\w+|Users/\w+|work/(?:main|shared))/")
    for name in committed():
        path = paths.ROOT / name
        if path.is_file() and not name.startswith("data/"):
            found = pattern.search(path.read_bytes())
            assert not found, f"{name}: {found[0]!r}"


COMMITTED_FIGURES = gallery.read_manifest(paths.FIGURES)


@pytest.mark.parametrize("entry", COMMITTED_FIGURES, ids=lambda entry: entry["name"])
def test_committed_figure(entry):
    name = entry["name"]
    data = pd.read_csv(paths.FIGURES / f"{name}.csv")
    assert len(data) == entry["rows"]
    assert list(data.columns) == entry["columns"]
    with Image.open(paths.FIGURES / f"{name}.png") as picture:
        assert picture.size == (figures.SCALE * entry["width"], figures.SCALE * entry["height"])
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    assert len(np.unique(pixels, axis=0)) > 20, "blank"


def test_manifest_lists_the_committed_figures():
    names = {e["name"] for e in COMMITTED_FIGURES}
    files = {path.stem for path in paths.FIGURES.glob("*.png")}
    assert files == names
    assert json.dumps(COMMITTED_FIGURES).isprintable()
