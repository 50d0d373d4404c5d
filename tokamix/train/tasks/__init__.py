"""Tasks: what is trained. The engine uses them through the `Task` protocol only."""
