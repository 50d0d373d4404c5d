"""Self-supervised training with DINO, arXiv 2104.14294."""
