"""Two processes that evaluate together get the numbers of one."""

import json
import socket
from pathlib import Path

import pytest

from tests.command import call
from tests.evaluate.test_detection import detections
from tests.evaluate.test_segmentation import count_by_hand, random_pair
from tests.evaluate.worker import COMMAND, FEW, evaluate_all, evaluate_as_rank_1, evaluate_together
from tests.processes import started
from tokamix.data import create_dataset, shapes
from tokamix.evaluate import CocoAP


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.xdist_group("processes")
def test_two_processes_agree_with_one(
    segmenter_run: Path, detector_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process is rank 0, which saves the start of an interpreter. Also if one process has no images, or fails."""
    monkeypatch.setitem(shapes.COUNTS, "val", FEW)
    runs = {"segment": str(segmenter_run), "detect": str(detector_run)}
    single = evaluate_all(runs)
    alone = call("eval", segmenter_run, *COMMAND)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": 2, "RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    with started(tmp_path / "log", evaluate_as_rank_1, tmp_path, runs, RANK="1") as other:
        first = evaluate_together(tmp_path, runs)
        other.join(100)
        output = (tmp_path / "log").read_text()
        assert other.exitcode == 0, output[-3000:]
    second = json.loads(output.splitlines()[-1])
    assert (first.pop("printed"), second.pop("printed")) == (alone, "")
    assert alone.count("mIoU") == 1
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
