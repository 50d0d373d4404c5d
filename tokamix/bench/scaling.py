"""Cost against size: whole mixers, ours and peers, from 196 to 65,536 tokens; models on images up to 4,096 px."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from timm.models.convnext import ConvNeXtBlock
from timm.models.swin_transformer import WindowAttention, window_partition, window_reverse
from torch import Tensor, nn

from tokamix.bench import ops
from tokamix.bench.models import TimedModel
from tokamix.bench.timing import median_ms, peak_gb
from tokamix.mixers import Site, WeightMixing, create_mixer

SIDES = (14, 28, 56, 112, 256)  # of the grid: 196 to 65,536 tokens
IMAGE_SIZES = (4096, 2048, 1024)
BATCH, DIM, HEADS = 4, 384, 6


class SwinWindows(nn.Module):
    """Swin's window attention as in timm, by PyTorch's fused attention; sides of the grid are multiples of 7."""

    def __init__(self, dim: int, heads: int, window: int = 7) -> None:
        super().__init__()
        self.window, self.attend = (window, window), WindowAttention(dim, heads, window_size=window)
        self.attend.fused_attn = True

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Tokens (B, N, C) -> (B, N, C)."""
        windows = window_partition(x.unflatten(1, grid), self.window).flatten(1, 2)
        return window_reverse(self.attend(windows).unflatten(1, self.window), self.window, *grid).flatten(1, 2)


class ConvNeXtLayer(nn.Module):
    """A whole block of ConvNeXt, its MLP included, on tokens; its map is channels_last."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.block = ConvNeXtBlock(dim, ls_init_value=None)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Tokens (B, N, C) -> (B, N, C)."""
        return self.block(x.unflatten(1, grid).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(1, 2)


OURS: dict[str, Callable[[Site], nn.Module]] = {
    "SimA": lambda site: create_mixer("sima", site),
    "active tokens": lambda site: create_mixer("active_token", site),
    "super tokens": lambda site: create_mixer("super_token", site, cell=7),
    "weight mixing": lambda site: WeightMixing(site.dim, 14, site.num_heads, 9, partition=site.grid[0] > 14),
}
PEERS: dict[str, Callable[[Site], nn.Module]] = {
    "softmax attention": lambda site: create_mixer("softmax", site),
    "Swin windows": lambda site: SwinWindows(site.dim, site.num_heads),
    "ConvNeXt block": lambda site: ConvNeXtLayer(site.dim),
}
WINDOWED = {"weight mixing", "Swin windows"}  # they get the next smaller side that is a multiple of 14


def measure_mixer(name: str, side: int, device: str = "cuda", seconds: float = 0.2) -> ops.OpRow:
    """Check and time one mixer with all its projections on a square grid of tokens.

    Args:
        name: a key of OURS or PEERS.
        side: of the grid.
        device: "cuda" or "cpu".
        seconds: duration of each timing.
    """
    torch.manual_seed(0)
    mixer = _create(name, side)
    tokens = math.prod(mixer.grid)
    case = ops.OpCase(name, f"B {BATCH}, C {DIM}", tokens, mixer, [torch.randn(BATCH, tokens, DIM)])
    kernels = name in OURS and device == "cuda"
    return ops.measure(case, "triton" if kernels else "torch", device, seconds)


def _create(name: str, side: int) -> ops.OnGrid:
    side -= side % 14 if name in WINDOWED else 0
    return ops.OnGrid((OURS | PEERS)[name](Site(DIM, HEADS, (side, side))), (side, side))


def launch_mixer(name: str, device: str = "cuda") -> None:
    """Run a mixer forward and backward at all sizes, so that its kernels are compiled and in Triton's cache."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for side in SIDES:
        mixer = _create(name, side).to(device, dtype)
        tokens = torch.randn(BATCH, math.prod(mixer.grid), DIM, device=device, dtype=dtype, requires_grad=True)
        mixer(tokens).sum().backward()


def launch_image(name: str, mode: str, device: str = "cuda", **kwargs: Any) -> None:
    """Run a model on the smallest image, so that its kernels are compiled and in Triton's cache."""
    TimedModel(name, mode, min(IMAGE_SIZES), 1, "", device=device, checked=False, **kwargs).step()


@dataclass
class ImageRow:
    """One model on one large image."""

    model: str
    mode: str  # "infer" or "train"
    size: int
    fits: bool  # False: it ran out of memory, and no number is known
    milliseconds: float
    graph_ms: float  # replayed from a CUDA graph
    peak_gb: float
    error: float  # of the logits against float32; NaN in training and on images above 1,024 px, where it is not checked

    def as_dict(self) -> dict[str, Any]:
        """The row as a dict, for a CSV file."""
        return asdict(self)


def measure_image(
    name: str, mode: str, size: int, device: str = "cuda", seconds: float = 0.3, **kwargs: Any
) -> ImageRow:
    """Time one image in a model, nothing compiled: inference in bfloat16, or forward and backward under autocast.

    Args:
        name: a model name, ours or timm's.
        mode: "infer" or "train".
        size: side of the image.
        device: "cuda" or "cpu".
        seconds: duration of each timing.
        kwargs: passed to the model.
    """
    row = ImageRow(name, mode, size, True, *[math.nan] * 4)
    checked = mode == "infer" and size <= min(IMAGE_SIZES)
    try:
        timed = TimedModel(name, mode, size, 1, "", device=device, checked=checked, **kwargs)
        if checked:
            row.error = timed.check()
        row.milliseconds = median_ms(timed.step, device, seconds)
        if device == "cuda":
            row.peak_gb = peak_gb(timed.step)
    except torch.OutOfMemoryError:
        row.fits = False
        return row
    if device == "cuda":
        torch.cuda.empty_cache()  # the graph has memory of its own
        with suppress(RuntimeError):  # a model that synchronises cannot be captured, nor one that needs all memory
            row.graph_ms = median_ms(timed.step_for_graph, device, seconds, graph=True)
    return row
