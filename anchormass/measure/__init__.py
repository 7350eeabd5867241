"""What is measured: one module per theme, each a function of a model or cache to a table."""
