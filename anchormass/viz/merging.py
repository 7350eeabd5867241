"""Figures of stage 2: where each token lives, how heavy its slot is, what was lost.

Every function takes a table of `measure.merging` and draws it; titles are read from that table.
Merged slots darken with their mass. Policies differ in colour, dash and width, for lines that
lie on each other.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from anchormass import figures
from anchormass.measure.merging import MERGED
from anchormass.viz.dress import dressed

# A row for each state in the house's colours; merged slots darken with their mass.
_MERGED_GREENS = ("#C5EBDD", "#6CCBAA", figures.GREEN, "#006A4D", "#00301F")
COLOURS = {
    "sink": figures.STATE_COLOURS["sink"],
    "tail": figures.STATE_COLOURS["tail"],
    "outlier alone": figures.STATE_COLOURS["outlier"],
    "background": figures.STATE_COLOURS["background"],
    **dict(zip(MERGED, _MERGED_GREENS, strict=True)),
    "dropped": figures.STATE_COLOURS["dropped"],
}
POLICY_LINES = {
    "adaptive": {"color": figures.GREEN, "width": 3},
    "score_merge": {"color": figures.ORANGE, "width": 2, "dash": "dash"},
    "uniform_merge": {"color": figures.SKY, "width": 2.5, "dash": "dashdot"},
    "priority": {"color": figures.PURPLE, "width": 2, "dash": "dot"},
    "fifo": {"color": figures.BLACK, "width": 2, "dash": "longdash"},
}
_LEGEND = 110  # pixels below the panels for axis title and a legend of two lines
_MOMENTS = 20  # most columns of a map's panel: more than that is not seen, but is stored
_OTHER_LINE = {"color": figures.GREY, "width": 2}  # a policy that someone registered


def slot_map(runs: pd.DataFrame, caption: str = "") -> go.Figure:
    """Slot-by-time map from `subgroup_runs`: position × tokens read, colour = state.

    A column per policy; above, what holds each subgroup's background, below, its outlier.
    """
    policies, parts = list(runs["policy"].unique()), ("background", "outlier")
    times, starts = np.unique(runs[["since", "until"]]), np.unique(runs["position"])
    times = times[:: min(-1, -len(times) // _MOMENTS)][::-1]  # the last one stays
    fig = make_subplots(
        rows=2,
        cols=len(policies),
        shared_xaxes=True,
        shared_yaxes=True,
        column_titles=policies,
        horizontal_spacing=0.012,
        vertical_spacing=0.045,
    )
    for (policy, part), table in runs.groupby(["policy", "part"], sort=False):
        codes = np.zeros((len(starts), len(times)), dtype=np.int8)  # 0: nothing there, white
        rows = np.searchsorted(starts, table["position"])
        since = np.searchsorted(times, table["since"])
        steps = np.searchsorted(times, table["until"], side="right") - since
        # Every run as its cells: the columns of a run count up from its first.
        ends = steps.cumsum()
        columns = np.arange(ends[-1]) - np.repeat(ends - steps - since, steps)
        kinds = table["state"].map({state: i for i, state in enumerate(COLOURS, start=1)})
        codes[np.repeat(rows, steps), columns] = np.repeat(kinds.to_numpy(), steps)
        fig.add_trace(
            go.Heatmap(
                x=times,
                y=starts,
                z=codes,
                name=f"{policy}, {part}",
                zmin=-0.5,
                zmax=len(COLOURS) + 0.5,
                colorscale=_steps(["white", *COLOURS.values()]),
                showscale=False,
                hovertemplate="token %{y}<br>after %{x} tokens read",
            ),
            row=parts.index(part) + 1,
            col=policies.index(policy) + 1,
        )
    _state_legend(fig, _present(runs))
    fig.update_xaxes(title_text="tokens read", row=2)
    fig.update_xaxes(nticks=4)
    fig.update_yaxes(autorange="reversed")
    for row, part in enumerate(parts, start=1):
        fig.update_yaxes(title_text=f"position, {part}s (token)", row=row, col=1)
    return dressed(fig, _map_title(runs), caption, True, height=820, margin_b=_LEGEND)


def _map_title(runs: pd.DataFrame) -> str:
    end = runs[runs["until"] == runs["until"].max()]
    end = end[~end["state"].isin(("sink", "tail"))]
    apart = end[end["part"] == "outlier"]
    alone = (apart["state"] == "outlier alone").groupby(apart["policy"], sort=False).mean()
    gone = (end["state"] == "dropped").groupby(end["policy"], sort=False).mean()
    losers = ", ".join(f"{policy} {share:.0%}" for policy, share in gone.items() if share > 0)
    kept = ", ".join(f"{policy} {share:.0%}" for policy, share in alone.items())
    return (
        f"Stage-1 slots lost with a budget of {_budget(runs)}: {losers or 'none'}; "
        f"outliers that still stand alone: {kept}"
    )


def mass_by_position(table: pd.DataFrame, caption: str = "") -> go.Figure:
    """Mean mass of the slot that holds a token, by position, and the share dropped."""
    fig = _by_position(table, "mass", "mean mass of the slot (tokens)")
    _log2_axis(fig, table["mass"].max())
    means = _oldest_mean(table, "mass")
    heaviest = ", ".join(f"{policy} {value:,.0f}" for policy, value in means.items())
    title = (
        f"In {_budget(table)} slots, a token of the oldest quarter that is still held shares its "
        f"slot with: {heaviest} tokens (mean mass)"
    )
    return dressed(fig, title, caption, height=620, margin_b=90)


def merges_by_position(table: pd.DataFrame, caption: str = "") -> go.Figure:
    """How many merges a token's slot went through, by position, and the share dropped."""
    fig = _by_position(table, "merges", "merges survived (mean)")
    means = _oldest_mean(table, "merges")
    counts = ", ".join(f"{policy} {value:.1f}" for policy, value in means.items())
    title = (
        f"In {_budget(table)} slots, merges survived by the tokens of the oldest quarter that are "
        f"still held: {counts}"
    )
    return dressed(fig, title, caption, height=620, margin_b=90)


