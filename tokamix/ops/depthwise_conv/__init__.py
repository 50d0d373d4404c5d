"""Depthwise convolution of channels-last maps, with what surrounds it in the papers' blocks."""
