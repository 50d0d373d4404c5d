"""DINO on Imagenette at 96 px with softmax attention, XCA and SimA in one small body; one CSV row per result.

    python benchmarks/dino.py run --data imagenette_96px_train.npz,imagenette_96px_val.npz
    python benchmarks/dino.py plot

Rows: k-NN and linear accuracy of raw pixels, of each body with random weights, and of each body after training without
labels. A row is written when it is finished; finished rows are not repeated, and a training that was stopped continues.
`--minutes` bounds one training: two epochs are timed, and the number of epochs is lowered if they would take longer.
`--deadline` stops everything after so many minutes; the same command continues later. `--holdout 1000` measures on
images held out of the training set, to choose settings. Several commands with different `--mixers` may run at a time;
`--mixers` alone measures raw pixels.
"""

import argparse
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

import tokamix
from tokamix.evaluate import measure_knn, measure_linear
from tokamix.probe import NEIGHBOURS, probe
from tokamix.recipes import load_recipe
from tokamix.study.data import decode_once, load_splits
from tokamix.study.rows import Row, read_rows, write_row
from tokamix.study.run import current_commit
from tokamix.train import train

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "docs" / "guides" / "self-supervised.md"
NAMES = {"softmax": "softmax attention", "xca": "XCA", "sima": "SimA"}
COLORS = ("#0072B2", "#009E73", "#D55E00")
RESULTS = ROOT / "results" / "dino_imagenette.csv"
COLUMNS = ["features", "mixer", "seed", "epochs", *(f"knn{k}" for k in NEIGHBOURS), "linear", "effective_rank"]
COLUMNS += ["seconds", "wall_seconds", "images_per_second", "processes", "parameters", "holdout", "settings", "commit"]
COLUMNS += ["gpu", "torch", "curve"]


def add_row(row: Row, path: Path) -> None:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    write_row(path, row | {"commit": current_commit(), "gpu": gpu, "torch": torch.__version__}, COLUMNS)
    print({key: row.get(key) for key in ("features", "mixer", "knn20", "linear", "epochs", "seconds")}, flush=True)


def accuracies(result: Any) -> Row:
    knn = {f"knn{k}": round(value, 2) for k, value in result.knn.items()}
    return knn | {"linear": round(result.linear.top1, 2)}


def raw_pixels(data: Any, device: str) -> Row:
    parts: list[torch.Tensor] = []
    for split in (data.train, data.val):
        images, labels = split.arrays()
        parts += [images.to(device).flatten(1).float() / 255 - 0.5, labels.to(device)]
    knn = measure_knn(parts[0], parts[1], parts[2], parts[3], NEIGHBOURS)
    linear = measure_linear(parts[0], parts[1], parts[2], parts[3])
    return {f"knn{k}": round(value, 2) for k, value in knn.items()} | {"linear": round(linear.top1, 2)}


def random_weights(recipe: Any, data: Any) -> Row:
    torch.manual_seed(recipe.seed)
    size = recipe.image_size
    model = tokamix.create_model(recipe.model, num_classes=0, img_size=size, **recipe.model_kwargs)
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, size, size), "crop_pct": 1.0}
    return accuracies(probe(model, data))


