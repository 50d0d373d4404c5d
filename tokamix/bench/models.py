"""Throughput and memory of models, ours and timm's."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.utils import reparameterize_model
from torch import Tensor

from tokamix.bench.timing import median_ms, peak_gb, relative_rmse
from tokamix.compile import graphed
from tokamix.models._registry import create_model
from tokamix.ops.dispatch import use_backend

CHECKED_IMAGES = 4  # whose logits are compared with float32 before timing


@dataclass
class ModelRow:
    """One measurement of one model."""

    model: str
    mode: str  # "infer" or "train"
    size: int | str  # side of the images, or height x width
    batch: int
    dtype: str
    compiled: str
    backend: str
    images_per_second: float = math.nan
    milliseconds: float = math.nan
    spread: float = math.nan  # between turns, largest minus smallest as a fraction of the median
    peak_gb: float = math.nan
    first_call_s: float = math.nan  # compilation included
    error: float = math.nan  # relative RMSE of logits, or of all gradients, against float32 without kernels

    def as_dict(self) -> dict[str, Any]:
        """The row as a dict, for a CSV file."""
        return asdict(self)


class Timed:
    """A call that is prepared in steps, so that several can be timed in turn: `first_call`, `check`, then `time`.

    Attributes:
        row: what is known so far.
        step: the timed call.
    """

    row: ModelRow
    step: Callable[[], object]
    device: str

    def first_call(self) -> None:
        """Call once, which compiles."""
        start = time.perf_counter()
        self.step()
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.row.first_call_s = time.perf_counter() - start

    def check(self) -> float:
        """Compare with float32 and return the relative error; an error above the limit raises RuntimeError."""
        raise NotImplementedError

    def time(self, seconds: float) -> None:
        """Time one turn; the row holds the median of all turns."""
        self._turns = [*getattr(self, "_turns", []), median_ms(self.step, self.device, seconds)]
        row = self.row
        row.milliseconds = statistics.median(self._turns)
        row.spread = (max(self._turns) - min(self._turns)) / row.milliseconds
        row.images_per_second = row.batch / row.milliseconds * 1e3
        # a replayed graph allocates nothing; its memory is that of the model compiled without graphs
        if self.device == "cuda" and row.compiled in ("", "default") and math.isnan(row.peak_gb):
            row.peak_gb = peak_gb(self.step)


class TimedModel(Timed):
    """A classifier, ours or timm's, in inference or training.

    Inference runs in pure bfloat16, with batch norms folded; training is forward and backward of a cross-entropy loss
    under bfloat16 autocast, weights in float32, without the optimizer. On the CPU everything runs in float32.

    Args:
        name: a model name, ours or timm's.
        mode: "infer" or "train".
        size: side of the square images.
        batch: images per step.
        compiled: "" for eager, "graphed" for `tokamix.compile.graphed` (inference), else torch.compile's mode.
        backend: force "eager" or "triton" for tokamix's operators.
        device: "cuda" or "cpu".
        checked: whether `check` will be called, which needs the outputs in float32.
        kwargs: passed to the model.
    """

    def __init__(
        self,
        name: str,
        mode: str = "infer",
        size: int = 224,
        batch: int = 128,
        compiled: str = "default",
        backend: str | None = None,
        device: str = "cuda",
        checked: bool = True,
        **kwargs: Any,
    ) -> None:
        torch.manual_seed(0)
        self.device, self.backend = device, backend
        self.half = torch.bfloat16 if device == "cuda" else torch.float32
        self.model = create_model(name, **kwargs).to(device).train(mode == "train")
        self.images = torch.randn(batch, 3, size, size, device=device)
        self.labels = torch.randint(self.model.num_classes, (batch,), device=device)
        torch.compiler.reset()
        if mode == "infer":
            self._prepare_inference(checked)
        self.call: Callable[[Tensor], Tensor] = self.model
        if compiled == "graphed":
            self.call = graphed(self.model)
        elif compiled:
            self.call = torch.compile(self.model, mode=compiled)
        self.step = self._infer if mode == "infer" else self._train
        dtype = "bf16" if self.half is torch.bfloat16 else "fp32"
        self.row = ModelRow(name, mode, size, batch, dtype, compiled, backend or "auto")

    @torch.no_grad()
    def _prepare_inference(self, checked: bool) -> None:
        with use_backend("eager"):
            if checked:
                self.exact = self.model(self.images[:CHECKED_IMAGES])
            self.model = reparameterize_model(self.model, inplace=True).to(self.half)
            self.images = self.images.to(self.half)
            if checked:
                self.plain = self.model(self.images[:CHECKED_IMAGES])

    def _infer(self) -> Tensor:
        with torch.inference_mode(), use_backend(self.backend):
            return self.call(self.images)

    def _train(self) -> None:
        with use_backend(self.backend):
            self._loss(self.call, self.half).backward()
        self.model.zero_grad(set_to_none=True)

    def _loss(self, call: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        with torch.autocast(self.device, dtype, enabled=dtype != torch.float32):
            return F.cross_entropy(call(self.images), self.labels)

    def step_for_graph(self) -> None:
        """The step, without writing `.grad`: that cannot be captured after calls on another stream."""
        if self.row.mode == "infer":
            self._infer()
            return
        with use_backend(self.backend):
            torch.autograd.grad(self._loss(self.call, self.half), list(self.model.parameters()), allow_unused=True)

    def _gradients(self, call: Callable[[Tensor], Tensor], dtype: torch.dtype, backend: str | None) -> Tensor:
        with use_backend(backend):
            self._loss(call, dtype).backward()
        gradients = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])
        self.model.zero_grad(set_to_none=True)
        return gradients

    def check(self) -> float:
        """Compare logits, or all gradients in training, with float32 and return the relative error."""
        if self.row.mode == "infer":
            self.row.error = check_error(self._infer()[:CHECKED_IMAGES], self.plain, self.exact)
            return self.row.error
        fast = self._gradients(self.call, self.half, self.backend)
        plain, exact = (self._gradients(self.model, dtype, "eager") for dtype in (self.half, torch.float32))
        self.row.error = check_error(fast, plain, exact)
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return self.row.error


def measure(create: Callable[[], Timed], seconds: float = 1.0) -> ModelRow:
    """Prepare, check and time one model.

    Args:
        create: returns the model, as `functools.partial(TimedModel, "stvit_small")`.
        seconds: duration of the timing.
    """
    timed = create()
    timed.first_call()
    timed.check()
    timed.time(seconds)
    return timed.row


def check_error(fast: Tensor, plain: Tensor, exact: Tensor) -> float:
    """Relative RMSE of the timed output; raises if it exceeds the limit.

    The limit is twice the error of plain PyTorch in the same precision plus 1e-3, both against float32.
    """
    error, allowed = relative_rmse(fast, exact), 2 * relative_rmse(plain, exact) + 1e-3
    if not error <= allowed:
        raise RuntimeError(f"not timed, because the result is wrong: relative error {error:.1e}, allowed {allowed:.1e}")
    return error
