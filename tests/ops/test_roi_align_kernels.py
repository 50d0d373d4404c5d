"""The multi-scale RoIAlign kernel against torchvision, under Triton's interpreter or on a GPU."""

import pytest
import torch
from torch import Tensor

from tests.ops.kernels import DEVICE, relative_rmse
from tokamix.ops.roi_align.op import multiscale_roi_align

STRIDES = (4, 8, 16, 32)
# empty, larger than the image, outside of it, less than a pixel
FAR = [[0.0, 0, 0, 0], [-20, -30, 230, 180], [900, 10, 950, 60], [10, 10, 10.5, 10.2]]


def inputs(channels: int, dtype: torch.dtype, levels: int = 4) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    maps = [torch.randn(2, channels, 40 >> i, 52 >> i, device=DEVICE).to(dtype) for i in range(levels)]
    boxes = torch.rand(7, 4) * 100
    boxes[:, 2:] += boxes[:, :2]
    boxes = torch.cat([boxes, torch.tensor(FAR)]).to(DEVICE)
    image, level = (torch.randint(0, high, (len(boxes),), device=DEVICE) for high in (2, levels))
    return maps, boxes, image, level


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("channels", "side"), [(1, 7), (65, 7), (16, 14)])
def test_against_torchvision(channels: int, side: int, dtype: torch.dtype, poison_empty: None) -> None:
    maps, *rest = inputs(channels, dtype)
    got = multiscale_roi_align(maps, *rest, side, STRIDES, backend="triton")
    plain = multiscale_roi_align(maps, *rest, side, STRIDES, backend="eager")
    exact = multiscale_roi_align([x.float() for x in maps], *rest, side, STRIDES, backend="eager")
    assert (got.shape, got.dtype) == (plain.shape, plain.dtype)
    bound = 1e-5 if dtype == torch.float32 else 2 * max(relative_rmse(plain, exact), torch.finfo(dtype).eps / 4)
    assert relative_rmse(got, exact) <= bound * (1 if DEVICE == "cuda" or dtype != torch.bfloat16 else 2)


@pytest.mark.parametrize("levels", [1, 3])
def test_fewer_levels_and_channels_last(levels: int, poison_empty: None) -> None:
    maps, *rest = inputs(8, torch.float32, levels)
    maps = [x.contiguous(memory_format=torch.channels_last) for x in maps]
    got, expected = (multiscale_roi_align(maps, *rest, 7, STRIDES[:levels], backend=b) for b in ("triton", "eager"))
    torch.testing.assert_close(got, expected)
    assert got.is_contiguous(memory_format=torch.channels_last)


def test_no_boxes_and_gradients() -> None:
    maps, boxes, image, level = inputs(8, torch.float32)
    none = multiscale_roi_align(maps, boxes[:0], image[:0], level[:0], 7, STRIDES, backend="triton")
    assert none.shape == (0, 8, 7, 7)
    with pytest.raises(RuntimeError, match="a gradient is needed"):
        multiscale_roi_align([x.requires_grad_() for x in maps], boxes, image, level, 7, STRIDES, backend="triton")


def test_opcheck() -> None:
    maps, *rest = inputs(4, torch.float32)
    few = [part[:2] for part in rest]
    torch.library.opcheck(torch.ops.tokamix.multiscale_roi_align, (maps, *few, 7, list(STRIDES)))
