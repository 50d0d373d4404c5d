"""Token mixers as modules, called `mixer(x, grid)` on tokens (B, N, C)."""
