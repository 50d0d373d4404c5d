"""The benchmark of detectors and segmenters runs and compares two equal models."""

import csv
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", ["dense.py", "--quick", "--out", str(tmp_path / "dense.csv")])
    runpy.run_path(str(FOLDER / "dense.py"), run_name="__main__")
    rows = list(csv.DictReader((tmp_path / "dense.csv").open()))
    assert [row["method"] for row in rows] == ["mask_rcnn", "semantic_fpn"]
    for row in rows:
        assert float(row["times_as_fast"]) == pytest.approx(float(row["deform_ms"]) / float(row["ours_ms"]), abs=0.02)
    assert "FAILED" not in capsys.readouterr().out
