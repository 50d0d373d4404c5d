"""`evaluate` and `tokamix eval`: sources, classes by name, splits, precision, wrong arguments."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch

from tests.command import call
from tests.train.tiny import tiny_data
from tests.train.tiny_dense import tiny_scenes
from tokamix.data import ArrayDataset, DataError, DatasetSplits
from tokamix.evaluate import evaluate
from tokamix.evaluate.classes import SelectClasses, match_classes
from tokamix.inference import InferenceConfig, imagenet_classes
from tokamix.predict import predictor


def with_classes(classes: list[str]) -> DatasetSplits:
    """The images of `tiny_data()` that belong to some classes, with labels in the order of `classes`."""
    parts = []
    for part in (tiny_data().train, tiny_data().val):
        names = [part.classes[label] for label in part.labels.tolist()]
        chosen = torch.tensor([i for i, name in enumerate(names) if name in classes])
        parts.append(ArrayDataset(part.images[chosen], [classes.index(names[i]) for i in chosen.tolist()], classes))
    return DatasetSplits("tiny", parts[0], parts[1], tuple(classes))


@pytest.fixture(scope="module")
def imperfect_run(classifier_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The classifier with noise on its weights, so that the order of classes matters but not everything is right."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("imperfect") / "run"
    shutil.copytree(classifier_run, folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    noisy = {name: w + 0.03 * torch.randn_like(w) if w.ndim > 1 else w for name, w in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_sources_agree(classifier_run: Path) -> None:
    """A run's folder, its weights files and a module; the numbers are those of training."""
    rows = [json.loads(line) for line in (classifier_run / "metrics.jsonl").read_text().splitlines()]
    epochs = [row for row in rows if row["event"] == "epoch"]
    result = evaluate(classifier_run, tiny_data(), device="cpu")
    assert result["top1"] == pytest.approx(max(row["top1"] for row in epochs))
    assert (result.num_images, result.total_images, result.split, result.data) == (37, 117, "val", "tiny")
    assert (result.task, result.precision, result.device, result.notes) == ("classify", "fp32", "cpu", ())
    assert result.source == str(classifier_run)
    last = evaluate(classifier_run / "last.safetensors", tiny_data(), device="cpu")
    assert last["loss"] == pytest.approx(epochs[-1]["val_loss"] if "val_loss" in epochs[-1] else epochs[-1]["loss"])
    assert evaluate(f"local-dir:{classifier_run}", tiny_data(), device="cpu").metrics == result.metrics
    module = timm.create_model(f"local-dir:{classifier_run}", pretrained=True)
    assert evaluate(module, tiny_data(), device="cpu", batch_size=10).metrics == pytest.approx(result.metrics)


def test_checkpoint_with_the_name_of_its_model(tmp_path: Path) -> None:
    model = timm.create_model("test_resnet", num_classes=4)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    result = evaluate(tmp_path / "w.pth", tiny_data(), model="test_resnet", image_size=32, device="cpu")
    assert result["top5"] == 100.0
    assert "class names of the model are unknown" in result.notes[0]
    with pytest.raises(ValueError, match="was not trained for 3 classes"):
        evaluate(tmp_path / "w.pth", tiny_data(classes=3), model="test_resnet", image_size=32, device="cpu")
    with pytest.raises(ValueError, match="weights of an unknown architecture; name it with --model"):
        evaluate(tmp_path / "w.pth", tiny_data(), device="cpu")


def test_classes_in_a_different_order(imperfect_run: Path) -> None:
    """The same images and names give the same accuracy; by index, they would not."""
    names = ["class 0", "class 1", "class 2", "class 3"]
    expected = evaluate(imperfect_run, with_classes(names), device="cpu")
    assert 40 < expected["top1"] < 100
    permuted = evaluate(imperfect_run, with_classes(names[2:] + names[:2]), device="cpu")
    assert permuted.metrics == pytest.approx(expected.metrics)
    assert "same classes in a different order" in permuted.notes[0]


def test_a_subset_of_the_classes(imperfect_run: Path) -> None:
    """Only the outputs of these classes are compared."""
    result = evaluate(imperfect_run, with_classes(["class 3", "class 1"]), device="cpu")
    assert "the data has 2 of the model's 4 classes: predictions are restricted to them" in result.notes[0]
    model = timm.create_model(f"local-dir:{imperfect_run}", pretrained=True).eval()
    config = InferenceConfig.load(imperfect_run)
    data = with_classes(["class 3", "class 1"]).val
    mean, std = (torch.tensor(v)[:, None, None] for v in (config.mean, config.std))
    with torch.no_grad():
        logits = model((data.images / 255 - mean) / std)[:, [3, 1]]
    assert result["top1"] == pytest.approx(100 * (logits.argmax(1) == data.labels).float().mean().item())


