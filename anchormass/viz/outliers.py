"""Figures of stage 1: a table of `anchormass.measure.outliers` in, one plotly figure out.

Notable: text is drawn as bars whose length is the width of the token, so that a running text
has colours, a legend and a hover for every token.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from anchormass.figures import BLACK, GREEN, GREY, ORANGE, SKY, STATE_COLOURS, VERMILION
from anchormass.measure.outliers import CHOICES, KINDS
from anchormass.viz.dress import dressed

ORTHOGONAL = 8**-0.5  # cosine of each of eight orthogonal vectors to their mean
ARTICLE_COS, ARTICLE_NORM = 0.85, 2.0

_LINE = 124  # widths of a Latin letter in one line of text
_TEXT_SIZE = 13
_HOVER = ["position", "similarity", "relative_norm", "least", "largest"]
_STATES = {
    "sink": ("sink, kept raw", GREY, "white"),
    "background": ("background, averaged", "#D6ECF8", "#222222"),
    "candidate": ("candidate that did not fire", SKY, "#222222"),
    "outlier": ("outlier, its own slot", STATE_COLOURS["outlier"], "black"),
    "tail": ("open block, still raw", "#FBE6BD", "#222222"),
}
_REASONS = {
    "cosine": ("fires: cosine", STATE_COLOURS["outlier"], "circle"),
    "norm": ("fires: norm", ORANGE, "diamond"),
    "both": ("fires: both", VERMILION, "square"),
    "none": ("does not fire", GREEN, "x"),
}
_CHOICES = {
    "no outlier": (GREY, "line-ns-open"),
    "any token": (BLACK, "diamond-open"),
    "largest norm": (ORANGE, "square"),
    "least similar": (STATE_COLOURS["outlier"], "circle"),
    "best possible": (GREEN, "star"),
}


def _lines(sources: Sequence[str]) -> dict[str, dict[str, str]]:
    """One line a source: layers run from dark to light, random values are dotted or dashed."""
    layers = [s for s in sources if not s.startswith("random")]
    steps = [0.9 * i / max(len(layers) - 1, 1) for i in range(len(layers))]
    found = {
        source: {"color": shade, "dash": "solid"}
        for source, shade in zip(layers, sample_colorscale("Cividis", steps), strict=True)
    }
    random = [s for s in sources if s not in layers]
    for i, source in enumerate(random):
        found[source] = {"color": (GREY, BLACK)[i % 2], "dash": ("dot", "dashdot")[i % 2]}
    return found


def _percent(share: float) -> str:
    """No more decimals than it takes to tell a share from all and from nothing."""
    return f"{share:.0%}" if share in (0.0, 1.0) or 0.005 <= share <= 0.995 else f"{share:.1%}"


# ---------------------------------------------------------------- the text


def text_map(
    rows: pd.DataFrame, caption: str = "", first: int = 0, n_tokens: int = 208
) -> go.Figure:
    """A text with each token coloured by what stage 1 makes of it.

    Args:
        rows: from `decide`, of one document and one layer.
        caption: model and text.
        first: position of the first token shown.
        n_tokens: how many are shown.
    """
    shown = rows[(rows.position >= first) & (rows.position < first + n_tokens)]
    shown = _set(shown)
    fig = go.Figure()
    drawn = shown.state.where(~((shown.state == "background") & shown.candidate), "candidate")
    for state, (name, colour, ink) in _STATES.items():
        part = shown[drawn == state]
        fig.add_bar(
            name=name,
            orientation="h",
            x=part.width,
            base=part.start,
            y=part.line,
            text=part.label,
            customdata=part[_HOVER].to_numpy(dtype="float32"),
            hovertemplate="%{text} · position %{customdata[0]:.0f}<br>"
            + "cosine to the subgroup's mean %{customdata[1]:.3f}, relative norm "
            + "%{customdata[2]:.3f}<br>subgroup: least cosine %{customdata[3]:.3f}, largest norm "
            + "%{customdata[4]:.3f}"
            + "<extra></extra>",
            marker={"color": colour, "line": {"width": 0}},
            textposition="inside",
            insidetextanchor="middle",
            insidetextfont={"size": _TEXT_SIZE, "color": ink},
            constraintext="none",
            textangle=0,
        )
    lines = int(shown.line.max()) + 1
    compressed = rows[rows.part == "compressed"]
    fired = _percent(compressed[compressed.candidate].fired.mean())
    counts = shown[shown.state == "outlier"].label.value_counts()
    most = ", ".join(f"“{label}”" for label in counts[counts > 1].index[:3])
    title = f"Layer {rows.layer.iloc[0]}: {fired} of subgroups split off a token" + (
        f", here most often {most}" if most else ""
    )
    return dressed(
        fig,
        title,
        caption,
        barmode="overlay",
        bargap=0.12,
        height=150 + 30 * lines,
        xaxis={"visible": False, "range": [0, _LINE + 4]},
        yaxis={"visible": False, "range": [lines - 0.5, -0.5]},
        legend={"itemwidth": 30},
        margin={"l": 20, "r": 20},
    )


def _set(rows: pd.DataFrame) -> pd.DataFrame:
    """Where each token goes on the page: `line`, `start` and `width`, and its `label`."""
    lines, starts, widths, labels = [], [], [], []
    line, at = 0, 0.0
    previous = None
    for piece, subgroup in zip(rows.piece, rows.subgroup.fillna(-1), strict=True):
        label = {"\n": "⏎"}.get(piece, piece.strip() or "␣")
        label = label[3:5] if label.startswith("<0x") else label
        width = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1.15 for c in label) + 0.9
        if previous is not None and subgroup != previous:
            at += 0.9  # a gap between subgroups
        if at + width > _LINE:
            line, at = line + 1, 0.0
        lines.append(line)
        starts.append(at)
        widths.append(width)
        labels.append(html.escape(label))
        at, previous = at + width + 0.15, subgroup
    return rows.assign(line=lines, start=starts, width=widths, label=labels)


# ---------------------------------------------------------------- thresholds


def thresholds(
    groups: pd.DataFrame, cos_threshold: float, norm_threshold: float, caption: str = ""
) -> go.Figure:
    """Every subgroup by the two numbers that decide, with the thresholds as lines.

    `groups`: from `groups(decide(…))`, of one layer or several.
    """
    fig = go.Figure()
    for reason, (name, colour, symbol) in _REASONS.items():
        part = groups[groups.reason == reason]
        fig.add_scatter(
            name=f"{name} ({len(part):,})",
            mode="markers",
            x=part.least,
            y=part.largest,
            hovertext=[
                html.escape(f"“{piece}” in “{text}”".replace("\n", "⏎"))
                for piece, text in zip(part.piece, part.text, strict=True)
            ],
            hovertemplate="%{hovertext}<br>least cosine %{x:.3f}, "
            + "largest norm %{y:.3f}<extra></extra>",
            marker={"color": colour, "symbol": symbol, "size": 6, "opacity": 0.7},
            showlegend=True,
        )
    fig.add_vline(
        cos_threshold,
        line={"color": BLACK, "width": 1.5},
        annotation={
            "text": f"cosine below {cos_threshold:g} fires",
            "textangle": -90,
            "bgcolor": "white",
            "xshift": -4,
        },
        annotation_position="top left",
    )
    fig.add_hline(
        norm_threshold,
        line={"color": BLACK, "width": 1.5, "dash": "dash"},
        annotation={"text": f"norm above {norm_threshold:g} fires"},
        annotation_position="top left",
    )
    by_norm = groups.reason.isin(["norm", "both"]).mean()
    title = (
        f"{_percent(groups.fired.mean())} of {len(groups):,} subgroups fire at "
        f"{cos_threshold:g} and {norm_threshold:g}; the norm alone would fire "
        f"{_percent(by_norm)}"
    )
    low = min(float(groups.least.min()), ORTHOGONAL) - 0.05
    high = max(float(groups.largest.max()), 2.0) + 0.25
    fig.update_xaxes(title_text="least cosine to the mean, of eight tokens", range=[low, 1.02])
    fig.update_yaxes(title_text="largest norm ÷ mean norm, of eight tokens", range=[0.9, high])
    return dressed(fig, title, caption)


def similarities(histogram: pd.DataFrame, caption: str = "") -> go.Figure:
    """How similar tokens are to their subgroup's mean: each layer, and random directions."""
    fig = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.12,
        subplot_titles=("all tokens", "the least similar of each eight: the candidate"),
    )  # fmt: skip
    lines = _lines(list(histogram.source.unique()))
    for row, which in enumerate(("all tokens", "least of eight"), start=1):
        for source, part in histogram[histogram.which == which].groupby("source", sort=False):
            fig.add_scatter(
                name=str(source),
                legendgroup=str(source),
                showlegend=row == 1,
                x=part.similarity,
                y=100 * part.share,
                mode="lines",
                line=lines[str(source)] | {"shape": "hvh"},
                row=row,
                col=1,
            )
        for x, label in ((ORTHOGONAL, "1/√8"), (ARTICLE_COS, "article: 0.85")):
            fig.add_vline(x, line={"color": BLACK, "dash": "dash", "width": 1}, row=row, col=1)
            if row == 2:  # where the random peaks leave room
                fig.add_annotation(
                    x=x, y=1, yref="y2 domain", text=label, showarrow=False,
                    xanchor="left", yanchor="top", xshift=3, row=2, col=1,
                )  # fmt: skip
    middle = histogram[histogram.which == "all tokens"].drop_duplicates("source")
    real = middle[~middle.source.str.startswith("random")]["median"]
    where = f"near {real.mean():.2f}" if real.max() - real.min() < 0.05 else (
        f"between {real.min():.2f} and {real.max():.2f}"
    )  # fmt: skip
    title = (
        f"The typical token has cosine {where} to its subgroup's mean; "
        f"eight orthogonal values have {ORTHOGONAL:.2f}"
    )
    fig.update_xaxes(title_text="cosine to the subgroup's mean value (mean over heads)", row=2)
    fig.update_yaxes(title_text="share (%)", rangemode="tozero")
    return dressed(fig, title, caption, headings=True, height=600)


