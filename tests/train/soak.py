"""Disturb training runs at random moments until the time is up; each must end with the bits of an undisturbed run.

`make soak`, or `python -m tests.train.soak --seconds 1200 --seed 0`. Classification and detection, each in one process
and in two ranks of torchrun, all with data workers. The tally is printed as a table in Markdown. Linux only; filling
the disk needs the right to mount one (root).
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psutil
from torchvision.transforms.functional import to_pil_image

from tests.processes import ROOT
from tests.train.tiny import assert_same_bits
from tokamix.data.shapes import Shapes
from tokamix.train.loop.state import read_header

COMMON = "--device cpu --workers 1 --log-every 1"
CLASSIFY = f"{COMMON} --recipe small --model columnar_tiny_sima --batch-size 16 --image-size 16 --epochs 12"
CLASSIFY += " --set model_kwargs.dim=16 --set model_kwargs.depth=2 --set model_kwargs.patch_size=4"
CLASSIFY += " --set model_kwargs.num_heads=2 --set ema_half_life=5"
DETECT = f"{COMMON} --data shapes:32 --recipe shapes_detect --set iterations=30 --set eval_every=15"
DETECT += " --set warmup_iterations=5 --set method_kwargs.width=16"
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1"
PATIENCE = 240.0  # seconds until a job counts as hung; a start takes a tenth of that on two busy cores
FREE = 512  # MB of the disk that is filled

Processes = list[psutil.Process]


class Job:
    """A training command, its output so far, and its processes.

    Args:
        command: what to run.
        folder: of the run.
    """

    def __init__(self, command: list[str], folder: Path) -> None:
        self.folder, self.log = folder, tempfile.TemporaryFile("w+")  # noqa: SIM115, closed with the job
        self.seen: set[psutil.Process] = set()  # torchrun gives each rank a session of its own
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self.log, stderr=self.log, start_new_session=True
        )

    def processes(self) -> Processes:
        """Everything that is left of the job, also children whose parent has died."""
        with suppress(psutil.Error):
            own = psutil.Process(self.process.pid)
            self.seen |= {own, *own.children(recursive=True)}
        for process in list(self.seen):
            with suppress(psutil.Error):
                self.seen |= set(process.children(recursive=True))
        return [process for process in self.seen if is_alive(process)]

    def ranks(self) -> Processes:
        """The training processes: the command itself, or the children of torchrun."""
        with suppress(psutil.Error):
            own = psutil.Process(self.process.pid)
            return own.children() if "torch.distributed.run" in own.cmdline() else [own]
        return []

    def workers(self) -> Processes:
        """The data workers."""
        with suppress(psutil.Error):
            return [child for rank in self.ranks() for child in rank.children()]
        return []

    def wait(self, seconds: float) -> int | None:
        """The exit code once no process is left; None if the job still runs after this time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.process.poll() is not None and not self.processes():
                return self.process.returncode
            time.sleep(0.1)
        return None

    def output(self) -> str:
        """What it printed."""
        self.log.seek(0)
        return self.log.read()

    def close(self) -> None:
        """Kill what is left."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()
        self.log.close()


def is_alive(process: psutil.Process) -> bool:
    """Whether a process is still running, and not a zombie."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def kill(processes: Processes, number: int, draw: random.Random) -> bool:
    """Send a signal to one of them; returns whether there was one."""
    with suppress(IndexError, psutil.Error):
        draw.choice(processes).send_signal(number)
        return True
    return False


def signal_group(job: Job, number: int) -> bool:
    """Send a signal to all processes, as a terminal, `timeout` and Slurm do."""
    for process in job.processes():
        with suppress(psutil.Error):
            process.send_signal(number)
    return True


def fill_disk(job: Job) -> bool:
    """Fill the disk of the run until the job has ended."""
    ballast = job.folder.parent / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (2**20, 2**12):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
    job.wait(60)
    ballast.unlink()
    return True


