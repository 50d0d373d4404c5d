"""The speed of deployed models on two CPU cores, and the page docs/deploy.md.

    python benchmarks/deploy.py export files/     # once, about 12 minutes on an idle machine
    python benchmarks/deploy.py measure files/    # all bars, under 5 minutes; writes results/deploy.csv
    python benchmarks/deploy.py page              # docs/deploy.md from results/deploy.csv and results/int8.csv

All paths of a model are timed in turn in one process, batch 1, so that the load of the machine hits all alike. The
authors' operators are ours written as in their code (deformable convolution, fold and unfold as convolutions,
`F.normalize`), in the same body, in eager mode; outputs are compared before anything is timed. int8 is calibrated on
random images here, which does not change its speed.
"""

import argparse
import copy
import csv
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from active_token import deformable_model
from timm.utils import reparameterize_model
from torch import Tensor, nn

from tokamix.bench.runtimes import _random_data, create_for_size
from tokamix.export.check import check_file
from tokamix.export.graph import create_graph
from tokamix.export.quantize import _Onnx, _OpenVino, calibration_batches
from tokamix.export.run import trace
from tokamix.export.write import save_openvino, to_openvino, write_onnx
from tokamix.inference import InferenceConfig
from tokamix.mixers import sima, super_token
from tokamix.runtimes import load_exported

MODELS = (("stvit_small", 224), ("atmnet_tiny", 224), ("amixer_tiny", 224), ("xcit_small_12_p16_sima", 224))
LONG = tuple((name, size) for size in (512, 1024) for name in ("deit_small_sima", "deit_small_patch16_224"))
PATHS = ("onnx", "onnx-int8", "openvino", "openvino-bf16", "openvino-int8")
RESULTS, PAGE = Path("results/deploy.csv"), Path("docs/deploy.md")
SECONDS = 25.0  # for each model


def authors_sima(qkv: Tensor, norm: str | None = "l1", *_: Any) -> Tensor:
    """SimA as published: both operands normalised, the cheaper order."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    q, k = F.normalize(q, p=1.0, dim=-2), F.normalize(k, p=1.0, dim=-2)
    out = (q @ k.mT) @ v if q.shape[-2] < q.shape[-1] else q @ (k.mT @ v)
    return out.transpose(1, 2).flatten(2)


def _one_hot(x: Tensor) -> Tensor:
    return torch.eye(9, dtype=x.dtype).view(9, 1, 3, 3)


def authors_unfold(x: Tensor) -> Tensor:
    """(B, C, p, q) -> (B, C * 9, p * q), as one convolution of all planes."""
    batch, channels, p, q = x.shape
    return F.conv2d(x.reshape(-1, 1, p, q), _one_hot(x), padding=1).reshape(batch, channels * 9, p * q)


def authors_fold(x: Tensor, p: int, q: int) -> Tensor:
    """(B * C, 9, p, q) -> (B * C, 1, p, q), the adjoint."""
    return F.conv_transpose2d(x.reshape(-1, 9, p, q), _one_hot(x), padding=1)


def authors_sample(x: Tensor, cell: tuple[int, int], n_iter: int = 1, *_: Any) -> tuple[Tensor, Tensor]:
    """Super token sampling on channels-first maps with fold and unfold, as published; one iteration."""
    (h, w), (batch, height, width, channels) = cell, x.shape
    image = F.pad(x.permute(0, 3, 1, 2).contiguous(), (0, -width % w, 0, -height % h))
    p, q = image.shape[2] // h, image.shape[3] // w
    pixels = image.reshape(batch, channels, p, h, q, w).permute(0, 2, 4, 3, 5, 1).reshape(batch, p * q, h * w, channels)
    tokens = F.adaptive_avg_pool2d(image, (p, q))
    near = authors_unfold(tokens).transpose(1, 2).reshape(batch, p * q, channels, 9)
    association = (pixels @ near * channels**-0.5).softmax(-1)  # (B, p * q, h * w, 9)
    sums = authors_fold(association.sum(2).transpose(1, 2).reshape(batch, 9, p, q), p, q)
    tokens = pixels.transpose(-1, -2) @ association
    tokens = authors_fold(tokens.permute(0, 2, 3, 1).reshape(batch * channels, 9, p, q), p, q)
    tokens = tokens.reshape(batch, channels, p, q) / (sums + 1e-12)
    return tokens.permute(0, 2, 3, 1), association


def authors_scatter(tokens: Tensor, association: Tensor, cell: tuple[int, int], *_: Any) -> Tensor:
    """Super tokens back to the map, as published; for maps that the cells divide."""
    (h, w), (batch, p, q, channels) = cell, tokens.shape
    near = authors_unfold(tokens.permute(0, 3, 1, 2).contiguous()).transpose(1, 2).reshape(batch, p * q, channels, 9)
    pixels = near @ association.transpose(-1, -2)  # (B, p * q, C, h * w)
    image = pixels.reshape(batch, p, q, channels, h, w).permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, p * h, q * w)
    return image.permute(0, 2, 3, 1)


def authors_call(name: str, model: nn.Module, images: Tensor) -> Callable[[], Tensor] | None:
    """The model with the authors' operators, or None where they are not written here."""
    if name.startswith("atmnet"):
        theirs = deformable_model(model)
        return lambda: theirs(images)
    module, patches = {
        "stvit": (super_token, {"super_token_sample": authors_sample, "super_token_scatter": authors_scatter}),
        "xcit": (sima, {"sima_self_attention": authors_sima}),
    }.get(name.split("_")[0], (None, {}))
    if module is None:
        return None

    def run() -> Tensor:
        ours = {key: getattr(module, key) for key in patches}
        for key, value in patches.items():
            setattr(module, key, value)
        try:
            return model(images)
        finally:
            for key, value in ours.items():
                setattr(module, key, value)

    return run