def firing_curves(
    curves: pd.DataFrame,
    selecting: pd.DataFrame,
    cos_threshold: float = ARTICLE_COS,
    caption: str = "",
) -> go.Figure:
    """Share of subgroups that fire against the cosine threshold, a line per source.

    `curves` from `firing`, with one norm threshold; `selecting` from `selecting_range`.
    """
    fig = go.Figure()
    lines = _lines(list(curves.source.unique()))
    for source, part in curves.groupby("source", sort=False):
        fig.add_scatter(
            name=str(source),
            x=part.cos_threshold,
            y=100 * part.rate,
            mode="lines",
            line=lines[str(source)] | {"width": 2.5},
        )
    fig.add_vline(ORTHOGONAL, line={"color": BLACK, "dash": "dot", "width": 1})
    fig.add_annotation(x=ORTHOGONAL, y=4, text="1/√8", showarrow=False, xanchor="left", xshift=4)
    fig.add_vline(ARTICLE_COS, line={"color": BLACK, "dash": "dash", "width": 1})
    fig.add_annotation(
        x=ARTICLE_COS, y=4, text="article: 0.85", showarrow=False, xanchor="right", xshift=-4
    )
    if cos_threshold != ARTICLE_COS:
        fig.add_vline(cos_threshold, line={"color": VERMILION, "width": 2})
    layers = selecting[~selecting.source.str.startswith("random")]
    nearest = (curves.cos_threshold - cos_threshold).abs()
    at = curves[(nearest == nearest.min()) & ~curves.source.str.startswith("random")].rate
    among = _percent(at.min())
    if at.max() > at.min():
        among += f" (least) to {_percent(at.max())} (most)"
    title = (
        f"At {cos_threshold:g}, {among} of a layer's subgroups fire; "
        f"a cosine threshold begins to choose below {layers.high.max():.2f}"
    )
    norm = curves.norm_threshold.iloc[0]
    lowest = min(float(selecting.low.min()), ORTHOGONAL)
    fig.update_xaxes(title_text="cosine threshold", range=[lowest - 0.15, 1.0])
    fig.update_yaxes(
        title_text=f"subgroups that fire (%), norm threshold {norm:g}", range=[-2, 104]
    )
    return dressed(fig, title, caption)