EVENTS: dict[str, Callable[[Job, random.Random], bool]] = {
    "kill -9 of the command (python or torchrun)": lambda job, draw: kill(
        [psutil.Process(job.process.pid)], signal.SIGKILL, draw
    ),
    "kill -9 of one rank": lambda job, draw: kill(job.ranks(), signal.SIGKILL, draw),
    "kill -9 of a data worker": lambda job, draw: kill(job.workers(), signal.SIGKILL, draw),
    "SIGTERM to the command": lambda job, draw: kill([psutil.Process(job.process.pid)], signal.SIGTERM, draw),
    "SIGTERM to all processes": lambda job, draw: signal_group(job, signal.SIGTERM),
    "SIGINT to all processes": lambda job, draw: signal_group(job, signal.SIGINT),
    "SIGUSR1 to all processes": lambda job, draw: signal_group(job, signal.SIGUSR1),
    "full disk": lambda job, draw: fill_disk(job),
}


def rows(folder: Path) -> list[dict]:
    """Complete lines of the run's metrics."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps(folder: Path) -> int:
    """Number of training steps in the run's metrics."""
    return sum(row["event"] == "train" for row in rows(folder))


def check_saved(folder: Path) -> None:
    """After a signal that the run handles, the state of its last step is saved."""
    state = folder / "state" / "state.safetensors"
    assert state.is_file(), "no state was saved"
    header = read_header(state)
    saved, last = header["epoch"] * header["steps"] + header["step"], steps(folder)
    assert saved == last, f"the state of step {saved} was saved, not of step {last}"


def soak(command: list[str], folder: Path, seconds: float, draw: random.Random) -> Iterator[str]:
    """Run a command to its end with a few disturbances on the way; yields what happened."""
    events = list(EVENTS) if os.path.ismount(folder.parent) else [name for name in EVENTS if name != "full disk"]
    left = draw.randint(2, 5)
    while True:
        saving = draw.choice([["--save-every", str(draw.randint(1, 20))], []])
        disturbed, code = False, None
        yield "resumption from a saved state" if (folder / "state").is_dir() else "start"
        with closing(Job([*command, str(folder), *saving], folder)) as job:
            try:
                while left and code is None:
                    begun = draw.random() > 0.1 and wait_for_step(job)
                    time.sleep(draw.random() * (seconds if begun else 5))
                    event = draw.choice(events)
                    job.processes()
                    if job.process.poll() is not None:
                        break
                    if not EVENTS[event](job, draw):
                        continue
                    yield event
                    code = job.wait(PATIENCE if "SIG" in event else 3)
                    # after an elastic restart, the signal may come before the first step
                    if "SIG" in event and begun and code and not disturbed:
                        check_saved(folder)
                    left, disturbed = left - 1, True
                code = job.wait(PATIENCE) if code is None else code
                assert code is not None, f"still running after {PATIENCE:.0f} s"
                assert code == 0 or disturbed, f"ended with exit code {code}"
                assert "torch.distributed.run" in command or "Traceback" not in job.output(), "printed a traceback"
            except AssertionError as error:
                raise AssertionError(f"{error}\n{job.output()[-3000:]}") from error
        if code == 0:
            return


def wait_for_step(job: Job) -> bool:
    """Wait until the job has trained a step; returns False if it has ended."""
    before, until = steps(job.folder), time.monotonic() + PATIENCE
    while steps(job.folder) in (0, before) and job.process.poll() is None:
        job.processes()  # remembers them
        assert time.monotonic() < until, f"no step in {PATIENCE:.0f} s"
        time.sleep(0.1)
    return job.process.poll() is None


