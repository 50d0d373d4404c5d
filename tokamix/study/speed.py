"""Speed and memory of a study's arms, each alone on the device, in its own process."""

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tokamix.bench.timing import median_ms
from tokamix.compile import compile_blocks
from tokamix.files import write_json
from tokamix.recipes import Recipe, create_recipe
from tokamix.study.processes import start_process, stop_processes
from tokamix.study.rows import SPEED_COLUMNS, Row, read_rows, write_row
from tokamix.study.run import current_commit
from tokamix.study.schema import Study, load_study
from tokamix.train.loop.optim import create_optimizer
from tokamix.train.setup.model import create_classifier

CLASSES = 100
PIXELS = 8 * 2**20  # images per batch in inference, in pixels; at most the batch of training
SECONDS = 1.0
TIMEOUT = 240


def measure_speeds(
    study: str | Study,
    output: str | Path = "results/studies",
    runs: str | Path | None = None,
    device: str | None = None,
    deadline: float | None = None,
    say: Callable[[str], object] = print,
) -> list[Row]:
    """Measure training at the arms' own size and inference at the study's sizes; append rows to NAME_speed.csv.

    Arms that have rows are not measured again. Nothing else should run on the device.
    """
    end = time.monotonic() + deadline if deadline else None
    study = study if isinstance(study, Study) else load_study(study)
    if not study.sizes:
        raise ValueError(f"study {study.name} has no sizes at which to measure the speed of its arms")
    path = Path(output) / f"{study.name}_speed.csv"
    runs = Path(runs or f"runs/studies/{study.name}")
    (runs / "results").mkdir(parents=True, exist_ok=True)
    measured = {row["arm"] for row in read_rows(path)}
    for arm in study.arms.values():
        if arm.name in measured or arm.equal_time or (end and time.monotonic() > end):
            continue
        base = runs / "results" / f"speed_{arm.name}"
        job, result, log = (base.with_suffix(suffix) for suffix in (".job", ".json", ".log"))
        result.unlink(missing_ok=True)
        write_json(job, {"settings": {**arm.settings, "name": arm.name}, "sizes": study.sizes, "device": device})
        process = start_process("tokamix.study.speed", [str(job), str(result)], log, runs, mps=False)
        try:
            process.wait(TIMEOUT)
        except Exception:
            say(f"{arm.name}: not measured within {TIMEOUT} s")
        finally:
            stop_processes([process], 1)
        if not result.exists():
            say(f"{log.read_text(errors='replace')[-1500:]}\n{arm.name}: no speed; its log is {log}")
            continue
        for row in json.loads(result.read_text()):
            write_row(path, row | {"arm": arm.name, "commit": current_commit()}, SPEED_COLUMNS)
            say(f"{arm.name} {row['mode']} {row['size']} px: {row['images_per_second'] or row['status']} images/s")
    return read_rows(path)


def measure_arm(recipe: Recipe, sizes: list[int], device: str) -> list[Row]:
    """Rows of an arm: training at the recipe's size, inference at each size."""
    rows = []
    for mode, size in [("train", recipe.image_size), *(("infer", size) for size in sizes)]:
        batch = max(1, min(recipe.batch_size, PIXELS // size**2)) if mode == "infer" else recipe.batch_size
        row: Row = {"mode": mode, "size": size, "batch": batch, "status": "measured", "torch": torch.__version__}
        row["gpu"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        try:
            row |= _measure(recipe, mode, size, batch, device)
        except torch.OutOfMemoryError:
            row |= {"images_per_second": "", "peak_gb": "", "status": "out of memory"}
        rows.append(row)
    return rows


def _measure(recipe: Recipe, mode: str, size: int, batch: int, device: str) -> Row:
    cuda = device == "cuda"
    torch.compiler.reset()
    model, _ = create_classifier(None, recipe.replace(image_size=size), CLASSES)
    model = model.to(device).train(mode == "train")
    optimizer = create_optimizer(model, recipe, torch.device(device)) if mode == "train" else None
    if cuda:
        compile_blocks(model, graphs=mode == "train")
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.randint(CLASSES, (batch,), device=device)

    def autocast() -> Any:
        return torch.autocast(device, torch.bfloat16) if cuda else nullcontext()

    def train() -> None:
        with autocast():
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # type: ignore[union-attr]
        model.zero_grad(set_to_none=True)

    def infer() -> None:
        with torch.inference_mode(), autocast():
            model(images)

    step = train if mode == "train" else infer
    milliseconds = median_ms(step, device, SECONDS)
    peak = round(torch.cuda.max_memory_allocated() / 2**30, 3) if cuda else ""
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    return {"images_per_second": round(batch / milliseconds * 1e3, 1), "peak_gb": peak}


if __name__ == "__main__":
    job_path, result_path = map(Path, sys.argv[1:])
    given = json.loads(job_path.read_text())
    chosen = given["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    write_json(result_path, measure_arm(create_recipe(given["settings"]), given["sizes"], chosen))
