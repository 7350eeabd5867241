"""Sliders around figures: the same drawing function serves the notebook and the drag.

Headless, `drag` is just the figure at the defaults; a widget is made only when someone can
touch it, because each one stores megabytes in the notebook. While a value is worked out the
status line says so; when drawing fails, the last good figure stays and the message stands
beside the controls (JupyterLab would hide it in a log).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from anchormass.errors import AnchorMassError


@dataclass(frozen=True)
class Slider:
    """A number between `min` and `max` in steps of `step`; whole if the start value is."""

    value: float
    min: float
    max: float
    step: float
    label: str

    def widget(self) -> Any:
        import ipywidgets as w

        kind = w.IntSlider if isinstance(self.value, int) else w.FloatSlider
        return kind(
            value=self.value,
            min=self.min,
            max=self.max,
            step=self.step,
            description=self.label,
            continuous_update=False,
            **_look(),
        )


@dataclass(frozen=True)
class Choice:
    """One of `options`."""

    value: Any
    options: Sequence[Any]
    label: str

    def widget(self) -> Any:
        import ipywidgets as w

        return w.Dropdown(
            options=list(self.options), value=self.value, description=self.label, **_look()
        )


@dataclass(frozen=True)
class TextBox:
    """Text of the reader's own; takes effect when the box is left."""

    value: str
    label: str

    def widget(self) -> Any:
        import ipywidgets as w

        return w.Textarea(
            value=self.value, description=self.label, continuous_update=False, **_look()
        )


Control = Slider | Choice | TextBox


def _look() -> dict[str, Any]:
    import ipywidgets as w

    return {
        "style": {"description_width": "initial"},
        "layout": w.Layout(width="46%", min_width="320px"),
    }


def drag(draw: Callable[..., go.Figure], *, interactive: bool, **controls: Control) -> Any:
    """The figure `draw(**values)`, with a control for each of its arguments.

    Args:
        draw: a pure function of the controls' values.
        interactive: False returns a plain `Figure` at the defaults; True a widget.
        controls: by the name of the argument they set.

    Raises:
        AnchorMassError: when no control is given.
    """
    if not controls:
        raise AnchorMassError("drag() needs at least one control: Slider, Choice or TextBox")
    first = draw(**{name: control.value for name, control in controls.items()})
    if not interactive:
        return first
    import ipywidgets as w

    figure = go.FigureWidget(first)
    widgets = {name: control.widget() for name, control in controls.items()}
    status = w.HTML("")

    def redraw(_: Any) -> None:
        status.value = "<i>working …</i>"
        try:
            _show(figure, draw(**{name: widget.value for name, widget in widgets.items()}))
            status.value = ""
        except Exception as error:  # whatever it is, the reader must see it
            status.value = _message(error)

    for widget in widgets.values():
        widget.observe(redraw, names="value")
    rows = w.Box([*widgets.values()], layout=w.Layout(flex_flow="row wrap"))
    return w.VBox([rows, status, figure])


def _show(figure: go.FigureWidget, new: go.Figure) -> None:
    """Bring `figure` to what `new` shows, in one message to the browser where it can."""
    same = [t.type for t in figure.data] == [t.type for t in new.data]
    with figure.batch_update():
        if same:
            for old, trace in zip(figure.data, new.data, strict=True):
                old.update(trace.to_plotly_json(), overwrite=True)
        else:
            figure.data = ()
            figure.add_traces(new.data)
        figure.layout = new.layout


def _message(error: Exception) -> str:
    from html import escape

    kind = "" if isinstance(error, AnchorMassError) else f"{type(error).__name__}: "
    return f'<span role="alert" style="color:#b00020">{escape(kind + str(error))}</span>'
