"""The speed of deployed models on two CPU cores, and the page docs/deploy.md.

    python benchmarks/deploy.py export files/     # once; writes what is missing
    python benchmarks/deploy.py measure files/    # about 10 minutes for all; writes results/deploy.csv
    python benchmarks/deploy.py measure files/ --models amixer_tiny:224   # one model; the other rows stay
    python benchmarks/deploy.py page              # docs/deploy.md from deploy.csv, int8.csv and aoti.csv in results/

All paths of a model are timed in turn in one process, batch 1, so that the load of the machine hits all alike. The
authors' operators are ours written as in their code (deformable convolution, STViT channels-first with fold and unfold
as convolutions, `F.normalize`), in eager mode; outputs are compared before anything is timed. int8 is calibrated on
random images here, which does not change its speed.
"""

import argparse
import csv
import math
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from active_token import deformable_model
from super_token import authors_stvit
from timm.utils import reparameterize_model
from torch import Tensor, nn

from tokamix.bench.runtimes import _random_data, create_for_size
from tokamix.export.check import check_file
from tokamix.export.graph import create_graph
from tokamix.export.quantize import _Onnx, _OpenVino, calibration_batches
from tokamix.export.run import trace
from tokamix.export.write import save_openvino, to_openvino, write_onnx
from tokamix.inference import InferenceConfig
from tokamix.mixers import sima
from tokamix.models import list_models
from tokamix.ops.dispatch import use_backend
from tokamix.runtimes import load_exported

MODELS = (("stvit_small", 224), ("atmnet_tiny", 224), ("amixer_tiny", 224), ("xcit_small_12_p16_sima", 224))
PEER = ("convnext_tiny", 224)
PAIR = (("pyramid_nano_softmax", 96), ("pyramid_nano_sima", 96))  # those of benchmarks/int8.py
LONG = tuple((name, size) for size in (512, 1024) for name in ("deit_small_sima", "deit_small_patch16_224"))
ALL = (*MODELS, PEER, *PAIR, *LONG)
PLAIN = "eager, plain layers"
PATHS = ("onnx", "onnx-int8", "openvino", "openvino-bf16", "openvino-int8")
RESULTS, INT8, PAGE = Path("results/deploy.csv"), Path("results/int8.csv"), Path("docs/deploy.md")
AOTI = Path("results/aoti.csv")  # of benchmarks/aoti.py
# what profiles of the missed targets show, for the page
LIMITS = (
    "What the profiles and the repeated runs show:",
    "",
    "- **Eager mode became faster, so files gain less over it.** Since 20 November 2026 linear layers of all families"
    " are oneDNN's in `torch.inference_mode()`, as those of stvit_small were before: PyTorch's own choice, MKL, has "
    "no AVX-512 kernels for AMD's processors. The row *eager, plain layers* is what files were compared with when the"
    " target was set.",
    "- **Ratios depend on the processor.** All rows are of one day, 20 November 2026, on an AMD EPYC of family 26 "
    "(Zen 5); of the models at 224 px, each path was timed 14 to 29 times. On an earlier AMD EPYC, whose speed "
    "changed within minutes, stvit_small in int8 was 2.5x to 3.3x as fast as eager mode, and ONNX Runtime 0.93x to "
    "1.3x.",
    "- **Two of five runs of atmnet_tiny** had its files 20 to 30 % slower than the other three (ONNX Runtime 44 ms,"
    " 0.98x eager mode), within a process always the same; the cause is unknown.",
    "- **stvit_small in eager mode** was 1.4x (two runs), 1.57x, 1.6x to 1.8x (four) and 1.7x to 1.9x (three) as fast"
    " as the authors' operators on the earlier processor, and 1.40x, 1.41x, 1.46x, 1.56x and 1.74x on this one. Of 36"
    " ms oneDNN's linear layers take 17, which is near the limit of the cores, convolutions 3.5, attention 3.4, and the"
    " rest is the host: the setup of 97 calls of oneDNN, small operators of the super tokens, and the check that "
    "packed weights are current.",
    "- **AOTInductor on a GPU** is not measured: with torch 2.11, compiling STViT's package for several images failed"
    " in Inductor (pytorch issue 178676; `tokamix export` works around it since), and no other package was ready "
    "within two minutes on 16 cores.",
)
SETTLE = 0.05  # seconds of calls that are not timed, before each that is
COLUMNS = (
    "model",
    "size",
    "path",
    "milliseconds",
    "spread",
    "speedup",
    "over_authors",
    "rounds",
    "load",
    "nodes",
    "blocks",
)


