"""ATMNet-T in a detector and a segmenter: this library's operator against torchvision's deformable convolution.

Mask R-CNN on images of 800 x 1280 and Semantic FPN on 512 x 512, inference, in bfloat16 autocast. `--precision half`
uses float16 weights, the best case for deformable convolution: under autocast it computes in float32. The two are first
compared in float32. The mode "graphed" is `tokamix.dense.GraphedModel`: compiled parts, the whole model as one CUDA
graph. `--quick` is a small run for any machine. Writes the CSV file `--out`.
"""

import argparse
import contextlib
import csv
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from active_token import deformable_model
from torch import Tensor, nn

from tokamix.bench.detectors import scale_class_logits
from tokamix.bench.timing import median_ms, print_costs
from tokamix.dense import GraphedModel, MaskRCNN, create_detector, create_segmenter

CASES = [("mask_rcnn", (800, 1280), 1), ("mask_rcnn", (800, 1280), 4), ("semantic_fpn", (512, 512), 8)]
QUICK = [("mask_rcnn", (64, 96), 1), ("semantic_fpn", (64, 64), 1)]
FIELDS = ("method", "size", "batch", "precision", "mode", "ours_ms", "deform_ms", "ours_images_s", "times_as_fast")


def create(method: str, quick: bool) -> nn.Module:
    torch.manual_seed(0)
    backbone, small = ("atmnet_xtiny", {"width": 32, "depths": (1, 1, 1, 1)}) if quick else ("atmnet_tiny", {})
    if method == "mask_rcnn":
        return create_detector(method, backbone, 80, **small).eval()
    return create_segmenter(method, backbone, 150, **small).eval()


def outputs(model: nn.Module, images: Tensor) -> list[Tensor]:
    return model.neck(model.backbone(images)) if isinstance(model, MaskRCNN) else [model(images)]


def check(ours: nn.Module, theirs: nn.Module, images: Tensor) -> None:
    """Stop unless both sides give the same maps or logits in float32."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        pairs = list(zip(outputs(ours, images), outputs(theirs, images), strict=True))
    for a, b in pairs:
        error = (a - b).norm() / b.norm()
        if not error < 1e-4:
            raise SystemExit(f"nothing is timed: the relative difference of the two sides is {error:.1e}")


@contextlib.contextmanager
def prepared(model: nn.Module, images: Tensor, precision: str, mode: str) -> Iterator[Callable[[], object]]:
    """The call that one row of the table times."""
    if precision == "half":
        model.half()
    device = images.device.type
    lowered = precision == "autocast" and device == "cuda"  # deform_conv2d cannot run in bfloat16 on the CPU
    with torch.autocast(device, torch.bfloat16, enabled=lowered):
        if precision == "half":
            images = images.half()
        call = GraphedModel(model, images) if mode == "graphed" else model
        yield lambda: call(images)


def measure(case: tuple[str, tuple[int, int], int], options: argparse.Namespace) -> Iterator[dict]:
    method, size, batch = case
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = torch.randn(batch, 3, *size, device=device)
    ours = create(method, options.quick).to(device)
    if isinstance(ours, MaskRCNN):
        scale_class_logits(ours, ours.stages[0].classify, images[:1])
    check(ours, deformable_model(ours), images[:1])
    state = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    for precision in options.precision:
        for mode in options.mode:
            times = []
            for side in ("ours", "deform"):
                model = create(method, options.quick).to(device)
                model.load_state_dict(state)
                model = model if side == "ours" else deformable_model(model)
                try:
                    with prepared(model, images, precision, mode) as call:
                        times.append(median_ms(call, device, options.seconds))
                        if options.profile and side == "ours":
                            print_costs(call, device)
                except Exception as error:  # the other rows must still run
                    print(f"{side} {method} {precision} {mode} FAILED, {type(error).__name__}: {str(error)[:300]}")
                    times.append(math.nan)
            yield {
                "method": method,
                "size": f"{size[0]}x{size[1]}",
                "batch": batch,
                "precision": precision if device == "cuda" else "float32",
                "mode": mode,
                "ours_ms": f"{times[0]:.2f}",
                "deform_ms": f"{times[1]:.2f}",
                "ours_images_s": f"{batch / times[0] * 1e3:.1f}",
                "times_as_fast": f"{times[1] / times[0]:.2f}",
            }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, small images, one batch")
    parser.add_argument("--mode", nargs="+", default=["eager", "graphed"], choices=["eager", "graphed"])
    parser.add_argument("--precision", nargs="+", default=["autocast"], choices=["autocast", "half"])
    parser.add_argument("--cases", nargs="+", type=int, default=[0, 1, 2], help="indices of CASES")
    parser.add_argument("--profile", action="store_true", help="print the slowest kernels of our side")
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each timing")
    parser.add_argument("--out", type=Path, help="CSV file; default for a complete run: results/dense.csv")
    options = parser.parse_args()
    if options.out is None:
        if options.quick or len(options.mode) < 2 or len(options.cases) < len(CASES):
            parser.error("an incomplete run needs --out, so that results/dense.csv stays complete")
        options.out = Path(__file__).parents[1] / "results" / "dense.csv"
    if options.quick:
        options.mode, options.seconds = ["eager"], 0.1
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {where}")
    print("  ".join(f"{field:>13s}" for field in FIELDS))
    with options.out.open("w", newline="") as file:
        table = csv.DictWriter(file, FIELDS)
        table.writeheader()
        for case in QUICK if options.quick else [CASES[i] for i in options.cases]:
            for row in measure(case, options):
                print("  ".join(f"{row[field]!s:>13s}" for field in FIELDS), flush=True)
                table.writerow(row)
                file.flush()


if __name__ == "__main__":
    main()
