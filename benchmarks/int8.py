"""int8 against fp32 with the weights that ship: accuracy, drop and latency, softmax attention beside the others.

    python benchmarks/int8.py imagenette TRAIN.npz,VAL.npz results/int8.csv

Writes each finished row at once and skips rows that are there. All networks have the same body, calibration images and
settings; only the mixer differs. "attention" in the column `products` means that products of two activations are int8
as well, which for softmax attention includes the attention weights. Latency: medians, fp32 and int8 in turn.
"""

import argparse
import csv
import statistics
import tempfile
import time
from pathlib import Path

import torch

import tokamix
from tokamix.export import export
from tokamix.models.shipped import shipped_weights
from tokamix.runtimes import load_exported

CASES = (("onnx", False), ("onnx", True), ("openvino", True))
COLUMNS = ("model", "data", "runtime", "products", "images", "fp32", "int8", "drop", "fp32_ms", "int8_ms")
ROUNDS = 60


def latency(files: list[Path], size: int) -> list[float]:
    """Median milliseconds of one image for each file, all in turn."""
    models, image = [load_exported(file) for file in files], torch.randn(1, 3, size, size)
    times: list[list[float]] = [[] for _ in files]
    for i in range(ROUNDS + 5):
        for model, values in zip(models, times, strict=True):
            start = time.perf_counter()
            model.run(image)
            if i >= 5:
                values.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(values) for values in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tag", help="imagenette or cifar100")
    parser.add_argument("data")
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", default="", help="part of a model's name")
    args = parser.parse_args()
    data = tokamix.create_dataset(args.data)
    done = set()
    if args.output.is_file():
        with args.output.open() as file:
            done = {(row["model"], row["runtime"], row["products"]) for row in csv.DictReader(file)}
    for name in [name for name in shipped_weights() if name.endswith(f".{args.tag}") and args.only in name]:
        for runtime, attention in CASES:
            products = "attention" if attention else "weights"
            if (name, runtime, products) in done:
                continue
            with tempfile.TemporaryDirectory() as folder:
                suffix = {"onnx": ".onnx", "openvino": ".xml"}[runtime]
                files = [Path(folder) / f"{precision}{suffix}" for precision in ("fp32", "int8")]
                export(name, files[0], to=runtime)
                options = {"precision": "int8", "data": data, "keep_layers": 0, "max_drop": 100, "attention": attention}
                report = export(name, files[1], to=runtime, **options)
                numbers = report.metrics
                milliseconds = latency(files, report.size[0])
            row = (name, args.tag, runtime, products, len(data.val), *(numbers[k] for k in ("fp32", "int8", "drop")))
            new = not args.output.is_file()
            args.output.parent.mkdir(parents=True, exist_ok=True)
            with args.output.open("a", newline="") as file:
                writer = csv.writer(file)
                writer.writerows([COLUMNS] if new else [])
                writer.writerow([f"{x:.4g}" if isinstance(x, float) else x for x in (*row, *milliseconds)])
            print(*row, *(f"{ms:.2f} ms" for ms in milliseconds), flush=True)


if __name__ == "__main__":
    main()
