"""Learned position embeddings that are resized to any grid."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module, trunc_normal_
from torch import Tensor, nn

from tokamix.layers.layout import channels_last
from tokamix.ops import dispatch


@register_notrace_module
class PositionEmbedding(nn.Module):
    """Learned position embedding of a grid and of the prefix tokens before it, added to the tokens.

    It is resized on the fly for a grid other than its own `grid`.
    """

    def __init__(
        self,
        dim: int,
        grid: tuple[int, int],
        prefix: int = 0,
        mode: str = "bilinear",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.grid, self.prefix, self.mode = grid, prefix, mode
        self.table = nn.Parameter(torch.empty(1, prefix + grid[0] * grid[1], dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the table."""
        trunc_normal_(self.table, std=0.02)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Add the positions of `grid` (H, W) to tokens x (B, prefix + H*W, C)."""
        # an exported graph must not compare sizes, or it is tied to one; resizing to the same size changes nothing
        same = not dispatch.is_exporting() and grid == self.grid
        return x + (self.table if same else self._resized(self.table, self.grid, grid))

    def fit(self, table: Tensor) -> Tensor:
        """Resize a checkpoint's table (1, prefix + N, C), made for a square grid, to this grid."""
        if table.shape == self.table.shape:
            return table
        side = math.isqrt(table.shape[1] - self.prefix)
        if side**2 + self.prefix != table.shape[1]:
            raise ValueError(
                f"a position embedding of {table.shape[1]} tokens, {self.prefix} of them prefix tokens, has no square"
                f" grid; create the model for the checkpoint's image size and call set_input_size after loading"
            )
        return self._resized(table, (side, side), self.grid)

    def set_grid(self, grid: tuple[int, int]) -> None:
        """Resize the table permanently."""
        if grid != self.grid:
            with torch.no_grad():
                self.table = nn.Parameter(self._resized(self.table, self.grid, grid))
            self.grid = grid

    def _resized(self, table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
        positions = table[:, self.prefix :].unflatten(1, old).permute(0, 3, 1, 2)
        wide = positions.to(torch.promote_types(table.dtype, torch.float32))
        positions = channels_last(F.interpolate(wide, size=new, mode=self.mode)).flatten(1, 2).to(table.dtype)
        return torch.cat([table[:, : self.prefix], positions], dim=1)


def fit_position_embeddings(state_dict: dict[str, Tensor], model: nn.Module) -> None:
    """Resize a checkpoint's position embeddings to those of `model`, in place."""
    for name, module in model.named_modules():
        if isinstance(module, PositionEmbedding) and f"{name}.table" in state_dict:
            state_dict[f"{name}.table"] = module.fit(state_dict[f"{name}.table"])
