"""The training loop: engine, optimizer, EMA, schedule, state."""
