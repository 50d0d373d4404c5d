"""Mask pasting against grid_sample and torchvision."""

import pytest
import torch
import torch.nn.functional as F
from torchvision.models.detection.roi_heads import paste_masks_in_image

from tokamix.ops.mask_paste.op import paste_masks


@pytest.mark.parametrize("box", [[10.0, 12, 38, 40], [3.3, 4.7, 21.2, 39.5], [-5, -3, 20, 70], [30, 30, 31, 31]])
def test_against_grid_sample(box: list[float]) -> None:
    torch.manual_seed(0)
    masks, size = torch.rand(3, 28, 28), (50, 64)
    boxes = torch.tensor([box, [0, 0, 64, 50], [5, 5, 60, 45]])
    y, x = torch.meshgrid(torch.arange(50) + 0.5, torch.arange(64) + 0.5, indexing="ij")
    grids = [torch.stack([(x - b[0]) / (b[2] - b[0]), (y - b[1]) / (b[3] - b[1])], -1) * 2 - 1 for b in boxes]
    expected = F.grid_sample(masks[:, None], torch.stack(grids), align_corners=False)[:, 0]
    got = paste_masks(masks, boxes, size)
    assert got.dtype == torch.bool
    clear = (expected - 0.5).abs() > 1e-4
    torch.testing.assert_close(got[clear], (expected >= 0.5)[clear])


def test_close_to_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disc in a box of whole pixels: torchvision's result differs by at most a pixel at the edge."""
    y, x = torch.meshgrid(*[torch.arange(28) - 13.5] * 2, indexing="ij")
    disc = ((x**2 + y**2).sqrt() < 12).float()
    boxes = torch.tensor([[10.0, 12, 66, 68]])
    got, theirs = paste_masks(disc[None], boxes, (80, 90)), paste_masks_in_image(disc[None, None], boxes, (80, 90))
    assert (got ^ (theirs[:, 0] >= 0.5)).sum() < 0.06 * got.sum()
    many = paste_masks(disc.expand(5, -1, -1), boxes.expand(5, -1), (80, 90))
    monkeypatch.setattr("tokamix.ops.mask_paste.reference.MAX_PIXELS", 2 * 80 * 90)  # two at a time
    torch.testing.assert_close(paste_masks(disc.expand(5, -1, -1), boxes.expand(5, -1), (80, 90)), many)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(paste_masks(disc[None], boxes, (80, 90)), got)
    assert paste_masks(disc[None][:0], boxes[:0], (80, 90)).shape == (0, 80, 90)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"needs masks \(n, s, s\) and boxes \(n, 4\)"):
        paste_masks(torch.rand(2, 28, 28), torch.rand(3, 4), (10, 10))
