"""Two processes that evaluate together get the numbers of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import call
from tests.evaluate.test_detection import detections
from tests.evaluate.test_segmentation import count_by_hand, random_pair
from tests.evaluate.worker import evaluate_all
from tokamix.data import create_dataset
from tokamix.evaluate import CocoAP

ROOT = Path(__file__).parents[2]


def test_two_processes_agree_with_one(segmenter_run: Path, detector_run: Path, tmp_path: Path) -> None:
    """Also if one process has no images, or fails; `tokamix eval` prints once what both measured."""
    runs = {"segment": str(segmenter_run), "detect": str(detector_run)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.evaluate.worker", str(tmp_path), json.dumps(runs)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    single = evaluate_all(runs)
    for task, decoded in (("segment", (4, 3)), ("detect", (4, 3)), ("classify", (19, 18))):
        assert (first.pop(f"{task} decoded"), second.pop(f"{task} decoded")) == decoded
        assert first[task] == pytest.approx(single[task], abs=1e-5)
        assert first[f"{task} images"] == sum(decoded)
    assert first == second
    assert first["pixels"] == pytest.approx(count_by_hand([random_pair(i) for i in range(5)]), abs=1e-9)
    assert first["pixels of rank 0"] == pytest.approx(count_by_hand([random_pair(0)]), abs=1e-9)
    dataset = create_dataset(str(tmp_path), "detect").val
    whole, part = CocoAP(dataset, masks=True), CocoAP(dataset)
    for i in range(len(dataset)):
        whole.update(i, detections(dataset.sample(i), i))
    part.update(0, detections(dataset.sample(0), 0))
    assert first["objects"] == whole.compute()
    assert first["objects of rank 1"] == part.compute()
    assert "but one of its masks" in first["error"]
    alone = call("eval", segmenter_run, "--data", "shapes:32", "--device", "cpu", "--workers", "0")
    assert " ".join(done.stdout.split()) == alone
    assert alone.count("mIoU") == 1
