"""A notebook's figures: each shown, saved and read out in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from IPython.display import Markdown, display

from anchormass import explore
from anchormass.figures import save_figure
from anchormass.provenance import provenance


class Page:
    """Remembers what every figure of a notebook is saved with: the notebook's parameters."""

    def __init__(
        self, notebook: str, profile: str, seed: int, interactive: bool, out_dir: str
    ) -> None:
        self.notebook, self.interactive, self.out_dir = notebook, interactive, out_dir
        self.provenance = provenance(
            profile, seed, f"reproduce --only {notebook[:2]} --profile {profile}"
        )

    def show(
        self,
        draw: go.Figure | Callable[..., go.Figure],
        name: str,
        says: str,
        data: pd.DataFrame,
        **controls: Any,
    ) -> None:
        """Display a figure (with its sliders when interactive), save it, and read it out.

        Args:
            draw: the figure, or a function of the `controls` that draws it; saved is what it
                draws at their defaults.
            name: of the files, see `save_figure`.
            says: one sentence that reads the figure.
            data: every number drawn.
            controls: see `explore.drag`.
        """
        if isinstance(draw, go.Figure):
            fig = shown = draw
        else:
            fig = shown = explore.drag(draw, interactive=False, **controls)
            if self.interactive:
                shown = explore.drag(draw, interactive=True, **controls)
        save_figure(
            fig,
            name,
            self.out_dir,
            title_says=says,
            notebook=self.notebook,
            data=data,
            provenance=self.provenance,
        )
        display(shown, Markdown(says))