def _by_position(table: pd.DataFrame, column: str, label: str) -> go.Figure:
    fig = make_subplots(
        rows=2, cols=1, shared_xaxes=True, row_heights=[0.74, 0.26], vertical_spacing=0.05
    )
    for policy, rows in table.groupby("policy", sort=False):
        for row, (name, unit) in enumerate(((column, ":.1f"), ("dropped", ":.0%")), start=1):
            fig.add_trace(
                go.Scatter(
                    x=rows["position"],
                    y=rows[name],
                    name=str(policy),
                    legendgroup=str(policy),
                    showlegend=row == 1,
                    mode="lines",
                    line=POLICY_LINES.get(str(policy), _OTHER_LINE) | {"shape": "hvh"},
                    hovertemplate=f"{policy}, around %{{x:.0f}}: %{{y{unit}}}<extra></extra>",
                ),
                row=row,
                col=1,
            )
    fig.update_yaxes(title_text=label, row=1)
    fig.update_yaxes(title_text="dropped", tickformat=".0%", range=[-0.04, 1.04], row=2)
    fig.update_xaxes(title_text="position in the text (token; the newest on the right)", row=2)
    return fig


def _oldest_mean(table: pd.DataFrame, column: str) -> pd.Series:
    """Mean over held tokens of the oldest quarter, for the policies that hold any of them."""
    first, last = table["position"].min(), table["position"].max()
    part = table[table["position"] <= first + (last - first) / 4]
    held = part["tokens"] * (1 - part["dropped"])
    total = held.groupby(part["policy"], sort=False).sum()
    mean = (part[column] * held).groupby(part["policy"], sort=False).sum() / total
    return mean[total > 0]


def shares(table: pd.DataFrame, caption: str = "") -> go.Figure:
    """How the tokens are kept at the end: stacked shares, a panel per budget."""
    budgets = list(table["max_slots"].unique())
    policies = list(table["policy"].unique())
    fig = make_subplots(
        rows=len(budgets),
        cols=1,
        shared_xaxes=True,
        subplot_titles=[f"{budget} slots" for budget in budgets],
        vertical_spacing=0.09,
    )
    for state in _present(table):
        for row, budget in enumerate(budgets, start=1):
            rows = table[(table["state"] == state) & (table["max_slots"] == budget)]
            fig.add_trace(
                go.Bar(
                    x=rows["share"],
                    y=rows["policy"],
                    orientation="h",
                    name=state,
                    showlegend=False,
                    marker={"color": COLOURS[state], "line": {"color": "#666", "width": 0.5}},
                    hovertemplate=f"%{{y}}, {state}: %{{x:.1%}}<extra></extra>",
                ),
                row=row,
                col=1,
            )
    _state_legend(fig, _present(table))
    fig.update_layout(barmode="stack", bargap=0.25, legend_traceorder="normal")
    fig.update_yaxes(categoryorder="array", categoryarray=policies[::-1])
    fig.update_xaxes(range=[0, 1], tickformat=".0%")
    fig.update_xaxes(title_text="share of the tokens read", row=len(budgets))
    height = 280 + 140 * len(budgets)
    return dressed(fig, _shares_title(table), caption, True, height=height, margin_b=_LEGEND)


def _shares_title(table: pd.DataFrame) -> str:
    tight = table[table["max_slots"] == table["max_slots"].min()]
    by_state = tight.pivot_table("share", "policy", "state", "sum", fill_value=0.0, sort=False)
    gone = by_state.get("dropped", pd.Series(0.0, by_state.index))
    heavy = by_state[[s for s in MERGED[3:] if s in by_state]].sum(axis=1)
    lost = ", ".join(f"{policy} {share:.0%}" for policy, share in gone.items() if share > 0)
    blurred = ", ".join(f"{policy} {heavy[policy]:.0%}" for policy in gone.index[gone == 0])
    return (
        f"In {tight['max_slots'].iloc[0]} slots, tokens forgotten: {lost or 'none'}; "
        f"tokens kept in slots of more than 32: {blurred or 'none'}"
    )


