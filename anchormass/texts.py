"""Text for the notebooks: held-out text where the corpus is built, else the shipped sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anchormass import corpus, tokenizer
from anchormass.errors import AnchorMassError
from anchormass.paths import DATA

SAMPLE = DATA / "sample.ja.txt"


@dataclass(frozen=True)
class Text:
    """Token ids `[1, T]`, what each token reads as, and where the text is from."""

    ids: Tensor
    pieces: list[str]
    source: str


def example(profile: str, n_tokens: int, text: str = "", document: int = 0) -> Text:
    """`n_tokens` of Japanese text.

    Args:
        profile: `"smoke"` always takes the shipped sample, which needs nothing built; the
            others take held-out text when the corpus is built, else the sample, and say so.
        n_tokens: how many; a shorter source gives fewer.
        text: the reader's own text, used instead when not empty.
        document: which held-out document (those of at least `n_tokens` come first).

    Raises:
        AnchorMassError: no text at all.
    """
    tok = tokenizer.load()
    if text.strip():
        ids, source = tok.encode(text), "your text"
    elif profile != "smoke" and corpus.available():
        held_out = corpus.load(split="val")
        start = _document_start(held_out, n_tokens, document)
        ids = held_out.tokens[start : start + n_tokens].tolist()
        source = f"held-out text ({held_out.sidecar['source']}), token {start:,}"
    else:
        ids, source = tok.encode(SAMPLE.read_text(encoding="utf-8")), "data/sample.ja.txt"
    ids = [int(i) for i in ids[:n_tokens]]
    if not ids:
        raise AnchorMassError("the text is empty: type at least one character")
    return Text(torch.tensor([ids]), tok.pieces(ids), source)


def _document_start(held_out: corpus.Bin, n_tokens: int, document: int) -> int:
    starts = [int(s) for s in held_out.documents]
    ends = [*starts[1:], len(held_out.tokens)]
    long_first = sorted(range(len(starts)), key=lambda i: ends[i] - starts[i] < n_tokens)
    return starts[long_first[document % len(starts)]]
