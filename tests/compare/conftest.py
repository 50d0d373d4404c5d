"""Fixtures of the comparison's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tokamix.compare import measure
from tokamix.train.output import run_folder
from tokamix.train.tasks import classify


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """No charts and reports in run folders, few repetitions of timed passes: they take longer than the trainings."""

    def draw(rows: list, path: Path, *args) -> None:
        path.write_bytes(b"drawn")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "draw_curves", draw)
        patch.setattr(classify, "write_report", lambda *args: None)
        patch.setattr(measure, "LATENCY_SECONDS", 0.0)
        yield
