"""Documents to packed tokens on disk, and back: `data build`, `load`.

Notable: a corpus is a folder with `train.bin`, `val.bin`, `long.bin` (uint16, each document
closed by the end-of-text token) and `corpus.json`, written last, which says what is in it.
`long.bin` holds the training documents of at least 4,096 tokens once more. Bins made with
another tokenizer than the one in use are refused: their numbers would mean other text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from anchormass import holdout, paths, sources, tokenizer
from anchormass.errors import AnchorMassError
from anchormass.sources import Document

SPLITS = ("train", "val", "long")
LONG_TOKENS = 4096
DEFAULT = "debian-mini"
SIDECAR_KEYS = (
    "source",
    "tokenizer",
    "tokenizer_sha256",
    "vocab_size",
    "eot",
    "dtype",
    "seed",
    "corpus_sha256",
    "splits",
    "licence",
    "packages",
    "missing",
)


@dataclass(frozen=True)
class Bin:
    """Tokens of one split (uint16, on disk), where its documents start, and the sidecar."""

    tokens: np.ndarray
    documents: np.ndarray
    sidecar: dict[str, Any]


# ---------------------------------------------------------------- reading


def folder_of(name: str | Path) -> Path:
    """A bare name is in the cache; anything with a slash is a folder of the user's."""
    return Path(name) if "/" in str(name) else paths.cache_dir() / "corpus" / name


def available(name: str | Path = DEFAULT) -> bool:
    """Whether `load` would find a built corpus."""
    return (folder_of(name) / "corpus.json").is_file()