# ---------------------------------------------------------------- which tokens, and why


def kinds(table: pd.DataFrame, caption: str = "") -> go.Figure:
    """Share of each kind of token that stage 1 splits off, per layer, with 95 % intervals."""
    layers = sorted(table.layer.unique())
    lines = _lines([f"layer {i}" for i in layers])
    order = [k for k in KINDS if k in set(table.kind)]
    fig = go.Figure()
    for i, layer in enumerate(layers):
        part = table[table.layer == layer]
        shift = 0.5 * ((i + 0.5) / len(layers) - 0.5)
        fig.add_scatter(
            name=f"layer {layer}",
            mode="markers",
            x=100 * part.share,
            y=[order.index(k) + shift for k in part.kind],
            error_x={
                "array": 100 * (part.high - part.share),
                "arrayminus": 100 * (part.share - part.low),
                "thickness": 1.2,
                "width": 0,
            },
            customdata=part[["kind", "outliers", "tokens"]],
            hovertemplate="%{customdata[0]}: %{customdata[1]} of %{customdata[2]} tokens",
            marker={"color": lines[f"layer {layer}"]["color"], "size": 8},
        )
    base = table.outliers.sum() / table.tokens.sum()
    fig.add_vline(100 * base, line={"color": BLACK, "dash": "dash", "width": 1})
    pooled = table.groupby("kind")[["outliers", "tokens"]].sum()
    share = (pooled.outliers / pooled.tokens).sort_values()
    if share.max() == 0:
        title = "No token is split off at these thresholds"
    else:
        title = (
            f"Most often split off: {share.index[-1]} ({_percent(share.iloc[-1])}); "
            f"least often: {share.index[0]} ({_percent(share.iloc[0])}); "
            f"all tokens: {_percent(base)} (dashed)"
        )
    fig.update_xaxes(
        title_text="tokens that became outliers (%), 95 % interval", rangemode="tozero"
    )
    fig.update_yaxes(
        tickvals=list(range(len(order))), ticktext=order, range=[len(order) - 0.5, -0.5]
    )
    return dressed(fig, title, caption)


