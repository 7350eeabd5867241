"""Figures of notebook 00: cache sizes, the head split, tokens seen from a distance, the calculator.

Notable: the picture of the head split is drawn from tokens, not from slots: a cell says as what
its row's query sees its column's token, so Local and Global heads share both axes.
"""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from anchormass.figures import (
    ARTICLE_MARKER,
    BLACK,
    MODEL_COLOURS,
    STATE_COLOURS,
    context_label,
    log2_axis,
)
from anchormass.measure.size import KINDS, PLAIN, beyond
from anchormass.viz.dress import dressed
from anchormass.viz.merging import COLOURS

_NAMES = {"standard": "Standard", "anchormass": "AnchorMass"}
_LAYOUTS = {PLAIN: "", "shared-mass": ", our layout", "article": ", article's layout"}
_DASHES = {PLAIN: "solid", "shared-mass": "solid", "article": "dot"}
_SEEN_AS = {
    "local": "raw, in the window",
    "sink": "raw, a sink",
    "tail": "raw, in the query's own block",
    "outlier": "outlier, a slot of its own",
    "background": "in the mean of its subgroup (shades tell slots apart)",
}
_OTHER_SHADE = "#9FD4F3"  # of every second background slot


def _digits(x: float) -> str:
    """Three digits, and never an exponent for a large number."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def amount(mib: float) -> str:
    """`258.58` -> `259 MiB`, `10752` -> `10.5 GiB`."""
    return f"{_digits(mib / 1024)} GiB" if mib >= 1024 else f"{_digits(mib)} MiB"


def _size_axis(low: float, high: float) -> dict[str, Any]:
    """A log axis in MiB with a tick at every second power of two."""
    first, last = int(np.floor(np.log2(low))), int(np.ceil(np.log2(high)))
    ticks = [2.0**i for i in range(first - first % 2, last + 1, 2)]
    text = [f"{t / 1024:g} GiB" if t >= 1024 else f"{t:g} MiB" for t in ticks]
    return {"type": "log", "tickvals": ticks, "ticktext": text}


# ---------------------------------------------------------------- cache size


def sizes(table: pd.DataFrame, caption: str = "") -> go.Figure:
    """KV-cache size against context: formula lines, measured markers, the article's hollow.

    `table`: from `measure.size.sizes`.
    """
    fig = go.Figure()
    lines = table[table.kind == "formula"]
    for model, layout in KINDS:
        part = lines[(lines.model == model) & (lines.layout == layout)]
        colour, name = MODEL_COLOURS[model], _NAMES[model] + _LAYOUTS[layout]
        line = {"color": colour, "dash": _DASHES[layout]}
        fig.add_scatter(
            name=name, x=part.context, y=part.mib, mode="lines", line=line,
            hovertemplate=f"{name}: %{{y:,.2f}} MiB",
        )  # fmt: skip
        filled = table[
            (table.kind == "measured") & (table.model == model) & (table.layout == layout)
        ]
        fig.add_scatter(
            name="measured", showlegend=False,
            x=filled.context, y=filled.mib, mode="markers",
            marker={"color": colour, "size": 7}, hovertemplate="measured: %{y:,.2f} MiB",
        )  # fmt: skip
    for model in MODEL_COLOURS:
        part = table[(table.kind == "article") & (table.model == model)]
        fig.add_scatter(
            name="the article's", showlegend=False,
            x=part.context, y=part.mib, mode="markers",
            marker=ARTICLE_MARKER | {"color": MODEL_COLOURS[model]},
            hovertemplate="article: %{y:,.0f} MiB",
        )  # fmt: skip
    # The two kinds of marker stand in the legend once, without a model's colour.
    for name, marker in (
        ("measured", {"color": BLACK, "size": 7}),
        ("the article's", ARTICLE_MARKER | {"color": BLACK}),
    ):
        fig.add_scatter(name=name, x=[None], y=[None], mode="markers", marker=marker)

    end = lines.context.max()
    at = lines[lines.context == end].set_index("layout").mib
    title = (
        f"At {context_label(end)} tokens Standard's cache takes {amount(at[PLAIN])}, "
        f"AnchorMass's {amount(at['shared-mass'])}: {at[PLAIN] / at['shared-mass']:.0f} × less"
    )
    fig.update_xaxes(**log2_axis(lines.context))
    fig.update_yaxes(title_text="KV cache", **_size_axis(table.mib.min(), table.mib.max()))
    return dressed(fig, title, caption, hovermode="x", margin_b=110)


# ---------------------------------------------------------------- the head split


def visibility(table: pd.DataFrame, query: int, caption: str = "") -> go.Figure:
    """Which tokens a Local and a Global head see, and as what; one query is read out.

    `table`: from `measure.size.visibility`. `query`: the marked row; the last one if there are
    fewer.
    """
    length = int(table["query"].max()) + 1
    query = min(query, length - 1)
    states = list(_SEEN_AS)
    colours = [*(STATE_COLOURS[s] for s in states), _OTHER_SHADE]
    n = len(colours)
    scale = [(edge / n, colour) for i, colour in enumerate(colours) for edge in (i, i + 1)]
    fig = make_subplots(
        rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.03,
        subplot_titles=["a Local head", "a Global head"],
    )  # fmt: skip
    for column, head in enumerate(("Local", "Global"), start=1):
        part = table[table["head"] == head]
        codes = np.full((length, length), np.nan)
        # Slots are numbered after the tokens, two to a subgroup.
        other = (part.state == "background") & ((part.entry - length) // 2 % 2 == 1)
        codes[part["query"], part.token] = part.state.map(states.index) + other
        text = np.full((length, length), "", dtype=object)
        text[part["query"], part.token] = _hovers(part)
        fig.add_heatmap(
            z=codes, text=text, hovertemplate="%{text}<extra></extra>", hoverongaps=False,
            colorscale=scale, zmin=-0.5, zmax=n - 0.5, showscale=False,
            xgap=1, ygap=1, row=1, col=column,
        )  # fmt: skip
        fig.add_hrect(
            query - 0.5, query + 0.5, line={"color": BLACK, "width": 1.5}, row=1, col=column
        )
    present = set(table.state)
    for state in states:
        if state in present:
            marker = {"color": STATE_COLOURS[state], "symbol": "square", "size": 12}
            fig.add_scatter(name=_SEEN_AS[state], x=[None], y=[None], mode="markers", marker=marker)
    asked = table[table["query"] == query]
    local = (asked["head"] == "Local").sum()
    entries = asked[asked["head"] == "Global"].drop_duplicates("entry")
    title = (
        f"Token {query} sees its last {local} tokens (Local) and, through {len(entries)} keys, "
        f"all {entries.mass.sum():.0f} (Global)"
    )
    fig.update_xaxes(
        title_text="token that is seen (position)", range=[-0.5, length - 0.5], showgrid=False
    )
    fig.update_yaxes(range=[length - 0.5, -0.5], showgrid=False)
    fig.update_yaxes(title_text="token that asks (position)", col=1)
    return dressed(fig, title, caption, True, height=600, margin_b=120)


def _hovers(part: pd.DataFrame) -> list[str]:
    columns = (part.query_piece, part["query"], part.piece, part.token, part.state, part.mass)
    return [
        f"“{html.escape(asked)}” at {q} sees “{html.escape(piece)}” at {t}<br>"
        f"{_SEEN_AS[state]}, mass {mass:.0f}"
        for asked, q, piece, t, state, mass in zip(*columns, strict=True)
    ]


# ---------------------------------------------------------------- seen from a distance


def by_distance(table: pd.DataFrame, window: int, caption: str = "") -> go.Figure:
    """As what a token is seen, stacked, against its distance from the query.

    `table`: from `measure.size.by_distance`. `window`: tokens that a Local head sees.
    """
    shares = table.pivot_table(index=["start", "stop"], columns="state", values="share").fillna(0)
    edges = [*shares.index.get_level_values("start"), shares.index.get_level_values("stop")[-1]]
    fig = go.Figure()
    for state in COLOURS:
        if state not in shares:
            continue
        values = shares[state].to_numpy()
        fig.add_scatter(
            name=state, x=edges, y=[*values, values[-1]], stackgroup="all", mode="lines",
            line={"shape": "hv", "width": 0.5, "color": "white"}, fillcolor=COLOURS[state],
            hovertemplate="%{y:.1%}",
        )  # fmt: skip
    fig.add_vline(window, line={"color": BLACK, "dash": "dash"})
    fig.add_annotation(
        x=np.log10(window), y=1, yref="paper", yanchor="bottom", xanchor="right",
        text=f"← Local heads see the last {window} raw as well", showarrow=False,
    )  # fmt: skip
    share = beyond(table, window)
    merged = share[[s for s in share.index if s.startswith("merged")]].sum()
    title = (
        f"{window} or more tokens back, {share.get('outlier alone', 0):.0%} of the tokens stand "
        f"alone, {share.get('background', 0):.0%} are in the mean of their subgroup, "
        f"{merged:.0%} in merged slots, {share.get('dropped', 0):.0%} gone"
    )
    ticks = [2**i for i in range(int(np.log2(edges[-1])) + 1)]
    fig.update_xaxes(**log2_axis(ticks, "distance from the query (tokens back)"))
    fig.update_xaxes(range=[0, np.log10(edges[-1])])
    fig.update_yaxes(title_text="share of the tokens", range=[0, 1], tickformat=".0%")
    fig.update_layout(legend_traceorder="normal", hovermode="x unified")
    return dressed(fig, title, caption, True, margin_b=130)


# ---------------------------------------------------------------- the calculator


def calculator(table: pd.DataFrame, caption: str = "") -> go.Figure:
    """Both caches of a shape of one's own; the chosen context and the crossing marked.

    `table`: from `measure.size.calculator`.
    """
    fig = go.Figure()
    for model in MODEL_COLOURS:
        part = table[table.model == model]
        line = part[part.kind == "line"]
        chosen = part[part.kind == "chosen"].iloc[0]
        fig.add_scatter(
            name=_NAMES[model], x=line.context, y=line.mib, mode="lines",
            line={"color": MODEL_COLOURS[model]}, hovertemplate="%{y:,.2f} MiB",
        )  # fmt: skip
        fig.add_scatter(
            name=_NAMES[model], showlegend=False, x=[chosen.context], y=[chosen.mib],
            mode="markers+text", text=[f"<b>{amount(chosen.mib)}</b>"],
            textposition="top left" if model == "standard" else "bottom right",
            marker={"color": MODEL_COLOURS[model], "size": 11}, cliponaxis=False,
            hovertemplate="%{y:,.2f} MiB",
        )  # fmt: skip
    at = table[table.kind == "chosen"].set_index("model")
    start = table[table.kind == "smaller from"].context.iloc[0]
    context = at.context.iloc[0]
    ratio = at.mib["standard"] / at.mib["anchormass"]
    compared = f"{_digits(ratio)} × less" if ratio >= 1 else f"{_digits(1 / ratio)} × more"
    title = (
        f"At {context_label(context)} tokens AnchorMass needs {amount(at.mib['anchormass'])} "
        f"instead of {amount(at.mib['standard'])} ({compared}); "
        f"it is the smaller one from {start:,} tokens on"
    )
    fig.add_vline(start, line={"color": BLACK, "dash": "dash", "width": 1})
    lines = table[table.kind == "line"]
    fig.update_xaxes(**log2_axis(lines.context))
    fig.update_yaxes(title_text="KV cache", **_size_axis(lines.mib.min(), lines.mib.max()))
    return dressed(fig, title, caption, hovermode="x unified", margin_b=110)