def files_of(folder: Path, name: str, size: int) -> dict[str, Path]:
    suffix = {path: ".onnx" if path.startswith("onnx") else ".xml" for path in PATHS}
    return {path: folder / f"{name}_{size}_{path}{suffix[path]}" for path in PATHS}


def export_all(folder: Path, models: list[tuple[str, int]], paths: tuple[str, ...]) -> None:
    """Write what is missing; the model is traced and translated once for all runtimes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in models:
        files = {path: file for path, file in files_of(folder, name, size).items() if path in paths}
        if size > 224:  # the bar at high resolution compares the same runtime, in fp32
            files = {path: file for path, file in files.items() if path in ("onnx", "openvino")}
        missing = {path: file for path, file in files.items() if not file.is_file()}
        if not missing:
            continue
        start = time.perf_counter()
        torch.manual_seed(0)
        model = create_for_size(name, size)
        config = InferenceConfig.from_model(model).replace(image_size=size, crop_pct=1.0)
        graph = create_graph(model, config, preprocessing=False, features=False, precision="fp32")
        program = trace(graph, (size, size), 1, config, name)
        metadata = {"inference": config.to_dict(), "input": "float32", "size": [size, size], "batch": 1}
        metadata |= {"outputs": ["logits"], "features": False, "multiple": 1, "model": name}
        batches = calibration_batches(graph, config, _random_data(size, len(config.class_names)), 1)
        for path, file in missing.items():
            precision = path.partition("-")[2] or "fp32"
            own = {**metadata, "precision": precision}
            if path == "onnx":
                write_onnx(program, file, own, 20)
            elif path == "onnx-int8":
                _Onnx(program, own, 20, batches).write(file, [])
            elif path == "openvino-int8":
                _OpenVino(program, own, 20, batches).write(file, [])
            else:
                save_openvino(to_openvino(program, ["logits"], 20), file, own)
            try:
                (case,) = check_file(file, graph, [((size, size), 1)], precision)
            except ValueError:
                file.unlink()  # the next call must not take it for a good one
                raise
            print(f"{name} {size} {path}: error {case.error:.0e} ({time.perf_counter() - start:.0f} s)", flush=True)


@torch.inference_mode()
def measure(folder: Path, models: list[tuple[str, int]]) -> None:
    """Time all paths of a model in turn and write a row for each."""
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ("model", "size", "path", "milliseconds", "spread", "speedup", "over_authors", "rounds", "load")
        )
        for size in dict.fromkeys(size for _, size in models):
            names = [name for name, side in models if side == size]
            groups = [names] if size > 224 else [[name] for name in names]  # the two DeiTs run in turn
            for group in groups:
                calls: dict[tuple[str, str], Callable[[], Any]] = {}
                for name in group:
                    calls |= {(name, path): call for path, call in create_calls(folder, name, size).items()}
                for row in time_calls(calls, size):
                    writer.writerow(row)
                    print(*row, flush=True)
                file.flush()


def create_calls(folder: Path, name: str, size: int) -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    model = create_for_size(name, size)
    images = torch.randn(1, 3, size, size)
    expected = model(images)
    plain = copy.deepcopy(model)
    ours = reparameterize_model(model)
    calls: dict[str, Callable[[], Any]] = {"eager": lambda: ours(images)}
    if size == 224 and (theirs := authors_call(name, plain, images)) is not None:
        torch.testing.assert_close(theirs(), expected, rtol=1e-3, atol=1e-4)
        calls["authors' operators"] = theirs
    for path, file in files_of(folder, name, size).items():
        if file.is_file():
            exported = load_exported(file)
            calls[path] = lambda exported=exported: exported.run(images)
    return calls


def time_calls(calls: dict[tuple[str, str], Callable[[], Any]], size: int) -> list[tuple[Any, ...]]:
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    start = time.perf_counter()
    while min(map(len, times.values())) < 8 or time.perf_counter() - start < SECONDS:
        for key, call in calls.items():
            begin = time.perf_counter()
            call()
            times[key].append(1e3 * (time.perf_counter() - begin))
        if time.perf_counter() - start > 3 * SECONDS:
            break
    medians = {key: statistics.median(values[2:]) for key, values in times.items()}
    rows = []
    for (name, path), values in times.items():
        low, _, high = statistics.quantiles(values[2:], n=4)
        own = medians[name, path]
        eager, authors = (medians.get((name, other), math.nan) for other in ("eager", "authors' operators"))
        spread = (high - low) / 2 / own
        cells = [f"{x:.3g}" for x in (own, spread, eager / own, authors / own)]
        rows.append((name, size, path, *cells, len(values), f"{os.getloadavg()[0]:.1f}"))
    return rows


def write_page() -> None:
    """docs/deploy.md: the tables of the two CSV files."""
    lines = ["# Deployed models on a CPU", "", "Generated by `python benchmarks/deploy.py page`; do not edit.", ""]
    with RESULTS.open() as file:
        rows = list(csv.DictReader(file))
    load = max(float(row["load"]) for row in rows)
    lines += [
        "Two cores, batch 1, medians; paths of a model run in turn (`python benchmarks/deploy.py measure`). ± is half"
        f" the range between the quartiles. Highest load average during the run: {load:.1f}.",
        "",
        "| model | size | path | ms | ± | x eager | x authors' operators |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratios = ["" if row[key] == "nan" else f"{float(row[key]):.2f}" for key in ("speedup", "over_authors")]
        cells = (row["model"], row["size"], row["path"], row["milliseconds"], f"{float(row['spread']):.0%}", *ratios)
        lines.append(f"| {' | '.join(cells)} |")
    int8 = Path("results/int8.csv")
    if int8.is_file():
        lines += ["", "## int8 with trained weights", ""]
        lines += [
            "Top-1 on the validation images in the file's runtime (`python benchmarks/int8.py`); the same body and the"
            " same 64 calibration images, no layer in fp32. *attention*: products of two activations are int8 too.",
            "",
            "| model | runtime | int8 | images | fp32 | int8 | drop |",
            "|---|---|---|---|---|---|---|",
        ]
        with int8.open() as file:
            for row in csv.DictReader(file):
                keys = ("model", "runtime", "products", "images", "fp32", "int8", "drop")
                lines.append(f"| {' | '.join(row[key] for key in keys)} |")
    PAGE.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["export", "measure", "page"])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("files"))
    parser.add_argument("--models", default="", help="NAME:SIZE,...; default: those of the bars")
    parser.add_argument("--paths", default=",".join(PATHS))
    args = parser.parse_args()
    pairs = [part.split(":") for part in args.models.split(",") if part]
    models = [(name, int(size)) for name, size in pairs] or [*MODELS, *LONG]
    if args.action == "export":
        export_all(args.folder, models, tuple(args.paths.split(",")))
    elif args.action == "measure":
        measure(args.folder, models)
    else:
        write_page()


if __name__ == "__main__":
    main()