def head_spread(table: pd.DataFrame, caption: str = "") -> go.Figure:
    """How averaging over heads narrows similarities, beside what independent heads would do."""
    fig = go.Figure()
    lines = _lines(list(table.source.unique()))
    for source, part in table.groupby("source", sort=False):
        line = lines[str(source)] | {"dash": "solid", "width": 2}
        fig.add_scatter(
            name=str(source), x=part.heads, y=part.spread, mode="lines+markers", line=line,
            marker={"size": 9},
        )  # fmt: skip
        fig.add_scatter(
            x=part.heads, y=part.independent, mode="lines", showlegend=False, hoverinfo="skip",
            line=line | {"dash": "dot", "width": 1.5},
        )  # fmt: skip
    fig.add_scatter(
        name="if heads were independent (÷ √heads)", x=[None], y=[None], mode="lines",
        line={"color": BLACK, "dash": "dot", "width": 1.5},
    )  # fmt: skip
    layers = table[~table.source.str.startswith("random")]
    heads = int(layers.heads.max())
    one, all_ = (layers[layers.heads == n].mean(numeric_only=True) for n in (1, heads))
    if heads == 1:
        title = f"One Global head: similarities spread by {one.spread:.2f}, nothing is averaged"
    else:
        title = (
            f"Averaging {heads} heads narrows the spread from {one.spread:.2f} to "
            f"{all_.spread:.2f}; independent heads would reach {all_.independent:.2f}"
        )
    fig.update_xaxes(title_text="Global heads that are averaged", dtick=1)
    fig.update_yaxes(title_text="spread over tokens (standard deviation)", rangemode="tozero")
    return dressed(fig, title, caption)


def choices(table: pd.DataFrame, caption: str = "") -> go.Figure:
    """What is left of the values' differences, by which token is split off."""
    sources = list(dict.fromkeys(table.source))
    fig = go.Figure()
    for i, choice in enumerate(CHOICES):
        part = table[table.choice == choice].set_index("source").loc[sources]
        colour, symbol = _CHOICES[choice]
        fig.add_scatter(
            name=choice + (" (article)" if choice == "least similar" else ""),
            mode="markers",
            x=100 * part["median"],
            y=[j + 0.14 * (i - 2) for j in range(len(sources))],
            error_x={
                "array": 100 * (part.high - part["median"]),
                "arrayminus": 100 * (part["median"] - part.low),
                "thickness": 1.2,
                "width": 0,
            },
            marker={"color": colour, "symbol": symbol, "size": 10, "line": {"width": 2}},
            hovertemplate="%{x:.1f} % left",
        )
    real = table[~table.source.str.startswith("random")].groupby("choice")["median"].mean()
    article, norm, best = (real[c] for c in ("least similar", "largest norm", "best possible"))
    title = (
        f"The least similar token leaves {article:.1%} of the differences, any token "
        f"{real['any token']:.1%}, the largest {norm:.1%}, the best {best:.1%}"
    )
    fig.update_xaxes(
        title_text="squared distance of values to their background, "
        "% of that with no outlier (median, quartiles)"
    )
    fig.update_yaxes(
        tickvals=list(range(len(sources))), ticktext=sources, range=[len(sources) - 0.5, -0.5]
    )
    return dressed(fig, title, caption)
