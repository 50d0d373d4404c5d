"""COCO's run-length encoding of masks."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def encode_rle(mask: Tensor) -> dict[str, Any]:
    """Encode a mask (H, W) as uncompressed run lengths, column by column; the first run is of zeros.

    Needs no pycocotools, so that every installation can write detections.
    """
    flat = mask.t().flatten().numpy()
    ends = np.append(np.flatnonzero(np.diff(flat)) + 1, flat.size)
    counts = np.diff(ends, prepend=0).tolist()
    return {"size": list(mask.shape), "counts": [0, *counts] if flat.size and flat[0] else counts}


def compress_masks(masks: Tensor) -> list[dict[str, Any]]:
    """Encode masks (n, H, W) as pycocotools' compressed run lengths, for COCO's evaluation."""
    if not len(masks):
        return []
    columns = masks.to(torch.uint8).transpose(1, 2).contiguous().cpu().numpy()  # pycocotools reads column by column
    return import_mask_tools().encode(columns.transpose(2, 1, 0))


def import_mask_tools() -> Any:
    """Import pycocotools' mask functions."""
    try:
        from pycocotools import mask
    except ImportError:
        raise ImportError("COCO masks need pycocotools: pip install 'tokamix[detect]'") from None
    return mask
