"""Comparison of kernels with the references: forward and every gradient, one tolerance per dtype."""

from collections.abc import Callable

import torch
from torch import Tensor

from tokamix import ops
from tokamix.ops import dispatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOAT32_TOLERANCE = 1e-5
# Triton's interpreter truncates to bfloat16 where a GPU rounds: twice the error for the same kernel
TIMES_PLAIN = {torch.float16: 2, torch.bfloat16: 2 if DEVICE == "cuda" else 4}

if dispatch.INTERPRET:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder

    _create_dot = InterpreterBuilder.create_dot

    def _create_dot_in_float32(self, a, b, *rest):
        """The interpreter stores bfloat16 as integers, and its dot would multiply those."""
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return _create_dot(self, a, b, *rest)

    InterpreterBuilder.create_dot = _create_dot_in_float32
    # before Triton 3.8, the interpreter's tl.maximum and tl.minimum return NaN where a GPU returns the other operand
    InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)

    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _patch_lang_tensor_and_index(tensor, scope):
        """Before Triton 3.7, loops over a range need NumPy below 2.4, which makes an int of an array of one number."""
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = _patch_lang_tensor_and_index


def both_axes(x: Tensor, offset: Tensor, backend: str) -> Tensor:
    """The outputs of `active_gather_axes` in one tensor."""
    return torch.stack(ops.active_gather_axes(x, offset, backend=backend))


def sample_and_scatter(x: Tensor, cell: tuple[int, int], backend: str) -> Tensor:
    """Super tokens of x, mapped back to tokens."""
    tokens, association = ops.super_token_sample(x, cell, backend=backend)
    return ops.super_token_scatter(tokens, association, cell, backend=backend)


def relative_rmse(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||, in float64; infinite where anything is not finite."""
    actual, expected = actual.double(), expected.double()
    if not actual.isfinite().all():
        return float("inf")
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def assert_kernel_close(
    op: Callable[..., Tensor], inputs: tuple[Tensor, ...], dtype: torch.dtype, **kwargs: object
) -> None:
    """The kernel's output and gradients against the float32 reference on the same (rounded) inputs.

    float32: relative RMSE of at most 1e-5. Half precision: at most twice the error of plain PyTorch in that precision.
    """
    rounded = [t.to(DEVICE, dtype) for t in inputs]
    exact = _run(op, [t.double() for t in rounded], backend="eager", **kwargs)
    plain = _run(op, rounded, backend="eager", **kwargs)
    kernel = _run(op, rounded, backend="triton", **kwargs)
    for i, (e, p, k) in enumerate(zip(exact, plain, kernel, strict=True)):
        what = "output" if i == 0 else f"gradient of input {i - 1}"
        assert (k.shape, k.dtype) == (p.shape, p.dtype), what
        error = relative_rmse(k, e)
        half_ulp = torch.finfo(dtype).eps / 4  # plain PyTorch may be exact by chance
        bound = TIMES_PLAIN[dtype] * max(relative_rmse(p, e), half_ulp) if dtype in TIMES_PLAIN else FLOAT32_TOLERANCE
        assert error <= bound, f"{what}: relative RMSE {error:.2e}, allowed {bound:.2e}"


def _run(op: Callable[..., Tensor], inputs: list[Tensor], **kwargs: object) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = op(*leaves, **kwargs)
    generator = torch.Generator().manual_seed(1)
    seed = torch.randn(out.shape, generator=generator).to(out.device, out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, seed)]