def authors_sima(qkv: Tensor, norm: str | None = "l1", *_: Any) -> Tensor:
    """SimA as published: both operands normalised, the cheaper order."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    q, k = F.normalize(q, p=1.0, dim=-2), F.normalize(k, p=1.0, dim=-2)
    out = (q @ k.mT) @ v if q.shape[-2] < q.shape[-1] else q @ (k.mT @ v)
    return out.transpose(1, 2).flatten(2)


def authors_call(name: str, model: nn.Module, images: Tensor) -> Callable[[], Tensor] | None:
    """The model with the authors' operators, or None where they are not written here."""
    if name.startswith(("atmnet", "stvit")):
        theirs = (deformable_model if name.startswith("atmnet") else authors_stvit)(model).eval()
        return lambda: theirs(images)
    if not name.startswith("xcit"):
        return None

    def run() -> Tensor:
        ours = sima.sima_self_attention
        sima.sima_self_attention = authors_sima
        try:
            return model(images)
        finally:
            sima.sima_self_attention = ours

    return run


def files_of(folder: Path, name: str, size: int) -> dict[str, Path]:
    suffix = {path: ".onnx" if path.startswith("onnx") else ".xml" for path in PATHS}
    return {path: folder / f"{name}_{size}_{path}{suffix[path]}" for path in PATHS}


def export_all(folder: Path, models: list[tuple[str, int]], paths: tuple[str, ...]) -> None:
    """Write what is missing; the model is traced and translated once for each runtime."""
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
        programs = {
            to: trace(graph, (size, size), 1, config, name, to) for to in {path.split("-")[0] for path in missing}
        }
        metadata = {"inference": config.to_dict(), "input": "float32", "size": [size, size], "batch": 1}
        metadata |= {"outputs": ["logits"], "features": False, "multiple": 1, "model": name}
        batches = calibration_batches(graph, config, _random_data(size, len(config.class_names)), 1, (size, size))
        for path, file in missing.items():
            to, _, kind = path.partition("-")
            program, precision = programs[to], kind or "fp32"
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
def measure(folder: Path, models: list[tuple[str, int]], seconds: float) -> None:
    """Time all paths of a model in turn and write a row for each; rows of other models stay."""
    for size in dict.fromkeys(size for _, size in models):
        names = [name for name, side in models if side == size]
        groups = [[name] for name in names] if size == 224 else [names]  # softmax and SimA run in turn
        for group in groups:
            calls: dict[tuple[str, str], Callable[[], Any]] = {}
            for name in group:
                calls |= {(name, path): call for path, call in create_calls(folder, name, size).items()}
            rows = []
            for row in time_calls(calls, size, seconds):
                row += count_nodes(files_of(folder, row[0], size)["onnx"], row[0], size) if row[2] == "onnx" else ()
                print(*row, flush=True)
                rows.append(dict(zip(COLUMNS, map(str, row), strict=False)))
            replace_rows(rows)


def replace_rows(rows: list[dict[str, str]]) -> None:
    """Write rows to the results, in place of those of the same models and sizes."""
    measured = {(row["model"], row["size"]) for row in rows}
    before = read_rows(RESULTS) if RESULTS.is_file() else []
    order = [(name, str(size)) for name, size in ALL]
    merged = [row for row in before if (row["model"], row["size"]) not in measured] + rows
    merged.sort(key=lambda row: order.index(key) if (key := (row["model"], row["size"])) in order else len(order))
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(merged)


