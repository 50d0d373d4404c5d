"""Time and memory of the mixers' operators: kernels, plain PyTorch and softmax attention."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.bench.timing import median_ms, peak_gb, relative_rmse
from tokamix.mixers import SuperTokenAttention, WeightMixing
from tokamix.ops import active_gather_axes, broadcast_context, sima_attention
from tokamix.ops.dispatch import use_backend

BANDWIDTH = 4.25e12  # bytes per second, read plus written, of a device-to-device copy on an H200


@dataclass
class OpRow:
    """One measurement of one operator."""

    op: str
    case: str
    tokens: int
    backend: str
    forward_ms: float
    training_ms: float  # forward and backward
    graph_ms: float  # forward, replayed from a CUDA graph
    training_graph_ms: float  # forward and backward, replayed from a CUDA graph
    peak_gb: float  # of forward and backward
    forward_gb: float  # peak memory of forward alone
    limit_ms: float  # minimal bytes of the forward pass, each tensor once, divided by BANDWIDTH
    error: float  # relative RMSE of the output against float32 without kernels
    gradient_error: float  # the largest over all inputs and parameters

    def as_dict(self) -> dict[str, Any]:
        """The row as a dict, for a CSV file."""
        return asdict(self)


@dataclass
class OpCase:
    """An operator or module and its differentiable inputs."""

    op: str
    case: str
    tokens: int
    run: Callable[..., Tensor]
    inputs: list[Tensor]
    backends: tuple[str, ...] = ("triton", "eager")


class AxialContexts(nn.Module):
    """Both axes of the active token mixer with their projections, in place of two deformable convolutions."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))

    def forward(self, x: Tensor, offset: Tensor) -> Tensor:
        """Map (B, H, W, C) and offsets (B, H, W, 2 C / share) -> (B, H, W, C)."""
        along_width, along_height = active_gather_axes(x, offset)
        return self.embed[0](along_width) + self.embed[1](along_height)


class OnGrid(nn.Module):
    """A mixer with a fixed grid: called with tokens only."""

    def __init__(self, mixer: nn.Module, grid: tuple[int, int]) -> None:
        super().__init__()
        self.mixer, self.grid = mixer, grid

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, C) -> (B, N, C)."""
        return self.mixer(x, self.grid)


def sima_case(batch: int, heads: int, tokens: int, dim: int = 64) -> Iterator[OpCase]:
    """SimA and softmax attention on the same queries, keys and values."""
    label = f"B {batch}, {heads} heads of {dim}"
    for op, run, backends in (
        ("sima", sima_attention, ("triton", "eager")),
        ("softmax", F.scaled_dot_product_attention, ("torch",)),
    ):
        qkv = [torch.randn(batch, tokens, heads, dim).transpose(1, 2) for _ in range(3)]
        yield OpCase(op, label, tokens, run, qkv, backends)


def active_token_case(batch: int, side: int, dim: int, share: int) -> Iterator[OpCase]:
    """Both axes of the active token mixer with their projections; offsets of a few tokens."""
    inputs = [torch.randn(batch, side, side, dim), 2 * torch.randn(batch, side, side, 2 * dim // share)]
    yield OpCase("active_token", f"B {batch}, C {dim}", side**2, AxialContexts(dim), inputs)


def super_token_case(batch: int, side: int, dim: int, cell: int, heads: int) -> Iterator[OpCase]:
    """The whole super token attention module."""
    mixer = SuperTokenAttention(dim, heads, cell)
    run = OnGrid(mixer, (side, side))
    yield OpCase("super_token", f"B {batch}, C {dim}, cell {cell}", side**2, run, [torch.randn(batch, side**2, dim)])


def weight_mixing_case(batch: int, side: int, dim: int, heads: int, bank: int, window: int) -> Iterator[OpCase]:
    """The whole weight mixing module."""
    mixer = WeightMixing(dim, window, heads, bank, partition=side > window)
    label = f"B {batch}, C {dim}, {heads} heads, bank {bank}, window {window}"
    yield OpCase("weight_mixing", label, side**2, OnGrid(mixer, (side, side)), [torch.randn(batch, side**2, dim)])


def context_broadcast_case(batch: int, tokens: int, dim: int) -> Iterator[OpCase]:
    """Context broadcasting."""
    yield OpCase(
        "context_broadcast", f"B {batch}, C {dim}", tokens, broadcast_context, [torch.randn(batch, tokens, dim)]
    )


def model_cases() -> Iterator[OpCase]:
    """The sizes in the papers' models."""
    yield from sima_case(128, 6, 197)
    yield from sima_case(8, 6, 16_384)
    for side, dim, share in ((56, 64, 2), (28, 128, 4), (14, 320, 4), (7, 512, 8)):
        yield from active_token_case(128, side, dim, share)
    yield from active_token_case(8, 128, 64, 2)
    yield from super_token_case(128, 56, 64, 8, 1)
    yield from super_token_case(128, 28, 128, 4, 2)
    yield from super_token_case(4, 256, 64, 8, 1)
    yield from weight_mixing_case(128, 14, 384, 24, 36, 14)
    yield from weight_mixing_case(128, 56, 96, 6, 9, 7)
    yield from context_broadcast_case(128, 197, 384)