def sidecar(name: str | Path = DEFAULT) -> dict[str, Any]:
    """What `corpus.json` says.

    Raises:
        AnchorMassError: not built, or not readable.
    """
    path = folder_of(name) / "corpus.json"
    if not path.is_file():
        raise AnchorMassError(
            f"corpus {str(name)!r} is not built: run `{build_command(name)}` (takes minutes)"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {key: found[key] for key in SIDECAR_KEYS}
    except (ValueError, KeyError, TypeError) as error:
        raise AnchorMassError(f"{path} is damaged: run `{build_command(name)} --force`") from error


def build_command(name: str | Path) -> str:
    return "python -m anchormass data build" + (f" --out {name}" if name != DEFAULT else "")


def load(
    name: str | Path = DEFAULT, split: str = "train", tok: tokenizer.Tokenizer | None = None
) -> Bin:
    """One split of a built corpus.

    Args:
        name: of a corpus in the cache, or its folder.
        split: `train`, `val` or `long`.
        tok: the tokenizer in use; default: the one the corpus names, so the shipped one
            for `mini`.

    Raises:
        AnchorMassError: not built, damaged, or made with another tokenizer.
    """
    if split not in SPLITS:
        raise AnchorMassError(f"split {split!r} is unknown: use one of {', '.join(SPLITS)}")
    about = sidecar(name)
    folder = folder_of(name)
    if tok is None:
        own = about["tokenizer"] == "mini"
        tok = tokenizer.load("mini" if own else folder / about["tokenizer"])
    if tok.sha256 != about["tokenizer_sha256"]:
        raise AnchorMassError(
            f"corpus {str(name)!r} was made with tokenizer {about['tokenizer_sha256'][:12]}, not "
            f"{tok.sha256[:12]} ({tok.path.name}): run `{build_command(name)} --force`"
        )
    path = folder / f"{split}.bin"
    expected = about["splits"][split]["tokens"]
    if not path.is_file() or path.stat().st_size != 2 * expected:
        raise AnchorMassError(
            f"{path} is missing or cut short (expected {expected:,} tokens): "
            f"run `{build_command(name)} --force`"
        )
    if not expected:  # an empty file cannot be mapped
        return Bin(np.zeros(0, np.uint16), np.zeros(0, np.int64), about)
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    ends = np.flatnonzero(tokens == about["eot"]) + 1
    return Bin(tokens, np.concatenate([[0], ends[:-1]]), about)


# ---------------------------------------------------------------- building


def corpus_hash(documents: Iterable[Document]) -> str:
    total = hashlib.sha256()
    for document in documents:
        total.update(f"{document.id}\n{document.text}\n".encode())
    return total.hexdigest()


def encode(documents: list[Document], tok: tokenizer.Tokenizer, what: str) -> list[np.ndarray]:
    """Tokens of each document, the end-of-text token last."""
    return [
        np.array([*tok.encode(d.text), tok.eot], dtype=np.uint16)
        for d in tqdm(documents, desc=f"tokens of {what} text", unit="doc")
    ]


def write_split(path: Path, documents: list[Document], tokens: list[np.ndarray]) -> dict[str, int]:
    with paths.atomic_path(path) as temporary, temporary.open("wb") as out:
        for part in tokens:
            out.write(part.tobytes())
    return {
        "documents": len(documents),
        "characters": sum(len(d.text) for d in documents),
        "bytes": sum(len(d.text.encode()) for d in documents),
        "tokens": sum(len(t) for t in tokens),
        "long_documents": sum(len(t) > LONG_TOKENS for t in tokens),
    }


def tokenizer_for(
    choice: str,
    folder: Path,
    training: list[Document],
    vocab_size: int,
    seed: int,
    about: dict[str, Any],
) -> tuple[str, tokenizer.Tokenizer]:
    """(its name in the sidecar, the tokenizer); any but the shipped one is kept in the folder."""
    if choice == "mini":
        return choice, tokenizer.load("mini")
    own = folder / "tokenizer.model"
    if choice == "train":
        texts = (d.text for d in tqdm(training, desc="text for the tokenizer", unit="doc"))
        return own.name, tokenizer.train(texts, own, vocab_size, seed, about)
    tok = tokenizer.load(choice)
    if len(tok) > 2**16:
        raise AnchorMassError(f"{choice}: {len(tok):,} tokens do not fit uint16: at most 65,536")
    if tok.path.resolve() != own.resolve():
        with paths.atomic_path(own) as temporary:
            shutil.copyfile(tok.path, temporary)
        own.with_suffix(".json").unlink(missing_ok=True)  # it described another model
    return own.name, tok


def build(
    source: str = "debian",
    out: str | Path | None = None,
    tokenizer_choice: str = "mini",
    vocab_size: int = tokenizer.VOCAB_SIZE,
    seed: int = 0,
    offline: bool = False,
    force: bool = False,
    max_documents: int = 200_000,
) -> dict[str, Any]:
    """Fetch, clean, split and encode; returns the sidecar.

    Args:
        source: `debian`, `hub` or a folder.
        out: a name in the cache or a folder; default: source and tokenizer, `debian-mini`.
        tokenizer_choice: `mini`, a model file, or `train` for a new one in the folder.
        vocab_size: of a new tokenizer.
        seed: of the split, the order of documents and a new tokenizer.
        offline: use only what is in the cache.
        force: build again over what is there.
        max_documents: of each hub dataset.
    """
    made_for = "mini" if tokenizer_choice == "mini" else Path(tokenizer_choice).stem
    name = out or f"{Path(source).resolve().name}-{made_for}"
    folder = folder_of(name)
    if available(name) and not force:
        about = sidecar(name)
        made = f"{about['source']}, tokenizer {about['tokenizer']}, seed {about['seed']}"
        print(f"corpus {str(name)!r} is there already ({made}): --force builds it again")
        return about
    if not 256 < vocab_size <= 2**16:
        raise AnchorMassError(f"--vocab-size {vocab_size}: must be 257 to 65,536 (uint16)")
    raw, about = sources.load(source, offline, max_documents)
    documents, shares = holdout.drop_repeats(raw)
    training, held_out = holdout.split(documents, shares, seed)
    folder.mkdir(parents=True, exist_ok=True)
    origin = {
        "source": source if source in ("debian", "hub") else Path(source).resolve().name,
        "corpus_sha256": corpus_hash(documents),
    }
    tokenizer_name, tok = tokenizer_for(
        tokenizer_choice, folder, training, vocab_size, seed, {"split": "train", **origin}
    )
    train_tokens = encode(training, tok, "training")
    val_tokens = encode(held_out, tok, "held-out")
    long = [i for i, tokens in enumerate(train_tokens) if len(tokens) > LONG_TOKENS]
    # Without a sidecar a folder counts as not built, should this be interrupted.
    (folder / "corpus.json").unlink(missing_ok=True)
    splits = {
        "train": write_split(folder / "train.bin", training, train_tokens),
        "val": write_split(folder / "val.bin", held_out, val_tokens),
        "long": write_split(
            folder / "long.bin", [training[i] for i in long], [train_tokens[i] for i in long]
        ),
    }
    result = {
        **origin,
        "tokenizer": tokenizer_name,
        "tokenizer_sha256": tok.sha256,
        "vocab_size": len(tok),
        "eot": tok.eot,
        "dtype": "uint16",
        "seed": seed,
        "splits": splits,
        **about,
    }
    with paths.atomic_path(folder / "corpus.json") as temporary:
        text = json.dumps(result, ensure_ascii=False, indent=1)
        temporary.write_text(text + "\n", encoding="utf-8")
    return result


# ---------------------------------------------------------------- command line


def table(about: dict[str, Any]) -> str:
    """The sidecar for people."""
    lines = [
        f"source      {about['source']} ({about['licence']})",
        f"tokenizer   {about['tokenizer']}, {about['vocab_size']:,} tokens, "
        f"sha256 {about['tokenizer_sha256'][:12]}",
        f"corpus      sha256 {about['corpus_sha256'][:12]}, seed {about['seed']}",
        "",
        f"{'split':6} {'documents':>10} {'characters':>12} {'tokens':>11} "
        f"{'>=4,096':>8} {'bytes/token':>12}",
    ]
    for name, s in about["splits"].items():
        lines.append(
            f"{name:6} {s['documents']:10,} {s['characters']:12,} {s['tokens']:11,} "
            f"{s['long_documents']:8,} {s['bytes'] / max(1, s['tokens']):12.2f}"
        )
    if about["packages"]:
        lines += ["", f"{'package':36} {'documents':>10} {'characters':>12}  version, licence"]
    for name, p in about["packages"].items():
        lines.append(
            f"{name:36} {p['documents']:10,} {p['characters']:12,}  {p['version']}, {p['licence']}"
        )
    lines += [f"{name:36} left out: {why}" for name, why in about["missing"].items()]
    return "\n".join(lines)


def add_parser(subparsers: Any) -> None:
    """Add the command `data`."""
    parser = subparsers.add_parser(
        "data", help="build or describe training text", description=__doc__.split("\n")[0]
    )
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    made = commands.add_parser(
        "build",
        help="fetch text, split it, write tokens",
        description="Fetch, clean, split and encode text. Every step is kept in the cache: an "
        "interrupted build goes on, a repeat needs no network.",
        epilog="examples: python -m anchormass data build; "
        "python -m anchormass data build --source ~/texts --out mine --tokenizer train",
    )
    made.add_argument(
        "--source",
        default="debian",
        metavar="debian|hub|DIR",
        help="Debian's Japanese documentation and Tatoeba (default), hub datasets, your own files",
    )
    made.add_argument(
        "--out",
        metavar="NAME|DIR",
        help="name in the cache, or a folder (with a slash); default SOURCE-TOKENIZER",
    )
    made.add_argument(
        "--tokenizer",
        default="mini",
        metavar="mini|FILE|train",
        help="the shipped one (default), a model file, or a new one trained on this text",
    )
    made.add_argument(
        "--vocab-size",
        type=int,
        default=tokenizer.VOCAB_SIZE,
        metavar="N",
        help=f"of a new tokenizer (default {tokenizer.VOCAB_SIZE})",
    )
    made.add_argument("--seed", type=int, default=0, help="of the split and a new tokenizer")
    made.add_argument(
        "--max-documents", type=int, default=200_000, metavar="N", help="of each hub dataset"
    )
    made.add_argument("--offline", action="store_true", help="use only what is in the cache")
    made.add_argument("--force", action="store_true", help="build again over what is there")
    made.set_defaults(run=run_build)
    info = commands.add_parser(
        "info",
        help="what a built corpus holds",
        epilog="example: python -m anchormass data info debian-mini",
    )
    info.add_argument("name", nargs="?", default=DEFAULT, help=f"default {DEFAULT}")
    info.set_defaults(run=run_info)


def run_build(args: argparse.Namespace) -> None:
    about = build(
        args.source,
        args.out,
        args.tokenizer,
        args.vocab_size,
        args.seed,
        args.offline,
        args.force,
        args.max_documents,
    )
    print(table(about))


def run_info(args: argparse.Namespace) -> None:
    print(f"folder      {folder_of(args.name)}")
    print(table(sidecar(args.name)))