def count_nodes(file: Path, name: str, size: int) -> tuple[int, int]:
    """Nodes of an ONNX file, and blocks of its model."""
    import onnx

    blocks = [n for n, _ in create_for_size(name, size).named_modules() if re.search(r"blocks\w*\.\d+$", n)]
    return len(onnx.load(str(file)).graph.node), len(blocks)


def create_calls(folder: Path, name: str, size: int) -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    with torch.inference_mode(False):  # as users create models: packed weights need parameters that count their changes
        model = create_for_size(name, size)
        ours = reparameterize_model(model)
    images = torch.randn(1, 3, size, size)
    expected = model(images)
    calls: dict[str, Callable[[], Any]] = {"eager": lambda: ours(images)}
    if name in list_models():
        calls[PLAIN] = use_backend("eager")(lambda: ours(images))
    if size == 224 and (theirs := authors_call(name, model, images)) is not None:
        torch.testing.assert_close(theirs(), expected, rtol=1e-3, atol=1e-4)
        calls["authors' operators"] = use_backend("eager")(theirs)
    for path, file in files_of(folder, name, size).items():
        if file.is_file():
            exported = load_exported(file)
            calls[path] = lambda exported=exported: exported.run(images)
    return calls


def time_calls(calls: dict[tuple[str, str], Callable[[], Any]], size: int, seconds: float) -> list[tuple[Any, ...]]:
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    start = time.perf_counter()
    while min(map(len, times.values())) < 8 or time.perf_counter() - start < seconds:
        for key, call in calls.items():
            begin = time.perf_counter()
            while time.perf_counter() - begin < SETTLE:  # threads of the runtime before spin on
                call()
            begin = time.perf_counter()
            call()
            times[key].append(1e3 * (time.perf_counter() - begin))
    medians = {key: statistics.median(values[2:]) for key, values in times.items()}
    rows = []
    for (name, path), values in times.items():
        low, _, high = statistics.quantiles(values[2:], n=4)
        own = medians[name, path]
        eager, authors = (medians.get((name, other), math.nan) for other in ("eager", "authors' operators"))
        spread = (high - low) / 2 / own
        cells = [f"{x:.4g}" for x in (own, spread, eager / own, authors / own)]
        rows.append((name, size, path, *cells, len(values), f"{os.getloadavg()[0]:.1f}"))
    return rows


def write_page() -> None:
    """docs/deploy.md: the tables of results/deploy.csv, results/int8.csv and results/aoti.csv, where they exist."""
    lines = ["# Deployed models", "", "Generated by `python benchmarks/deploy.py page`; do not edit.", ""]
    if RESULTS.is_file():
        lines += speed_lines(read_rows(RESULTS))
    if INT8.is_file():
        lines += int8_lines(read_rows(INT8), read_rows(INT8.with_name("int8_layers.csv")))
    if AOTI.is_file():
        lines += aoti_lines(read_rows(AOTI))
    PAGE.write_text("\n".join(lines) + "\n")


