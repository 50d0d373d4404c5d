"""Speed and memory of a study's arms: all compile at the same time, then each is timed alone on the device."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F

from tokamix.bench.timing import median_ms
from tokamix.compile import compile_blocks, graphed
from tokamix.files import write_json
from tokamix.recipes import Recipe, create_recipe
from tokamix.study.processes import Process, send, start_process, stop_processes
from tokamix.study.rows import SPEED_COLUMNS, Row, read_rows, write_row
from tokamix.study.run import RUNS, current_commit
from tokamix.study.schema import Arm, Study, load_study
from tokamix.train.loop.optim import create_optimizer
from tokamix.train.setup.model import create_classifier

CLASSES = 100
PIXELS = 8 * 2**20  # images per batch in inference, in pixels; at most the batch of training
SECONDS = 0.4  # of each measurement
TIMEOUT = 180.0  # seconds for the compilation of all arms
Measured = tuple[str, str, int]  # arm, mode and image size


def measure_speeds(
    study: str | Study,
    output: str | Path = "results/studies",
    runs: str | Path | None = None,
    *,
    device: str | None = None,
    deadline: float | None = None,
    only: str = "*",
    say: Callable[[str], object] = print,
) -> list[Row]:
    """Measure training at the arms' own size and inference at the study's sizes, and return all rows.

    On a GPU both are compiled and replay CUDA graphs: training under autocast, inference with bfloat16 weights.

    Each measurement is a row of NAME_speed.csv at once and is not repeated. Nothing else should run on the device.

    Args:
        study: a name of `list_studies()`, a YAML file, or a study.
        output: folder of NAME_speed.csv.
        runs: folder for logs and compiled code; default: runs/studies.
        device: "cuda" or "cpu"; default: a GPU if there is one.
        deadline: seconds after which nothing more is measured.
        only: patterns of arms, such as "column_*,time_*".
        say: called with a line of text for each event.
    """
    end = time.monotonic() + deadline if deadline else None
    study = study if isinstance(study, Study) else load_study(study)
    if not study.sizes:
        raise ValueError(f"study {study.name} has no sizes at which to measure the speed of its arms")
    path, runs = Path(output) / f"{study.name}_speed.csv", Path(runs or RUNS)
    (runs / "results").mkdir(parents=True, exist_ok=True)
    done = {(row["arm"], row["mode"], int(row["size"])) for row in read_rows(path)}
    arms = [arm for arm in study.select(only) if not arm.equal_time]
    timers = [_Timer(arm, study.sizes, done, runs, device) for arm in arms]
    timers = [timer for timer in timers if timer.left]
    try:
        for timer in timers:
            timer.start()
        _wait(timers, min(time.monotonic() + TIMEOUT, end or float("inf")), say)
        commit = current_commit()
        for timer in timers:
            for row in timer.measure(end):
                write_row(path, row | {"arm": timer.arm.name, "commit": commit}, SPEED_COLUMNS)
                speed = f"{row['images_per_second']:,} images/s" if row["images_per_second"] else row["status"]
                say(f"{timer.arm.name} {row['mode']} {row['size']} px: {speed}")
    finally:
        stop_processes([timer.process for timer in timers if timer.process], 5)
    return read_rows(path)


def _wait(timers: list["_Timer"], end: float, say: Callable[[str], object]) -> None:
    """Wait until every process has compiled its networks, and drop those that have not: they would disturb others."""
    while time.monotonic() < end and any(timer.is_compiling() for timer in timers):
        time.sleep(0.1)
    for timer in list(timers):
        if not timer.ready.exists():
            stop_processes([timer.process] if timer.process else [], 1)
            say(f"{timer.log.read_text(errors='replace')[-1500:]}\n{timer.arm.name}: no speed; its log is {timer.log}")
            timers.remove(timer)


class _Timer:
    """The process that measures one arm."""

    def __init__(self, arm: Arm, sizes: Mapping[int, Row], done: set[Measured], runs: Path, device: str | None) -> None:
        every = [("train", arm.settings["image_size"], {}), *(("infer", size, sizes[size]) for size in sizes)]
        self.left = [list(one) for one in every if (arm.name, one[0], one[1]) not in done]
        self.arm, self.runs, self.device = arm, runs, device
        base = runs / "results" / f"speed_{arm.name}"
        self.job, self.ready, self.result, self.log = (
            base.with_suffix(suffix) for suffix in (".job", ".ready", ".json", ".log")
        )
        self.process: Process | None = None

    def start(self) -> None:
        for path in (self.ready, self.result):
            path.unlink(missing_ok=True)
        what = {"settings": {**self.arm.settings, "name": self.arm.name}, "measurements": self.left}
        write_json(self.job, what | {"device": self.device, "ready": str(self.ready), "result": str(self.result)})
        self.process = start_process("tokamix.study.speed", [str(self.job)], self.log, self.runs, mps=False)

    def is_compiling(self) -> bool:
        return self.process is not None and self.process.poll() is None and not self.ready.exists()

    def measure(self, end: float | None) -> Iterator[Row]:
        """The rows, each when it is measured."""
        assert self.process is not None
        for number in range(len(self.left)):
            if end and time.monotonic() > end:
                return
            send(self.process, str(number))
            while not self.result.exists() and self.process.poll() is None:
                time.sleep(0.01)
            if self.result.exists():
                row: Row = json.loads(self.result.read_text())
                self.result.unlink()
                yield row
        stop_processes([self.process], 1)  # frees its memory


def prepare(recipe: Recipe, mode: str, size: int, changes: Row, device: str) -> Callable[[], Row]:
    """Compile one measurement, and return the function that makes it: a row."""
    batch = max(1, min(recipe.batch_size, PIXELS // size**2)) if mode == "infer" else recipe.batch_size
    row: Row = {"mode": mode, "size": size, "batch": batch, "status": "measured", "torch": torch.__version__}
    row |= {"gpu": torch.cuda.get_device_name() if device == "cuda" else "cpu", "images_per_second": "", "peak_gb": ""}
    try:
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        step = _create_step(recipe, mode, size, changes, batch, device)
        for _ in range(4):  # compiles, captures CUDA graphs, replays them
            step()
        if device == "cuda":
            torch.cuda.synchronize()
            row["peak_gb"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
    except torch.OutOfMemoryError:
        return lambda: row | {"status": "out of memory"}

    def measure() -> Row:
        milliseconds = median_ms(step, device, SECONDS)
        return row | {"images_per_second": round(batch / milliseconds * 1e3, 1)}

    return measure


def _create_step(recipe: Recipe, mode: str, size: int, changes: Row, batch: int, device: str) -> Callable[[], None]:
    cuda = device == "cuda"
    arguments = {**recipe.model_kwargs, **changes}
    model, _ = create_classifier(None, recipe.replace(image_size=size, model_kwargs=arguments), CLASSES)
    training = mode == "train"
    dtype = torch.bfloat16 if cuda and not training else torch.float32
    model = model.to(device, dtype).train(training)
    optimizer = create_optimizer(model, recipe, torch.device(device)) if training else None
    if cuda:
        compile_blocks(model, graphs=training)
    network = model if training else graphed(model, clone=False)  # small networks wait for the host without graphs
    images = torch.randn(batch, 3, size, size, device=device, dtype=dtype)
    labels = torch.randint(CLASSES, (batch,), device=device)

    def train() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=cuda):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # type: ignore[union-attr]
        model.zero_grad(set_to_none=True)

    def infer() -> None:
        with torch.inference_mode():
            network(images)

    if cuda:
        torch.cuda.reset_peak_memory_stats()
    return train if training else infer


def main() -> None:
    """Compile the measurements of a job file; then make those whose numbers come in on standard input."""
    job = json.loads(Path(sys.argv[1]).read_text())
    device = job["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    recipe = create_recipe(job["settings"])
    measures = [prepare(recipe, mode, size, changes, device) for mode, size, changes in job["measurements"]]
    write_json(Path(job["ready"]), {})
    for line in iter(sys.stdin.readline, ""):
        write_json(Path(job["result"]), measures[int(line)]())


if __name__ == "__main__":
    main()
