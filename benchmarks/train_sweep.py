"""Train the arms of a sweep with several seeds on one GPU, several runs at a time; one CSV row per run.

    python benchmarks/train_sweep.py unpack FOLDER...              decode packs (*.npz) once for all runs
    python benchmarks/train_sweep.py probe SWEEP ARM               images/s of 1, 3, ... runs at a time
    python benchmarks/train_sweep.py run SWEEP PART --output DIR   train; the same command resumes

A sweep file has `bases` (settings by name) and `parts` with arms, in the order in which they run:

    bases: {column: {model: columnar_tiny_softmax, batch_size: 512}}
    parts:
      tune:
        fast: {use: [column], set: {lr: 0.002}, data: cifar100, holdout: 5000, seeds: [0, 1], group: column}
      final:
        best: {best_of: column, otherwise: fast, data: cifar100, seeds: [10, 11]}

`set` has keys of a recipe. `holdout` images are taken out of the training set, the same ones in each run, for
validation; 0 evaluates on the test set. `best_of` takes the settings of the best finished run of a group with a
holdout.
"""

import argparse
import contextlib
import csv
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path("/dev/shm/tokamix")
COLUMNS = ["arm", "seed", "group", "data", "holdout", "train_images", "epochs", "model", "parameters"]
COLUMNS += ["ema_top1", "top1", "seconds", "train_seconds", "images_per_second", "processes", "mps"]
COLUMNS += ["status", "settings_hash", "commit", "gpu", "torch", "settings", "curve"]
Row = dict[str, Any]
Process = subprocess.Popen[bytes]


def unpack(sources: list[Path], target: Path) -> None:
    """Decode the packs of some folders and join those of one split: `x_train_a.npz` -> `x_train.npz`."""
    from PIL import Image

    splits: dict[str, list[Path]] = {}
    for path in sorted(path for source in sources for path in source.rglob("*.npz")):
        split = "train" if "_train" in path.stem else "test"
        splits.setdefault(f"{path.stem.partition('_')[0]}_{split}", []).append(path)
    target.mkdir(parents=True, exist_ok=True)

    def decode(blob: bytes) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(blob)).convert("RGB")).transpose(2, 0, 1)

    for name, paths in splits.items():
        images: list[np.ndarray] = []
        labels = []
        for path in paths:
            pack = np.load(path)
            blob, offsets = pack["blob"], pack["offsets"]
            with ThreadPoolExecutor() as pool:
                images += pool.map(decode, [blob[a:b].tobytes() for a, b in pairwise(offsets)])
            labels.append(pack["labels"])
        np.savez(target / f"{name}.npz", images=np.stack(images), labels=np.concatenate(labels))
        print(f"{name}: {len(images)} images from {', '.join(path.name for path in paths)}", flush=True)


def load_splits(name: str, holdout: int, folder: Path) -> Any:
    """Load a data set written by `unpack`."""
    import torch

    from tokamix.data import ArrayDataset, DatasetSplits

    def load(split: str) -> tuple[Any, Any]:
        arrays = np.load(folder / f"{name}_{split}.npz")
        return torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"].astype(np.int64))

    images, labels = load("train")
    classes = [str(i) for i in range(int(labels.max()) + 1)]
    if holdout:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        train, val = ((images[indices], labels[indices]) for indices in (order[holdout:], order[:holdout]))
    else:
        train, val = (images, labels), load("test")
    return DatasetSplits(name, ArrayDataset(*train, classes), ArrayDataset(*val, classes), tuple(classes))


def list_jobs(sweep: Row, arms: Row, rows: list[Row]) -> Iterator[Row]:
    """The runs of some arms, in order, with all their settings."""
    for name, arm in arms.items():
        settings: Row = {}
        for changes in [sweep["bases"][base] for base in arm.get("use", [])] + [arm.get("set", {})]:
            settings = merge_settings(settings, changes)
        if group := arm.get("best_of"):
            settings = merge_settings(best_settings(sweep, rows, group, arm["otherwise"]), settings)
        settings["eval_every"] = max(1, settings["epochs"] // 10)
        for seed in arm.get("seeds", [0]):
            job = {"arm": name, "seed": seed, "group": arm.get("group", ""), "data": arm["data"]}
            job |= {"holdout": arm.get("holdout", 0), "settings": {**settings, "seed": seed, "name": name}}
            job["settings_hash"] = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]
            yield job