def test_different_classes_are_refused(classifier_run: Path, segmenter_run: Path) -> None:
    data = tiny_data()
    renamed = replace(data, classes=("class 0", "class 1", "cat", "dog"))
    message = r"the classes of tiny are not those of the model. The model has 4 classes \('class 0', .*'class 3'\); "
    with pytest.raises(ValueError, match=message + r"tiny has 4 classes \('class 0', 'class 1', 'cat', 'dog'\)"):
        evaluate(classifier_run, renamed, device="cpu")
    samples = tiny_scenes("segment")
    with pytest.raises(ValueError, match=r"of tiny scenes are not those of the model\. The model has 9 classes"):
        evaluate(segmenter_run, replace(samples, classes=("ground", *samples.classes[1:])), device="cpu")
    with pytest.raises(ValueError, match="the model's task is segment, but tiny was opened for task classify"):
        evaluate(segmenter_run, data, device="cpu")


def test_match_classes() -> None:
    config = InferenceConfig(task="classify", class_names=tuple(name for _, name in imagenet_classes(1000)))
    assert len(set(config.class_names)) == 1000
    ids = [label for label, _ in imagenet_classes(1000)]
    assert match_classes(config, ids, "ImageNet") == (None, "")
    assert match_classes(config, [ids[7], ids[3]], "a part")[0] == [7, 3]
    numbers = InferenceConfig(task="classify", class_names=("0", "1"))
    assert match_classes(numbers, ["cat", "dog"], "pets")[0] is None
    with pytest.raises(ValueError, match="the model has 2 classes, but pets has 3"):
        match_classes(numbers, ["cat", "dog", "mouse"], "pets")


def test_selected_classes_of_segmenters_and_detectors() -> None:
    logits = torch.randn(2, 4, 3, 3)
    assert torch.equal(SelectClasses(torch.nn.Identity(), [2, 0])(logits), logits[:, [2, 0]])
    detections = {"labels": torch.tensor([0, 1, 2, 2]), "scores": torch.tensor([0.9, 0.8, 0.7, 0.6])}
    (selected,) = SelectClasses(torch.nn.Identity(), [2, 0])([detections])
    assert selected["labels"].tolist() == [1, 0, 0]
    assert selected["scores"].tolist() == pytest.approx([0.9, 0.7, 0.6])


@pytest.mark.parametrize("task", ["classify", "segment", "detect"])
def test_splits(task: str, request: pytest.FixtureRequest) -> None:
    """`all` is training and validation images together."""
    runs = {"classify": "classifier_run", "segment": "segmenter_run", "detect": "detector_run"}
    run = request.getfixturevalue(runs[task])
    data = tiny_data() if task == "classify" else tiny_scenes(task, train=3, val=2, side=32)
    train, val, both = (evaluate(run, data, device="cpu", split=split) for split in ("train", "val", "all"))
    sizes = (len(data.train), len(data.val))
    assert (train.num_images, val.num_images, both.num_images) == (*sizes, sum(sizes))
    name = {"classify": "loss", "segment": "pixel_accuracy", "detect": "box_ar"}[task]
    low, high = sorted((train[name], val[name]))
    assert low - 1e-6 <= both[name] <= high + 1e-6
    if task == "classify":
        assert both["loss"] == pytest.approx((80 * train["loss"] + 37 * val["loss"]) / 117)