def measure(case: OpCase, backend: str, device: str = "cuda", seconds: float = 0.2) -> OpRow:
    """Check output and gradients, then time one operator in bfloat16 (float32 on the CPU)."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    module = case.run.to(device, torch.float32) if isinstance(case.run, nn.Module) else case.run
    inputs = [t.to(device).requires_grad_() for t in case.inputs]
    forced = None if backend == "torch" else backend

    def leaves() -> list[Tensor]:
        return [*inputs, *(module.parameters() if isinstance(module, nn.Module) else ())]

    def output_and_gradients(backend: str | None) -> list[Tensor]:
        with use_backend(backend):
            out = module(*inputs)
            torch.manual_seed(1)
            seed = torch.randn(out.shape, device=device).to(out.dtype)
            return [out.detach(), *torch.autograd.grad(out, leaves(), seed)]

    exact = output_and_gradients("eager")
    if isinstance(module, nn.Module):
        module.to(dtype)
    inputs = [t.detach().to(dtype).requires_grad_() for t in inputs]
    plain = [relative_rmse(a, e) for a, e in zip(output_and_gradients("eager"), exact, strict=True)]
    errors = [relative_rmse(a, e) for a, e in zip(output_and_gradients(forced), exact, strict=True)]
    if not all(error <= 2 * allowed + 1e-5 for error, allowed in zip(errors, plain, strict=True)):
        pairs = ", ".join(f"{error:.1e} ({allowed:.1e})" for error, allowed in zip(errors, plain, strict=True))
        raise RuntimeError(
            "not timed, because the result is wrong: relative errors of output and gradients (of plain PyTorch):"
            f" {pairs}"
        )
    del exact  # otherwise it would count as memory of the operator
    with use_backend(forced):
        with torch.no_grad():
            out = module(*inputs)
            forward, graph = _eager_and_graph_ms(lambda: module(*inputs), device, seconds)
            forward_peak = peak_gb(lambda: module(*inputs)) if device == "cuda" else float("nan")
        seed = torch.randn_like(out)

        def train() -> None:
            torch.autograd.grad(module(*inputs), leaves(), seed)

        training, training_graph = _eager_and_graph_ms(train, device, seconds)
        peak = peak_gb(train) if device == "cuda" else float("nan")
    limit = sum(t.numel() * t.element_size() for t in [*inputs, out]) / BANDWIDTH * 1e3
    label = (case.op, case.case, case.tokens, backend)
    times = (forward, training, graph, training_graph)
    return OpRow(*label, *times, peak, forward_peak, limit, errors[0], max(errors[1:]))


def _eager_and_graph_ms(run: Callable[[], object], device: str, seconds: float) -> tuple[float, float]:
    eager, graph = median_ms(run, device, seconds), float("nan")
    if device == "cuda":
        with suppress(RuntimeError):  # a function that synchronises cannot be captured
            graph = median_ms(run, device, seconds, graph=True)
    return eager, graph
