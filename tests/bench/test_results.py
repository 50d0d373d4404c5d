"""Results of the package, of CSV files and of measurements in one form."""

import math
from pathlib import Path

import pytest

from tokamix.bench.results import ModelResult, measured_result, paper_results, read_results, shipped_results
from tokamix.bench.runtimes import RuntimeRow
from tokamix.models.shipped import shipped_weights

RESULTS = Path(__file__).parents[2] / "results"


def test_shipped_weights() -> None:
    """The accuracies and counts of weights.json, in the units of a plot."""
    rows = {row.model: row for row in shipped_results()}
    assert rows.keys() == shipped_weights().keys()
    row = rows["pyramid_nano_softmax.imagenette"]
    assert (row.accuracy, row.source, row.setting) == (90.24, "shipped, imagenette", "96 px")
    assert row.exps == pytest.approx(2.213568)
    assert row.exps > rows["pyramid_nano_sima.imagenette"].exps
    assert math.isnan(row.milliseconds)


def test_papers() -> None:
    rows = {row.model: row for row in paper_results()}
    assert len(rows) > 20
    assert rows["atmnet_tiny"].accuracy == 82.0
    assert rows["atmnet_tiny"].parameters == pytest.approx(27.15, abs=0.01)
    assert not any(name.startswith("pyramid_nano") for name in rows)  # shipped ones, of other data


def test_our_own_files() -> None:
    """Tables of models are read, those of operators are not."""
    rows = read_results(RESULTS / "models.csv")
    assert len(rows) > 10
    assert rows[0].setting == "infer, 224 px, batch 128, bf16, default"
    assert rows[0].memory_gb > 0
    study = read_results(RESULTS / "studies" / "shipped.csv")[0]
    assert study.setting.startswith("training, imagenette")
    assert 80 < study.accuracy < 100
    assert read_results(RESULTS / "ops.csv") == []


def test_files_of_others(tmp_path: Path) -> None:
    """A file that is no table, or has no numbers of ours, gives nothing; a bad number is missing."""
    path = tmp_path / "a.csv"
    for content in (b"\xff\xfe\x00", b"", b"model,colour\na,red\n", b"name,top1\na,3\n"):
        path.write_bytes(content)
        assert read_results(path) == []
    assert read_results(tmp_path / "missing.csv") == []
    path.write_text("model,top1,milliseconds,macs\na,n/a,2.5,3000000000\n")
    (row,) = read_results(path)
    assert math.isnan(row.accuracy)
    assert (row.milliseconds, row.macs, row.source) == (2.5, 3.0, "a.csv")


@pytest.mark.parametrize(("size", "known"), [(96, True), (128, False)])
def test_measurements(size: int, known: bool) -> None:
    """Measured weights have their recorded accuracy at the size it was measured with, and only there."""
    numbers = (2.0, 0.1, 500.0, 1.0, 0.25, math.nan, 1128778, 207040032, 2213568, 0.0)
    row = measured_result(RuntimeRow("pyramid_nano_softmax.imagenette", "eager", "cpu", size, 1, *numbers))
    assert isinstance(row, ModelResult)
    assert math.isnan(row.accuracy) is not known
    assert (row.images_per_second, row.memory_gb, row.exps) == (500.0, 0.25, pytest.approx(2.213568))
    assert row.setting == f"eager, cpu, {size} px, batch 1"
