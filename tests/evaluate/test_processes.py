"""Two processes that evaluate together get the numbers of one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.evaluate.test_detection import detections
from tests.evaluate.test_segmentation import by_hand, made_up
from tokamix.data import open_scenes
from tokamix.evaluate import CocoAP

ROOT = Path(__file__).parents[2]


def test_two_processes_are_like_one(tmp_path: Path) -> None:
    """Also where one of them has seen nothing, and where one fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.evaluate.worker", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["pixels"] == pytest.approx(by_hand([made_up(i) for i in range(5)]), abs=1e-9)
    assert first["pixels of one"] == pytest.approx(by_hand([made_up(0)]), abs=1e-9)
    dataset = open_scenes(str(tmp_path), "detect").val
    alone, lonely = CocoAP(dataset, masks=True), CocoAP(dataset)
    for i in range(len(dataset)):
        alone.update(i, detections(dataset.scene(i), i))
    lonely.update(0, detections(dataset.scene(0), 0))
    assert first["things"] == alone.compute()
    assert first["things of one"] == lonely.compute()
    assert "but a mask of it" in first["error"]
