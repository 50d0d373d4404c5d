"""Model, data and task of a run, from its recipe."""
