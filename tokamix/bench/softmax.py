"""The cost of softmax alone: attention with and without it, in the same order of multiplication (SimA, figure 1)."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tokamix.bench.timing import in_turn_ms, median_and_spread, relative_rmse

Attention = Literal["self", "cross-covariance"]
PATCH = 16  # px
HEAD_DIM = 64  # of self-attention, as in DeiT
HEADS = 8  # of cross-covariance attention, as in XCiT-S: its heads grow with the width
CHECKED_QUERIES = 128  # rows of self-attention that are compared with float64
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative RMSE
Variant = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class SoftmaxRow:
    """One size of attention, with softmax and without it; medians of calls in turn."""

    attention: str  # "self" or "cross-covariance"
    size: int  # side of the image in px
    tokens: int
    width: int
    device: str
    softmax_ms: float
    products_ms: float  # the same products without softmax
    norms_ms: float  # the same products with the l1 norms of SimA
    other_order_ms: float  # the other order of the products, which softmax forbids
    softmax_spread: float  # ms, half the range between the quartiles
    products_spread: float
    norms_spread: float
    other_order_spread: float
    slowdown: float  # by softmax: 0.5 is 50 % slower than the products alone; the median of the ratios of each turn
    slowdown_spread: float
    norms_slowdown: float
    norms_slowdown_spread: float
    error: float  # the largest relative RMSE of the four against float64

    def as_dict(self) -> dict[str, Any]:
        """The row as a dict, for a CSV file."""
        return asdict(self)


def list_variants(attention: Attention) -> dict[str, Variant]:
    """The calls that are timed, from q, k, v (1, heads, tokens, channels) to an output of the same shape.

    Self-attention mixes tokens, (q kᵀ) v. Cross-covariance attention mixes channels: its softmax is over the columns of
    the matrix of channels in the middle of q (kᵀ v).
    """
    if attention == "self":
        return {
            "softmax": lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
            "products": lambda q, k, v: (q @ k.mT) @ v,
            "norms": lambda q, k, v: ((q * _inverse_norms(q, k)) @ k.mT) @ v,
            "other_order": lambda q, k, v: q @ (k.mT @ v),
        }
    return {
        "softmax": lambda q, k, v: q @ (k.mT @ v).softmax(-2),
        "products": lambda q, k, v: q @ (k.mT @ v),
        "norms": lambda q, k, v: q @ ((k.mT @ v) * _inverse_norms(q, k).mT),
        "other_order": lambda q, k, v: (q @ k.mT) @ v,
    }


def _inverse_norms(q: Tensor, k: Tensor) -> Tensor:
    """1 / (|q| |k|) of each channel, l1 norms over the tokens, (1, heads, 1, channels)."""
    return 1 / (q.abs().sum(-2, keepdim=True) * k.abs().sum(-2, keepdim=True))


def check_variants(
    variants: dict[str, Variant], q: Tensor, k: Tensor, v: Tensor, attention: Attention
) -> dict[str, float]:
    """Compare all variants with float64; raise an error that names the first wrong one.

    Self-attention is compared in its first rows: those of 4,096 tokens in float64 would take gigabytes.
    """
    errors = {}
    for name, call in variants.items():
        expected = _reference(q.double(), k.double(), v.double(), name, attention)
        errors[name] = relative_rmse(call(q, k, v)[..., : expected.shape[-2], :], expected)
        if not errors[name] <= TOLERANCE[q.dtype]:
            raise RuntimeError(f"not timed, because the result of {name} is wrong: relative error {errors[name]:.1e}")
    return errors


def _reference(q: Tensor, k: Tensor, v: Tensor, name: str, attention: Attention) -> Tensor:
    """The first rows of a variant's output in float64, by sums that say which axis is summed over."""
    if name == "norms":
        q, k = (x / x.abs().sum(2)[:, :, None] for x in (q, k))
    q = q[:, :, :CHECKED_QUERIES]
    if name == "softmax" and attention == "self":
        weights = torch.einsum("bhqc,bhkc->bhqk", q, k).exp()
        return torch.einsum("bhqk,bhkc,bhq->bhqc", weights, v, 1 / weights.sum(3))
    mixing = torch.einsum("bhkc,bhkd->bhcd", k, v)
    if name == "softmax":
        mixing = mixing.exp() / mixing.exp().sum(2)[:, :, None]
    return torch.einsum("bhqc,bhcd->bhqd", q, mixing)


