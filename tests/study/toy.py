"""A toy study, and rows as its runs would write them."""

import copy
import json
from collections.abc import Sequence
from typing import Any

from tokamix.study.plan import Job, final_job, tuning_jobs
from tokamix.study.rows import Row
from tokamix.study.schema import Study, create_study

TOY: dict[str, Any] = {
    "title": "Toy",
    "protocol": "Stripes.",
    "data": {"stripes": "stripes.npz"},
    "holdout": 20,
    "looks": [3, 5],
    "tune": {"lr": [0.5, 1, 2], "set": {"epochs": 1}},
    "sizes": {8: {}},
    "run_minutes": 2.0,
    "bases": {
        "toy": {
            "epochs": 2,
            "batch_size": 16,
            "lr": 0.01,
            "warmup_epochs": 0,
            "image_size": 8,
            "crop_scale": None,
            "select": "last",
            "model_kwargs": {"patch_size": 4, "dim": 8, "depth": 1, "num_heads": 1},
        }
    },
    "arms": {
        "softmax": {"use": ["toy"], "set": {"model": "columnar_tiny_softmax"}},
        "sima": {"use": ["toy"], "set": {"model": "columnar_tiny_sima"}},
        "time_sima": {"use": ["toy"], "set": {"model": "columnar_tiny_sima"}, "equal_time": "softmax"},
    },
    "claims": [
        {
            "claim": "SimA is better",
            "source": "x",
            "printed": 1,
            "arms": {"sima": 1, "softmax": -1},
            "holds": {"above": 0},
        }
    ],
}


def toy_study(**changes: Any) -> Study:
    return create_study("toy", {**copy.deepcopy(TOY), **changes})


def row_of(job: Job, score: float | None) -> Row:
    """The row of a finished run; None: it diverged."""
    row = {key: str(getattr(job, key)) for key in ("arm", "seed", "phase", "data", "holdout", "settings_hash")}
    row |= {"score": str(score), "metrics": json.dumps({} if score is None else {"top1": score})}
    row |= {"status": "diverged" if score is None else "finished", "parameters": "1000", "epochs": "2", "gpu": "cpu"}
    row |= {"seconds": "30", "train_seconds": "24", "processes": "2", "commit": "abc", "train_images": "60"}
    return row | {"curve": json.dumps([[1, 1.0, (score or 0) / 2], [2, 2.0, score or 0]])}


def tuned(study: Study, best: int = 1) -> list[Row]:
    """Rows of the whole tuning; the factor number `best` wins."""
    arms = [arm for arm in study.arms.values() if not arm.equal_time]
    return [row_of(job, 50.0 + (i == best)) for arm in arms for i, job in enumerate(tuning_jobs(study, arm))]


def with_runs(study: Study, rows: list[Row], **scores: Sequence[float | None]) -> list[Row]:
    """The rows, and final ones with these scores for each arm."""
    rows = list(rows)
    for arm, values in scores.items():
        for i, score in enumerate(values):
            job = final_job(study, study.arms[arm], study.first_seed + i, rows, ())
            assert job is not None
            rows.append(row_of(job, score))
    return rows
