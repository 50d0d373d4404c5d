"""Batched non-maximum suppression (NMS) of boxes."""
