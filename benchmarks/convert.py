"""Conversions of trained softmax bodies on one GPU, several runs at a time: a row of results/conversion.csv per run.

    python -m benchmarks.convert run --cifar100 a.npz,b.npz,test.npz --imagenette train.npz,val.npz --deadline 540
    python -m benchmarks.convert speed
    python -m benchmarks.convert table
    python -m benchmarks.convert small --cifar100 a.npz,b.npz,test.npz

`run` converts the softmax networks that ship with tokamix to SimA, super tokens and weight mixing, in a quarter of the
epochs of their recipes (cifar100_nano and imagenette_nano), with 3 seeds:

    naive       swap, then fine-tuning on the labels
    calibrated  swap with calibration, then fine-tuning on the labels
    full        calibration, attention transfer, fine-tuning with distillation from the original
    scratch     the same body with the new mixer, trained from scratch for 4/3 of the epochs: a step of distillation
                costs about 4/3 of a plain one

The same command resumes: finished runs are rows, stopped ones continue from their folders. `--only 'cifar100 sima *'`
selects runs. `table` writes the tables and curves of docs/guides/convert.md from the rows. `speed` times originals and
conversions with the GPU to themselves: about 2 minutes. `small` is a check for a CPU: 5,000 images of 20 classes, a
column of three blocks, 30 epochs, converted to SimA in 7; half an hour on a core.
"""

import argparse
import csv
import fnmatch
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.convert_report import write_report
from tokamix.files import write_json
from tokamix.study.data import decode_once
from tokamix.study.processes import Process, start_mps, start_process, stop_mps, stop_processes
from tokamix.study.rows import Row, read_rows, write_row
from tokamix.study.run import current_commit, gpu_is_there

RECIPES = {"cifar100": "cifar100_nano", "imagenette": "imagenette_nano"}  # these trained the originals
MIXERS = ("sima", "super_token", "weight_mixing")
ARMS = ("full", "naive", "calibrated", "scratch")
SEEDS = (10, 11, 12)
DOCS = Path(__file__).parents[1] / "docs"
SHARE = 4  # a conversion has 1 / SHARE of the original's epochs
COLUMNS = ["data", "to", "arm", "seed", "top1", "original", "swapped", "calibrated", "transferred", "epochs", "steps"]
COLUMNS += ["original_steps", "seconds", "processes", "mps", "commit", "gpu", "torch", "errors", "curve"]
SPEED_COLUMNS = ["data", "to", "size", "milliseconds", "memory_gb", "problem", "break_even", "commit", "gpu", "torch"]


class Job(NamedTuple):
    """One run."""

    data: str
    to: str
    arm: str
    seed: int

    @property
    def label(self) -> str:
        """Name for patterns and messages."""
        return f"{self.data} {self.to} {self.arm} {self.seed}"

    @property
    def folder(self) -> str:
        """Name of the run's folder."""
        return self.label.replace(" ", "_")


def list_jobs() -> list[Job]:
    """All runs, most wanted first: SimA, then the other mixers, seed by seed."""
    return [Job(data, to, arm, seed) for to in MIXERS for seed in SEEDS for data in RECIPES for arm in ARMS]


def original_of(data: str) -> str:
    """Name of the trained softmax network."""
    return f"pyramid_nano_softmax.{data}"