def slot_bars(table: pd.DataFrame, caption: str = "") -> go.Figure:
    """The compressed stream in order: height = mass, colour = energy, hover = the text held."""
    hover = table.assign(energy=table["energy"].round(3), text=_boxes(list(table["text"])))
    fig = go.Figure(
        go.Bar(
            x=table["slot"],
            y=table["mass"],
            width=1,
            customdata=hover[["first", "last", "energy", "text"]].to_numpy(),
            marker={
                "color": table["energy"],
                "colorscale": "Viridis",
                "line": {"width": 0},
                "colorbar": {"title": {"text": "energy e"}, "thickness": 14},
            },
            hovertemplate=(
                "slot %{x}: %{y} tokens, energy %{customdata[2]}<br>"
                "tokens %{customdata[0]} … %{customdata[1]}<br>%{customdata[3]}<extra></extra>"
            ),
        )
    )
    guarded = table[table["protected"]]
    if len(guarded):
        fig.add_vrect(
            x0=guarded["slot"].min() - 0.5,
            x1=guarded["slot"].max() + 0.5,
            fillcolor="#999999",
            opacity=0.18,
            line_width=0,
            layer="below",
            annotation={"text": "protected", "font": {"size": 12}},
            annotation_position="top left",
        )
    _log2_axis(fig, 2 * table["mass"].max())  # with room above for the names of two slots
    fig.update_yaxes(title_text="mass (tokens in the slot)")
    fig.update_xaxes(title_text="slot, oldest first", range=[-0.5, len(table) - 0.5])
    fig.update_layout(showlegend=False, bargap=0)
    _name_slots(fig, table)
    single = int((table["mass"] == 1).sum())
    title = (
        f"{len(table)} slots hold {table['mass'].sum():,.0f} tokens: the heaviest stands for "
        f"{table['mass'].max():,.0f}, and {single} still stand for one each"
        if len(table)
        else "No block is complete yet: there is no slot"
    )
    return dressed(fig, title, caption, height=520)


def _name_slots(fig: go.Figure, table: pd.DataFrame) -> None:
    """Write the text beside two slots worth a look, for readers without a mouse."""
    if not len(table):
        return
    alone = table[table["mass"] == 1]
    chosen = [("heaviest slot", 40, table.iloc[int(table["mass"].to_numpy().argmax())])]
    if len(alone):
        chosen.append(("oldest token alone", 90, alone.iloc[0]))
    for what, lift, row in chosen:
        text = str(row["text"]).replace("\n", " ")
        text = text if len(text) <= 16 else f"{text[:8]} … {text[-6:]}"
        left = row["slot"] < len(table) / 2
        fig.add_annotation(
            x=row["slot"],
            y=np.log10(row["mass"]),  # annotations on a log axis are placed by exponent
            text=f"{what}: 「{html.escape(text)}」",
            ax=30 if left else -30,
            ay=-lift,
            xanchor="left" if left else "right",
            bgcolor="rgba(255,255,255,0.85)",
            arrowwidth=1.2,
        )


def _boxes(texts: Sequence[str], width: int = 40, lines: int = 6) -> list[str]:
    """Texts as hover boxes: escaped, cut in the middle, broken every `width` characters."""
    boxes = []
    for text in texts:
        flat = text.replace("\n", "⏎")
        room = width * lines
        if len(flat) > room:
            flat = f"{flat[: room * 2 // 3]} ［…］ {flat[-room // 3 :]}"
        cut = [html.escape(flat[i : i + width]) for i in range(0, len(flat), width)]
        boxes.append("<br>".join(cut))
    return boxes


def _steps(colours: Sequence[str]) -> list[tuple[float, str]]:
    """A colour scale of equal flat steps."""
    n = len(colours)
    return [(edge / n, c) for i, c in enumerate(colours) for edge in (i, i + 1)]


def _present(table: pd.DataFrame) -> list[str]:
    """The states that occur, in the order of the legend."""
    found = set(table["state"].unique())
    return [state for state in COLOURS if state in found]


def _state_legend(fig: go.Figure, states: Sequence[str]) -> None:
    """Legend entries for the colours of `states`, without data of their own."""
    for state in states:
        marker = {"color": COLOURS[state], "symbol": "square", "size": 13}
        marker["line"] = {"color": "#666", "width": 0.5}
        fig.add_trace(go.Scatter(x=[None], y=[None], mode="markers", name=state, marker=marker))


def _log2_axis(fig: go.Figure, largest: float) -> None:
    """First y axis in powers of two, from a little below 1 to above `largest`."""
    top = max(2.0, float(np.nan_to_num(largest))) * 2
    axis = {"type": "log", "dtick": np.log10(2), "range": [np.log10(0.7), np.log10(top)]}
    fig.update_layout(yaxis=axis)


def _budget(table: pd.DataFrame) -> str:
    return ", ".join(f"{budget:,}" for budget in table["max_slots"].unique())
