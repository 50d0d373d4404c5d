"""Throughput and memory of models, ours and timm's."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.utils import reparameterize_model
from torch import Tensor

from tokamix.bench.timing import median_ms, peak_gb, relative_rmse
from tokamix.models._registry import create_model
from tokamix.ops.dispatch import use_backend

CHECKED_IMAGES = 4  # whose logits are compared with float32 before timing


@dataclass
class ModelRow:
    """One measurement of one model."""

    model: str
    mode: str  # "infer" or "train"
    size: int
    batch: int
    dtype: str
    compiled: str
    backend: str
    images_per_second: float
    milliseconds: float
    peak_gb: float
    error: float  # relative RMSE of logits, or of all gradients, against float32 without kernels

    def as_dict(self) -> dict[str, Any]:
        """The row as a dict, for a CSV file."""
        return asdict(self)


def measure(
    name: str,
    mode: str = "infer",
    size: int = 224,
    batch: int = 128,
    compiled: str = "default",
    backend: str | None = None,
    device: str = "cuda",
    seconds: float = 1.0,
    before_timing: Callable[[], object] | None = None,
    **kwargs: Any,
) -> ModelRow:
    """Check, then time a model.

    Inference runs in pure bfloat16, with batch norms folded; training is forward and backward of a cross-entropy loss
    under bfloat16 autocast, weights in float32, without the optimizer. On the CPU everything runs in float32.

    Args:
        name: a model name, ours or timm's.
        mode: "infer" or "train".
        size: side of the square images.
        batch: images per step.
        compiled: "" for eager, else torch.compile's mode.
        backend: force "eager" or "triton" for tokamix's operators.
        device: "cuda" or "cpu".
        seconds: duration of the timing.
        before_timing: called between compilation and timing, for example to wait for the GPU.
        kwargs: passed to the model.
    """
    torch.manual_seed(0)
    half = torch.bfloat16 if device == "cuda" else torch.float32
    model = create_model(name, **kwargs).to(device).train(mode == "train")
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.randint(model.num_classes, (batch,), device=device)
    torch.compiler.reset()
    if mode == "infer":
        with torch.no_grad(), use_backend("eager"):
            exact = model(images[:CHECKED_IMAGES])
            model, images = reparameterize_model(model, inplace=True).to(half), images.to(half)
            plain = model(images[:CHECKED_IMAGES])
    call = torch.compile(model, mode=compiled) if compiled else model

    def infer() -> Tensor:
        with torch.inference_mode():
            return call(images)

    def backward(call: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(call(images), labels)
        loss.backward()

    def train() -> None:
        backward(call, half)
        model.zero_grad(set_to_none=True)

    def gradients(call: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        backward(call, dtype)
        all_gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        model.zero_grad(set_to_none=True)
        return all_gradients

    def gradient_error() -> float:
        fast = gradients(call, half)
        with use_backend("eager"):
            return check_error(fast, gradients(model, half), gradients(model, torch.float32))

    step = infer if mode == "infer" else train
    with use_backend(backend):
        if before_timing is not None:
            step()
            before_timing()
        if mode == "infer":
            error = check_error(infer()[:CHECKED_IMAGES], plain, exact)
        else:
            error = gradient_error()  # its gradients are freed before memory is measured
            torch.cuda.empty_cache()
        milliseconds = median_ms(step, device, seconds)
        # a replayed graph allocates nothing; its memory is that of the model compiled without graphs
        peak = peak_gb(step) if device == "cuda" and compiled != "reduce-overhead" else float("nan")
    rate = batch / milliseconds * 1e3
    label = "bf16" if half is torch.bfloat16 else "fp32"
    return ModelRow(name, mode, size, batch, label, compiled, backend or "auto", rate, milliseconds, peak, error)


def check_error(fast: Tensor, plain: Tensor, exact: Tensor) -> float:
    """Relative RMSE of the timed output; raises if it exceeds the limit.

    The limit is twice the error of plain PyTorch in the same precision plus 1e-3, both against float32.
    """
    error, allowed = relative_rmse(fast, exact), 2 * relative_rmse(plain, exact) + 1e-3
    if not error <= allowed:
        raise RuntimeError(f"not timed, because the result is wrong: relative error {error:.1e}, allowed {allowed:.1e}")
    return error
