"""Fixtures of the training tests."""

from pathlib import Path
from typing import Any

import pytest

from tokamix.train.output import run_folder
from tokamix.train.tasks import classify


@pytest.fixture(autouse=True)
def no_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace curves and reports, which take longer than a tiny run; `finished` in test_run.py has the real ones."""

    def draw_curves(rows: list, path: Path, names: dict) -> None:
        path.write_bytes(b"drawn")

    def write_report(folder: Path, *args: Any) -> None:
        (folder / "mistakes.png").write_bytes(b"drawn")

    monkeypatch.setattr(run_folder, "draw_curves", draw_curves)
    monkeypatch.setattr(classify, "write_report", write_report)