def speed_lines(rows: list[dict[str, str]]) -> list[str]:
    """Targets, latencies of all paths, and the nodes of the graphs."""
    load = max(float(row["load"]) for row in rows)
    lines = [
        "How fast the models are for one image on two CPU cores, as PyTorch modules and as the files that"
        " [`tokamix export`](guides/export.md) writes; and what int8 costs in accuracy. The processor is a server's"
        " with AVX-512, bf16 and VNNI instructions (AMD EPYC, Zen 5); without bf16 instructions, the paths"
        " openvino-bf16 and openvino-int8 gain less.",
        "",
        "## Targets",
        "",
        *bar_lines(rows),
        "",
        "The first rows differ by what eager mode gained over plain layers and over the authors' operators: the faster"
        " eager mode is, the less a file gains.",
        "",
        *LIMITS,
        "",
        "## Latency",
        "",
        "- **eager**: the model in PyTorch, `model(images)`, BatchNorms folded.",
        "- **eager, plain layers**: the same without oneDNN's kernels (`TOKAMIX_BACKEND=eager`).",
        "- **authors' operators**: the same model in PyTorch's own layers with the mixer written as in its authors'"
        " code. Not written for AMixer.",
        "- **onnx**, **onnx-int8**: ONNX Runtime, in fp32 and in int8.",
        "- **openvino**, **openvino-bf16**, **openvino-int8**: OpenVINO in fp32, bf16 and int8; what int8 leaves in"
        " floating point runs in bf16.",
        "",
        "Medians of batch 1 in milliseconds; ± is half the range between the quartiles. The paths of a model run in"
        f" turn in one process, so ratios are safer than milliseconds (highest load average: {load:.1f}). int8 is"
        " calibrated on random images here, which does not change its speed.",
        "",
        "| model | image size | path | ms | ± | x eager | x authors' operators |",
        "|---|--:|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        ratios = ["" if row[key] == "nan" else f"{float(row[key]):.2f}" for key in ("speedup", "over_authors")]
        cells = (row["model"], row["size"], row["path"], row["milliseconds"], f"{float(row['spread']):.0%}", *ratios)
        lines.append(f"| {' | '.join(cells)} |")
    return lines + node_lines(rows)


def bar_lines(rows: list[dict[str, str]]) -> list[str]:
    """What was aimed at, and what is reached."""
    times = {(row["model"], row["size"], row["path"]): float(row["milliseconds"]) for row in rows}
    models = [name for name, _ in MODELS if (name, "224", "eager") in times]
    cells: list[tuple[str, str, str]] = []
    for other in ("eager", PLAIN, "authors' operators"):
        reached = []
        for name in models:
            own = {path: ms for (model, size, path), ms in times.items() if model == name and size == "224"}
            path = min(own, key=lambda path: own[path])
            if other in own:
                reached.append(f"{name} {own[other] / own[path]:.2f} ({path})")
        if reached:
            cells.append((f"best path against {other}, 224 px", "3x each", ", ".join(reached)))
    if ("stvit_small", "224", "authors' operators") in times:
        ratio = times["stvit_small", "224", "authors' operators"] / times["stvit_small", "224", "eager"]
        cells.append(("stvit_small in eager mode against the authors' operators", "1.6x", f"{ratio:.2f}"))
    both = [(name, "224") for name in models] + [("deit_small_sima", size) for size in ("512", "1024")]
    slower = [
        f"{name} {times[name, size, 'eager'] / times[name, size, 'onnx']:.2f}{'' if size == '224' else f' ({size} px)'}"
        for name, size in both
        if (name, size, "onnx") in times
    ]
    cells.append(("ONNX Runtime against eager mode", "at least 1x", ", ".join(slower)))
    ratios = []
    for (name, size, path), ms in times.items():
        other = times.get(("deit_small_patch16_224", size, path))
        if name == "deit_small_sima" and other:
            ratios.append(f"{size} px {path} {other / ms:.2f}")
    cells.append(("deit_small_sima against deit_small, same runtime", "over 1x", ", ".join(ratios)))
    return ["| ratio of speeds | target | reached |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in cells)]


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def node_lines(rows: list[dict[str, str]]) -> list[str]:
    """Nodes of the ONNX files, for each block."""
    counted = [row for row in rows if row["path"] == "onnx" and int(row["size"]) <= 224]
    shares = {row["model"]: int(row["nodes"]) / int(row["blocks"]) for row in counted}
    bar = 2 * shares.get(PEER[0], 0.0)
    reached = [name for name, share in shares.items() if name != PEER[0] and share <= bar]
    lines = ["", "## Nodes of the ONNX graphs", "", "| model | nodes | blocks | nodes per block |", "|---|--:|--:|--:|"]
    for row in counted:
        lines.append(f"| {row['model']} | {row['nodes']} | {row['blocks']} | {shares[row['model']]:.1f} |")
    return [
        *lines,
        "",
        "The target is at most twice ConvNeXt's nodes per block; "
        + (f"{', '.join(reached)} reach{'es' * (len(reached) == 1)} it." if reached else "it is missed.")
        + " The export folds scales and BatchNorms into weights, merges reshapes and transposes, and writes a linear"
        " layer as one node. What is left: a block of ConvNeXt is one depthwise convolution and two linear layers."
        " AMixer's has six linear layers and two batched products; tokens are ordered once for values and policies."
        " XCiT's has a convolutional branch besides attention and MLP (10 nodes), and SimA's norms (9): one sum over"
        " queries, keys and values would take two nodes less, but 1 % more time.",
        "",
        "A block of STViT without super tokens has 23 nodes: 4 convolutions, 2 linear layers, norm, GELU, 2 additions,"
        " 2 products, softmax, a split into queries, keys and values, and 9 reshapes and transposes. Super tokens add"
        " 28: three times a padding, a gather and reshapes to exchange values between cells; 3 products, softmax,"
        " weighted means. Two transposes in a row, from a convolution's map to cells, would be one node, but ONNX"
        " Runtime copies that one element by element: 8 % more time.",
        "",
        "A block of ATMNet has 40 nodes, and 15 more where it predicts offsets: 8 linear layers, 2 norms, 2 GELUs, 2"
        " additions, 7 for samples (padding, 2 gathers, interpolation), 13 for the weights of three branches and their"
        " sums, and 6 reshapes. `GridSample` would replace most of those for samples, but reads four neighbours"
        " where two are needed. `ReduceL1` and `Sum` would save more nodes, but not time: ONNX Runtime's `ReduceL1`"
        " takes two to twenty times as long as `Abs` and `ReduceSum`. ONNX has no operator for any of these mixers."
        " Runtimes fuse many of these nodes when they open a file: the column *x eager* shows what is left of their"
        " cost.",
    ]


def aoti_lines(rows: list[dict[str, str]]) -> list[str]:
    """AOTInductor packages beside torch.compile on a GPU."""
    times = {(row["model"], row["batch"], row["runtime"]): float(row["milliseconds"]) for row in rows}
    lines = [
        *("", "## AOTInductor on a GPU", ""),
        f"`python benchmarks/aoti.py` on one {rows[0]['hardware']} with torch {rows[0]['torch']}: bf16, BatchNorms"
        f" folded, {rows[0]['size']} px. A call from Python until the GPU is done; medians in milliseconds, ± is half"
        " the range between the quartiles. Each row has its own process; they are timed in turn, one at a time.",
        "",
        "- **eager**, **compile**, **graphs**: the model in PyTorch; with torch.compile; with torch.compile and CUDA"
        " graphs. All three use our Triton kernels.",
        "- **aoti**: the package that `tokamix export --to aoti --device cuda --precision bf16` writes. It holds plain"
        " operators only, so that it runs without tokamix: what our kernels do, Inductor compiles.",
        "",
        "| model | batch | runtime | ms | ± | images/s | x eager | x compile |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        others = [times.get((row["model"], row["batch"], other)) for other in ("eager", "compile")]
        ratios = ["" if other is None else f"{other / float(row['milliseconds']):.2f}" for other in others]
        cells = [row[key] for key in ("model", "batch", "runtime", "milliseconds")]
        cells += [f"{float(row['spread']):.0%}", f"{float(row['images_per_second']):,.0f}", *ratios]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def drop_interval(lost: int, gained: int, images: int) -> tuple[float, float]:
    """Exact 95 % interval of a drop in points, given the images on which fp32 and int8 differ (Clopper-Pearson)."""
    from scipy.stats import binomtest

    total = lost + gained
    if not total:
        return 0.0, 0.0
    ci = binomtest(lost, total).proportion_ci()
    return tuple(100 * total * (2 * share - 1) / images for share in (ci.low, ci.high))


def int8_lines(rows: list[dict[str, str]], layers: list[dict[str, str]]) -> list[str]:
    """Accuracy of int8 with trained weights, whether softmax makes a difference, and the most sensitive layers."""
    lines = [
        *("", "## int8 with trained weights", ""),
        "Top-1 accuracy in percent on the validation images of Imagenette, in the file's runtime"
        " (`python benchmarks/int8.py`). The networks differ in the mixer only; all are calibrated on the same 64"
        " images, on 19 November 2026, before the last change of the graphs. *quantised*: `weights` means layers with"
        " weights; `attention`, products of two activations as well."
        " *kept*: layers left in fp32. *drop*: points that int8 loses; below 0, it gains. The interval is exact and"
        " paired: it counts the images on which only one of the two files is right. The target is a drop of at most"
        " 0.5 points.",
        "",
        "| model | runtime | quantised | kept | images | fp32 | int8 | drop | 95 % interval |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    losses = {}
    for row in rows:
        lost, gained, images = (int(row[key]) for key in ("lost", "gained", "images"))
        low, high = drop_interval(lost, gained, images)
        drop = 100 * (lost - gained) / images
        spread = 1e4 * ((lost + gained) / images - (lost / images - gained / images) ** 2) / images
        mixer = row["model"].removeprefix("pyramid_nano_").partition(".")[0]
        losses[mixer, row["runtime"], row["products"], row["kept"]] = (drop, spread)
        cells = [row[key] for key in ("model", "runtime", "products", "kept", "images", "fp32", "int8")]
        lines.append(f"| {' | '.join(cells)} | {drop:.2f} | {low:.2f} to {high:.2f} |")
    lines += ["", "**Is attention without softmax easier to quantise?**", ""]
    differ = False
    for (mixer, *case), (drop, spread) in losses.items():
        if mixer == "softmax" and (other := losses.get(("sima", *case))):
            half = 1.96 * math.sqrt(spread + other[1])
            more = drop - other[0]
            differ |= abs(more) > half
            word = "more" if more > 0 else "less"
            lines.append(
                f"- {case[0]}, {case[1]}: softmax loses {abs(more):.2f} points {word} than SimA"
                f" (drop of softmax minus drop of SimA: {more:+.2f}, 95 % interval {more - half:+.2f} to"
                f" {more + half:+.2f}, treating the two networks as independent)."
            )
    found = "Some intervals do not contain 0" if differ else "All intervals contain 0: no difference is found"
    lines += ["", f"{found}. There is one trained network of each, so this compares two networks only.", ""]
    lines += ["Layers whose quantisation alone changes the logits most (relative error, ONNX Runtime):", ""]
    for name in dict.fromkeys(row["model"] for row in layers):
        worst = [f"`{r['layer']}` {float(r['error']):.1%}" for r in layers if r["model"] == name][:4]
        lines.append(f"- {name}: {', '.join(worst)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["export", "measure", "page"])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("files"))
    parser.add_argument("--models", default="", help="NAME:SIZE,...; default: those of the bars")
    parser.add_argument("--paths", default=",".join(PATHS))
    parser.add_argument("--seconds", type=float, default=25.0, help="of the measurement of each model")
    args = parser.parse_args()
    pairs = [part.split(":") for part in args.models.split(",") if part]
    models = [(name, int(size)) for name, size in pairs] or list(ALL)
    if args.action == "export":
        export_all(args.folder, models, tuple(args.paths.split(",")))
    elif args.action == "measure":
        measure(args.folder, models, args.seconds)
    else:
        write_page()


if __name__ == "__main__":
    main()
