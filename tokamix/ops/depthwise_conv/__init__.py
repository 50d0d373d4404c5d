"""Depthwise convolution of channels-last maps, optionally with GELU before it and a residual connection."""