def run_job(job: Job, source: str, runs: Path, changes: list[str]) -> Row:
    """Train one run in this process and return its row."""
    import torch

    import tokamix
    from tokamix.recipes import load_overrides, load_recipe
    from tokamix.study.data import load_splits

    cuda = torch.cuda.is_available()
    overrides: dict[str, Any] = {"seed": job.seed} | ({} if cuda else {"precision": "fp32", "compile": False})
    overrides |= load_overrides(changes)  # a short run to try the script: the schedule scales with the epochs
    recipe = load_recipe(RECIPES[job.data], overrides)
    splits, folder, begun = load_splits(source), runs / job.folder, time.perf_counter()
    steps = len(splits.train) // recipe.batch_size
    share = max(2, round(recipe.epochs / SHARE))
    row: Row = {**job._asdict(), "torch": torch.__version__, "gpu": torch.cuda.get_device_name() if cuda else "cpu"}
    row |= {"original_steps": recipe.epochs * steps}
    options: dict[str, Any] = {"quiet": True}
    if job.arm == "scratch":
        recipe = load_recipe(RECIPES[job.data], {**overrides, "epochs": round(share * 4 / 3)})
        recipe = recipe.replace(model=f"pyramid_nano_{job.to}")
        result = tokamix.train(None, splits, recipe, folder, **options)
        points = result.epochs
        row |= {"top1": result.last["top1"], "epochs": recipe.epochs}
    else:
        plain: dict[str, Any] = {"teacher": "none", "transfer_epochs": 0}
        arms: dict[str, dict[str, Any]] = {"naive": {**plain, "calibration_images": 0}, "calibrated": plain, "full": {}}
        options |= {"recipe": recipe, "epochs": share, "sizes": (), **arms[job.arm]}
        done = tokamix.convert(original_of(job.data), splits, job.to, folder, **options)
        with (folder / "metrics.csv").open() as file:
            points = [{key: float(value) for key, value in line.items() if value} for line in csv.DictReader(file)]
        row |= {**done.accuracy, "top1": done.accuracy["converted"], "epochs": share}
        row["errors"] = json.dumps([round(error, 4) for error in done.errors.values()])
    row["steps"] = row["epochs"] * steps
    key = "ema_top1" if "ema_top1" in points[-1] else "top1"
    row["curve"] = json.dumps([[point["epoch"], round(point[key], 2)] for point in points if key in point])
    row["seconds"] = round(time.perf_counter() - begun, 1)
    return row


def run(args: argparse.Namespace) -> None:
    """Run what is missing, `--jobs` at a time, until the deadline."""
    deadline = time.monotonic() + args.deadline
    sources = {"cifar100": args.cifar100, "imagenette": args.imagenette}
    done = {tuple(row[key] for key in ("data", "to", "arm", "seed")) for row in read_rows(args.output)}
    wanted = [job for job in list_jobs() if sources[job.data] and fnmatch.fnmatch(job.label, args.only)]
    waiting = [job for job in wanted if tuple(map(str, job)) not in done]
    print(f"{len(waiting)} runs to do", flush=True)
    packs = {data: decode_once(source, "classify", args.runs / "data") for data, source in sources.items() if source}
    problem = start_mps(args.runs) if gpu_is_there() and args.jobs > 1 else "no GPU, or one run at a time"
    print("MPS runs" if problem is None else f"no MPS: {problem}", flush=True)
    running: dict[Job, Process] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    extra: Row = {"processes": args.jobs, "mps": problem is None, "commit": current_commit()}
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < args.jobs:
                job = waiting.pop(0)
                arguments = ["worker", json.dumps(job), packs[job.data], str(args.runs), *args.set]
                log = args.runs / f"{job.folder}.log"
                running[job] = start_process("benchmarks.convert", arguments, log, args.runs, problem is None)
            for job in [job for job, process in running.items() if process.poll() is not None]:
                stop_processes([running.pop(job)])
                result = args.runs / f"{job.folder}.json"
                if not result.exists():
                    log = args.runs / f"{job.folder}.log"
                    print(f"{log.read_text(errors='replace')[-2000:]}\nFAILED {job.label}; see {log}", flush=True)
                    continue
                row = json.loads(result.read_text()) | extra
                write_row(args.output, row, COLUMNS)
                print(f"{job.label}: {row['top1']:.2f} % in {row['seconds']:.0f} s", flush=True)
            time.sleep(0.1)
        for job in [*running, *waiting]:
            print(f"not finished: {job.label}; the same command resumes it", flush=True)
    finally:
        stop_processes(list(running.values()))
        if problem is None:
            stop_mps(args.runs)


