"""Fixtures of the training tests."""

from pathlib import Path

import pytest

from tokamix.train.output import run_folder


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than a tiny run; one test draws for real."""

    def draw(rows: list, path: Path, shown: dict) -> None:
        path.write_bytes(b"drawn")

    monkeypatch.setattr(run_folder, "draw_curves", draw)