def train_row(recipe: Any, data: Any, folder: Path, minutes: float) -> Row:
    """Train within the minutes and probe the teacher's backbone."""
    plan = folder / "epochs.json"
    if not plan.is_file():
        timing = recipe.replace(epochs=2, warmup_epochs=0.0, teacher_temp_warmup=0.0, eval_every=2)
        seconds = train(None, data, timing, folder / "timing").epochs[-1]["seconds"]
        affordable = int(60 * minutes / (1.1 * seconds))  # evaluations take a tenth at most
        plan.parent.mkdir(parents=True, exist_ok=True)
        plan.write_text(json.dumps({"epochs": max(1, min(recipe.epochs, affordable)), "seconds": seconds}))
    epochs = json.loads(plan.read_text())["epochs"]
    ratio = epochs / recipe.epochs
    changes = {"warmup_epochs": recipe.warmup_epochs * ratio, "teacher_temp_warmup": recipe.teacher_temp_warmup * ratio}
    recipe = recipe.replace(epochs=epochs, eval_every=max(1, epochs // 10), **changes)
    result = train(None, data, recipe, folder / "run")
    row = accuracies(probe(result.folder, data))
    evaluated = [epoch for epoch in result.epochs if "knn" in epoch]
    keys = ("epoch", "train_loss", "knn", "effective_rank", "teacher_information")
    curve = [[round(epoch[key], 3) for key in keys] for epoch in evaluated]
    seconds = sum(epoch["seconds"] for epoch in result.epochs)
    speed = epochs * len(data.train) / seconds
    row |= {"epochs": epochs, "seconds": round(seconds, 1), "images_per_second": round(speed, 1)}
    row |= {"effective_rank": round(evaluated[-1]["effective_rank"], 2), "curve": json.dumps(curve)}
    parameters = sum(p.numel() for p in result.load().parameters())
    return row | {"parameters": parameters, "settings": json.dumps(recipe.to_dict())}


def run(args: argparse.Namespace) -> None:
    if args.deadline:
        # the training loop saves its state on SIGINT and stops
        timer = threading.Timer(60 * args.deadline, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder, output = Path(args.runs), Path(args.output)
    data = load_splits(decode_once(args.data, "classify", folder / "data"), args.holdout)
    done = {(row["features"], row["mixer"], row["seed"]) for row in read_rows(output)}
    overrides = [*args.set, f"seed={args.seed}"] + ([] if device == "cuda" else ["compile=false"])
    common: Row = {"holdout": args.holdout, "processes": args.processes}
    if not args.mixers and ("raw pixels", "", "") not in done:
        add_row({"features": "raw pixels", **raw_pixels(data, device), **common}, output)
    for kind, mixer in [(kind, mixer) for mixer in args.mixers for kind in ("random weights", "DINO")]:
        if (kind, mixer, str(args.seed)) in done:
            continue
        recipe = load_recipe("imagenette_dino", overrides).replace(model=f"pyramid_tiny_{mixer}")
        begun = time.monotonic()
        if kind == "DINO":
            row = train_row(recipe, data, folder / f"{mixer}_{args.seed}", args.minutes)
        else:
            row = random_weights(recipe, data)
        row |= {"features": kind, "mixer": mixer, "seed": args.seed, "wall_seconds": round(time.monotonic() - begun, 1)}
        add_row(row | common, output)


def plot(args: argparse.Namespace) -> None:
    """Draw 20-NN accuracy over the epochs, and write the table of the guide."""
    from matplotlib.figure import Figure

    rows = [row for row in read_rows(Path(args.rows)) if row["holdout"] == "0"]
    trained = sorted((row for row in rows if row["features"] == "DINO"), key=lambda row: -float(row["knn20"]))
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for row, color in zip(trained, COLORS, strict=False):
        curve = json.loads(row["curve"])
        axes.plot([p[0] for p in curve], [p[2] for p in curve], marker=".", color=color, label=NAMES[row["mixer"]])
    for kind, style in (("raw pixels", ":"), ("random weights", "--")):
        values = [float(row["knn20"]) for row in rows if row["features"] == kind]
        if values:
            axes.axhline(max(values), color="grey", linestyle=style, linewidth=1, label=kind)
    axes.set(xlabel="epoch", ylabel="20-NN accuracy (%)", xlim=(0, None), ylim=(0, 100))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right", ncols=2)
    figure.savefig(args.output, dpi=140)
    lines = ["| features | epochs | 20-NN | linear |", "|---|---:|---:|---:|"]
    for row in sorted(rows, key=lambda row: -float(row["knn20"])):
        name = f"{NAMES[row['mixer']]}, {row['features']}" if row["mixer"] else row["features"]
        lines.append(f"| {name} | {row['epochs']} | {float(row['knn20']):.1f} | {float(row['linear']):.1f} |")
    text = "\n".join(["<!-- dino -->", "", *lines, "", "<!-- end -->"])
    GUIDE.write_text(re.sub("<!-- dino -->.*?<!-- end -->", lambda _: text, GUIDE.read_text(), flags=re.DOTALL))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("--data", required=True, help="packs of Imagenette at 96 px: train.npz,val.npz")
    running.add_argument("--mixers", nargs="*", default=["softmax", "xca", "sima"])
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--minutes", type=float, default=7.0, help="of one training at most")
    running.add_argument("--deadline", type=float, help="minutes after which everything stops; run again to continue")
    running.add_argument("--holdout", type=int, default=0, help="training images to measure on instead")
    running.add_argument("--processes", type=int, default=1, help="that share the GPU; written into the rows")
    running.add_argument("--runs", default="runs/dino_imagenette", help="folder of the runs")
    running.add_argument("--output", default=str(RESULTS))
    running.add_argument("--set", action="append", default=[], help="key=value replaces a value of the recipe")
    running.set_defaults(function=run)
    plotting = commands.add_parser("plot")
    plotting.add_argument("--rows", default=str(RESULTS))
    plotting.add_argument("--output", default=str(ROOT / "docs" / "dino.png"))
    plotting.set_defaults(function=plot)
    args = parser.parse_args()
    try:
        args.function(args)
    except KeyboardInterrupt:
        print("stopped; run the same command again to continue", flush=True)


if __name__ == "__main__":
    main()
