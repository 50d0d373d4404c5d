"""What a study still has to run, and what its claims come to, given the finished rows."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from tokamix.recipes import create_recipe
from tokamix.recipes.schema import default_of
from tokamix.study.rows import Key, Row, key_of, score_of
from tokamix.study.schema import DIVERGES, Arm, Claim, Study, merge_settings
from tokamix.study.statistics import Estimate, alpha_of_looks, contrast, detectable, holm

TUNING_SEED = 0
HOLDS, FAILS, OPEN = "holds", "does not hold", "not resolvable at this scale"
RUNNING, MISSING = "more seeds to come", "not measured"


@dataclass(frozen=True)
class Job:
    """One run."""

    study: str
    arm: str
    seed: int
    phase: str
    lr_factor: float | None
    data: str
    holdout: int
    images: int | None
    settings: dict[str, Any]
    settings_hash: str
    minutes: float
    probes: tuple[str, ...] = ()
    look: int = 0  # the test of the claims that needs it; 0 for tuning, too

    @property
    def key(self) -> Key:
        """What identifies the run."""
        return self.seed, self.settings_hash

    @property
    def name(self) -> str:
        """Name of the run's files."""
        return f"{self.arm}_{self.seed}_{self.settings_hash}"


class Verdict(NamedTuple):
    """What a claim comes to: the difference, the runs of each arm, and the verdict."""

    claim: Claim
    estimate: Estimate | None
    counts: dict[str, int]
    text: str


def list_jobs(study: Study, rows: Sequence[Row], speeds: Sequence[Row] = (), only: str = "*") -> list[Job]:
    """The runs to start now, in order: tuning, then the seeds of the first look, then those of undecided claims.

    Runs whose settings follow from others (a tuned learning rate, an equal time) appear when those are finished.
    """
    done = {key_of(row) for row in rows}
    arms = study.select(only)
    jobs = [job for arm in arms for job in tuning_jobs(study, arm)]
    wanted = wanted_seeds(study, rows, speeds)
    for i in range(study.looks[-1]):
        for arm in arms:
            if i < wanted[arm.name] and (job := final_job(study, arm, study.first_seed + i, rows, speeds)):
                jobs.append(replace(job, look=sum(i >= look for look in study.looks)))
    unique: dict[Key, Job] = {}
    for job in jobs:  # arms with equal settings share their runs
        if job.key not in done:
            unique.setdefault(job.key, job)
    return list(unique.values())


def tuning_jobs(study: Study, arm: Arm) -> list[Job]:
    """The runs that tune an arm's learning rate on held-out images."""
    if study.tune is None or not arm.tuned:
        return []
    settings = merge_settings(arm.settings, study.tune["set"])
    share = settings.get("epochs", 1) / (arm.settings.get("epochs") or 1)
    jobs = []
    for factor in study.tune["lr"]:
        changed = {**settings, "lr": arm.settings["lr"] * factor}
        jobs.append(_create_job(study, arm, TUNING_SEED, "tune", changed, factor, arm.minutes * share))
    return jobs


def tuned_factor(study: Study, arm: Arm, rows: Sequence[Row]) -> float | None:
    """The best factor on an arm's learning rate; None before all its tuning runs are finished."""
    jobs = tuning_jobs(study, arm)
    if not jobs:
        return 1.0
    found = {key_of(row): row for row in rows}
    if not all(job.key in found for job in jobs):
        return None
    scores = {
        job.lr_factor: score_of(row, study.metric) for job in jobs if (row := found[job.key])["status"] == "finished"
    }
    return max(scores, key=lambda factor: scores[factor]) if scores else 1.0  # all diverged: the final runs will too