def measure_softmax(
    size: int, width: int, device: str = "cpu", seconds: float = 2.0, attention: Attention = "self"
) -> SoftmaxRow:
    """Check and time attention over the patches of one image, in plain PyTorch, bfloat16 on a GPU.

    Args:
        size: side of the image in px, in patches of 16.
        width: channels, in heads of 64, or in 8 heads for cross-covariance.
        device: "cpu" or "cuda".
        seconds: time of all measurements together.
        attention: "self" (softmax over tokens) or "cross-covariance" (over channels).
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokens = (size // PATCH) ** 2
    heads = max(1, width // HEAD_DIM) if attention == "self" else HEADS
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, width // heads, generator=generator) for _ in range(3))
    if attention == "self":  # the scale of the scores, folded into an operand for all variants
        q = q * q.shape[-1] ** -0.5
    else:
        k = k * tokens**-0.5
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    variants = list_variants(attention)
    with torch.inference_mode():
        errors = check_variants(variants, q, k, v, attention)
        calls = [lambda call=call: call(q, k, v) for call in variants.values()]
        times = in_turn_ms(calls, device, seconds)
    softmax, products, norms, other_order = map(median_and_spread, times)
    slowdown, norms_slowdown = (_slowdown(slow, times[1]) for slow in (times[0], times[2]))
    return SoftmaxRow(
        *(attention, size, tokens, width, device),
        *(softmax[0], products[0], norms[0], other_order[0]),
        *(softmax[1], products[1], norms[1], other_order[1]),
        *(*slowdown, *norms_slowdown, max(errors.values())),
    )


def _slowdown(times: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    return median_and_spread([first / second - 1 for first, second in zip(times, base, strict=True)])


def draw_softmax(csv_path: Path, path: Path) -> None:
    """Draw the slowdown by softmax and by SimA's norms, by resolution and by width, from the suite's CSV file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plots need matplotlib: pip install 'tokamix[bench]'") from None
    with csv_path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    panels = [("self", "size", "Self-attention, softmax over tokens", "px")]
    panels += [("cross-covariance", "width", "Cross-covariance attention, softmax over channels", "channels")]
    panels = [panel for panel in panels if any(row["attention"] == panel[0] for row in rows)]
    figure = Figure(figsize=(5.4 * len(panels), 4.4), layout="constrained")
    plots = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (attention, key, title, unit) in zip(plots, panels, strict=True):
        found = sorted((row for row in rows if row["attention"] == attention), key=lambda row: int(row[key]))
        fixed = f"width {found[0]['width']}" if key == "size" else f"{found[0]['size']} px"
        tallest = 1.0
        for i, (column, label) in enumerate(
            (("slowdown", "with softmax"), ("norms_slowdown", "with the l1 norms of SimA instead"))
        ):
            ratios = [1 + float(row[column]) for row in found]
            errors = [float(row[f"{column}_spread"]) for row in found]
            places = [j + 0.38 * (i - 0.5) for j in range(len(found))]
            axes.bar(places, ratios, 0.36, label=label)
            axes.errorbar(places, ratios, errors, fmt="none", ecolor="0.25", elinewidth=0.8, capsize=2)
            for place, ratio, error in zip(places, ratios, errors, strict=True):
                above = (place, ratio + error)
                axes.annotate(f"{ratio:.2f}", above, (0, 2), textcoords="offset points", ha="center", fontsize=7)
            tallest = max([tallest, *ratios])
        axes.axhline(1, color="0.25", linewidth=0.8, linestyle="--", label="the same products alone")
        labels = [f"{row[key]} {unit}\n{_format_ms(row['products_ms'])}" for row in found]
        axes.set_xticks(range(len(found)), labels, fontsize=8)
        axes.set_title(f"{title}\n{fixed}, batch 1", fontsize=10)
        axes.set_ylim(0, 1.3 * tallest)  # a wide error bar may be cut off, and not make the others unreadable
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("and the time of the products alone; medians, with half the range of the quartiles", fontsize=8)
        axes.set_ylabel("time, relative to the products alone")
    figure.legend(*plots[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    processor = rows[0]["processor"]
    figure.suptitle(f"Cost of softmax alone on {processor}, products in the same order", fontsize=11)
    figure.savefig(path, dpi=130)


def _format_ms(text: str) -> str:
    value = float(text)
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.2g} ms"
