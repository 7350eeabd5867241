"""Figures: one module per theme, each a function of a table of `measure` to a plotly figure."""
