"""`run_study`: train what a study still lacks, several runs at a time; every finished run is a row at once."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tokamix.data.create import normalize_source
from tokamix.files import write_json
from tokamix.study.cost import JOBS
from tokamix.study.data import decode_once
from tokamix.study.networks import check_networks
from tokamix.study.plan import Job, list_jobs
from tokamix.study.processes import ROOT, Process, send, start_mps, start_process, stop_mps, stop_processes
from tokamix.study.rows import CORRECT_COLUMNS, Key, Row, key_of, read_all_rows, read_rows, write_row
from tokamix.study.schema import Study, load_study

Say = Callable[[str], object]
RUNS = "runs/studies"


def run_study(
    study: str | Study | Sequence[str | Study],
    sources: Mapping[str, str] | None = None,
    output: str | Path = "results/studies",
    runs: str | Path | None = None,
    *,
    jobs: int | None = None,
    mps: bool = True,
    device: str | None = None,
    deadline: float | None = None,
    only: str = "*",
    reuse: bool = True,
    say: Say = print,
) -> list[Row]:
    """Train the runs that a study still lacks, and return all rows. If it is stopped, the same call resumes it.

    If runs fail, the others are finished first; then ChildProcessError is raised.

    Args:
        study: a name of `list_studies()`, a YAML file, or a study; several share the device, and equal runs.
        sources: data sets that replace the study's, by name, such as {"cifar100": "a_train.npz,a_test.npz"}.
        output: folder of NAME.csv, to which each finished run is appended.
        runs: folder for the runs; default: runs/studies. Stopped runs resume from it.
        jobs: runs at a time; default: 8 on a GPU, 1 on a CPU.
        mps: use NVIDIA's multi-process service for several runs on a GPU.
        device: "cuda" or "cpu"; default: a GPU if there is one.
        deadline: seconds after which running trainings are stopped, with their state saved.
        only: patterns of arms, such as "column_*,time_*".
        reuse: runs of an arm follow each other in one process, which starts and compiles once.
        say: called with a line of text for each event.
    """
    begun = time.monotonic()
    given = [study] if isinstance(study, (str, Study)) else study
    studies = [one if isinstance(one, Study) else load_study(one) for one in given]
    for one in studies:
        check_networks(one, only)
    pack = _Pack(studies, Path(output), Path(runs or RUNS), device, only, reuse, say)
    pack.decode(sources or {})
    count = jobs or (JOBS if pack.has_gpu else 1)
    if mps := mps and pack.has_gpu and count > 1:
        problem = start_mps(pack.runs)
        mps = problem is None
        say("MPS runs" if mps else f"no MPS: {problem}")
    say(f"{', '.join(pack.studies)}: {count} runs at a time")
    try:
        with _stop_on_signal():
            pack.run(count, mps, begun + deadline if deadline else None)
    finally:
        pack.stop()
        if mps:
            stop_mps(pack.runs)
    if pack.failed:
        logs = pack.runs / "results"
        raise ChildProcessError(
            f"{len(pack.failed)} runs failed, see the logs in {logs}; the same command repeats them"
        )
    return pack.rows


class _Pack:
    """The running trainings of one study or several."""

    def __init__(
        self, studies: Sequence[Study], output: Path, runs: Path, device: str | None, only: str, reuse: bool, say: Say
    ) -> None:
        self.studies = {study.name: study for study in studies}
        self.output, self.runs, self.device, self.only, self.say = output, runs, device, only, say
        self.reuse = reuse
        self.rows = read_all_rows(output, studies[0].name)
        self.speeds = {name: read_rows(output / f"{name}_speed.csv") for name in self.studies}
        self.busy: dict[Key, tuple[Process, Job]] = {}
        self.idle: list[Process] = []  # on their way out
        self.used: set[int] = set()  # processes with a second run
        self.failed: set[Key] = set()
        self.retried: set[Key] = set()
        self.commit = current_commit()
        (runs / "results").mkdir(parents=True, exist_ok=True)
        self.has_gpu = device != "cpu" and gpu_is_there()

    def decode(self, sources: Mapping[str, str]) -> None:
        """Decode the data that the waiting runs need."""
        known = {name: source for study in self.studies.values() for name, source in study.data.items()}
        if unknown := [name for name in sources if name not in known]:
            names = ", ".join(self.studies)
            raise ValueError(f"study {names} has no data {unknown[0]!r}; it has {', '.join(known)}: --data NAME=SOURCE")
        self.sources: dict[str, str] = {}
        for name in dict.fromkeys(job.study for job in self._waiting()):
            for arm in self.studies[name].select(self.only):
                if arm.data not in self.sources:
                    source = normalize_source(sources.get(arm.data, known[arm.data]))
                    task = arm.settings.get("task", "classify")
                    self.sources[arm.data] = decode_once(source, task, self.runs / "data")

    def run(self, count: int, mps: bool, deadline: float | None) -> None:
        """Keep `count` runs going until none is left or the deadline is reached."""
        self.count, self.mps = count, mps
        # results of a study that was killed before it could write their rows
        while left := [job for job in self._waiting() if self._files(job)[1].exists()]:
            for job in left:
                self._record(job)
        waiting = self._waiting()
        while (waiting or self.busy) and not (deadline and time.monotonic() > deadline):
            while waiting and len(self.busy) < self.count:
                job = next_job(waiting, [(job.study, job.arm) for _, job in self.busy.values()])
                waiting.remove(job)
                self._start(job)
            finished = [key for key, (process, job) in self.busy.items() if self._has_ended(process, job)]
            for key in finished:
                waiting = self._finish(*self.busy.pop(key))
            if not finished:
                time.sleep(0.05)
        for _, job in self.busy.values():
            self.say(f"stopped {job.arm} {job.seed}; the same command resumes it")

    def stop(self) -> None:
        """Stop every process; runs save their state."""
        stop_processes([*self.idle, *(process for process, _ in self.busy.values())])

    def _waiting(self) -> list[Job]:
        jobs: dict[Key, Job] = {}
        for name, study in self.studies.items():
            for job in list_jobs(study, self.rows, self.speeds[name], self.only):
                if job.key not in self.busy and job.key not in self.failed:
                    first = jobs.setdefault(job.key, job)  # studies share equal runs, with the probes of all
                    probes = tuple(dict.fromkeys(first.probes + job.probes))
                    jobs[job.key] = replace(first, probes=probes, look=min(first.look, job.look))
        return list(jobs.values())

    def _files(self, job: Job) -> tuple[Path, Path, Path]:
        base = self.runs / "results" / job.name
        return base.with_suffix(".job"), base.with_suffix(".json"), base.with_suffix(".log")

    def _has_ended(self, process: Process, job: Job) -> bool:
        return process.poll() is not None or self._files(job)[1].exists()

    def _start(self, job: Job) -> None:
        """Start a process with its first run."""
        log = self._files(job)[2]
        threads = threads_of_run(self.count, self.has_gpu)
        self._send(job, start_process("tokamix.study.worker", [], log, self.runs, self.mps, threads))

    def _send(self, job: Job, process: Process) -> None:
        description, result, _ = self._files(job)
        more = {"source": self.sources[job.data], "folder": str(self.runs / job.name), "device": self.device}
        write_json(description, asdict(job) | more | {"result": str(result)})
        self.busy[job.key] = process, job
        send(process, str(description))

    def _finish(self, process: Process, job: Job) -> list[Job]:
        """Record a run that has ended, give its process another one of the same arm, and return the runs left."""
        if not self._files(job)[1].exists():
            self._fail(process, job)
            return self._waiting()
        self._record(job)
        waiting = self._waiting()
        look = min((other.look for other in waiting), default=0)
        same_arm = (other for other in waiting if (other.study, other.arm, other.look) == (job.study, job.arm, look))
        following = next(same_arm, None) if self.reuse else None
        if following is not None and process.poll() is None:
            waiting.remove(following)
            self.used.add(process.pid)
            self._send(following, process)
        else:
            send(process, None)
            self.idle.append(process)
        return waiting

    def _fail(self, process: Process, job: Job) -> None:
        """Report a process that ended without a result; the run is tried again if the cause may not be its own."""
        stop_processes([process])  # its children
        log = self._files(job)[2]
        text = log.read_text(errors="replace") if log.exists() else ""
        if process.pid in self.used:
            self.say(f"{job.arm} {job.seed} failed after another run in its process; trying again in one of its own")
            self.used.discard(process.pid)
        elif self.mps and job.key not in self.retried and "CUDA" in text[-3000:]:
            self.say(f"{text[-1000:]}\n{job.arm} {job.seed} failed under MPS; trying again without it")
            self.mps = False
            self.retried.add(job.key)
        else:
            self.failed.add(job.key)
            self.say(f"{text[-2000:]}\nFAILED {job.arm} {job.seed}; its log is {log}")

    def _record(self, job: Job) -> None:
        result = self._files(job)[1]
        row: Row = json.loads(result.read_text())
        row |= {key: getattr(job, key) for key in ("arm", "seed", "phase", "lr_factor", "data", "holdout")}
        row |= {"settings_hash": job.settings_hash, "commit": self.commit, "processes": self.count, "mps": self.mps}
        if "correct" in row:  # before the run's row, which marks it as finished
            correct = self.output / f"{job.study}_correct.csv"
            if job.key not in map(key_of, read_rows(correct)):  # a study killed between the two has written it
                write_row(correct, row, CORRECT_COLUMNS)
        write_row(self.output / f"{job.study}.csv", row)
        result.unlink()
        # as read from the file
        self.rows.append({key: "" if value is None else str(value) for key, value in row.items()})
        score = f"{row['score']:.2f} %" if row["status"] == "finished" else row["status"]
        speed = f", {row['images_per_second']:,.0f} images/s" if row["status"] == "finished" else ""
        factor = f" lr x {job.lr_factor:g}" if job.phase == "tune" else ""
        self.say(f"{job.phase} {job.arm} {job.seed}{factor}: {score} in {row['seconds']:.0f} s{speed}")


def threads_of_run(jobs: int, has_gpu: bool) -> int | None:
    """CPU threads of each of `jobs` runs at a time: on a CPU their part of the cores; None: a run alone chooses."""
    from tokamix.train.setup.threads import usable_cores  # needs Accelerate, which reading results does not

    if has_gpu:
        return 2
    return None if jobs == 1 else max(1, usable_cores() // jobs)


def next_job(waiting: Sequence[Job], arms: Sequence[tuple[str, str]]) -> Job:
    """The run to start in a new process while runs of `arms` (study and arm) are in work.

    First the runs that the first test of the claims needs. Among them arms without a process, so that two processes do
    not compile the same code at once; then tuning, on which other runs wait; then the longest runs, so that none is
    left for the end.
    """

    def place(job: Job) -> tuple[Any, ...]:
        return job.look, arms.count((job.study, job.arm)), job.phase != "tune", -job.minutes

    return min(waiting, key=place)


@contextmanager
def _stop_on_signal() -> Iterator[None]:
    """A termination signal ends the study like Ctrl-C."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def gpu_is_there() -> bool:
    """Whether there is an NVIDIA GPU; without torch, which would open the driver before MPS starts."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return bool(subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20, check=True).stdout.strip())
    return False


def current_commit() -> str:
    """The commit of the source tree; TOKAMIX_COMMIT names it where there is no repository."""
    if commit := os.environ.get("TOKAMIX_COMMIT"):
        return commit
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return ""
