"""Setting up a run: processes, starting weights, teacher."""
