"""Two processes that evaluate together get the numbers of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.evaluate.test_detection import detections
from tests.evaluate.test_segmentation import by_hand, made_up
from tests.evaluate.worker import whole
from tests.train.tiny_dense import run
from tokamix.cli import app
from tokamix.data import create_dataset
from tokamix.evaluate import CocoAP

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def printed(*arguments: str) -> str:
    """What a module prints, started in two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A segmenter and a detector."""
    path = tmp_path_factory.mktemp("runs")
    for task in ("segment", "detect"):
        run(task, path / task, iterations=1, eval_every=1)
    return path


def test_the_command_deals_the_images_out(folder: Path) -> None:
    """One process tells what all of them saw."""
    command = ["eval", str(folder / "segment"), "--data", "shapes:32", "--device", "cpu", "--workers", "0"]
    together = printed("tokamix", *command)
    assert together.count("mIoU") == 1
    assert together == CliRunner().invoke(app, command).output


def test_two_processes_are_like_one(folder: Path) -> None:
    """Also where one of them has seen nothing, and where one fails."""
    printed("tests.evaluate.worker", str(folder))
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    alone = whole(folder)
    for task, share in (("segment", (4, 3)), ("detect", (4, 3)), ("classify", (19, 18))):
        assert (first.pop(f"{task} asked"), second.pop(f"{task} asked")) == share
        assert first[task] == pytest.approx(alone[task], abs=1e-5)
    assert first == second
    assert first["pixels"] == pytest.approx(by_hand([made_up(i) for i in range(5)]), abs=1e-9)
    assert first["pixels of one"] == pytest.approx(by_hand([made_up(0)]), abs=1e-9)
    dataset = create_dataset(str(folder), "detect").val
    alone, lonely = CocoAP(dataset, masks=True), CocoAP(dataset)
    for i in range(len(dataset)):
        alone.update(i, detections(dataset.scene(i), i))
    lonely.update(0, detections(dataset.scene(0), 0))
    assert first["things"] == alone.compute()
    assert first["things of one"] == lonely.compute()
    assert "but one of its masks" in first["error"]
