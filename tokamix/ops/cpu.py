"""Eager float32 layers on a CPU with oneDNN; for inference fused with what follows them, and with packed weights.

`TOKAMIX_BACKEND=eager` turns it off. Only linear layers are used in training and under `torch.no_grad()`, and only on
AMD's processors: PyTorch gives them to MKL, which has no AVX-512 kernels there.

All else is used in `torch.inference_mode()` only, where nothing needs gradients. oneDNN reorders the weights of a layer
in every call, which is slow compared with the product where a map has few pixels. So the reordered ("packed") weights
are kept until the layer's own weights change or are deleted; they take as much memory again. Models that were created
in inference mode run without them, because their weights count no changes.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokamix.ops import dispatch

MAX_PACKED_ROWS = 1024  # with more rows, reordering the weights takes little of the product's time
MAX_HIDDEN = 250_000  # values of a hidden map, 1 MB: a larger one does not stay in the caches between two layers
MAX_PARTS = 4  # of a hidden map; products with fewer than 64 channels are slow
MIN_PRODUCTS = 1_000_000  # a call of oneDNN takes longer to set up than one of PyTorch's own matrix product

_AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class _Packed(NamedTuple):
    source: weakref.ref[Tensor]
    kind: str
    address: int
    version: int
    probe: Tensor  # a view of elements of each row and column of the weight
    values: Tensor  # what they were
    packed: Any

    def is_current(self, weight: Tensor) -> bool:
        """Whether the weight has not changed."""
        same = self.version == weight._version and self.address == weight.data_ptr()
        return same and torch.equal(self.probe, self.values)


_packed: dict[int, _Packed] = {}


def usable(x: Tensor) -> bool:
    """Whether the functions below may be used for x: a plain eager call in inference mode, in float32 on a CPU."""
    # every layer asks, so what rules out training and GPUs comes first; a compiler cannot trace the second question
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled() and _is_plain(x)


def usable_in_training(x: Tensor) -> bool:
    """Whether `differentiable_linear` may be used for x: likewise, outside of inference mode.

    Under `torch.no_grad()`, too: gradient checkpoints run their first pass there, and the second one must equal it.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not _is_amd():
        return False
    return torch.autograd.forward_ad._current_level < 0 and _is_plain(x)  # forward-mode AD needs PyTorch's operators


def _is_plain(x: Tensor) -> bool:
    if type(x) not in (Tensor, torch.nn.Parameter) or not x.is_cpu or x.dtype is not torch.float32 or x.numel() == 0:
        return False
    if not _AVAILABLE or dispatch.INTERPRET or dispatch.forced() is not None or not torch._C._get_mkldnn_enabled():
        return False
    return not torch.is_autocast_enabled("cpu") and not dispatch.is_watched()


@cache
def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return False


def keep(weight: Tensor, kind: str, pack: Callable[[], Any]) -> Any:
    """What `pack` makes of the weight, kept until the weight changes or is deleted; call it only where `usable`.

    PyTorch counts changes, but not those made through `weight.data`, as moving averages and pruning often do. So an
    element of each row and of most columns is compared as well; all of them would take a tenth of the model's time.
    """
    key = id(weight)
    found = _packed.get(key)
    if found is not None and found.source() is weight and found.kind == kind and found.is_current(weight):
        return found.packed
    if weight.is_inference() or not weight.is_contiguous():  # changes are not counted, or the elements not adjacent
        return pack()
    rows = weight.shape[0]
    probe = weight.detach().view(-1)[:: max(1, min(rows, weight.numel() // rows) - 1)]  # of each row and column
    source = weakref.ref(weight, lambda _: _packed.pop(key, None))
    _packed[key] = _Packed(source, kind, weight.data_ptr(), weight._version, probe, probe.clone(), pack())
    return _packed[key].packed


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool = False, residual: Tensor | None = None
) -> Tensor:
    """A linear layer on x (..., C), and either GELU of its output or its sum with `residual`."""
    rows = x.numel() // x.shape[-1]
    if rows * weight.numel() < MIN_PRODUCTS and not gelu:
        y = F.linear(x, weight, bias)
        return y if residual is None else y.add_(residual)
    if rows < MAX_PACKED_ROWS:
        weight = keep(weight, "linear", lambda: torch.ops.mkldnn._reorder_linear_weight.default(weight, rows))
    if residual is not None:
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, "add")
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, *_activation(gelu))


