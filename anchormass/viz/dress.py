"""Title and caption of a figure, whatever their length.

Notable: room above the plot is counted in lines, since plotly leaves none for a second one; the
caption is an annotation of that name, which the gallery sets as text of its own.
"""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from anchormass import figures


def dressed(
    fig: go.Figure, title: str, caption: str, headings: bool = False, **layout: Any
) -> go.Figure:
    """Set the title, and the caption just above the plot (above the panels' `headings`)."""
    title, caption = figures.headline(title), figures.headline(caption, size=13)
    lift = 26 if headings else 4
    fig.add_annotation(
        name="caption",
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
    top = 54 + lift + figures.TITLE_LINE * title.count("<br>")
    top += figures.CAPTION_LINE * (1 + caption.count("<br>"))
    fig.update_layout(template="anchormass", margin_t=top)
    return fig.update_layout(title={"text": title, "automargin": False, "pad": {"t": 28}}, **layout)
