"""benchmarks/report.py: the table of speed targets, the figure of mixers and the table of large images."""

import csv
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from tokamix.bench import detectors, scaling, suites
from tokamix.bench.models import ModelRow
from tokamix.bench.rows import RowFile

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    module: Any = importlib.import_module("report")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "DOCS", tmp_path)
    return module


def write_targets(folder: Path, *measured: tuple[ModelRow, dict[str, float]]) -> None:
    rows = RowFile(folder / "targets.csv")
    for i, (row, numbers) in enumerate(measured):
        rows.append(str(i), row.as_dict() | numbers, "cpu")


def table(report: Any) -> dict[tuple[str, str], list[str]]:
    """The cells of the table of targets by setting and model."""
    lines = report.targets_table(*(report.rows(name) for name in ("targets", "eager", "traced", "side_by_side")))
    cells = [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert all(len(row) == 7 for row in cells)
    return {(row[0], row[1]): row[2:] for row in cells}


def test_nothing_is_measured(report: Any) -> None:
    cells = table(report)
    assert len(cells) > 35
    assert {row[1] for row in cells.values()} == {"not measured"}
    assert all(row[4] == ("not measured" if row[3] else "") for row in cells.values())
    assert "not measured" in report.scaling_section()[-1]
    assert not (report.DOCS / "scaling.png").exists()


def test_bars(report: Any) -> None:
    """Numbers and peers of one run; high rates and short times reach a bar."""
    setting = ("infer", 224, 128, "bf16", "reduce-overhead", "auto")
    eager, best = ("infer", "800x1280", 1, "bf16", "", "auto"), ("infer", "800x1280", 1, "bf16", "graphed", "auto")
    write_targets(
        report.RESULTS,
        (ModelRow("atmnet_tiny", *setting), {"images_per_second": 20900.0, "first_call_s": 20.0}),
        (ModelRow("stvit_small", *setting), {"images_per_second": 17100.0, "first_call_s": 9.0}),
        (ModelRow("convnext_tiny", *setting), {"images_per_second": 16000.0, "first_call_s": 18.0}),
        (ModelRow(detectors.OURS, *eager), {"milliseconds": 20.0}),
        (ModelRow(detectors.TORCHVISION, *eager), {"milliseconds": 30.0}),
        (ModelRow(detectors.OURS, *best), {"milliseconds": 5.5}),
    )
    with (report.RESULTS / "eager.csv").open("w") as file:
        writer = csv.DictWriter(file, ["model", "mode", "light", "batch", "ms", "images_per_second"])
        writer.writeheader()
        for name, light, rate in (("stvit_small", "on", 3000), ("stvit_small", "off", 1), ("convnext_tiny", "", 2000)):
            ms = 128e3 / rate
            writer.writerow(dict(zip(writer.fieldnames, (name, "train", light, 128, ms, rate), strict=True)))
        writer.writerow(dict(zip(writer.fieldnames, ("atmnet_tiny", "one image", "on", 1, 8.0, 125), strict=True)))
    cells = table(report)
    graphs = ["convnext_tiny 16,000", "19,000"]
    assert cells["inference, graphs", "atmnet_tiny"][1:] == ["20,900", *graphs, "**yes**, 1.10x"]
    assert cells["inference, graphs", "stvit_small"][1:] == ["17,100", *graphs, "no, 0.90x"]
    assert cells["first call, inference, s", "atmnet_tiny"][1::3] == ["20.0", "no, 0.90x"]
    assert cells["first call, inference, s", "stvit_small"][1::3] == ["9.00", "**yes**, 2.00x"]
    assert cells["Mask R-CNN, eager, ms", detectors.OURS][1::3] == ["20.0", "**yes**, 1.50x"]
    assert cells["Mask R-CNN, best mode, ms", detectors.OURS][1::3] == ["5.50", "not measured"]
    assert cells["training, eager", "stvit_small"][1::3] == ["3,000", "**yes**, 1.50x"]
    assert cells["one image, eager, ms", "atmnet_tiny"][1:] == ["8.00", "not measured", "7.00", "no, 0.88x"]


def test_every_target_is_measured(report: Any) -> None:
    """The suite has a case for each model and peer of the table; the eager ones are those of another script."""
    measured = {
        (mode, str(size), batch, compiled, name)
        for mode, size, batch, compiled, names in suites.TARGETS
        for name in names.split()
    }
    targets: Any = sys.modules["targets"]
    for target in targets.TARGETS:
        for model in (*target.bars, *target.peers):
            if target.file == "targets" and "Mask" not in target.title:
                assert (*target.setting, model) in measured, target.title
    assert {targets.OURS, targets.TORCHVISION} == set(detectors.BEST_MODE)


def test_scaling(report: Any) -> None:
    """Mixers that are drawn are those that are measured; cells of images are times, misses or gaps."""
    assert set(report.COLORS) == {*scaling.OURS, *scaling.PEERS}
    assert set(report.PEERS) == set(scaling.PEERS)
    rows = RowFile(report.RESULTS / "scaling.csv")
    for i, name in enumerate(report.COLORS):
        for tokens in (196, 784):
            numbers = dict.fromkeys((*report.PANELS.values(), "limit_ms"), (i + 1) * tokens / 100)
            rows.append(f"{name} {tokens}", {"op": name, "tokens": tokens, **numbers}, "cpu")
    nan = float("nan")
    images = RowFile(report.RESULTS / "images.csv")
    for row in (
        scaling.ImageRow("stvit_small", "infer", 4096, True, 50.0, 41.0, 9.0, nan),
        scaling.ImageRow("stvit_small", "infer", 1024, True, 15.0, nan, 1.0, 0.01),
        scaling.ImageRow("stvit_small", "train", 4096, False, nan, nan, nan, nan),
        scaling.ImageRow("stvit_small", "train", 1024, True, 60.0, 20.0, 3.0, nan),
        scaling.ImageRow("deit_small_patch16_224", "infer", 4096, True, 900.0, 900.0, 5.0, nan),
    ):
        images.append(str(row), row.as_dict(), "cpu")
    lines = report.scaling_section()
    assert "from 196 to 784 tokens" in lines[2]
    gap = "not measured"
    assert lines[-2:] == [
        "| `stvit_small` | 15.0 (1.0) | 41.0 (9.0) | 20.0 (3.0) | does not fit | 4,096 px / 1,024 px |",
        f"| `deit_small_patch16_224` | {gap} | 900.0 (5.0) | {gap} | {gap} | 4,096 px / {gap} |",
    ]
    assert (report.DOCS / "scaling.png").read_bytes().startswith(b"\x89PNG")