def differentiable_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer on x (..., C) with gradients."""
    if x.numel() // x.shape[-1] * weight.numel() < MIN_PRODUCTS:
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        # gradients of gradients, and several gradients at once, need PyTorch's own product
        watched = torch.is_grad_enabled() or dispatch.is_watched() or torch._C._functorch.is_legacy_batchedtensor(grad)
        product = F.linear if watched else _product
        tokens, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        return (
            product(grads, weight.t()).view(x.shape) if ctx.needs_input_grad[0] else None,
            product(grads.t(), tokens.t()) if ctx.needs_input_grad[1] else None,
            grads.sum(0) if ctx.needs_input_grad[2] else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, *_activation())


def conv(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Sequence[int],
    stride: Sequence[int] = (1, 1),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    residual: bool = False,
    gelu: bool = False,
) -> Tensor:
    """A convolution of an image (B, C, H, W) to channels_last memory.

    With `residual` it is depthwise and the image is added; with `gelu`, GELU of its output is returned.
    """
    options = padding, stride, dilation, groups
    image = image.contiguous(memory_format=torch.channels_last)

    def pack() -> Tensor:
        kernels = _add_identity(weight) if residual else weight
        return torch.ops.mkldnn._reorder_convolution_weight.default(kernels, *options, image.shape)

    packed = keep(weight, "residual" if residual else "conv", pack)
    return torch.ops.mkldnn._convolution_pointwise.default(image, packed, bias, *options, *_activation(gelu))


def conv_mlp(
    x: Tensor,
    grid: tuple[int, int],
    fc1: tuple[Tensor, Tensor],
    kernels: tuple[Tensor, Tensor],
    fc2: tuple[Tensor, Tensor],
    residual: Tensor | None = None,
) -> Tensor:
    """Linear, GELU, z + depthwise convolution of z, Linear, plus `residual`, on tokens x (B, H*W, C) of grid (H, W).

    A large hidden map is computed in parts of its channels, which the convolution does not mix.

    Args:
        x: the tokens.
        grid: their grid.
        fc1: weight and bias of the first linear layer.
        kernels: weight (hidden, 1, k, k), k odd, and bias of the convolution.
        fc2: weight and bias of the last linear layer.
        residual: tokens (B, H*W, C), or None.
    """
    (height, width), hidden, rows = grid, fc1[0].shape[0], x.shape[0] * x.shape[1]
    parts = min(MAX_PARTS, (rows * hidden + MAX_HIDDEN - 1) // MAX_HIDDEN)
    if rows < MAX_PACKED_ROWS or hidden % (16 * parts):
        parts = 1
    size, padding = hidden // parts, (kernels[0].shape[2] // 2, kernels[0].shape[3] // 2)
    if parts == 1:
        z = linear(x, *fc1, gelu=True)
        image = z.view(-1, height, width, hidden).permute(0, 3, 1, 2)
        z = conv(image, *kernels, padding, groups=hidden, residual=True).permute(0, 2, 3, 1).reshape(z.shape)
        return linear(z, *fc2, residual=residual)

    def pack_kernels() -> list[Tensor]:
        chunks, shape = _add_identity(kernels[0]).chunk(parts), (len(x), size, height, width)
        return [torch.ops.mkldnn._reorder_convolution_weight.default(part, *options, shape) for part in chunks]

    options, kind = (padding, (1, 1), (1, 1), size), f"{parts} parts"
    packed = keep(kernels[0], kind, pack_kernels)
    # contiguous, because oneDNN takes a thousand times as long for weights with gaps
    last = keep(fc2[0], kind, lambda: [part.contiguous() for part in fc2[0].chunk(parts, 1)])
    bias: Tensor | None = fc2[1]
    biases = kernels[1].chunk(parts)
    for i, first in enumerate(zip(fc1[0].chunk(parts), fc1[1].chunk(parts), strict=True)):
        z = linear(x, *first, gelu=True)
        image = z.view(-1, height, width, size).permute(0, 3, 1, 2)
        image = torch.ops.mkldnn._convolution_pointwise.default(image, packed[i], biases[i], *options, *_activation())
        z = image.permute(0, 2, 3, 1).reshape(z.shape)
        residual, bias = linear(z, last[i], bias, residual=residual), None
    assert residual is not None
    return residual


def _activation(gelu: bool = False) -> tuple[str, list[None], str]:
    """The arguments of oneDNN's operators."""
    return ("gelu", [None], "none") if gelu else ("none", [], "")


def _add_identity(kernels: Tensor) -> Tensor:
    """Add 1 at the centre of each kernel of a depthwise convolution, which adds the image to its output."""
    kernels = kernels.clone()
    kernels[:, :, kernels.shape[2] // 2, kernels.shape[3] // 2] += 1
    return kernels
