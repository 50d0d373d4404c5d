"""Top-1 of the shipped weights in int8 beside fp32, and the sensitivity of their layers.

    python benchmarks/int8.py imagenette TRAIN.npz,VAL.npz results/int8.csv

All networks have the same body, calibration images and settings; only the mixer differs. "attention" in the column
`products` means that products of two activations are int8 as well, which for softmax attention includes the attention
weights. If int8 loses more than 0.5 points, further rows keep the most sensitive layers in fp32. Each row is written as
soon as it is measured; rows that are there are skipped. The error of each layer alone in int8 is written beside, to
int8_layers.csv. Latencies: benchmarks/deploy.py.
"""

import argparse
import csv
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tokamix
from tokamix.data.images.loader import create_eval_loader
from tokamix.export.graph import Graph, create_graph
from tokamix.export.quantize import _Onnx, _OpenVino, calibration_batches
from tokamix.export.run import trace
from tokamix.export.write import SUFFIX, WRITERS
from tokamix.inference import InferenceConfig, load_model
from tokamix.models.shipped import shipped_weights
from tokamix.runtimes import load_exported

CASES = (("onnx", False), ("onnx", True), ("openvino", True))
COLUMNS = ("model", "data", "runtime", "products", "kept", "images", "fp32", "int8", "lost", "gained")
MAX_DROP, STEPS = 0.5, (0, 1, 2, 4, 8, 16)
OPSET, BATCH = 20, 64


class Network:
    """A shipped network, traced once for each runtime, with the images that it is measured on."""

    def __init__(self, name: str, data: Any) -> None:
        network, config = load_model(name)
        if tuple(config.class_names) != tuple(data.classes):
            raise ValueError(f"{name} has other classes than {data.name}")
        size = (config.image_size, config.image_size)
        self.graph: Graph = create_graph(network, config, preprocessing=False, features=False, precision="fp32")
        self.programs = {to: trace(self.graph, size, None, config, name, to) for to in ("onnx", "openvino")}
        self.config: InferenceConfig = config
        self.data = data
        self.metadata: dict[str, Any] = {
            "inference": config.to_dict(),
            "input": "float32",
            "size": list(size),
            "batch": None,
        }
        self.metadata |= {"outputs": ["logits"], "features": False, "multiple": 1, "model": name}

    def quantizer(self, runtime: str, attention: bool) -> _Onnx | _OpenVino:
        """The calibrated quantiser of a runtime."""
        batches = calibration_batches(self.graph, self.config, self.data, 1, self.metadata["size"])
        metadata = {**self.metadata, "precision": "int8"}
        if runtime == "onnx":
            return _Onnx(self.programs[runtime], metadata, OPSET, batches, attention)
        return _OpenVino(self.programs[runtime], metadata, OPSET, batches)

    def write_exact(self, runtime: str, path: Path) -> None:
        """Write the fp32 file."""
        WRITERS[runtime](self.programs[runtime], path, {**self.metadata, "precision": "fp32"}, OPSET)

    def correct(self, path: Path) -> Tensor:
        """Which validation images a file classifies correctly."""
        model = load_exported(path)
        loader = create_eval_loader(self.data.val, self.config, batch_size=BATCH, device=torch.device("cpu"))
        return torch.cat([model(images).argmax(1) == labels for images, labels in loader.epoch(0)])


def measure(name: str, data: Any, done: set[tuple[str, ...]]) -> Iterator[tuple[Any, ...]]:
    """The rows of one network that are not done yet."""
    tag = name.partition(".")[2]
    missing = [(r, a) for r, a in CASES if (name, r, products(a)) not in done]
    network = Network(name, data) if missing else None
    for runtime, attention in missing:
        assert network is not None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"model{SUFFIX[runtime]}"
            network.write_exact(runtime, path)
            exact = network.correct(path)
            quantizer = network.quantizer(runtime, attention)
            for count in STEPS:
                quantizer.write(path, quantizer.most_sensitive(count) if count else [])
                actual = network.correct(path)
                lost, gained = int((exact & ~actual).sum()), int((actual & ~exact).sum())
                n = len(exact)
                accuracies = (100 * int(exact.sum()) / n, 100 * int(actual.sum()) / n)
                yield name, tag, runtime, products(attention), count, n, *accuracies, lost, gained
                if lost - gained <= MAX_DROP / 100 * n:
                    break


def layers(name: str, data: Any) -> Iterator[tuple[Any, ...]]:
    """Relative error of the logits if one layer alone is in int8, the most sensitive first."""
    quantizer = Network(name, data).quantizer("onnx", attention=True)
    assert isinstance(quantizer, _Onnx)
    for layer, error in sorted(quantizer.sensitivity().items(), key=lambda item: -item[1]):
        yield name, layer, error


def products(attention: bool) -> str:
    """The name of a case in the column `products`."""
    return "attention" if attention else "weights"


def append(path: Path, columns: Sequence[str], row: Sequence[Any]) -> None:
    """Add a row to a CSV file, and the header to a new one."""
    new = not path.is_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([columns] if new else [])
        writer.writerow([f"{x:.4g}" if isinstance(x, float) else x for x in row])
    print(*row, flush=True)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; none if there is no file."""
    if not path.is_file():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tag", help="imagenette or cifar100")
    parser.add_argument("data")
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", default="", help="parts of models' names, separated by commas")
    args = parser.parse_args()
    data = tokamix.create_dataset(args.data)
    beside = args.output.with_name(f"{args.output.stem}_layers.csv")
    done = {(row["model"], row["runtime"], row["products"]) for row in read(args.output)}
    listed = {row["model"] for row in read(beside)}
    names = [name for name in shipped_weights() if name.endswith(f".{args.tag}")]
    for name in [name for part in args.only.split(",") for name in names if part in name]:
        for row in measure(name, data, done):
            append(args.output, COLUMNS, row)
        for row in layers(name, data) if name not in listed else ():
            append(beside, ("model", "layer", "error"), row)


if __name__ == "__main__":
    main()
