"""The study: the ordered notebooks, and the command that runs them.

Everything that can be refused is refused before the first notebook runs; after that a
notebook that fails is named with its cell and the others go on.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from anchormass import paths
from anchormass.errors import AnchorMassError
from anchormass.provenance import provenance
from anchormass.runner import Result, kernel_environment, run_notebook

PROFILES = ("smoke", "mini", "paper")
# Set by the command itself; every notebook declares them.
STANDARD_PARAMETERS = ("profile", "seed", "interactive", "out_dir")
TIMEOUT = 1800  # seconds for one notebook


class Notebook(NamedTuple):
    stem: str
    question: str


NOTEBOOKS = (
    Notebook("00_start_here", "What does AnchorMass keep, and what does it save?"),
    Notebook("01_outlier_slots", "Which tokens get a slot of their own?"),
    Notebook("02_mass_maps", "What does log-mass do to attention?"),
    Notebook("03_merge_evolution", "What does each policy lose when the budget is full?"),
)


# ---------------------------------------------------------------- preparation


def _prepare_tokenizer(profile: str) -> str:
    from anchormass import tokenizer

    tok = tokenizer.load()
    return f"{tok.path.name}, {len(tok):,} tokens"


def _prepare_checkpoints(profile: str) -> str:
    from anchormass import checkpoints

    if profile == "smoke":
        return "none needed: random weights"
    size = {"mini": "mini", "paper": "150m"}[profile]
    names = [f"{model}-{size}" for model in ("standard", "anchormass")]
    missing = [n for n in names if not (checkpoints.CHECKPOINTS / f"{n}.safetensors").is_file()]
    if missing:
        return f"missing: {', '.join(missing)}; a notebook that needs them will say so"
    return ", ".join(names)


def _prepare_corpus(profile: str) -> str:
    from anchormass import corpus

    if profile == "smoke":
        return "none needed"
    if profile == "paper" and not corpus.available():
        return "not built: run `python -m anchormass data build --source hub`"
    built = "built"
    if not corpus.available():
        try:
            corpus.build()
        except (AnchorMassError, OSError) as error:
            return f"not built, so the notebooks use the short sample text ({error})"
        built = "built now"
    return f"{corpus.DEFAULT}, {built}{_other_text(corpus.sidecar()['corpus_sha256'])}"


def _other_text(corpus_hash: str) -> str:
    """Says so where the shipped models were trained on another version of the text."""
    from anchormass import checkpoints

    path = checkpoints.CHECKPOINTS / "anchormass-mini.safetensors"
    trained_on = checkpoints.load_model(path)[1]["corpus_sha256"] if path.is_file() else corpus_hash
    if trained_on == corpus_hash:
        return ""
    return (
        f", of other versions (hash {corpus_hash[:12]}) than the shipped models were trained on "
        f"({trained_on[:12]}): held-out text here may have been training text there"
    )


# (label, step): a step takes the profile and says in a few words what it found or did.
PREPARE_STEPS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("tokenizer", _prepare_tokenizer),
    ("checkpoints", _prepare_checkpoints),
    ("corpus", _prepare_corpus),
)


def prepare(profile: str) -> None:
    """Run every step, a line each. A step that makes the study impossible raises."""
    for label, step in PREPARE_STEPS:
        print(f"prepare {label}: {step(profile)}", flush=True)


# ---------------------------------------------------------------- what to run, with what


def declared(path: Path) -> dict[str, Any]:
    """Names and defaults in the cell tagged `parameters`.

    Raises:
        AnchorMassError: unreadable, no such cell, or something else than literals in it.
    """
    import nbformat

    try:
        cells = nbformat.read(path, as_version=4).cells
    except (OSError, ValueError) as error:
        raise AnchorMassError(f"{path} is not a readable notebook: {error}") from error
    sources = [c.source for c in cells if "parameters" in c.metadata.get("tags", [])]
    if len(sources) != 1:
        raise AnchorMassError(f"{path.name} has {len(sources)} cells tagged 'parameters', not 1")
    found = {}
    for statement in ast.parse(sources[0]).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case _:
                raise AnchorMassError(
                    f"{path.name}: only NAME = LITERAL belongs in its parameters cell, "
                    f"not {ast.unparse(statement)!r}"
                )
        try:
            found[name] = ast.literal_eval(value)
        except ValueError as error:
            raise AnchorMassError(
                f"{path.name}: parameter {name} must be a literal, not {ast.unparse(value)!r}"
            ) from error
    return found


def select(only: Sequence[str], folder: Path) -> tuple[Notebook, ...]:
    """The notebooks whose name starts with one of `only` (all for an empty one), in order."""
    for prefix in only:
        if not prefix or not any(n.stem.startswith(prefix) for n in NOTEBOOKS):
            choices = ", ".join(n.stem for n in NOTEBOOKS)
            raise AnchorMassError(f"no notebook starts with {prefix!r}: choose from {choices}")
    chosen = tuple(n for n in NOTEBOOKS if not only or n.stem.startswith(tuple(only)))
    for notebook in chosen:
        if not (path := folder / f"{notebook.stem}.ipynb").is_file():
            raise AnchorMassError(f"{path} is missing: restore it with git checkout")
    return chosen


def overrides(settings: Sequence[str], notebook: Path) -> dict[str, Any]:
    """`name=value` settings as values of the types that the notebook declares.

    Raises:
        AnchorMassError: a name it does not declare, or a value of another type.
    """
    known = declared(notebook)
    own = [name for name in known if name not in STANDARD_PARAMETERS]
    chosen = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise AnchorMassError(f"-p {setting}: write it as name=value")
        if name in STANDARD_PARAMETERS:
            raise AnchorMassError(
                f"-p {name}: the command sets it; see --profile, --seed and --out"
            )
        if name not in known:
            raise AnchorMassError(
                f"{notebook.stem} has no parameter {name!r}: it has {', '.join(own) or 'none'} "
                "(--only chooses the notebooks that a setting is for)"
            )
        chosen[name] = _value(name, text, known[name])
    return chosen


def _value(name: str, text: str, default: Any) -> Any:
    """`text` as a Python literal; as itself where the default is a string, or it is none."""
    if isinstance(default, str):
        return text
    try:
        value = ast.literal_eval({"true": "True", "false": "False", "null": "None"}.get(text, text))
    except (ValueError, SyntaxError):
        value = text
    fits = type(value) is type(default) or (isinstance(default, float) and type(value) is int)
    if default is not None and not fits:
        raise AnchorMassError(
            f"-p {name}={text}: must be of type {type(default).__name__}, like {default!r}"
        )
    return value


class Outputs(NamedTuple):
    notebooks: Path
    figures: Path
    summary: Path


def outputs(profile: str, out: Path | None) -> Outputs:
    """Everything below `out`; by default `build/`, and `figures/` for all but smoke runs."""
    build = out.resolve() if out else paths.ROOT / "build"
    figures = build / "figures"
    if not out:
        figures = build / "figures-smoke" if profile == "smoke" else paths.FIGURES
    return Outputs(build / "notebooks", figures, build / "reproduce.json")


def command_line(profile: str, seed: int, only: Sequence[str], settings: Sequence[str]) -> str:
    """How to get the same again; says nothing of defaults."""
    words = ["python", "-m", "anchormass", "reproduce"]
    words += ["--profile", profile] if profile != "mini" else []
    words += ["--seed", str(seed)] if seed else []
    words += ["--only", *only] if only else []
    for setting in settings:
        words += ["-p", setting]
    return shlex.join(words)


def run(
    notebooks: Sequence[Notebook],
    *,
    profile: str,
    seed: int,
    out: Outputs,
    settings: Sequence[str] = (),
    timeout: float = TIMEOUT,
    folder: Path = paths.NOTEBOOKS,
) -> Iterator[Result]:
    """Run notebooks in order, one result each as it ends. Refusals come before the first runs."""
    from tqdm.auto import tqdm

    from anchormass import figures

    parameters = {n.stem: overrides(settings, folder / f"{n.stem}.ipynb") for n in notebooks}
    relative = out.figures.is_relative_to(paths.ROOT)
    for own in parameters.values():
        own |= {"profile": profile, "seed": seed, "interactive": False}
        # Relative where it can be: an executed copy then says nothing of this machine.
        own["out_dir"] = str(out.figures.relative_to(paths.ROOT) if relative else out.figures)
    bar = tqdm(notebooks, unit="notebook", disable=None, leave=False)
    with kernel_environment(), bar:
        for stem, _ in bar:
            os.environ[figures.COMMAND_VARIABLE] = command_line(profile, seed, [stem], settings)
            source = folder / f"{stem}.ipynb"
            result = run_notebook(source, parameters[stem], out.notebooks, out.figures, timeout)
            line = f"{stem}: {result.status}, {result.seconds:.1f} s, {result.figures} figures"
            tqdm.write(line if result.status == "ok" else f"{line}\nerror: {result.error}")
            yield result


# ---------------------------------------------------------------- command line


def closing_table(results: Sequence[Result]) -> str:
    width = max([8, *(len(r.notebook) for r in results)])
    lines = [f"{'notebook':{width}}  status  seconds  figures  PNG  CSV"]
    for r in results:
        lines.append(
            f"{r.notebook:{width}}  {r.status:6}  {r.seconds:7.1f}  {r.figures:7}  "
            f"{r.png:3}  {r.csv:3}"
        )
    return "\n".join(lines)


def add_parser(subparsers: Any) -> None:
    """Add the command `reproduce`."""
    parser = subparsers.add_parser(
        "reproduce",
        help="run the notebooks, write figures and gallery",
        description="Run the study: every notebook in order, figures as PNG, CSV and one "
        "interactive page. A notebook that fails does not stop the others.",
        epilog="examples: python -m anchormass reproduce; "
        "python -m anchormass reproduce --only 02 03 --profile smoke; "
        "python -m anchormass reproduce --only 03 -p budget=512",
    )
    parser.add_argument(
        "--profile", choices=PROFILES, default="mini", help="size of the models (default mini)"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="STEM", help="notebooks whose name starts so"
    )
    parser.add_argument(
        "-p",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a parameter of the chosen notebooks; may be repeated",
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default 0)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="put notebooks, figures and the summary there (default build/, and figures/)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="SECONDS",
        help=f"for one notebook (default {TIMEOUT})",
    )
    parser.add_argument(
        "--prepare-only", action="store_true", help="check and fetch what is needed, run nothing"
    )
    parser.set_defaults(run=reproduce)


def reproduce(args: argparse.Namespace, folder: Path = paths.NOTEBOOKS) -> int:
    """The command; 0 when every notebook ran to its end, else 1."""
    from anchormass import figures, gallery

    if args.timeout <= 0:
        raise AnchorMassError(f"--timeout {args.timeout:g}: must be above 0")
    start = time.monotonic()
    notebooks = () if args.prepare_only else select(args.only, folder)
    for notebook in notebooks:  # refused before the preparation, which may take minutes
        overrides(args.settings, folder / f"{notebook.stem}.ipynb")
    prepare(args.profile)
    if args.prepare_only:
        return 0
    out = outputs(args.profile, args.out)
    results: list[Result] = []
    interrupted = False
    try:
        for result in run(
            notebooks,
            profile=args.profile,
            seed=args.seed,
            out=out,
            settings=args.settings,
            timeout=args.timeout,
            folder=folder,
        ):
            results.append(result)
    except KeyboardInterrupt:
        interrupted = True
    finished = {r.notebook for r in results if r.status == "ok"}
    gallery.update(out.figures, dict(NOTEBOOKS), finished)
    summary = {
        **provenance(args.profile, args.seed),
        "command": command_line(args.profile, args.seed, args.only, args.settings),
        "seconds": round(time.monotonic() - start, 1),
        "interrupted": interrupted,
        "notebooks": [asdict(r) for r in results],
    }
    with paths.atomic_path(out.summary) as temporary:
        text = json.dumps(summary, ensure_ascii=False, indent=1)
        temporary.write_text(text + "\n", encoding="utf-8")
    print(f"\n{closing_table(results)}\n\ngallery: {out.figures / 'index.html'}", flush=True)
    if not figures.find_browser():
        print(figures.browser_advice(), file=sys.stderr)
    if interrupted:
        raise KeyboardInterrupt
    return 0 if len(finished) == len(notebooks) else 1
