"""Figures of masses and attention: a table of `anchormass.measure.mass` in, one figure out.

Notable: the same two colours and symbols stand everywhere for attention with log n (blue
circles) and without it (orange crosses); the true value is black.
"""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from anchormass.figures import BLACK, BLUE, ORANGE, STATE_COLOURS, log2_axis
from anchormass.measure.mass import STATES, TRUE, WITH, WITHOUT
from anchormass.viz.dress import dressed

_LOOK = {
    WITHOUT: {"color": ORANGE, "symbol": "x"},
    WITH: {"color": BLUE, "symbol": "circle"},
    TRUE: {"color": BLACK, "symbol": "diamond-open"},
}
_PANELS = 4  # most panels side by side


def _short(text: str, most: int = 40) -> str:
    text = text.replace("\n", "⏎")
    return html.escape(text if len(text) <= most else text[: most - 1] + "…")


def _labels(rows: pd.DataFrame) -> list[str]:
    """What each entry of `stream` is, for hovering."""
    columns = (rows.state, rows.mass, rows["first"], rows["last"], rows.text)
    return [
        f"{state} of mass {mass:.0f}, positions {first} … {last}<br>{_short(text)}"
        for state, mass, first, last, text in zip(*columns, strict=True)
    ]


def _powers(low: float, high: float) -> dict[str, Any]:
    """Ticks of a log axis at powers of two (an upper bound of about ten)."""
    first, last = int(np.floor(np.log2(low))), int(np.ceil(np.log2(high)))
    step = max(1, (last - first) // 8)
    values = [2.0**i for i in range(first - first % step, last + 1, step)]  # 1 among them
    text = [f"{v:g}" if v >= 1 else f"1/{1 / v:g}" for v in values]
    return {"type": "log", "tickvals": values, "ticktext": text}


# ---------------------------------------------------------------- along the stream


def along(rows: pd.DataFrame, caption: str = "") -> go.Figure:
    """Mass of every slot over the positions it spans, a panel per budget.

    `rows`: from `stream`, of one layer, with a column `budget` added.
    """
    budgets = list(dict.fromkeys(rows.budget))
    counts = rows[~rows.state.isin(["sink", "tail"])].groupby("budget").size()
    fig = make_subplots(
        rows=len(budgets), cols=1, shared_xaxes=True, vertical_spacing=0.12,
        subplot_titles=[f"budget {b} slots: {counts.get(b, 0)} in use" for b in budgets],
    )  # fmt: skip
    named: set[str] = set()
    for row, budget in enumerate(budgets, start=1):
        for state in STATES:
            part = rows[(rows.budget == budget) & (rows.state == state)]
            if not len(part):
                continue
            shared: dict[str, Any] = {
                "name": state,
                "legendgroup": state,
                "showlegend": state not in named,
                "x": (part["first"] + part["last"]) / 2,
                "hovertext": _labels(part),
                "hovertemplate": "%{hovertext}<extra></extra>",
            }
            named.add(state)
            place = {"row": row, "col": 1}
            if state == "outlier":  # one token wide: a bar would hide behind its background
                look = {
                    "color": STATE_COLOURS[state],
                    "size": 6,
                    "line": {"color": "white", "width": 1},
                }
                fig.add_scatter(**shared, **place, y=part.mass, mode="markers", marker=look)
            else:
                fig.add_bar(
                    **shared,
                    **place,
                    width=part["last"] - part["first"] + 1,
                    base=0.5,
                    y=part.mass - 0.5,
                    marker={"color": STATE_COLOURS[state], "line": {"width": 0}},
                )
    slots = rows[~rows.state.isin(["sink", "tail"])]
    most = slots.groupby("budget").mass.max()
    title = f"Layer {rows.layer.iloc[0]}: " + ", ".join(
        f"{most[b]:.0f} tokens in the heaviest of {counts[b]} slots" for b in budgets
    )
    fig.update_yaxes(title_text="mass (tokens)", **_powers(1, rows.mass.max()))
    fig.update_yaxes(range=[np.log10(0.5), np.log10(1.3 * rows.mass.max())])
    fig.update_xaxes(title_text="position in the text (tokens)", row=len(budgets))
    return dressed(fig, title, caption, True, barmode="overlay", height=200 + 210 * len(budgets))


# ---------------------------------------------------------------- weights


def weights(rows: pd.DataFrame, caption: str = "") -> go.Figure:
    """One query's attention: each entry's weight against what its tokens would truly get.

    `rows`: from `query_weights`.
    """
    fig = go.Figure()
    low = float(rows[[TRUE, WITH, WITHOUT]].min().min()) / 2
    high = float(rows[[TRUE, WITH, WITHOUT]].max().max()) * 2
    fig.add_scatter(
        x=[low, high], y=[low, high], mode="lines", name="equal", line={"color": BLACK, "width": 1}
    )
    for name in (WITHOUT, WITH):
        fig.add_scatter(
            name=name,
            mode="markers",
            x=rows[TRUE],
            y=rows[name],
            hovertext=_labels(rows),
            hovertemplate="%{hovertext}<br>true %{x:.2e}, here %{y:.2e}",
            marker=_LOOK[name] | {"size": 5 + 3 * np.log2(rows.mass), "opacity": 0.55},
        )
    merged = rows[rows.mass > 1]
    share = merged[[WITH, WITHOUT, TRUE]].sum()
    one = rows.iloc[0]
    title = (
        f"Slots of several tokens deserve {share[TRUE]:.0%} of this query's attention; they get "
        f"{share[WITH]:.0%} with log n, {share[WITHOUT]:.0%} without"
    )
    where = (
        f"layer {one.layer}, Global head {one['head']}, "
        f"query “{_short(str(one.query_piece))}” at position {one['query']:,}"
    )
    axis: dict[str, Any] = {"type": "log", "exponentformat": "power", "dtick": 1}
    fig.update_xaxes(title_text="weight that full attention gives to the slot's tokens", **axis)
    fig.update_yaxes(title_text="weight of the slot", **axis)
    return dressed(fig, title, f"{where} · marker size: mass · {caption}")


def ratios(table: pd.DataFrame, caption: str = "") -> go.Figure:
    """What slots get as a multiple of what they deserve, against their mass; a line per layer."""
    fig = go.Figure()
    for name in (WITHOUT, WITH):
        for i, (layer, part) in enumerate(table[table.variant == name].groupby("layer")):
            fig.add_scatter(
                name=name,
                legendgroup=name,
                showlegend=i == 0,
                x=part.mass,
                y=part["median"],
                error_y={
                    "array": part.high - part["median"],
                    "arrayminus": part["median"] - part.low,
                    "thickness": 1,
                    "width": 0,
                },
                mode="lines+markers",
                line={"color": _LOOK[name]["color"], "width": 1.5},
                marker=_LOOK[name] | {"size": 8},
                customdata=part[["masses"]].assign(layer=layer),
                hovertemplate="layer %{customdata[1]}, mass %{customdata[0]}: %{y:.2f} ×",
            )
    fig.add_hline(1, line={"color": BLACK, "width": 1})
    heaviest = table[table.mass == table.mass.max()].masses.iloc[0]
    middle = table[table.masses == heaviest].groupby("variant")["median"].median()
    title = (
        f"Slots of {heaviest} tokens get {middle[WITH]:.2g} × their due with log n, "
        f"{middle[WITHOUT]:.2g} × without"
    )
    fig.update_xaxes(title_text="mean mass of the slots (tokens)", **_powers(1, table.mass.max()))
    fig.update_yaxes(
        title_text="weight ÷ true weight (median, quartiles)",
        **_powers(min(table.low.min(), 0.5), max(table.high.max(), 2)),
    )
    return dressed(fig, title, f"one line a layer · {caption}")


# ---------------------------------------------------------------- outputs


def errors(table: pd.DataFrame, by: str, caption: str = "") -> go.Figure:
    """Error of the attention output per layer, against `by`: "context" or "budget"."""
    layers = sorted(table.layer.unique())
    columns = min(len(layers), _PANELS)
    fig = make_subplots(
        rows=-(-len(layers) // columns), cols=columns, shared_xaxes=True, shared_yaxes=True,
        horizontal_spacing=0.02, subplot_titles=[f"layer {i}" for i in layers],
    )  # fmt: skip
    for i, layer in enumerate(layers):
        for name in (WITHOUT, WITH, TRUE):
            part = table[(table.layer == layer) & (table.variant == name)].sort_values(by)
            fig.add_scatter(
                name=name if name != TRUE else "true weights (what averaging values costs)",
                legendgroup=name,
                showlegend=i == 0,
                x=part[by],
                y=100 * part["median"],
                error_y={
                    "array": 100 * (part.high - part["median"]),
                    "arrayminus": 100 * (part["median"] - part.low),
                    "thickness": 1,
                    "width": 0,
                },
                mode="lines+markers",
                line={"color": _LOOK[name]["color"], "width": 1.5},
                marker=_LOOK[name] | {"size": 8},
                customdata=part[["tokens_per_entry"]].round(1),
                hovertemplate="%{y:.1f} % (%{customdata[0]} tokens an entry)",
                row=i // columns + 1,
                col=i % columns + 1,
            )
    unit = "context (tokens)" if by == "context" else "budget (slots)"
    fig.update_xaxes(**log2_axis(table[by], title=""))
    fig.update_xaxes(title_text=unit, row=-(-len(layers) // columns))
    ticks = [digit * 10.0**power for power in range(-3, 4) for digit in (1, 2, 5)]
    fig.update_yaxes(type="log", tickvals=ticks, ticktext=[f"{t:g}" for t in ticks])
    fig.update_yaxes(title_text="error of the output (%)", col=1)
    chosen = table[table[by] == (table[by].max() if by == "context" else table[by].min())]
    middle = 100 * chosen.groupby("variant")["median"].median()
    at = f"{chosen[by].iloc[0]:,} " + ("tokens" if by == "context" else "slots")
    said = {name: f"{x:.2g}" if x < 10 else f"{x:.0f}" for name, x in middle.items()}
    title = (
        f"At {at} the typical output error is {said[WITH]} % with log n, "
        f"{said[WITHOUT]} % without, {said[TRUE]} % with true weights"
    )
    return dressed(fig, title, caption, True, height=280 + 200 * (-(-len(layers) // columns)))


def identical(table: pd.DataFrame, caption: str = "") -> go.Figure:
    """Error of the output against how much the tokens of a subgroup differ."""
    spreads = [f"{s:g}" for s in sorted(table.spread.unique())]
    fig = go.Figure()
    for name in (WITHOUT, WITH):
        part = table[table.variant == name].sort_values("spread")
        fig.add_scatter(
            name=name, x=spreads, y=part["median"], mode="lines+markers",
            line={"color": _LOOK[name]["color"]}, marker=_LOOK[name] | {"size": 10},
        )  # fmt: skip
    exact = table[table.spread == table.spread.min()].set_index("variant")["median"]
    title = (
        f"Where tokens are identical, the error is {exact[WITH]:.0e} with log n "
        f"and {exact[WITHOUT]:.2f} without"
    )
    fig.update_xaxes(
        title_text="noise added to equal tokens (standard deviation, the tokens' own = 1)",
        type="category",
    )
    fig.update_yaxes(title_text="relative error of the output", type="log", exponentformat="power")
    return dressed(fig, title, caption)
