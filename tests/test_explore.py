"""Sliders: headless is a plain figure; a drag changes the data; an error leaves it alone."""

from __future__ import annotations

import plotly.graph_objects as go
import pytest

from anchormass import AnchorMassError
from anchormass.explore import Choice, Slider, TextBox, drag


def draw(n: int, height: float, kind: str, text: str) -> go.Figure:
    if text == "bad":
        raise AnchorMassError("text 'bad': choose <another>")
    fig = go.Figure()
    for i in range(n):
        y = [height * i, height]
        fig.add_trace(go.Bar(x=[0, 1], y=y) if kind == "bar" else go.Scatter(x=[0, 1], y=y))
    return fig.update_layout(title_text=f"{n} {kind}s {text}")


CONTROLS = {
    "n": Slider(2, 1, 5, 1, "traces"),
    "height": Slider(0.5, 0.0, 1.0, 0.1, "height"),
    "kind": Choice("bar", ["bar", "line"], "kind"),
    "text": TextBox("", "your own text"),
}


def test_headless_is_a_plain_figure_at_the_defaults() -> None:
    fig = drag(draw, interactive=False, **CONTROLS)
    assert type(fig) is go.Figure and fig == draw(2, 0.5, "bar", "")


def test_a_drag_changes_the_figure_and_an_error_keeps_it() -> None:
    box = drag(draw, interactive=True, **CONTROLS)
    rows, status, figure = box.children
    n, height, kind, text = rows.children
    assert [w.description for w in rows.children] == [c.label for c in CONTROLS.values()]
    assert isinstance(n.value, int) and not n.continuous_update

    height.value = 0.9
    assert list(figure.data[1].y) == [0.9, 0.9] and status.value == ""
    n.value = 4
    kind.value = "line"
    assert [t.type for t in figure.data] == ["scatter"] * 4
    assert figure.layout.title.text == "4 lines "

    text.value = "bad"
    assert "&lt;another&gt;" in status.value and 'role="alert"' in status.value
    assert figure.layout.title.text == "4 lines "
    text.value = "good"
    assert status.value == "" and figure.layout.title.text == "4 lines good"


def test_without_a_control_there_is_nothing_to_drag() -> None:
    with pytest.raises(AnchorMassError, match="Slider"):
        drag(lambda: go.Figure(), interactive=False)
