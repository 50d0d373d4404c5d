"""Training segmenters and detectors: learning, exact resume, starting weights and errors."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.data.annotated.files import annotation, content, write_coco
from tests.train.launch import DENSE_RUNS, MASKS, SMALL_STVIT
from tests.train.loop.test_resume import Stop, stop_at
from tests.train.tiny import assert_same_bits, tiny_data
from tests.train.tiny import run as run_classifier
from tests.train.tiny_dense import DETECT, SEGMENT, run, tiny_scenes
from tokamix.data import Loader, create_dataset
from tokamix.dense import create_segmenter
from tokamix.evaluate import evaluate
from tokamix.inference import load_model
from tokamix.train import RunResult, train
from tokamix.train.loop.engine import NotFiniteError
from tokamix.train.loop.epochs import FixedLengthEpochs
from tokamix.train.loop.optim import create_optimizer, create_scheduler
from tokamix.train.setup.accelerator import synchronise_batch_norm
from tokamix.train.tasks.dense import SHEET_IMAGES, Dense
from tokamix.train.tasks.segment import Segment

CPU = torch.device("cpu")


def test_segmentation_is_learned(tmp_path: Path) -> None:
    """Overfits 4 images; predicting background everywhere would give a mean IoU of 10."""
    data = tiny_scenes("segment", train=4, val=0, side=48)
    settings = {"iterations": 60, "eval_every": 20, "crop_size": 48, "lr": 2e-2}
    result = run("segment", tmp_path, data, **settings, method_kwargs={"width": 32, "neck_width": 32})
    losses = [row["train_loss"] for row in result.epochs]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2
    assert result.metric == "miou"
    assert result.score > 40


def test_detection_is_learned(tmp_path: Path) -> None:
    """Overfits 2 images, whose boxes and masks cannot be found by chance."""
    data = tiny_scenes("detect", train=2, val=0, side=64)
    settings = {"iterations": 50, "eval_every": 25, "batch_size": 2, "hflip": 0.0, "method": "mask_rcnn"}
    result = run("detect", tmp_path, data, **settings, method_kwargs={"width": 32, "rois_per_image": 16})
    losses = [row["train_loss"] for row in result.epochs]
    assert losses[-1] < losses[0] / 2
    assert result.metric == "mask_ap"
    assert result.score > 25
    assert result.best["box_ap"] > 25


CASES = {
    "segment": {"ema": 0.9, "accumulate": 2, "photometric": True, "scale": (64, 40), "scale_range": (0.5, 2.0)},
    "upernet": {"method": "upernet", "method_kwargs": {"width": 16}, "cat_max": 0.75},
    "detect": {"ema": 0.9, "scales": (24, 32, 40), "scale": (64, 32), "backbone": "stvit_small", "drop_path": 0.1}
    | {"model_kwargs": SMALL_STVIT},
    "masks": {**MASKS, "iterations": 4, "eval_every": 2},
    "cascade": {**MASKS, "method": "cascade_mask_rcnn", "iterations": 2, "eval_every": 1, "batch_size": 2},
}


# within an epoch of the data, and after an evaluation
STOPS = [("segment", 2), ("segment", 4), ("upernet", 4), ("detect", 4), ("masks", 1), ("cascade", 1)]


@pytest.mark.parametrize(("name", "update"), STOPS)
def test_resuming_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Callable[..., RunResult], name: str, update: int
) -> None:
    task = "segment" if name in ("segment", "upernet") else "detect"
    settings = {"save_every": 1, **CASES[name]}
    whole = reference(task, **settings)
    stop_at(monkeypatch, update)
    with pytest.raises(Stop):
        run(task, tmp_path / "broken", **settings)
    monkeypatch.undo()
    torch.manual_seed(123)
    resumed = run(task, tmp_path / "broken", **settings)
    assert_same_bits(whole.folder, resumed.folder)
    assert resumed.best == whole.best
    sheets = [{p.name: p.read_bytes() for p in (r.folder / "predictions").iterdir()} for r in (whole, resumed)]
    assert sheets[0] == sheets[1]


@pytest.mark.xdist_group("processes")
def test_two_processes(two_processes: tuple[Path, str]) -> None:
    """Each process evaluates its part of the images; the metrics equal those of one process, for every method."""
    root, output = two_processes
    assert "BatchNorm uses the images of each process alone" in output
    for name, settings in DENSE_RUNS.items():
        rows = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
        alone = evaluate(root / name, tiny_scenes(settings["task"]), device="cpu").metrics
        shared = {key: rows[-1][key] for key in alone if "/" not in key}
        assert shared == pytest.approx({key: alone[key] for key in shared}, abs=1e-6)
        assert len(shared) >= 3


def test_the_folder(tmp_path: Path) -> None:
    """The folder is enough to load the model; the drawings of the best and the latest epochs are kept."""
    data = tiny_scenes("segment")
    result = run("segment", tmp_path / "a", data, iterations=6, eval_every=1, scale=(64, 40), log_every=1)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["method"], config["backbone"], config["neck"]) == ("semantic_fpn", "test_resnet", "fpn")
    assert config["label_names"][:2] == ["background", "circle"]
    assert config["inference"]["scale"] == [64, 40]
    model, again = result.load(), load_model(tmp_path / "a")[0]
    image = torch.randn(1, 3, 33, 50)
    assert model(image).shape == (1, 9, 33, 50)
    assert torch.equal(model(image), again(image))
    found = evaluate(tmp_path / "a", data, device="cpu", batch_size=2)
    assert found["miou"] == pytest.approx(result.score)
    assert found["iou/background"] > 0
    kept = {f"epoch_{n:04}.png" for n in {result.best["epoch"], 4, 5, 6}}
    assert {p.name for p in (tmp_path / "a" / "predictions").iterdir()} == kept
    with Image.open(tmp_path / "a" / "predictions" / "epoch_0006.png") as sheet:
        assert sheet.size[0] > 3 * 320
    card = (tmp_path / "a" / "README.md").read_text()
    assert "`semantic_fpn with test_resnet`" in card
    assert "| miou |" in card
    run("segment", tmp_path / "a", data, iterations=1, eval_every=1, resume=False)
    assert [p.name for p in (tmp_path / "a" / "predictions").iterdir()] == ["epoch_0001.png"]


def first_weights(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Record the initial weights of a run."""
    found: dict[str, torch.Tensor] = {}
    real = Dense.prepare

    def prepare(self: Dense, model: torch.nn.Module, accelerator) -> None:
        found.update({name: t.clone() for name, t in model.state_dict().items()})
        real(self, model, accelerator)

    monkeypatch.setattr(Dense, "prepare", prepare)
    return found


