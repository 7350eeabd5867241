"""Text to token ids and back: sentencepiece BPE that loses nothing.

Notable: no normalisation, no dummy prefix, byte fallback and one token for the line break,
so that decode(encode(text)) == text (but for U+2581, sentencepiece's own mark of a space).
Digits are one token each: a passkey costs as many tokens as it has digits.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from anchormass import paths
from anchormass.errors import AnchorMassError

SHIPPED = paths.DATA / "tokenizer"
EOT = "<|endoftext|>"
# Names only: the instruction stages give them meaning.
CONTROLS = (
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|question|>",
    "<|answer|>",
    "<|choices|>",
    "<|context|>",
    "<|reserved|>",
)
VOCAB_SIZE = 4096
PARAGRAPHS = 400_000  # trained on at most so many, drawn evenly


class Tokenizer:
    """A trained model file.

    Attributes:
        path: the file.
        sha256: of the file; two with the same hash cut text in the same way.
        eot: id of the token that closes a document.
    """

    path: Path
    sha256: str
    eot: int

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise AnchorMassError(
                f"tokenizer {str(path)!r} is missing: use 'mini', or train one with "
                "`python -m anchormass data build --tokenizer train`"
            )
        data = self.path.read_bytes()
        self.sha256 = hashlib.sha256(data).hexdigest()
        if (known := _recorded_hash(self.path)) and known != self.sha256:
            raise AnchorMassError(
                f"tokenizer {str(path)!r} is not the file that {self.path.stem}.json describes: "
                "restore it, or train it again"
            )
        try:
            self._model = sentencepiece.SentencePieceProcessor()
            self._model.load_from_serialized_proto(data)  # refuses an empty file, too
            self.eot = self._model.piece_to_id(EOT)
        except RuntimeError as error:
            raise AnchorMassError(
                f"tokenizer {str(path)!r} is not a sentencepiece model: restore or retrain it"
            ) from error
        if self.eot == self._model.unk_id():
            raise AnchorMassError(
                f"tokenizer {str(path)!r} has no {EOT} token: train one with "
                "`python -m anchormass data build --tokenizer train`"
            )

    def __len__(self) -> int:
        return int(self._model.get_piece_size())

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; names of special tokens in it are plain text."""
        return list(self._model.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens vanish, a character cut in half reads U+FFFD."""
        return str(self._model.decode([int(i) for i in ids]))

    def id(self, special: str) -> int:
        """Id of a special token such as `<|user|>`."""
        if special not in (EOT, *CONTROLS):
            raise AnchorMassError(
                f"{special!r} is not a special token: use one of {', '.join((EOT, *CONTROLS))}"
            )
        return int(self._model.piece_to_id(special))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Readable text of each token; one byte of a rare character reads like <0xE3>."""
        return [self._model.id_to_piece(int(i)).replace("\u2581", " ") for i in ids]


def _recorded_hash(path: Path) -> str | None:
    """What the sidecar beside a model says its hash is; a model needs no sidecar."""
    beside = path.with_suffix(".json")
    if not beside.is_file():
        return None
    try:
        return str(json.loads(beside.read_text(encoding="utf-8"))["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise AnchorMassError(f"{beside} is damaged: restore it, or remove it") from error


def load(name_or_path: str | Path = "mini") -> Tokenizer:
    """`mini` is the one shipped with the package; anything else is a model file."""
    return Tokenizer(SHIPPED / "mini.model" if str(name_or_path) == "mini" else name_or_path)


def train(
    texts: Iterable[str],
    path: str | Path,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    about: dict[str, Any] | None = None,
) -> Tokenizer:
    """Train on the paragraphs of `texts`; the same paragraphs give the same file.

    Args:
        texts: documents, paragraphs separated by newlines.
        path: of the model; a `.json` beside it records what it was trained on.
        vocab_size: at least the special tokens, 256 bytes and the characters kept.
        seed: draws and orders the paragraphs.
        about: more to record beside the model.
    """
    path = Path(path)
    distinct = {paragraph for text in texts for paragraph in text.split("\n") if paragraph}
    if not distinct:
        raise AnchorMassError("no text to train a tokenizer on: give at least one document")

    def order(paragraph: str) -> bytes:
        return hashlib.blake2b(f"{seed}:{paragraph}".encode(), digest_size=8).digest()

    paragraphs = sorted(distinct, key=order)[:PARAGRAPHS]
    with paths.atomic_path(path) as temporary, temporary.open("wb") as out:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(paragraphs),
                model_writer=out,
                model_type="bpe",
                vocab_size=vocab_size,
                normalization_rule_name="identity",
                byte_fallback=True,
                split_digits=True,
                add_dummy_prefix=False,
                remove_extra_whitespaces=False,
                # Japanese has thousands of rare characters: a small vocabulary spends its
                # places on words and leaves the rarest to bytes.
                character_coverage=0.996 if vocab_size < 8192 else 0.9995,
                max_sentence_length=16_384,
                user_defined_symbols=["\n"],
                control_symbols=[EOT, *CONTROLS],
                bos_id=-1,
                eos_id=-1,
                pad_id=-1,
                shuffle_input_sentence=False,
                num_threads=2,
                minloglevel=2,
            )
        except RuntimeError as error:
            reason = re.sub(r"\s+", " ", str(error))
            raise AnchorMassError(
                f"vocab_size={vocab_size} does not fit {len(paragraphs):,} paragraphs: {reason}"
            ) from error
    record = {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "vocab_size": vocab_size,
        "seed": seed,
        "paragraphs": len(paragraphs),
        "sentencepiece": sentencepiece.__version__,
        **(about or {}),
    }
    with paths.atomic_path(path.with_suffix(".json")) as temporary:
        text = json.dumps(record, ensure_ascii=False, indent=1)
        temporary.write_text(text + "\n", encoding="utf-8")
    return Tokenizer(path)
