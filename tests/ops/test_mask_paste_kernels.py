"""The mask pasting kernel against the reference, under Triton's interpreter or on a GPU."""

import pytest
import torch

from tests.ops.kernels import DEVICE
from tokamix.ops.mask_paste.op import paste_masks

FAR = [[0.0, 0, 0, 0], [-50, -50, -20, -20], [-1e6, -10, 1e6, 1e30], [3, 3, 3.5, 60]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(1, 1), (17, 130), (33, 7)])
@pytest.mark.parametrize("side", [1, 28])
def test_against_reference(side: int, size: tuple[int, int], dtype: torch.dtype, poison_empty: None) -> None:
    torch.manual_seed(0)
    boxes = torch.rand(5, 2).mul(torch.tensor(size).flip(0)).repeat(1, 2) + torch.rand(5, 4) * torch.tensor(
        [0, 0, 99, 40]
    )
    boxes = torch.cat([boxes - 9, torch.tensor(FAR)]).to(DEVICE)
    masks = torch.rand(len(boxes), side, side, device=DEVICE).to(dtype)
    got, expected = (paste_masks(masks, boxes, size, backend=backend) for backend in ("triton", "eager"))
    assert (got.shape, got.dtype) == (expected.shape, torch.bool)
    assert (got ^ expected).float().mean() < 1e-3  # pixels whose sum is 0.5 up to the last bit


def test_no_masks_and_strides(poison_empty: None) -> None:
    masks, boxes = torch.rand(4, 7, 7, device=DEVICE).mT, torch.rand(4, 8, device=DEVICE)[:, ::2] * 20
    got, expected = (paste_masks(masks, boxes, (20, 20), backend=backend) for backend in ("triton", "eager"))
    assert (got ^ expected).float().mean() < 1e-3
    assert paste_masks(masks[:0], boxes[:0], (20, 20), backend="triton").shape == (0, 20, 20)


def test_opcheck() -> None:
    torch.library.opcheck(
        torch.ops.tokamix.paste_masks,
        (torch.rand(2, 7, 7, device=DEVICE), torch.tensor([[1.0, 1, 9, 9], [2, 0, 4, 9]], device=DEVICE), [10, 12]),
    )
