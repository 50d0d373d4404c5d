"""Inputs of impossible dtypes and sizes, found by `make fuzz`."""

import pytest
import torch

from tokamix import ops

WHOLE = torch.ones(1, 2, 2, 4, dtype=torch.int64)
REAL = WHOLE.float()
CALLS = {
    "sima_attention": lambda: ops.sima_attention(WHOLE, WHOLE, WHOLE),
    "sima_class_attention": lambda: ops.sima_class_attention(WHOLE, WHOLE, WHOLE),
    "sima_self_attention": lambda: ops.sima_self_attention(torch.ones(1, 2, 3, 1, 4, dtype=torch.int64)),
    "active_gather": lambda: ops.active_gather(WHOLE, REAL, 1),
    "active_gather_axes": lambda: ops.active_gather_axes(WHOLE, REAL),
    "active_gather_joint": lambda: ops.active_gather_joint(WHOLE, REAL),
    "super_token_sample": lambda: ops.super_token_sample(WHOLE, (1, 1)),
    "super_token_scatter": lambda: ops.super_token_scatter(WHOLE, torch.ones(1, 2, 2, 9), (1, 1)),
    "bank_mixing": lambda: ops.bank_mixing(WHOLE.flatten(1, 2)[..., None], None, torch.ones(4, 9), (2, 2)),
    "broadcast_context": lambda: ops.broadcast_context(WHOLE[0]),
    "depthwise_conv": lambda: ops.depthwise_conv(WHOLE, torch.ones(4, 1, 3, 3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_whole_numbers_are_refused(name: str) -> None:
    """Their results were rounded in silence."""
    with pytest.raises(ValueError, match=r"needs floating-point tensors, got torch.int64; convert it with \.float\(\)"):
        CALLS[name]()


def test_class_attention_checks_shapes() -> None:
    with pytest.raises(ValueError, match=r"sima_class_attention needs q .* got \(2, 2, 4\), \(1, 2, 2, 4\)"):
        ops.sima_class_attention(REAL[0], REAL, REAL)


def test_depthwise_conv_checks_dtypes_and_sizes() -> None:
    kernels = torch.ones(4, 1, 3, 3)
    with pytest.raises(ValueError, match=r"x, weight and bias must share one dtype, got .*; cast them first"):
        ops.depthwise_conv(REAL, kernels.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.depthwise_conv(REAL.bfloat16(), kernels).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"at least 1x1 with channels, got \(1, 0, 2, 4\)"):
        ops.depthwise_conv(REAL[:, :0], kernels)


def test_gradients_of_equal_weights_in_float16() -> None:
    """LayerNorm divides them by its eps; the product with a bank of zeros was NaN."""
    v, policy = torch.zeros(1, 4, 2, 64).half(), torch.ones(1, 4, 5, 2).half().requires_grad_()
    v[:, 0] = 60
    out = ops.bank_mixing(v, policy, torch.zeros(5, 9).half(), (2, 2), activation="layernorm")
    assert (torch.autograd.grad(out.sum() * 2, policy)[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradients_of_weights_that_are_all_zero(dtype: torch.dtype) -> None:
    """With the l2 norm they were divided by 1e-12, which gave NaN in float16."""
    v, policy = torch.ones(1, 4, 2, 3, dtype=dtype), torch.zeros(1, 4, 5, 2, dtype=dtype).requires_grad_()
    bank = torch.ones(5, 9, dtype=dtype).requires_grad_()
    out = ops.bank_mixing(v, policy, bank, (2, 2), activation="l2")
    assert (out == 0).all()
    for grad in torch.autograd.grad(out.sum(), (policy, bank)):
        assert grad.isfinite().all()
        assert grad.abs().max() < 1e3


def test_roi_align_checks_shapes_and_indices() -> None:
    """Indices out of range read foreign memory."""
    boxes, first = torch.tensor([[0.0, 0, 4, 4]]), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="image_index has values from 1 to 1, but must be from 0 to 0"):
        ops.multiscale_roi_align([REAL], boxes, first + 1, first, 2, [4])
    with pytest.raises(ValueError, match="level has values from -1 to -1, but must be from 0 to 0"):
        ops.multiscale_roi_align([REAL], boxes, first, first - 1, 2, [4])
    with pytest.raises(
        ValueError, match=r"needs boxes \(N, 4\), image_index \(N,\) and level \(N,\), got \(1, 4\), \(2"
    ):
        ops.multiscale_roi_align([REAL], boxes, first.expand(2), first, 2, [4])
    with pytest.raises(ValueError, match=r"feature maps must not be empty, got \(1, 2, 0, 4\)"):  # crashed
        ops.multiscale_roi_align([REAL[:, :, :0]], boxes, first, first, 2, [4])
    with pytest.raises(ValueError, match=r"the same B, C and dtype, got \(1, 2, 2, 4\) .*, \(1, 1, 2, 4\)"):
        ops.multiscale_roi_align([REAL, REAL[:, :1]], boxes, first, first, 2, [4, 8])
