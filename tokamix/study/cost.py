"""Expected GPU minutes of a study, from measured runs of the same network or the throughput that its file assumes."""

import json
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from tokamix.study.plan import equals_its_twin, final_job, tuning_jobs, wanted_seeds
from tokamix.study.rows import Row, key_of
from tokamix.study.schema import Study, train_images

JOBS = 8  # runs at a time on a GPU: some train while others start and compile
# estimates for an H200, from the runs of six at a time in results/studies/shipped.csv
START = 40.0  # seconds until a process trains: imports, CUDA, code for training and evaluation compiled
BETWEEN = 5.0  # seconds between two runs of a process: network, data, files
EVALUATION = 1.08  # evaluations, as a factor on the time of training
ALONE = 0.4  # images per second of one run alone, as a fraction of all runs together: an assumption for small networks


class Cost(NamedTuple):
    """What is left of a study: runs, minutes of work for the GPU, and minutes until it ends."""

    runs: int
    gpu_minutes: float
    minutes: float


def expected_costs(
    study: Study, rows: Sequence[Row], speeds: Sequence[Row] = (), only: str = "*", processes: int = JOBS
) -> tuple[Cost, Cost]:
    """What is left of a study: if no claim needs more seeds than it has now, and if every claim needs all of them."""
    now = wanted_seeds(study, rows, speeds)
    claimed = {arm for claim in study.claims for arm in claim.arms}
    most = {arm: study.looks[-1] if arm in claimed else seeds for arm, seeds in now.items()}
    least, largest = (_cost(study, rows, speeds, only, processes, seeds) for seeds in (now, most))
    return least, largest


def _cost(
    study: Study, rows: Sequence[Row], speeds: Sequence[Row], only: str, processes: int, seeds: dict[str, int]
) -> Cost:
    done = {key_of(row) for row in rows}
    measured = measured_seconds(rows)
    runs, starts, gpu = 0, 0, 0.0
    for arm in study.select(only):
        if equals_its_twin(study, arm, speeds):
            continue
        minutes, images = arm.minutes, train_images(arm)
        if images and (seconds := measured.get(network_key(arm.settings))):
            minutes = seconds * images * arm.settings["epochs"] / 60
        waiting = [job for job in tuning_jobs(study, arm) if job.key not in done] if not arm.equal_time else []
        gpu += sum(minutes * job.minutes / arm.minutes for job in waiting if arm.minutes)
        found = 0
        if (job := final_job(study, arm, study.first_seed, rows, speeds)) is not None:
            minutes *= job.settings["epochs"] / arm.settings["epochs"] if arm.equal_time else 1
            found = sum((study.first_seed + i, job.settings_hash) in done for i in range(seeds[arm.name]))
        gpu += minutes * (seeds[arm.name] - found)
        left = len(waiting) + seeds[arm.name] - found
        runs, starts = runs + left, starts + bool(left)
    if not runs:
        return Cost(0, 0.0, 0.0)
    busy = (starts * START + runs * BETWEEN) / 60 + gpu / ALONE
    return Cost(runs, gpu * EVALUATION, START / 60 + max(gpu * EVALUATION, busy / processes))


def network_key(settings: dict[str, Any]) -> str:
    """What the time for an image depends on."""
    keys = ("model", "model_kwargs", "image_size", "batch_size", "augment")
    return json.dumps([settings.get(key) for key in keys], sort_keys=True)


def measured_seconds(rows: Sequence[Row]) -> dict[str, float]:
    """GPU seconds of training for an image, by network: the median of finished runs, by their share of the GPU."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["status"] == "finished" and row["gpu"] != "cpu" and row.get("settings") and row.get("train_images"):
            images = int(row["train_images"]) * int(row["epochs"])
            seconds = float(row["train_seconds"]) / max(1, int(row["processes"])) / images
            found.setdefault(network_key(json.loads(row["settings"])), []).append(seconds)
    return {key: statistics.median(seconds) for key, seconds in found.items()}