def final_job(study: Study, arm: Arm, seed: int, rows: Sequence[Row], speeds: Sequence[Row]) -> Job | None:
    """A run on the test set; None before its settings are known."""
    own = _without_time(arm, study)
    factor = tuned_factor(study, own, rows)
    if factor is None:
        return None
    settings = {**arm.settings, "lr": arm.settings["lr"] * factor} if study.tune and arm.tuned else arm.settings
    if arm.equal_time:
        epochs = epochs_in_time(study, own, arm.equal_time, speeds)
        if epochs is None or equals_its_twin(study, arm, speeds):
            return None
        warmup = settings.get("warmup_epochs", 0) * epochs / settings["epochs"]
        settings = {**settings, "epochs": epochs, "warmup_epochs": round(warmup, 4)}
    if "epochs" in settings and not settings.get("iterations"):  # ten evaluations at most, for the learning curve
        settings = {**settings, "eval_every": max(1, settings["epochs"] // 10, settings.get("eval_every") or 1)}
    return _create_job(study, arm, seed, "final", settings, factor if own.tuned else None, arm.minutes)


def epochs_in_time(study: Study, arm: Arm, reference: str, speeds: Sequence[Row]) -> int | None:
    """Epochs of an arm in the training time of another; None before both speeds are measured."""
    own, other = train_speed(speeds, arm.name), train_speed(speeds, reference)
    if own is None or other is None:
        return None
    return max(1, round(study.arms[reference].settings["epochs"] * own / other))


def equals_its_twin(study: Study, arm: Arm, speeds: Sequence[Row]) -> bool:
    """Whether an arm of equal time has as many epochs as the arm whose settings it has, and so no runs of its own."""
    if arm.equal_time is None:
        return False
    return epochs_in_time(study, _without_time(arm, study), arm.equal_time, speeds) == arm.settings["epochs"]


def train_speed(speeds: Sequence[Row], arm: str) -> float | None:
    """Measured images per second of an arm's training with the GPU to itself."""
    found = [row for row in speeds if row["arm"] == arm and row["mode"] == "train" and row["images_per_second"]]
    return float(found[-1]["images_per_second"]) if found else None


def final_rows(study: Study, arm: str, rows: Sequence[Row], speeds: Sequence[Row] = ()) -> list[Row]:
    """The finished or diverged runs of an arm with its present settings, by seed."""
    if (job := final_job(study, study.arms[arm], study.first_seed, rows, speeds)) is None:
        return []
    found = [row for row in rows if row["settings_hash"] == job.settings_hash]
    return sorted({key_of(row): row for row in found}.values(), key=lambda row: int(row["seed"]))


def wanted_seeds(study: Study, rows: Sequence[Row], speeds: Sequence[Row] = ()) -> dict[str, int]:
    """Seeds of each arm: those of the first look, and of the next look while a claim of the arm is undecided."""
    wanted = dict.fromkeys(study.arms, study.looks[0])
    for verdict in verdicts(study, rows, speeds):
        if verdict.text != RUNNING:
            continue
        reached = min(verdict.counts.values())
        following = next((n for n in study.looks if n > reached), study.looks[-1])
        for arm in verdict.claim.arms:
            wanted[arm] = max(wanted[arm], following)
    return wanted


def verdicts(study: Study, rows: Sequence[Row], speeds: Sequence[Row] = ()) -> list[Verdict]:
    """The verdict on each claim, by the rules of the study's file: at the first look that decides it."""
    samples = {arm: final_rows(study, arm, rows, speeds) for claim in study.claims for arm in claim.arms}
    decided: dict[int, str] = {}
    for look, alpha in zip(study.looks, alpha_of_looks(study.looks), strict=True):
        at_look = {
            i: _estimate(claim, [samples[arm][:look] for arm in claim.arms], study.metric)
            for i, claim in enumerate(study.claims)
            if all(len(samples[arm]) >= look for arm in claim.arms) and claim.holds != DIVERGES
        }
        estimates = {i: estimate for i, estimate in at_look.items() if estimate is not None}
        # every claim of the study counts, also the ones that are not measured yet
        missing = [1.0] * (len(study.claims) - len(estimates))
        holds = holm([e.p_inside(*study.claims[i].range) for i, e in estimates.items()] + missing)
        fails = holm([_p_fails(study.claims[i], e) for i, e in estimates.items()] + missing)
        for i, p_holds, p_fails in zip(estimates, holds, fails, strict=False):
            if p_holds <= alpha or p_fails <= alpha:
                decided.setdefault(i, HOLDS if p_holds <= alpha else FAILS)
    return [_verdict(study, claim, samples, decided.get(i)) for i, claim in enumerate(study.claims)]


def resolution(study: Study) -> str:
    """What the seeds of a study can resolve, in words; empty if the spread between seeds is not known."""
    if not study.sigma or study.looks[-1] < 2:
        return ""
    last = alpha_of_looks(study.looks)[-1]
    single, first = (detectable(study.sigma, study.looks[-1], last / n) for n in (1, max(1, len(study.claims))))
    holm_text = f"; {first:.1f} if it is the first of {len(study.claims)} claims" if len(study.claims) > 1 else ""
    return (
        f"{study.looks[-1]} seeds of each arm resolve a difference of {single:.1f} points{holm_text} (power 80 %,"
        f" standard deviation between seeds {study.sigma:g})"
    )


def _verdict(study: Study, claim: Claim, samples: dict[str, list[Row]], decided: str | None) -> Verdict:
    own = [samples[arm] for arm in claim.arms]
    counts = {arm: len(samples[arm]) for arm in claim.arms}
    if claim.holds == DIVERGES:
        diverged = [row["status"] == "diverged" for row in own[0]]
        text = RUNNING if diverged else MISSING
        if len(diverged) >= study.looks[0]:
            text = HOLDS if all(diverged) else OPEN if any(diverged) else FAILS
        return Verdict(claim, None, counts, text)
    estimate = _estimate(claim, own, study.metric)
    if decided is not None:
        return Verdict(claim, estimate, counts, decided)
    if min(counts.values()) >= study.looks[-1] or any(r["status"] == "diverged" for rows in own for r in rows):
        return Verdict(claim, estimate, counts, OPEN)
    return Verdict(claim, estimate, counts, RUNNING if any(counts.values()) else MISSING)


def _estimate(claim: Claim, samples: Sequence[Sequence[Row]], metric: str) -> Estimate | None:
    """The claim's difference; None with fewer than two runs of an arm, one that diverged or one without the metric."""
    metric = claim.metric or metric
    if any(len(rows) < 2 or any(metric not in json.loads(row["metrics"]) for row in rows) for rows in samples):
        return None
    scores = [[score_of(row, metric) for row in rows] for rows in samples]
    return contrast(scores, list(claim.arms.values()))


def _p_fails(claim: Claim, estimate: Estimate) -> float:
    """P-value of "the claim does not hold": outside its range on either side."""
    return min(1.0, min(estimate.p_inside(*r) for r in claim.fail_ranges))


def _without_time(arm: Arm, study: Study) -> Arm:
    """The arm whose tuning and speed an arm of equal time shares: the one with the same settings."""
    if arm.equal_time is None:
        return arm
    twins = [a for a in study.arms.values() if a.equal_time is None and a.settings == arm.settings]
    if not twins:
        raise ValueError(f"study {study.name}: arm {arm.name} has the settings of no other arm, so its time is unknown")
    return twins[0]


def _create_job(
    study: Study, arm: Arm, seed: int, phase: str, settings: dict[str, Any], factor: float | None, minutes: float
) -> Job:
    holdout = study.holdout if phase == "tune" else 0
    changed = json.loads(_changed_settings(json.dumps(settings, sort_keys=True)))
    what = {"settings": changed, "data": arm.data, "holdout": holdout, "images": arm.images}
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:10]
    full = {**settings, "seed": seed, "name": arm.name}
    probes = arm.probes if phase == "final" else ()
    return Job(study.name, arm.name, seed, phase, factor, arm.data, holdout, arm.images, full, digest, minutes, probes)


def changed_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that differ from the defaults of recipes: new keys of recipes do not change the hash of old runs."""
    recipe = create_recipe({"name": "", **settings})
    unused = ("name", "seed", "source", "data")  # do not change a run, apart from the seed, which is part of its key
    return {k: v for k, v in recipe.to_dict().items() if k not in unused and v != _plain(default_of(type(recipe), k))}


@cache
def _changed_settings(settings: str) -> str:
    """The same as JSON, once for each settings: a study asks for those of all its arms after each run."""
    return json.dumps(changed_settings(json.loads(settings)), sort_keys=True)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
