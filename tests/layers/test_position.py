"""Position embeddings: resizing, export, dtype."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.layers import PositionEmbedding, map_to_tokens


class Positioned(nn.Module):
    """Positions added to a map (B, H, W, C)."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.positions = PositionEmbedding(4, (4, 6), mode=mode, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.positions(*map_to_tokens(x))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_exported_positions_serve_all_grids(mode: str) -> None:
    """A graph exported at one grid is right at the table's own grid, where nothing is resized, and at others."""
    model = Positioned(mode)
    dynamic = torch.export.Dim.AUTO
    example = torch.zeros(2, 7, 5, 4, dtype=torch.float64)
    exported = torch.export.export(model, (example,), dynamic_shapes=({0: dynamic, 1: dynamic, 2: dynamic},)).module()
    for grid in ((4, 6), (3, 9)):
        x = torch.randn(3, *grid, 4, dtype=torch.float64)
        torch.testing.assert_close(exported(x), model(x), rtol=1e-9, atol=1e-11)
    table = model.positions.table
    torch.testing.assert_close(model(torch.zeros(1, 4, 6, 4, dtype=torch.float64)), table)


def test_prefix_positions_are_not_resized() -> None:
    positions = PositionEmbedding(4, (2, 2), prefix=1)
    out = positions(torch.zeros(1, 1 + 3 * 3, 4), (3, 3))
    assert torch.equal(out[:, :1], positions.table[:, :1])
    expected = F.interpolate(positions.table[:, 1:].mT.unflatten(2, (2, 2)), size=(3, 3), mode="bilinear")
    torch.testing.assert_close(out[:, 1:], expected.flatten(2).mT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_keep_their_dtype(dtype: torch.dtype) -> None:
    positions = PositionEmbedding(4, (2, 2), mode="bicubic", dtype=dtype)
    assert positions(torch.zeros(1, 9, 4, dtype=dtype), (3, 3)).dtype == dtype
    positions.set_grid((3, 5))
    assert positions.table.dtype == dtype
    assert positions.table.shape == (1, 15, 4)
