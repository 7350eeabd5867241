"""A notebook's page: what is shown, what is saved; the model and texts it looks at."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go
import pytest
import torch

from anchormass import AnchorMassError, TransformerLM, explore, page, preset, texts
from anchormass.measure import subject
from anchormass.texts import Text


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `Page.show` displays and saves."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(page, "display", lambda *shown: found.update(shown=shown))
    monkeypatch.setattr(
        page,
        "save_figure",
        lambda fig, name, out, **rest: found.update(saved=(fig, name, out), **rest),
    )
    return found


def draw(height: int) -> go.Figure:
    return go.Figure(layout={"height": height, "title": {"text": "a finding"}})


DATA = pd.DataFrame({"x": [1]})
SLIDER = explore.Slider(400, 100, 900, 100, "height")


def test_headless_shows_the_figure_that_it_saves(seen: dict[str, Any]) -> None:
    mine = page.Page("01_outlier_slots", "smoke", 3, False, "figures")
    mine.show(draw, "01_x", "It is so.", DATA, height=SLIDER)
    fig, name, out = seen["saved"]
    assert seen["shown"][0] is fig and type(fig) is go.Figure and fig.layout.height == 400
    assert (name, out, seen["notebook"]) == ("01_x", "figures", "01_outlier_slots")
    assert seen["title_says"] == seen["shown"][1].data == "It is so." and seen["data"] is DATA
    assert seen["provenance"]["seed"] == 3
    assert seen["provenance"]["command"].endswith("reproduce --only 01 --profile smoke")


def test_interactive_shows_sliders_and_saves_the_default(seen: dict[str, Any]) -> None:
    mine = page.Page("01_outlier_slots", "smoke", 0, True, "figures")
    mine.show(draw, "01_x", "It is so.", DATA, height=SLIDER)
    assert not isinstance(seen["shown"][0], go.Figure)
    assert type(seen["saved"][0]) is go.Figure and seen["saved"][0].layout.height == 400


def test_a_figure_without_controls_is_shown_as_it_is(seen: dict[str, Any]) -> None:
    fig = draw(200)
    page.Page("02_mass_maps", "smoke", 0, True, "figures").show(fig, "02_x", "So.", DATA)
    assert seen["shown"][0] is seen["saved"][0] is fig


def test_passages_are_different_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    def example(profile: str, n: int, document: int) -> Text:
        start = document // 2  # every text comes twice
        return Text(
            torch.arange(start, start + n)[None], ["x"] * n, f"held-out text, token {start}"
        )

    monkeypatch.setattr(texts, "example", example)
    found = subject.passages("mini", 6, 4)
    assert [int(text.ids[0, 0]) for text in found] == [0, 1, 2]
    model = TransformerLM(preset("anchormass-smoke"))
    assert "untrained" in subject.caption(model, found)
    assert subject.caption(model, found).endswith("3 passages of held-out text")
    model.training_info = {"tokens": 12_288_000}
    assert "trained on 12,288,000 tokens · held-out text, token 0" in subject.caption(
        model, found[:1]
    )
    with pytest.raises(AnchorMassError, match="n_texts=0"):
        subject.passages("mini", 0, 4)


def test_model_of_a_profile() -> None:
    assert subject.model_of("smoke").config == preset("anchormass-smoke")
    with pytest.raises(AnchorMassError, match="anchormass-150m"):
        subject.model_of("paper")