def test_starting_from_a_classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backbone is the classifier's body; its name comes from the checkpoint."""
    settings = {"network": "test_resnet", "model_kwargs": {}, "image_size": 32, "epochs": 2}
    run_classifier(tmp_path / "classifier", data=tiny_data(), **settings)
    old = load_file(tmp_path / "classifier" / "model.safetensors")
    start = first_weights(monkeypatch)
    for source in ("classifier", "classifier/model.safetensors"):
        run("detect", tmp_path / "a", checkpoint=tmp_path / source, finetune=True, iterations=1, eval_every=1)
        body = {name.removeprefix("backbone.body."): t for name, t in start.items() if "backbone.body." in name}
        assert len(body) > 30
        assert all(torch.equal(t, old[name]) for name, t in body.items())
        (tmp_path / "a" / "state" / "state.safetensors").unlink()
    with pytest.raises(
        ValueError, match="starts from trained weights; give them with --checkpoint, or use --pretrained"
    ):
        run("detect", tmp_path / "b", finetune=True)


def test_starting_from_a_segmenter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same method takes all weights but those of different classes, another method only the backbone."""
    run("segment", tmp_path / "old", iterations=2, eval_every=2)
    old = load_file(tmp_path / "old" / "model.safetensors")
    start = first_weights(monkeypatch)
    data = tiny_scenes("segment")
    for number, source in enumerate(("old", "old/model.safetensors")):
        folder = tmp_path / f"same_{number}"
        run("segment", folder, data, checkpoint=tmp_path / source, iterations=1, eval_every=1, seed=5)
        assert all(torch.equal(t, old[name]) for name, t in start.items())
    assert not caplog.records
    (tmp_path / "alone.safetensors").write_bytes((tmp_path / "old" / "model.safetensors").read_bytes())
    alone = {"checkpoint": tmp_path / "alone.safetensors", "iterations": 1, "eval_every": 1, "seed": 5}
    run("segment", tmp_path / "alone", data, **alone)
    (message,) = caplog.messages
    assert message.endswith("does not name its method: only the backbone is loaded; give the run's folder")
    assert all(torch.equal(t, old[name]) for name, t in start.items() if name.startswith("backbone."))
    assert not all(torch.equal(t, old[name]) for name, t in start.items())
    fewer = replace(data, classes=data.classes[:5])
    for part in (fewer.train, fewer.val):
        part.classes, part.category_ids = part.classes[:5], part.category_ids[:5]
        for i in range(len(part)):
            scene = part.sample(i)
            scene.segmentation = scene.segmentation.clamp(max=4)
    run("segment", tmp_path / "fewer", fewer, checkpoint=tmp_path / "old", iterations=1, eval_every=1, seed=5)
    fresh = {name for name, t in start.items() if t.shape != old[name].shape or not torch.equal(t, old[name])}
    assert fresh == {"head.classifier.1.weight", "head.classifier.1.bias"}
    run("detect", tmp_path / "detector", checkpoint=tmp_path / "old", iterations=1, eval_every=1, seed=5)
    shared = {name for name, t in start.items() if name in old and torch.equal(t, old[name])}
    assert {name for name in start if name.startswith("backbone.body.")} <= shared
    with pytest.raises(ValueError, match="is not a classifier, but semantic_fpn for task segment"):
        run_classifier(tmp_path / "c", checkpoint=tmp_path / "old")


def bad_scenes(root: Path, **values: Any) -> str:
    """A COCO data set of four training and five validation images."""
    for part, images in (("train", 4), ("val", 5)):
        things = [annotation(i + 1, 10 + i, [5, 5, 20, 20], **values) for i in range(images)]
        write_coco(root, part, content(images, things))
    return str(root)


@pytest.mark.parametrize("task", ["segment", "detect"])
def test_unreadable_images(tmp_path: Path, task: str) -> None:
    """They are skipped if requested, also on the sheet of predictions."""
    source = bad_scenes(tmp_path / "data")
    (tmp_path / "data" / "val" / "10.png").write_bytes(b"no picture")
    data = create_dataset(source, task)
    result = run(task, tmp_path / "a", data, corrupt="skip", iterations=1, eval_every=1, batch_size=2)
    assert len(result.epochs) == 1
    with Image.open(tmp_path / "a" / "predictions" / "epoch_0001.png") as sheet:
        assert sheet.height > SHEET_IMAGES * 240  # rows of 320 x 256


def test_boxes_do_not_need_masks(tmp_path: Path) -> None:
    """RetinaNet ignores masks, so that one of the wrong size does not matter."""
    source = bad_scenes(tmp_path / "data", segmentation={"size": [20, 60], "counts": [0, 400, 800]})
    run("detect", tmp_path / "a", create_dataset(source, "detect"), iterations=1, eval_every=1, batch_size=2)
    assert (tmp_path / "a" / "predictions" / "epoch_0001.png").is_file()


def test_failed_drawings_do_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def ground_truth(self, sample):
        raise ValueError("no ground truth")

    monkeypatch.setattr(Segment, "ground_truth", ground_truth)
    assert len(run("segment", tmp_path).epochs) == 2
    assert caplog.messages == ["predictions cannot be drawn: ValueError: no ground truth"]
    assert not (tmp_path / "predictions").exists()


@pytest.mark.parametrize("averaged", [False, True])
def test_drawings_show_the_best_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, averaged: bool) -> None:
    """The weights or their average, whichever is better."""
    scores = iter([2.0, 3.0] if averaged else [3.0, 2.0])
    shown: list[dict[str, torch.Tensor]] = []

    def draw_predictions(self, model):
        shown.append({name: t.clone() for name, t in model.state_dict().items()})

    monkeypatch.setattr(Segment, "evaluate", lambda *args: {"miou": next(scores)})
    monkeypatch.setattr(Segment, "draw_predictions", draw_predictions)
    result = run("segment", tmp_path, ema=0.9, iterations=3, eval_every=3)
    assert result.best["averaged"] == averaged
    best = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(t, best[name]) for name, t in shown[0].items())


def test_compiled_for_all_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training with four image sizes needs fewer graphs; the losses are those without compilation."""
    graphs = []

    def count(graph, inputs):
        graphs.extend([graph] * torch.is_grad_enabled())
        return graph

    real = torch.nn.Module.compile
    settings = {"iterations": 8, "eval_every": 8, "batch_size": 2}
    settings |= {"scale": (128, 32), "scales": (24, 56, 88, 120)}  # are padded to 32, 64, 96 and 128
    plain = run("detect", tmp_path / "plain", **settings)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **kw: real(self, backend=count, **kw))
    torch._dynamo.reset()
    compiled = run("detect", tmp_path / "compiled", **settings, compile=True)
    torch._dynamo.reset()
    losses = [[row["train_loss"] for row in result.epochs] for result in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert 0 < len(graphs) < 4  # a size, then all others


@pytest.mark.parametrize("body", ["test_resnet", "test_efficientnet"])
def test_sync_batch_norm(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Every BatchNorm is converted, also with an activation inside, and the outputs stay the same."""
    model = create_segmenter("semantic_fpn", body, 3, width=16, neck_width=16).eval()
    image = torch.randn(1, 3, 64, 64)
    before = model(image)
    norms = sum(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *args: 2)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda *args: "nccl")
    assert f"{norms} BatchNorm layers are synchronised over 2" in (synchronise_batch_norm(model, SEGMENT) or "")
    assert sum(isinstance(m, torch.nn.SyncBatchNorm) for m in model.modules()) == norms > 5
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules())
    assert torch.equal(model(image), before)


def test_loss_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Dense.loss

    def loss(self, model, images, targets, position):
        value, logs = real(self, model, images, targets, position)
        if (position.epoch, position.batch) == (0, 1):
            value = value * torch.nan
        return value, {**logs, "loss": value}

    monkeypatch.setattr(Dense, "loss", loss)
    with pytest.raises(NotFiniteError, match="not finite at step 2 \\(batch 2 of epoch 1"):
        run("segment", tmp_path / "a")
    assert len(run("segment", tmp_path / "b", skip_nan=1).epochs) == 2


def test_intervals() -> None:
    """Batches continue over the boundaries of the data's epochs, and are the same from any start."""

    class Three:
        dataset_size = 12
        started: list[tuple[int, int]] = []  # noqa: RUF012

        def __len__(self) -> int:
            return 3

        def epoch(self, number: int, start: int = 0):
            self.started.append((number, start))
            yield from ((number, step) for step in range(start, 3))

        endless = Loader.endless

    intervals = FixedLengthEpochs(Three(), 5)
    assert len(intervals) == 5
    both = [*intervals.epoch(0), *intervals.epoch(1)]
    assert both == [(e, s) for e in range(4) for s in range(3)][:10]
    assert Three.started == [(0, 0), (1, 0), (2, 0), (3, 0)]  # no batch is read twice
    assert list(FixedLengthEpochs(Three(), 5).epoch(1, start=2)) == both[7:]


def rates(recipe, steps: int, updates) -> list[float]:
    optimizer = create_optimizer(torch.nn.Linear(3, 3), recipe, CPU)
    schedule = create_scheduler(optimizer, recipe, steps)
    found = []
    for update in updates:
        schedule.step_update(update)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_poly_and_step() -> None:
    poly = SEGMENT.replace(iterations=100, eval_every=50, power=0.9, lr=2.0, warmup_iterations=10, warmup_ratio=0.1)
    assert rates(poly, 50, [0, 5]) == pytest.approx([0.2, 1.1])
    assert rates(poly, 50, [10, 50, 99]) == pytest.approx([2 * (1 - t / 100) ** 0.9 for t in (10, 50, 99)])
    step = DETECT.replace(iterations=None, eval_every=None, epochs=12, schedule="step", milestones=(8, 11), lr=1.0)
    step = step.replace(warmup_iterations=0)
    assert rates(step, 7, [0, 8 * 7 - 1, 8 * 7, 11 * 7 - 1, 11 * 7]) == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    by_iterations = step.replace(iterations=100, milestones=(60,))
    assert rates(by_iterations, 7, [59, 60]) == pytest.approx([1, 0.1])


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the recipe tiny_detect is for task detect, not segment"):
        train(None, tiny_scenes("detect"), DETECT, tmp_path, task="segment", device="cpu")
    with pytest.raises(ValueError, match="needs annotated images, but tiny has images with one label each"):
        run("segment", tmp_path, tiny_data())
    with pytest.raises(ValueError, match="is for task classify, but tiny scenes was opened for another task"):
        run_classifier(tmp_path, data=tiny_scenes("segment"))
    with pytest.raises(ValueError, match="UperNet has its own pyramid and takes no neck, got 'atm_fpn'"):
        run("segment", tmp_path, method="upernet", neck="atm_fpn", method_kwargs={})
    with pytest.raises(ValueError, match="neither semantic_fpn nor test_resnet has an argument 'depths'"):
        run("segment", tmp_path, model_kwargs={"depths": [1]})
    with pytest.raises(ValueError, match="there is no model 'stvit_smal'; did you mean stvit_small"):
        run("segment", tmp_path, backbone="stvit_smal")
    with pytest.raises(ValueError, match="creates its model itself; give the name of a backbone"):
        run("segment", tmp_path, backbone=torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="--fsdp supports classifiers only, not task segment"):
        run("segment", tmp_path, fsdp=True)
    boxes = tiny_scenes("detect")
    boxes.train.has_masks = False
    with pytest.raises(ValueError, match="mask_rcnn learns masks, but the annotations have only boxes"):
        run("detect", tmp_path, boxes, **MASKS)
    with pytest.raises(ValueError, match="10 training images do not fill one batch of 16"):
        run("segment", tmp_path, batch_size=16)
    with pytest.raises(ValueError, match="names no model; give one with --model"):
        train(None, tiny_scenes("segment"), task="segment", output=tmp_path, device="cpu")


def test_different_classes(tmp_path: Path) -> None:
    run("segment", tmp_path / "a", iterations=1, eval_every=1)
    data = tiny_scenes("segment")
    renamed = replace(data, classes=("ground", *data.classes[1:]))
    with pytest.raises(
        ValueError, match=r"The model has 9 classes .'background', .* tiny scenes has 9 classes .'ground'"
    ):
        evaluate(tmp_path / "a", renamed, device="cpu")
    with pytest.raises(ValueError, match="a target has class 8, but there are 4"):
        evaluate(tmp_path / "a", replace(data, classes=data.classes[:4]), device="cpu")
    with pytest.raises(ValueError, match="'lr' is not an inference option; choose from"):
        evaluate(tmp_path / "a", data, overrides=["lr=1"], device="cpu")
    with pytest.raises(FileNotFoundError, match="there is no run folder and no checkpoint file"):
        load_model(tmp_path / "none")
    (tmp_path / "a" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors"):
        load_model(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="neither a run's folder nor a timm model's"):
        load_model(tmp_path)
