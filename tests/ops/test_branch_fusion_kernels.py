"""The kernels of branch fusion against the reference, under Triton's interpreter or on a GPU."""

import pytest
import torch
from torch import Tensor

from tests.ops.kernels import DEVICE, assert_kernel_close
from tokamix.ops.branch_fusion.op import branch_summary, fuse_branches

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 7), (2, 7, 33), (1, 65, 63), (3, 130, 24)]


def summarise(*branches: Tensor, backend: str) -> Tensor:
    return branch_summary(branches, backend)


def fuse(*tensors: Tensor, backend: str) -> Tensor:
    return fuse_branches(tensors[:3], tensors[3], backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_reference(shape: tuple[int, ...], dtype: torch.dtype, poison_empty: None) -> None:
    branches = torch.randn(3, *shape).unbind()
    assert_kernel_close(summarise, branches, dtype)
    assert_kernel_close(fuse, (*branches, torch.randn(shape[0], 3 * shape[2])), dtype)


def test_wide_channels_of_many_images(poison_empty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokamix.ops.branch_fusion import kernels

    monkeypatch.setattr(kernels, "FEW_PROGRAMS", 1)
    assert_kernel_close(fuse, (*torch.randn(3, 2, 3, 70).unbind(), torch.randn(2, 210)), torch.float32)


def test_extremes_in_float16(poison_empty: None) -> None:
    branches = [torch.full((1, 300, 4), value, dtype=torch.float16, device=DEVICE) for value in (6e4, 5e3, 0.0)]
    logits = torch.tensor([[3e4, -3e4, 0.0] * 4], dtype=torch.float16, device=DEVICE)
    torch.testing.assert_close(fuse(*branches, logits, backend="triton"), branches[0])
    assert summarise(*branches, backend="triton").isfinite().all()


def test_other_cases_run_in_plain_pytorch() -> None:
    branches = [torch.randn(1, 2, 4, device=DEVICE)] * 2
    with pytest.raises(RuntimeError, match="the kernels fuse 3 branches"):
        summarise(*branches, backend="triton")