def compare(one: Path, other: Path) -> None:
    """Weights, optimizer, averages, metrics and names of files are the same."""
    assert_same_bits(one, other)
    clock = ("seconds", "images_per_second", "memory_gb")
    epochs = [
        [{k: v for k, v in row.items() if k not in clock} for row in rows(folder) if row["event"] == "epoch"]
        for folder in (one, other)
    ]
    assert epochs[0] == epochs[1], "the metrics differ"
    files = [{str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} for folder in (one, other)]
    files = [{name for name in names if "events.out" not in name} for names in files]
    assert files[0] == files[1], f"different files: {sorted(files[0] ^ files[1])}"


def write_images(folder: Path) -> None:
    """An image folder of 96 training and 32 validation images."""
    for part, count in (("train", 96), ("val", 32)):
        shapes = Shapes(count, 24, part=part)
        for i in range(count):
            path = folder / part / shapes.classes[int(shapes.labels[i])] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            to_pil_image(shapes.sample(i).image).save(path)


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A folder on a disk of its own where this is allowed, so that it can be filled."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={FREE}m", "tmpfs", path], capture_output=True)
    if mounted.returncode:
        print("the disk is not filled: this needs the right to mount one")
    try:
        yield path
    finally:
        if not mounted.returncode:
            subprocess.run(["umount", path], check=True)


def main() -> int:
    """Run the soak test; returns the number of failed runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw, begun = random.Random(options.seed), time.monotonic()
    print(f"seed {options.seed}, {options.seconds:.0f} s", flush=True)
    with tempfile.TemporaryDirectory() as temporary, small_disk(Path(temporary) / "disk") as disk:
        write_images(Path(temporary) / "images")
        arguments = {"classify": f"{CLASSIFY} --data {temporary}/images", "detect": DETECT}
        jobs = {
            f"{task}, {ranks}": [*launcher.split(), "-m", "tokamix", "train", *options.split(), "--output"]
            for task, options in arguments.items()
            for ranks, launcher in (("one process", sys.executable), ("two ranks", f"{sys.executable} {TORCHRUN}"))
        }
        wholes: dict[str, tuple[Path, float]] = {}  # undisturbed runs, and the seconds they train
        events: Counter[str] = Counter()
        ends: dict[str, Counter[str]] = {name: Counter() for name in jobs}
        number = 0
        while time.monotonic() - begun < options.seconds:
            name = list(jobs)[number % len(jobs)]
            number += 1
            if name not in wholes:
                folder = Path(temporary) / f"whole {name}"
                subprocess.run([*jobs[name], str(folder)], cwd=ROOT, check=True, capture_output=True)
                times = [path.stat().st_mtime for path in (folder / "recipe.yaml", folder / "last.safetensors")]
                wholes[name] = folder, times[1] - times[0]
                print(f"{name}: undisturbed in {wholes[name][1]:.1f} s of training", flush=True)
            folder, seconds = disk / f"run {number}", wholes[name][1]
            happened: list[str] = []
            try:
                for event in soak(jobs[name], folder, min(seconds / 2, 6), draw):
                    happened.append(event)
                compare(wholes[name][0], folder)
                ends[name]["same bits"] += 1
                shutil.rmtree(folder)
            except AssertionError as error:
                ends[name]["failed"] += 1
                print(f"FAILED run {number}, {error}", flush=True)
                shutil.copytree(folder, Path(tempfile.gettempdir()) / f"soak failed {number}", dirs_exist_ok=True)
                shutil.rmtree(folder)
            events.update(happened)
            print(f"{time.monotonic() - begun:5.0f} s  {name}: {', '.join(happened)}", flush=True)
    minutes, failed = (time.monotonic() - begun) / 60, sum(counts["failed"] for counts in ends.values())
    print(f"\n| what happened in {minutes:.0f} minutes | times |\n|---|---|")
    for event in ("start", *EVENTS, "resumption from a saved state"):
        print(f"| {event} | {events[event]} |")
    print("\n| runs | ended with the bits of the undisturbed run |\n|---|---|")
    for name, counts in ends.items():
        print(f"| {name} | {counts['same bits']} of {counts.total()} |")
    return failed


if __name__ == "__main__":
    sys.exit(main())