def speed(args: argparse.Namespace) -> None:
    """Time the originals and full conversions of the first seed at several image sizes."""
    import torch

    from tokamix.convert.measure import measure_speeds
    from tokamix.convert.report import find_break_even
    from tokamix.inference import load_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    common = {"commit": current_commit(), "torch": torch.__version__}
    common["gpu"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    done = {(row["data"], row["to"]) for row in read_rows(args.speeds)}
    for data in RECIPES:
        before = None
        for to in ("softmax", *MIXERS):
            folder = args.runs / Job(data, to, "full", SEEDS[0]).folder
            if to != "softmax" and ((data, to) in done or not (folder / "model.safetensors").exists()):
                continue
            network, _ = load_model(original_of(data) if to == "softmax" else folder)
            rows = measure_speeds(network, args.sizes, 3, device)
            before = before or rows
            even = find_break_even(before, rows) if to != "softmax" else None
            for row in rows if (data, to) not in done else ():
                write_row(
                    args.speeds, {"data": data, "to": to, **vars(row), "break_even": even, **common}, SPEED_COLUMNS
                )
            print(f"{data} {to}: {[(row.size, row.milliseconds or row.problem) for row in rows]}, {even}", flush=True)


def small(args: argparse.Namespace) -> None:
    """Train and convert a small column on a part of CIFAR-100, and print the accuracies."""
    import torch

    import tokamix
    from tokamix.data import ArrayDataset, DatasetSplits
    from tokamix.recipes import create_recipe
    from tokamix.study.data import load_splits

    whole = load_splits(decode_once(args.cifar100, "classify", args.runs / "data"))
    classes = tuple(map(str, range(20)))

    def part(dataset: Any, count: int) -> Any:
        images, labels = dataset.arrays()
        chosen = [torch.nonzero(labels == 5 * i).flatten()[:count] for i in range(20)]  # every fifth class
        index = torch.cat(chosen).sort().values
        return ArrayDataset(images[index], labels[index] // 5, classes)

    data = DatasetSplits("cifar100_20", part(whole.train, 250), part(whole.val, 100), classes)
    body = {"weight_init": "fan_in", "scale_residual": True, "patch_size": 4, "dim": 64, "depth": 3, "num_heads": 2}
    recipe = create_recipe(
        {"name": "small_column", "model": "columnar_tiny_softmax", "image_size": 32, "crop_pct": 1.0, "epochs": 30}
        | {"model_kwargs": {**body, "mlp_ratio": 2, "mixer_kwargs": {"qk_norm": True}}, "eval_every": 3}
        | {"crop_scale": None, "crop_padding": 4, "batch_size": 128, "optimizer": "nmuon", "lr": 0.005, "min_lr": 0.0}
        | {"optimizer_kwargs": {"fallback_lr_scale": 0.4}, "momentum": 0.95, "weight_decay": 0.1, "schedule": "linear"}
        | {"warmup_epochs": 2, "clip_grad": 1.0, "drop_path": 0.05, "ema_half_life": 60, "select": "last"}
    )
    original = args.runs / "small_original"
    if not (original / "model.safetensors").exists():
        tokamix.train(None, data, recipe, original, quiet=True)
    plain: dict[str, Any] = {"teacher": "none", "transfer_epochs": 0}
    for to, arm in (("sima", "full"), ("sima", "naive"), ("super_token", "full"), ("weight_mixing", "full")):
        changes = {**plain, "calibration_images": 0} if arm == "naive" else {}
        folder = args.runs / f"small_{to}_{arm}"
        result = tokamix.convert(original, data, to, folder, epochs=7, sizes=(), quiet=True, **changes)
        print(to, arm, {phase: round(top1, 2) for phase, top1 in result.accuracy.items()}, flush=True)


def table(args: argparse.Namespace) -> None:
    """Write the tables and curves of docs/guides/convert.md, and print the tables."""
    print(
        write_report(
            read_rows(args.output), read_rows(args.speeds), DOCS / "guides/convert.md", DOCS / "conversion.png"
        )
    )


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "speed", "table", "small", "worker"])
    if sys.argv[1:2] == ["worker"]:
        _, _, job, source, runs, *changes = sys.argv
        parsed = Job(*json.loads(job))
        row = run_job(parsed, source, Path(runs), changes)
        write_json(Path(runs) / f"{parsed.folder}.json", row)
        return
    parser.add_argument("--cifar100", help="packs of CIFAR-100, or CIFAR100")
    parser.add_argument("--imagenette", help="packs of Imagenette")
    parser.add_argument("--runs", type=Path, default=Path("runs/conversion"), help="folder of the runs")
    parser.add_argument("--output", type=Path, default=Path("results/conversion.csv"))
    parser.add_argument("--speeds", type=Path, default=Path("results/conversion_speed.csv"))
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which runs are stopped, state saved")
    parser.add_argument("--only", default="*", help="pattern of 'data mixer arm seed'")
    parser.add_argument("--set", nargs="+", default=[], help="changes of the recipes, to try the script: epochs=4 ...")
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 512, 1024, 2048])
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    {"run": run, "speed": speed, "table": table, "small": small}[args.command](args)


if __name__ == "__main__":
    main()