def test_inference_options(segmenter_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding window, scales and flip reach the segmenter."""
    options: dict = {}
    original = predictor.predict_classes
    monkeypatch.setattr(predictor, "predict_classes", lambda *a, **kw: options.update(kw) or original(*a, **kw))
    changes = ["test_flip=true", "window=24", "test_scales=[0.5, 1]"]
    evaluate(segmenter_run, tiny_scenes("segment"), overrides=changes, device="cpu")
    assert options == {"size": (32, 32), "window": 24, "stride": None, "scales": (0.5, 1.0), "flip": True}


def test_precision_of_the_run(classifier_run: Path, tmp_path: Path) -> None:
    """The forward passes run in the precision of the run's own evaluations, and the result names it."""
    shutil.copytree(classifier_run, tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["precision"] == "fp32"
    fp32 = evaluate(tmp_path / "run", tiny_data(), device="cpu")
    (tmp_path / "run" / "config.json").write_text(json.dumps(config | {"precision": "bf16"}))
    bf16 = evaluate(tmp_path / "run", tiny_data(), device="cpu")
    assert (fp32.precision, bf16.precision) == ("fp32", "bf16")
    assert 1e-6 < abs(fp32["loss"] - bf16["loss"]) < 0.1
    assert evaluate(tmp_path / "run", tiny_data(), device="cpu", precision="fp32").metrics == fp32.metrics
    (tmp_path / "run" / "config.json").write_text(json.dumps(config | {"precision": "fp16"}))
    fp16 = evaluate(tmp_path / "run", tiny_data(), device="cpu")
    assert "fp16, which needs a GPU: evaluated in fp32" in fp16.notes[0]
    with pytest.raises(ValueError, match="fp16 needs a GPU; use fp32 or bf16 on a CPU"):
        evaluate(classifier_run, tiny_data(), device="cpu", precision="fp16")


def test_command(classifier_run: Path, segmenter_run: Path, image_folder: Path, tmp_path: Path) -> None:
    """It prints what was evaluated: the model, the data, the number of images, the split, precision and device."""
    common = ("--data", image_folder, "--device", "cpu", "--workers", 0)
    out = call("eval", classifier_run, *common)
    assert f"{classifier_run} on {image_folder}: 8 of 40 images (split val), fp32 on cpu top-1 100.00 %" in out
    assert "top-5" not in out, "it is always 100 % with two classes"
    assert "40 of 40 images (all images)" in call("eval", classifier_run, *common, "--split", "all")
    assert "32 of 40 images (split train)" in call("eval", classifier_run, *common, "--split", "train")
    out = call("eval", classifier_run, *common, "--report", tmp_path / "report")
    assert f"the report is in {tmp_path / 'report'}" in out
    assert (tmp_path / "report" / "confusion_matrix.csv").is_file()
    shapes = ("--data", "shapes:32", "--device", "cpu", "--workers", 0, "--batch-size", 32)
    out = call("eval", segmenter_run / "last.safetensors", *shapes)
    assert "mIoU" in out
    assert "IoU of background" in out
    assert "reports are for classifiers" in call("eval", segmenter_run, *shapes, "--report", tmp_path, code=1)


def test_no_image_can_be_decoded(classifier_run: Path, tmp_path: Path) -> None:
    for name in tiny_data().classes:
        for part in ("train", "val"):
            (tmp_path / part / name).mkdir(parents=True)
            (tmp_path / part / name / "a.png").write_bytes(b"")
    with pytest.raises(DataError, match="there are no images to measure: none could be decoded"):
        evaluate(classifier_run, tmp_path, device="cpu", corrupt="skip")


WRONG = {
    "no run": (["runs/nosuch"], "there is no run folder and no checkpoint file runs/nosuch"),
    "no weights": (["stvit_small"], "stvit_small has no pretrained weights; give a run's folder, or a checkpoint file"),
    "no model": (["stvit_smal"], "there is no model 'stvit_smal'; did you mean stvit_small"),
    "image size": (["RUN", "--image-size", "0"], "image_size is 0, but must be a number of pixels from 1 on"),
    "batch size": (["RUN", "--batch-size", "0"], "batch_size is 0, but must be at least 1"),
    "mps": (["RUN", "--device", "mps"], "device mps is not supported; use cpu or cuda"),
    "no device": (["RUN", "--device", "gpu"], "there is no device 'gpu'; use cpu or cuda"),
    "unknown option": (["RUN", "--set", "lr=1"], "'lr' is not an inference option; choose from"),
    "option of a segmenter": (["RUN", "--set", "test_flip=true"], "test_flip has no effect for task classify"),
    "no config": (["RUN/state"], "is neither a run's folder nor a timm model's: it has no config.json"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str, classifier_run: Path, image_folder: Path) -> None:
    """One sentence each."""
    arguments, message = WRONG[case]
    words = [word.replace("RUN", str(classifier_run)) for word in arguments]
    out = call("eval", *words, "--data", image_folder, "--workers", 0, code=1)
    assert message in out
    assert out.count("error:") == 1


def test_a_gpu_that_is_missing(classifier_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device cuda is not available: PyTorch finds no GPU; use cpu"):
        evaluate(classifier_run, tiny_data(), device="cuda")


def test_options_of_segmenters_are_refused_for_detectors(detector_run: Path) -> None:
    for option in ("test_flip=true", "test_scales=[0.5,1]", "window=64", "image_size=7"):
        with pytest.raises(ValueError, match=f"{option.partition('=')[0]} has no effect for task detect; choose from"):
            evaluate(detector_run, tiny_scenes("detect"), overrides=[option], device="cpu")


def test_unfinished_runs(classifier_run: Path, tmp_path: Path) -> None:
    shutil.copytree(classifier_run, tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors; has the run finished its first eval"):
        evaluate(tmp_path / "run", tiny_data(), device="cpu")
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        evaluate(tmp_path / "run", tiny_data(), device="cpu")
