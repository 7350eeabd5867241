"""Repeats out, and held-out documents that training text does not give away.

Notable: the choice is by a hash of seed and document, before tokens exist, so it is the
same for every tokenizer. Held-out text is purged against training text by exact paragraph
and by runs of 16 characters: manual pages share boilerplate that differs by a word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from tqdm import tqdm

from anchormass.errors import AnchorMassError
from anchormass.sources import Document

VAL_CHARACTERS = 500_000  # about 0.3 M tokens of the mini tokenizer
VAL_SHARE = 0.05  # at most so much of a small corpus
# Held-out text by document length in characters, so that contexts of 4K and 8K tokens
# can be evaluated inside one document: (at least, share of the held-out text).
VAL_LENGTHS = ((15_000, 0.3), (7_500, 0.25), (0, 0.45))
VAL_LARGEST = 0.12  # no single document is more of it than this
RUN = 16


def key(paragraph: str) -> str:
    """Two paragraphs with the same key are repeats: white space does not count."""
    return "".join(paragraph.split())


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def drop_repeats(documents: Iterable[Document]) -> tuple[list[Document], list[float]]:
    """Documents without paragraphs seen before, and the share of each that was kept."""
    seen: set[bytes] = set()
    kept_documents, shares = [], []
    for document in documents:
        kept = []
        for paragraph in document.text.split("\n"):
            if (mark := digest(key(paragraph))) not in seen:
                seen.add(mark)
                kept.append(paragraph)
        if kept:
            text = "\n".join(kept)
            kept_documents.append(replace(document, text=text))
            shares.append(len(text) / len(document.text))
    return kept_documents, shares


def choose(documents: list[Document], shares: list[float], seed: int) -> set[str]:
    """Ids of held-out documents; one that is mostly repeats is not eligible."""
    target = min(VAL_CHARACTERS, VAL_SHARE * sum(len(d.text) for d in documents))
    eligible = [d for d, share in zip(documents, shares, strict=True) if share >= 0.5]
    order = sorted(eligible, key=lambda d: digest(f"{seed}:{d.id}"))
    chosen: set[str] = set()
    for at_least, share in VAL_LENGTHS:
        room = share * target
        for document in order:
            size = len(document.text)
            if room <= 0:
                break
            if document.id not in chosen and at_least <= size <= VAL_LARGEST * target:
                chosen.add(document.id)
                room -= size
    # In a small corpus every document may be larger than the limit: hold one out all the same.
    return chosen or {d.id for d in order[:1]}


def runs(text: str) -> np.ndarray:
    """Hashes of every run of 16 characters, white space left out; uint64 `[n]`, in order."""
    codes = np.frombuffer(key(text).encode("utf-32-le"), dtype=np.uint32).astype(np.uint64)
    count = max(0, len(codes) - RUN + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(RUN):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + codes[offset : offset + count]
    return hashes


def purge(held_out: list[Document], training: list[Document]) -> list[Document]:
    """Held-out documents without what training text holds, exactly or nearly.

    A paragraph goes if half of its runs occur in training text; a document goes if half of
    its characters did. Memory grows with the held-out text alone.
    """
    own = np.unique(np.concatenate([runs(d.text) for d in held_out]))
    in_training = np.zeros(len(own), dtype=bool)
    exact: set[bytes] = set()
    for document in tqdm(training, desc="held-out text against training text", unit="doc"):
        exact.update(digest(key(p)) for p in document.text.split("\n"))
        if len(own):
            others = runs(document.text)
            where = np.minimum(np.searchsorted(own, others), len(own) - 1)
            in_training[where[own[where] == others]] = True
    result = []
    for document in held_out:
        kept = []
        for paragraph in document.text.split("\n"):
            where = np.searchsorted(own, runs(paragraph))
            near = len(where) > 0 and bool(in_training[where].mean() >= 0.5)
            if not near and digest(key(paragraph)) not in exact:
                kept.append(paragraph)
        text = "\n".join(kept)
        if len(text) >= 0.5 * len(document.text):
            result.append(replace(document, text=text))
    return result


def split(
    documents: list[Document], shares: list[float], seed: int
) -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents in an order fixed by the seed.

    Args:
        documents: without repeats.
        shares: what `drop_repeats` kept of each.
        seed: chooses and orders.
    """
    chosen = choose(documents, shares, seed)
    order = sorted(documents, key=lambda d: digest(f"{seed}:{d.id}"))
    training = [d for d in order if d.id not in chosen]
    held_out = [d for d in order if d.id in chosen]
    if training and held_out:
        held_out = purge(held_out, training)
    if not training or not held_out:
        raise AnchorMassError(
            f"{len(documents)} document(s) leave nothing to train on or to hold out: "
            "add documents that differ"
        )
    return training, held_out
