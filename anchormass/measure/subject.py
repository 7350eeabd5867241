"""Who is looked at: the model of a profile, several texts, and one line that names both."""

from __future__ import annotations

from collections.abc import Sequence

from anchormass import checkpoints, texts
from anchormass.errors import AnchorMassError
from anchormass.model import TransformerLM
from anchormass.texts import Text


def model_of(profile: str) -> TransformerLM:
    """The AnchorMass model of a profile; `paper` is the article's size.

    Raises:
        AnchorMassError: unknown profile, or no weights shipped for it.
    """
    return checkpoints.load_pretrained(f"anchormass-{'150m' if profile == 'paper' else profile}")


def passages(profile: str, n_texts: int, n_tokens: int) -> list[Text]:
    """Up to `n_texts` different texts of up to `n_tokens` tokens each.

    The shipped sample is one text whatever document is asked for, so repeats are left out:
    the same tokens twice would make every interval too narrow.

    Raises:
        AnchorMassError: `n_texts` below 1, or no text at all.
    """
    if n_texts < 1:
        raise AnchorMassError(f"n_texts={n_texts}: must be at least 1")
    found: list[Text] = []
    for document in range(n_texts):
        text = texts.example(profile, n_tokens, document=document)
        if not any(text.ids.equal(other.ids) for other in found):
            found.append(text)
    return found


def caption(model: TransformerLM, found: Sequence[Text]) -> str:
    """Model, training and texts in one line, for below a figure's title."""
    tokens = model.training_info.get("tokens", 0)
    trained = f"trained on {tokens:,} tokens" if tokens else "untrained, random weights"
    source = found[0].source
    if len(found) > 1:
        source = f"{len(found)} passages of {source.partition(', token')[0]}"
    size = f"{model.n_parameters() / 1e6:.1f} M parameters"
    return f"AnchorMass, {size}, {trained} · {source}"