def merge_settings(settings: Row, changes: Row) -> Row:
    """Settings with changes; mappings in both are merged."""
    both = {key for key in settings if isinstance(settings[key], dict) and isinstance(changes.get(key), dict)}
    return {**settings, **changes, **{key: merge_settings(settings[key], changes[key]) for key in both}}


def best_settings(sweep: Row, rows: list[Row], group: str, otherwise: str) -> Row:
    """Settings of the best finished run of a group on its held-out images; before any, those of arm `otherwise`."""
    finished = [row for row in rows if row["group"] == group and int(row["holdout"]) and row["status"] == "finished"]
    if finished:
        best = max(finished, key=lambda row: float(row["ema_top1"] or row["top1"]))
        print(f"best of {group}: {best['arm']} with {best['ema_top1']} %", flush=True)
        settings = json.loads(best["settings"])
    else:
        settings = first_job(sweep, otherwise)["settings"]
        print(f"best of {group}: no finished run, so the settings of {otherwise}", flush=True)
    return {key: value for key, value in settings.items() if key not in ("seed", "name")}


def first_job(sweep: Row, name: str) -> Row:
    """The first run of an arm."""
    arm = next(arms[name] for arms in sweep["parts"].values() if name in arms)
    return next(list_jobs(sweep, {name: arm}, []))


