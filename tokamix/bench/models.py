"""Images per second and memory of whole models, ours and timm's side by side."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.utils import reparameterize_model
from torch import Tensor, nn

from tokamix.bench.timing import median_ms, peak_gb
from tokamix.ops.dispatch import use_backend
from tokamix.registry import create_model


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
    error: float  # relative RMSE of the logits against float32 without kernels

    def as_dict(self) -> dict[str, Any]:
        """The row for a CSV file."""
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
    """Check, then time one model.

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
        seconds: how long to repeat.
        before_timing: called between compilation and timing, to wait for a turn on the GPU.
        kwargs: passed to the model.
    """
    torch.manual_seed(0)
    half = torch.bfloat16 if device == "cuda" else torch.float32
    model = create_model(name, **kwargs).to(device).eval()
    if mode == "infer":
        model = reparameterize_model(model, inplace=True)
    images = torch.randn(batch, 3, size, size, device=device)
    error = logits_error(model, images[:4], half, backend)
    labels = torch.randint(model.num_classes, (batch,), device=device)
    torch.compiler.reset()
    if mode == "infer":
        model, images = model.to(half), images.to(half)
    else:
        model.train()
    call = torch.compile(model, mode=compiled) if compiled else model

    def infer() -> Tensor:
        with torch.inference_mode():
            return call(images)

    def train() -> None:
        with torch.autocast(device, half, enabled=device == "cuda"):
            loss = F.cross_entropy(call(images), labels)
        loss.backward()
        model.zero_grad(set_to_none=True)

    step = infer if mode == "infer" else train
    with use_backend(backend):
        if before_timing is not None:
            step()
            before_timing()
        milliseconds = median_ms(step, device, seconds)
        # a replayed graph allocates nothing: its memory is that of the same model compiled without
        peak = peak_gb(step) if device == "cuda" and compiled != "reduce-overhead" else float("nan")
    rate = batch / milliseconds * 1e3
    label = "bf16" if half is torch.bfloat16 else "fp32"
    return ModelRow(name, mode, size, batch, label, compiled, backend or "auto", rate, milliseconds, peak, error)


@torch.no_grad()
def logits_error(model: nn.Module, images: Tensor, dtype: torch.dtype, backend: str | None) -> float:
    """Relative RMSE of the logits in `dtype` with `backend` against float32 without kernels; raises if it is wrong.

    Wrong is more than twice the error that plain PyTorch makes in the same precision.
    """
    with use_backend("eager"):
        exact = model(images).float()
        plain = _autocast(model, images, dtype)
    with use_backend(backend):
        fast = _autocast(model, images, dtype)
    error, allowed = _relative(fast, exact), 2 * _relative(plain, exact) + 1e-3
    if not error <= allowed:
        raise RuntimeError(f"not timed, because it is wrong: the logits are off by {error:.1e}, {allowed:.1e} allowed")
    return error


def _autocast(model: nn.Module, images: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
        return model(images).float()


def _relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()
