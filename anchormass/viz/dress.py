"""Title and caption of a figure, whatever their length.

Notable: room above the plot is counted in lines, because plotly's own `automargin` cuts off the
first line of a title of two, and its subtitle pushes a long title off the picture.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from anchormass import figures

_LINE, _SMALL_LINE = 22, 16  # heights of a line of title and of caption, pixels


def dressed(
    fig: go.Figure, title: str, caption: str, headings: bool = False, **layout: Any
) -> go.Figure:
    """Set the title, and the caption just above the plot (above the panels' `headings`)."""
    title, caption = figures.headline(title), figures.headline(caption, size=13)
    lift = 26 if headings else 4
    fig.add_annotation(
        text=caption,
        x=0,
        xref="paper",
        xanchor="left",
        y=1,
        yref="paper",
        yanchor="bottom",
        yshift=lift,
        align="left",
        showarrow=False,
        font={"size": 12, "color": "#555555"},
    )
    top = 54 + _LINE * title.count("<br>") + _SMALL_LINE * (caption.count("<br>") + 1) + lift
    fig.update_layout(template="anchormass", margin_t=top)
    return fig.update_layout(title={"text": title, "automargin": False, "pad": {"t": 28}}, **layout)