def train_job(job: Row, result: Path, probe: Path | None) -> None:
    """Train one run, in its own process, and write its row."""
    import torch
    from safetensors.torch import load_file

    from tokamix.recipes import create_recipe
    from tokamix.train import train

    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = job["settings"]
    if device == "cpu":
        settings = settings | {"precision": "fp32", "compile": False}
    data = load_splits(job["data"], job["holdout"], Path(job["folder"]))
    recipe = create_recipe(settings)
    if probe is not None:
        measure_on_demand(probe, int(os.environ["PROBE_INDEX"]), recipe.batch_size)
    begun = time.perf_counter()
    run = train(None, data, recipe, Path(job["runs"]) / f"{job['arm']}_{job['seed']}", device=device, quiet=True)
    seconds = time.perf_counter() - begun  # of this process: a resumed run trained before, see train_seconds
    last = run.epochs[-1]
    speeds = sorted(row["images_per_second"] for row in run.epochs)
    weights = load_file(run.folder / "last.safetensors")
    row = {key: job[key] for key in ("arm", "seed", "group", "data", "holdout", "settings_hash")}
    row |= {"train_images": len(data.train), "epochs": recipe.epochs, "model": recipe.model}
    row |= {
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "ema_top1": last.get("ema_top1"),
        "top1": last["top1"],
    }
    row |= {"seconds": round(seconds, 1), "train_seconds": round(sum(r["seconds"] for r in run.epochs), 1)}
    row |= {"images_per_second": speeds[len(speeds) // 2], "status": "finished", "torch": torch.__version__}
    row |= {"gpu": torch.cuda.get_device_name() if device == "cuda" else "cpu", "curve": json.dumps(curve(run.epochs))}
    row["settings"] = json.dumps(job["settings"], sort_keys=True)
    result.write_text(json.dumps(row))


def curve(epochs: list[Row]) -> list[list[Any]]:
    """[epoch, training loss, top-1, top-1 of the averaged weights] of each evaluation."""
    keys = ("train_loss", "top1", "ema_top1")
    return [[row["epoch"], *(round(row.get(key) or 0, 3) for key in keys)] for row in epochs if "top1" in row]


def measure_on_demand(folder: Path, index: int, batch_size: int) -> None:
    """Make the engine wait after some steps and measure images/s whenever a file `go_COUNT_SECONDS` appears."""
    import torch

    from tokamix.train.loop.engine import Engine

    train_step = Engine._train_step
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def step(self: Any, batches: Any) -> None:
        train_step(self, batches)
        if self.update != int(os.environ.get("PROBE_STEPS", "40")):
            return
        synchronize()
        batches = self.train_loader.loader.endless(1)
        (folder / f"ready_{index}").touch()
        handled: set[str] = set()
        while not (folder / "end").exists():
            requests = [path.name for path in folder.glob("go_*") if path.name not in handled]
            if not requests:
                time.sleep(0.01)
                continue
            handled.add(requests[0])
            _, count, seconds = requests[0].split("_")
            if index >= int(count):
                continue
            begun, steps = time.perf_counter(), 0
            while time.perf_counter() - begun < float(seconds):
                train_step(self, batches)
                steps += 1
                if steps % 10 == 0:
                    synchronize()
            synchronize()
            speed = steps * batch_size / (time.perf_counter() - begun)
            temporary = folder / f"temporary_{index}"
            temporary.write_text(str(speed))
            temporary.rename(folder / f"speed_{count}_{index}")  # so that nobody reads an empty file
        os._exit(0)

    Engine._train_step = step  # type: ignore[method-assign]


def process_environment(mps: bool) -> dict[str, str]:
    """Environment of a run's process: shared caches, few threads, MPS."""
    cache = os.environ.get("SWEEP_CACHE", "/tmp/tokamix_cache")
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
    env |= {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4", "PYTHONPATH": str(ROOT)}
    env |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    if mps:
        env |= {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps", "CUDA_MPS_LOG_DIRECTORY": "/tmp/mps_log"}
    return env


def start_mps() -> bool:
    """Start NVIDIA's multi-process service; False if it is missing or does not work."""
    env = process_environment(mps=True)
    for key in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        Path(env[key]).mkdir(exist_ok=True)
    script = "import torch; x = torch.ones(64, 64, device='cuda'); assert (x @ x).sum().item() == 64**3"
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env, timeout=20, check=False)  # may run already
        subprocess.run([sys.executable, "-c", script], env=env, timeout=40, check=True)
        options: Row = {"input": b"get_server_list\n", "stdout": subprocess.PIPE, "timeout": 10, "check": True}
        servers = subprocess.run(["nvidia-cuda-mps-control"], env=env, **options).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no MPS: {error}", flush=True)
        return False
    print(f"MPS servers: {servers}", flush=True)
    return bool(servers)


def stop_mps() -> None:
    """Stop the service."""
    env = process_environment(mps=True)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=env, timeout=20, check=False)


def start_process(job: Row, result: Path, mps: bool, **variables: str) -> Process:
    """Start the process of a run; its output goes to a .log file beside `result`."""
    command = [sys.executable, __file__, "train", json.dumps(job), str(result)]
    with result.with_suffix(".log").open("wb") as log:
        env = process_environment(mps) | variables
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def stop_process(process: Process) -> None:
    """Stop a run and its child processes; gently first, because MPS fails if a client is killed within a kernel."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def probe(args: argparse.Namespace, job: Row) -> None:
    """Measure images per second of several processes that train the same arm at the same time."""
    speeds: dict[str, int] = {}
    for mps in (False, True):
        if mps and not start_mps():
            continue
        folder = args.state / f"probe_{int(mps)}"
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            path.unlink()
        processes: list[Process] = []
        try:
            for count, speed in measure_speeds(args, job, mps, folder, processes):
                speeds[f"{count}{' mps' if mps else ''}"] = speed
        finally:
            (folder / "end").touch()
            time.sleep(1)
            for process in processes:
                stop_process(process)
    best = max(speeds, key=lambda key: speeds[key])
    result = {"arm": job["arm"], "images_per_second": speeds, "jobs": int(best.split()[0]), "mps": "mps" in best}
    if not result["mps"]:
        stop_mps()
    (args.state / "probe.json").write_text(json.dumps(result))
    print("probe:", json.dumps(result), flush=True)


def measure_speeds(
    args: argparse.Namespace, job: Row, mps: bool, folder: Path, processes: list[Process]
) -> Iterator[tuple[int, int]]:
    """Start the processes and yield the images per second of the first 1, 3, ... of them at the same time."""
    counts = [count for count in args.counts if count > 1 or not mps]
    begun = time.monotonic()
    for i in range(max(counts)):
        own = {**job, "arm": f"probe{i}", "runs": str(args.state / "probe_runs" / str(int(mps)))}
        variables = {"PROBE_INDEX": str(i), "PROBE_FOLDER": str(folder)}
        processes.append(start_process(own, folder / f"result{i}.json", mps, **variables))
    wait_for_files(folder, [f"ready_{i}" for i in range(max(counts))], processes, 120)
    print(f"probe: {max(counts)} processes ready after {time.monotonic() - begun:.0f} s", flush=True)
    for count in counts:
        (folder / f"go_{count}_{args.window}").touch()
        names = [f"speed_{count}_{i}" for i in range(count)]
        wait_for_files(folder, names, processes, 30 + args.window)
        speed = sum(float((folder / name).read_text()) for name in names)
        print(f"probe: {count} processes, MPS {mps}: {speed:,.0f} images/s", flush=True)
        yield count, round(speed)


def wait_for_files(folder: Path, names: list[str], processes: list[Process], limit: float) -> None:
    """Wait until the files exist; TimeoutError after `limit` seconds or if a process fails."""
    begun = time.monotonic()
    while not all((folder / name).exists() for name in names):
        if time.monotonic() - begun > limit or any(p.poll() not in (None, 0) for p in processes):
            for path in folder.glob("*.log"):
                print(path.name, path.read_text()[-1500:], flush=True)
            raise TimeoutError(f"the processes did not write {', '.join(names)}; see their logs above")
        time.sleep(0.01)


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file, if it exists."""
    csv.field_size_limit(10**8)
    with contextlib.suppress(FileNotFoundError), path.open(newline="") as file:
        return list(csv.DictReader(file))
    return []


def write_row(path: Path, row: Row) -> None:
    """Append a row; a new file starts with the header."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", restval="")
        if new:
            writer.writeheader()
        writer.writerow(row)


def current_commit() -> str:
    """The commit of the working tree; SWEEP_COMMIT names it where there is no repository."""
    if commit := os.environ.get("SWEEP_COMMIT"):
        return commit
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return ""


def run_sweep(args: argparse.Namespace) -> None:
    """Train the runs that are not finished yet, until all are or the deadline is reached."""
    deadline = args.begun + args.deadline
    probed = args.state / "probe.json"
    measured = json.loads(probed.read_text()) if probed.exists() else {"jobs": 3, "mps": False}
    count, mps = args.jobs or measured["jobs"], measured["mps"] and start_mps()
    sweep = yaml.safe_load(args.sweep.read_text())
    rows_path = args.state / "rows.csv"
    rows = read_rows(rows_path)
    print(f"{count} runs at a time, MPS {mps}, {len(rows)} rows so far", flush=True)
    finished = {(row["arm"], row["seed"], row["settings_hash"]) for row in rows if row["status"] == "finished"}
    jobs = list_jobs(sweep, sweep["parts"][args.part], rows)
    waiting = [job for job in jobs if (job["arm"], str(job["seed"]), job["settings_hash"]) not in finished]
    running: list[tuple[Process, Row, Path]] = []
    results = args.state / "results"
    results.mkdir(parents=True, exist_ok=True)
    args.output.mkdir(parents=True, exist_ok=True)
    commit = current_commit()

    def record(row: Row) -> None:
        row |= {"processes": count, "mps": mps, "commit": commit}
        for path in (rows_path, args.output / "rows.csv"):
            write_row(path, row)
        numbers = {key: row.get(key) for key in ("ema_top1", "top1", "seconds", "images_per_second")}
        seconds = time.monotonic() - args.begun
        print(f"{seconds:5.0f} s  {row['status']} {row['arm']} {row['seed']} {numbers}", flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    while (waiting or running) and time.monotonic() < deadline:
        while waiting and len(running) < count:
            job = waiting.pop(0) | {"folder": str(args.data), "runs": str(args.state / "runs")}
            result = results / f"{job['arm']}_{job['seed']}_{job['settings_hash']}.json"
            running.append((start_process(job, result, mps), job, result))
        for entry in list(running):
            process, job, result = entry
            if process.poll() is None:
                continue
            running.remove(entry)
            stop_process(process)
            log = result.with_suffix(".log").read_text()
            if result.exists():
                record(json.loads(result.read_text()))
            elif mps and "retried" not in job and "CUDA" in log[-3000:]:
                print(log[-1500:], "\ntrying again without MPS", flush=True)
                mps = False
                waiting.insert(0, job | {"retried": True})
            else:
                print(log[-2500:], flush=True)
                record({**job, "status": "failed", "settings": json.dumps(job["settings"], sort_keys=True)})
        time.sleep(0.05)
    for process, *_ in running:
        process.terminate()
    for process, job, _ in running:
        stop_process(process)
        record(stopped_row(job, args.state / "runs"))
    for job in waiting:
        print(f"not started: {job['arm']} {job['seed']}", flush=True)


def stopped_row(job: Row, runs: Path) -> Row:
    """The row of a run that the deadline stopped, from its log of metrics."""
    path = runs / f"{job['arm']}_{job['seed']}" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    epochs = [row for row in (json.loads(line) for line in lines if line.endswith("}")) if row["event"] == "epoch"]
    points = curve(epochs)
    metrics: Row = {"top1": points[-1][2], "ema_top1": points[-1][3]} if points else {}
    speeds = sorted(row["images_per_second"] for row in epochs)
    metrics["images_per_second"] = speeds[len(speeds) // 2] if speeds else ""
    status = f"stopped after epoch {len(epochs)} of {job['settings']['epochs']}"
    settings = json.dumps(job["settings"], sort_keys=True)
    return {**job, **metrics, "status": status, "curve": json.dumps(points), "settings": settings}


def main() -> None:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("unpack", help="decode packs once for all runs")
    command.add_argument("sources", type=Path, nargs="+")
    command.add_argument("--target", type=Path, default=SHARED)
    command = commands.add_parser("train", help="train one run; used by the other commands")
    command.add_argument("job", type=json.loads)
    command.add_argument("result", type=Path)
    for name, text in (("probe", "measure the throughput"), ("run", "train the runs of a part")):
        command = commands.add_parser(name, help=text)
        command.add_argument("sweep", type=Path)
        command.add_argument("--data", type=Path, default=SHARED, help="folder written by unpack")
        command.add_argument("--state", type=Path, default=Path("/tmp/tokamix_sweep"), help="kept between calls")
        if name == "probe":
            command.add_argument("arm")
            command.add_argument("--counts", type=int, nargs="+", default=[1, 3, 5], help="runs at a time")
            command.add_argument("--window", type=float, default=4.0, help="seconds of each measurement")
        else:
            command.add_argument("part")
            command.add_argument("--output", type=Path, required=True, help="folder for rows.csv")
            command.add_argument("--jobs", type=int, default=None, help="runs at a time; default: the best of probe")
            command.add_argument("--deadline", type=float, default=1e9, help="seconds after which runs are stopped")
    args = parser.parse_args()
    args.begun = begun
    if args.command == "unpack":
        unpack(args.sources, args.target)
    elif args.command == "train":
        folder = os.environ.get("PROBE_FOLDER")
        train_job(args.job, args.result, Path(folder) if folder else None)
    elif args.command == "probe":
        job = first_job(yaml.safe_load(args.sweep.read_text()), args.arm)
        args.state.mkdir(parents=True, exist_ok=True)
        probe(args, job | {"folder": str(args.data), "runs": ""})
    else:
        run_sweep(args)


if __name__ == "__main__":
    main()
