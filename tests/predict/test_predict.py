"""`predict` and `Predictor`: every task, every form of input, what is written, unreadable files."""

import csv
import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO

from tests.command import call
from tests.train.tiny import tiny_data
from tests.train.tiny_dense import tiny_scenes
from tokamix.data import DataError
from tokamix.data.annotated.loader import create_eval_loader as create_annotated_loader
from tokamix.data.images.datasets import FileDataset
from tokamix.data.images.loader import create_eval_loader
from tokamix.inference import InferenceConfig
from tokamix.predict import Prediction, Predictor, load_predictor, predict
from tokamix.predict.files import find_images, merge_masks
from tokamix.predict.predictor import read_image

NAMES = ("a.png", "b.jpg", "c.webp", "d.png", "line.png")
CPU = ("--device", "cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images in several file formats, and one of a single row."""
    path = tmp_path / "images"
    path.mkdir()
    samples = tiny_scenes("detect", train=4, val=0, side=64)
    for i, name in enumerate(NAMES[:4]):
        Image.fromarray(samples.train.sample(i).image.permute(1, 2, 0).numpy()).save(path / name)
    Image.new("RGB", (400, 1), (90, 120, 200)).save(path / "line.png")
    return path


@pytest.fixture(scope="module")
def classifier(classifier_run: Path) -> Predictor:
    return load_predictor(classifier_run, "cpu")


@pytest.fixture(scope="module")
def detector(detector_run: Path) -> Predictor:
    return load_predictor(detector_run, "cpu", score_threshold=0.1)


def test_classify(classifier: Predictor) -> None:
    """Top classes with names, best first, equal to the softmax of the model."""
    data = tiny_data().val
    images = data.images[:9]
    predictions = predict(classifier, images)
    pixels = images.float() / 255
    mean, std = (torch.tensor(v)[:, None, None] for v in (classifier.config.mean, classifier.config.std))
    probabilities = classifier.model((pixels - mean) / std).softmax(1)
    for prediction, row, label in zip(predictions, probabilities, data.labels, strict=False):
        assert prediction.scores.tolist() == pytest.approx(row.sort(descending=True).values.tolist(), abs=1e-5)
        assert prediction.names == tuple(f"class {i}" for i in prediction.labels.tolist())
        assert prediction.names[0] == f"class {label}"
    assert "%" in predictions[0].summary()
    few = Predictor(classifier.model, classifier.config, top_k=2, batch_size=4)
    assert [len(p.names) for p in few(list(images))] == [2] * 9


def test_files_are_preprocessed_as_in_evaluation(classifier_run: Path, folder: Path) -> None:
    """To the bit, for classifiers, which resize and crop, and for segmenters of several scales."""
    config = InferenceConfig.load(classifier_run).replace(image_size=24, crop_pct=0.8)
    predictor = Predictor(torch.nn.Linear(1, 1), config)
    files = [folder / name for name in NAMES[:4]]
    (batch, _), *_ = create_eval_loader(FileDataset(files, [0] * 4, ("a",)), config, batch_size=4).epoch(0)
    for file, expected in zip(files, batch, strict=True):
        assert torch.allclose(predictor.preprocess(read_image(file, config)), expected, atol=1e-6)


def test_annotated_images_are_preprocessed_as_in_evaluation(segmenter_run: Path) -> None:
    """To the pixel, also an image of a single column, where torch has a fault of its own."""
    data = tiny_scenes("segment").val
    for scale in ((400, 40), (64, 24), None):
        config = InferenceConfig.load(segmenter_run).replace(scale=scale)
        predictor = Predictor(torch.nn.Linear(1, 1), config)
        (images, _), *_ = create_annotated_loader(data, config, batch_size=5).epoch(0)
        for i, expected in enumerate(images):
            assert torch.allclose(predictor.preprocess(data.sample(i).image), expected, atol=1e-6)
    config = config.replace(scale=(400, 40))
    column = torch.randint(256, (3, 800, 1), dtype=torch.uint8)
    narrow = Predictor(torch.nn.Linear(1, 1), config).preprocess(column)
    wide = Predictor(torch.nn.Linear(1, 1), config).preprocess(column.expand(3, 800, 2).contiguous())
    assert narrow.shape == (3, 400, 1)
    assert torch.allclose(narrow, wide[..., :1], atol=0.02)


def test_forms_of_input(classifier: Predictor, detector: Predictor, folder: Path) -> None:
    """A file, a PIL image, an array and a tensor are the same image; a list gives a list."""
    for predictor in (classifier, detector):
        file = folder / "a.png"
        array = np.array(Image.open(file))
        tensor = torch.from_numpy(array).permute(2, 0, 1)
        expected = predictor(file)
        assert expected.image == str(file)
        assert expected.size == (64, 64)
        for image in (str(file), Image.open(file), array, tensor):
            assert torch.equal(predictor(image).scores, expected.scores)
        for images in ([file, file], (array, array), torch.stack([tensor] * 2), np.stack([array] * 2)):
            assert [torch.equal(p.scores, expected.scores) for p in predictor(images)] == [True, True]
        assert predictor([]) == []
        assert predict(predictor, []) == []
        grey = predictor(array[..., 0])
        assert torch.equal(grey.scores, predictor(np.repeat(array[..., :1], 3, -1)).scores)
        with pytest.raises(ValueError, match=r"an image is a uint8 tensor \(.*3.*, H, W\), got \(64, 64, 3\)"):
            predictor(tensor.permute(1, 2, 0))
        with pytest.raises(ValueError, match=r"of torch\.float32"):
            predictor(tensor.float())


def test_classify_command(classifier_run: Path, folder: Path, tmp_path: Path) -> None:
    """A table on the screen; CSV, JSONL and a contact sheet on request; the same predictions in all of them."""
    table, lines, sheet = tmp_path / "out.csv", tmp_path / "out.jsonl", tmp_path / "sheet.png"
    out = call("predict", classifier_run, folder, "-o", table, "--sheet", sheet, "--top-k", 2, "--batch-size", 2, *CPU)
    predictions = load_predictor(classifier_run, "cpu", top_k=2)([folder / name for name in NAMES])
    for prediction in predictions:
        assert f"{prediction.names[0]} {100 * float(prediction.scores[0]):.1f} % {prediction.names[1]}" in out
    assert f"written: {table}" in out
    assert f"written: {sheet}" in out
    rows = list(csv.reader(table.open()))
    assert rows[0] == ["image", "class1", "score1", "class2", "score2"]
    assert [Path(row[0]).name for row in rows[1:]] == list(NAMES)
    call("predict", classifier_run, folder / "*.png", "-o", lines, "--top-k", 2, *CPU)
    parsed = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [Path(row["image"]).name for row in parsed] == ["a.png", "d.png", "line.png"]
    for row, prediction in zip(rows[1:], predictions, strict=True):
        assert (row[1], row[3]) == prediction.names
        assert [float(row[2]), float(row[4])] == pytest.approx(prediction.scores.tolist(), abs=1e-5)
    assert parsed[0]["scores"] == [float(rows[1][2]), float(rows[1][4])]
    with Image.open(sheet) as image:
        assert min(image.size) > 200
    paths = f"{folder / 'a.png'}\n\n{folder / 'b.jpg'}\n"
    assert call("predict", classifier_run, "-", *CPU, stdin=paths).count(".png") == 1
    wrong = call("predict", classifier_run, folder, "--sheet", tmp_path / "sheet.txt", *CPU, code=1)
    assert "a contact sheet is written to a .png or .jpg file, not to " in wrong
    wrong = call("predict", classifier_run, folder, "--model", "stvit_small", *CPU, code=1)
    assert "not stvit_small; leave out --model, which is for checkpoint files" in wrong
    wrong = call("predict", classifier_run, folder, "-o", tmp_path / "results", *CPU, code=1)
    assert "the predictions of a classifier are written to a .csv or .jsonl file, not to" in wrong


def test_images_alone_go_to_the_network_of_the_package(tmp_path: Path) -> None:
    Image.new("RGB", (40, 30), "green").save(tmp_path / "a.png")
    for images in (tmp_path / "a.png", tmp_path):
        out = call("predict", images, "--top-k", 10, "-o", tmp_path / "out.csv", *CPU)
        assert "No model given: pyramid_nano_sima.imagenette, whose classes are tench, English springer" in out
        table = (tmp_path / "out.csv").read_text()
        assert "score10" in table
        assert "golf ball" in table
    wrong = call("predict", "pyramid_nano_sima", *CPU, code=1)
    assert "pyramid_nano_sima is no image; name images after the model" in wrong
    assert "nowhere/photos does not exist" in call("predict", "nowhere/photos", *CPU, code=1)
    wrong = call("predict", "pyramid_nano_sima.imagenet", tmp_path, *CPU, code=1)
    assert "pyramid_nano_sima has no weights with the tag 'imagenet'; did you mean imagenette?" in wrong
    assert "stvit_small has no pretrained weights" in call("predict", "stvit_small.x", tmp_path, *CPU, code=1)


@pytest.mark.parametrize(
    ("run", "option", "needed", "found"),
    [
        ("classifier_run", "--score-threshold", "a detector", "a classifier"),
        ("segmenter_run", "--score-threshold", "a detector", "a segmenter"),
        ("segmenter_run", "--top-k", "a classifier", "a segmenter"),
        ("detector_run", "--top-k", "a classifier", "a detector"),
        ("detector_run", "--batch-size", "a classifier", "a detector"),
    ],
)
def test_options_without_effect(
    run: str, option: str, needed: str, found: str, folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Refused in one sentence, also with the value of the default, and nothing is written."""
    source, value = request.getfixturevalue(run), 5 if option == "--top-k" else 1
    out = call("predict", source, folder, option, value, "-o", tmp_path / "out", *CPU, code=1)
    assert f"error: {option} is for {needed}, but {source} is {found}; leave it out" in out
    assert not (tmp_path / "out").exists()


def test_segment_command(segmenter_run: Path, folder: Path, tmp_path: Path) -> None:
    """A palette image whose values are classes, and an overlay with a legend, at the size of the image."""
    out = call("predict", segmenter_run, folder, "-o", tmp_path / "out", *CPU)
    assert "a.png: background" in out
    written = {p.name for p in (tmp_path / "out").iterdir()}
    assert written == {f"{Path(n).stem}_{kind}.png" for n in NAMES for kind in ("overlay", "classes")}
    predictions = load_predictor(segmenter_run, "cpu")([folder / name for name in NAMES])
    assert any(len(p.segmentation.unique()) > 1 for p in predictions)
    for name, prediction in zip(NAMES, predictions, strict=True):
        with Image.open(tmp_path / "out" / f"{Path(name).stem}_classes.png") as class_map:
            assert class_map.mode == "P"
            assert torch.equal(torch.from_numpy(np.array(class_map)).long(), prediction.segmentation)
    with Image.open(tmp_path / "out" / "line_classes.png") as line:
        assert line.size == (400, 1)
    with Image.open(tmp_path / "out" / "a_overlay.png") as overlay:
        assert overlay.width > overlay.height >= 480  # enlarged, with the legend beside it
    wrong = call("predict", segmenter_run, folder, "-o", tmp_path / "out.csv", *CPU, code=1)
    assert "the predictions of task segment are written to a folder, not to the file" in wrong


def test_detect(detector: Predictor, folder: Path, tmp_path: Path) -> None:
    """One JSON file in COCO's format, with the boxes and masks of the model."""
    assert [p.error for p in predict(detector, folder, output=tmp_path / "out")] == [None] * 5
    coco = COCO(str(tmp_path / "out" / "detections.json"))
    assert [Path(image["file_name"]).name for image in coco.dataset["images"]] == list(NAMES)
    expected = detector(folder / "b.jpg")
    entries = [entry for entry in coco.dataset["annotations"] if entry["image_id"] == 2]
    assert len(entries) == len(expected.boxes) > 5
    for n, entry in enumerate(entries):
        left, top, width, height = entry["bbox"]
        assert expected.boxes[n].tolist() == pytest.approx([left, top, left + width, top + height], abs=0.02)
        assert entry["score"] == pytest.approx(float(expected.scores[n]), abs=1e-4)
        assert np.array_equal(coco.annToMask(entry), expected.masks[n].numpy())
        assert coco.cats[entry["category_id"]]["name"] == expected.names[n]
    strict = Predictor(detector.model, detector.config.replace(score_threshold=0.3))(folder / "b.jpg")
    assert 0 < len(strict.boxes) < len(expected.boxes)
    with Image.open(tmp_path / "out" / "b_classes.png") as class_map:
        assert torch.equal(torch.from_numpy(np.array(class_map)).long(), merge_masks(expected))
    with pytest.raises(ValueError, match="score_threshold is 2, but must be from 0 to 1"):
        detector.config.replace(score_threshold=2)


def test_unreadable_files(segmenter_run: Path, folder: Path, tmp_path: Path) -> None:
    """They are named, the others are predicted, and the exit code is 1."""
    (folder / "bad.png").write_bytes(b"no image")
    (folder / "cut.png").write_bytes((folder / "a.png").read_bytes()[:-400])
    out = call("predict", segmenter_run, folder, tmp_path / "gone.png", "-o", tmp_path / "out", *CPU, code=1)
    assert "bad.png is not" in out
    assert "cut.png is corrupt or truncated" in out
    assert "gone.png does not exist" in out
    assert (tmp_path / "out" / "d_overlay.png").is_file()
    assert not (tmp_path / "out" / "bad_overlay.png").exists()
    out = call("predict", segmenter_run, tmp_path / "gone.png", "-o", tmp_path / "nothing", *CPU, code=1)
    assert "written" not in out
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "empty").mkdir()
    assert "has no images" in call("predict", segmenter_run, tmp_path / "empty", code=1)
    assert "no image matches" in call("predict", segmenter_run, tmp_path / "*.gif", code=1)
    assert "there is no run folder" in call("predict", tmp_path / "none", folder, code=1)
    assert "neither a run's folder nor a timm model's" in call("predict", folder, folder, code=1)


def test_exif_rotation(segmenter_run: Path, classifier_run: Path, tmp_path: Path) -> None:
    """Segmenters and detectors rotate images as the EXIF tag specifies; classifiers ignore it, as timm does."""
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 10
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate clockwise by a quarter
    dense, plain = InferenceConfig.load(segmenter_run), InferenceConfig.load(classifier_run)
    for name in ("a.png", "b.webp"):
        Image.fromarray(pixels).save(tmp_path / name, exif=exif, lossless=True)
        rotated = torch.from_numpy(np.rot90(pixels, -1).copy())
        assert torch.equal(read_image(tmp_path / name, dense).permute(1, 2, 0), rotated)
        assert torch.equal(read_image(tmp_path / name, plain).permute(1, 2, 0), torch.from_numpy(pixels))
    Image.fromarray(pixels).convert("RGBA").save(tmp_path / "c.png", exif=exif)
    assert read_image(tmp_path / "c.png", dense).shape == (3, 3, 2)


def test_modes_of_pillow(segmenter_run: Path, classifier_run: Path, tmp_path: Path) -> None:
    """16 bits are scaled, not clipped, and transparent parts are white, in an image as in its file."""
    deep = Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000)
    transparent = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    for config in (InferenceConfig.load(run) for run in (segmenter_run, classifier_run)):
        for image, mean in ((deep, 122.56), (transparent, 255)):
            image.save(tmp_path / "a.png")
            assert torch.equal(read_image(image, config), read_image(tmp_path / "a.png", config))
            assert read_image(image, config).float().mean() == pytest.approx(mean, abs=0.01)
        with pytest.raises(DataError, match=r"^an image has floating-point pixels, whose range is unknown"):
            read_image(Image.new("F", (8, 8)), config)


def test_names_do_not_collide(segmenter_run: Path, folder: Path, tmp_path: Path) -> None:
    """Files with the same name get numbers that no other file has in its name."""
    (tmp_path / "further").mkdir()
    further = [tmp_path / "further" / name for name in ("A.jpg", "a.jpg", "a_2.jpg")]
    for file in further:
        file.write_bytes((folder / "b.jpg").read_bytes())
    predict(segmenter_run, [folder / "a.png", tmp_path / "further"], output=tmp_path / "out", device="cpu")
    written = {p.name.removesuffix("_overlay.png") for p in (tmp_path / "out").glob("*_overlay.png")}
    assert written == {"a", "A_2", "a_3", "a_2_2"}
    assert find_images([tmp_path / "further"]) == further


def test_odd_files_in_a_folder(classifier_run: Path, folder: Path, tmp_path: Path) -> None:
    """Links to folders are searched; hidden files and folders called .jpg are no images; names may be any bytes."""
    inside = tmp_path / "inside"
    (inside / "folder.jpg").mkdir(parents=True)
    (inside / "link").symlink_to(folder)
    (inside / "._a.png").write_bytes(b"Mac OS X")
    name = os.fsdecode(b"caf\xe9.png")  # Latin-1
    (inside / name).write_bytes((folder / "a.png").read_bytes())
    table = tmp_path / "table.jsonl"
    command = [sys.executable, "-m", "tokamix", "predict", classifier_run, inside, "-o", table, *CPU]
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}  # the default of most locales
    assert r"caf\udce9.png" in subprocess.run(command, capture_output=True, text=True, check=True, env=strict).stdout
    rows = [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]
    assert {Path(row["image"]).name for row in rows} == {*NAMES, name}
    predict(classifier_run, inside, output=tmp_path / "table.csv", device="cpu")
    assert r"caf\udce9.png" in (tmp_path / "table.csv").read_text(encoding="utf-8")


def test_masks_are_freed(detector: Predictor, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an output folder, the masks of an image are freed before the next image but one."""
    references: list[weakref.ref] = []
    alive: list[int] = []
    original = Predictor._detections

    def watch(self: Predictor, detections: dict) -> Prediction:
        gc.collect()
        alive.append(sum(reference() is not None for reference in references))
        prediction = original(self, detections)
        references.append(weakref.ref(prediction.masks))
        return prediction

    monkeypatch.setattr(Predictor, "_detections", watch)
    predict(detector, folder, output=tmp_path / "out")
    assert len(alive) == 5
    assert max(alive) <= 1


def test_an_error_keeps_earlier_predictions(detector: Predictor, folder: Path, tmp_path: Path) -> None:
    """Detections before the error are written, and no partial file is left."""

    def fail(prediction: Prediction) -> None:
        if "c.webp" in prediction.image:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        predict(detector, folder, output=tmp_path / "out", on_prediction=fail)
    content = json.loads((tmp_path / "out" / "detections.json").read_text())
    assert [Path(image["file_name"]).name for image in content["images"]] == list(NAMES[:3])
    assert not list((tmp_path / "out").glob("*.part"))


def test_best_masks_win() -> None:
    masks = torch.zeros(2, 4, 4, dtype=torch.bool)
    masks[0, :2], masks[1, 1:] = True, True
    prediction = Prediction(
        boxes=torch.zeros(2, 4), labels=torch.tensor([4, 7]), scores=torch.tensor([0.9, 0.5]), masks=masks
    )
    assert merge_masks(prediction).tolist() == [[5] * 4, [5] * 4, [8] * 4, [8] * 4]


def test_a_higher_threshold_leaves_objects_out() -> None:
    """Boxes, labels, scores, masks and names stay together; a segmentation has no scores to choose by."""
    masks = torch.eye(3)[:, :, None].bool()
    boxes, scores = torch.arange(12.0).view(3, 4), torch.tensor([0.9, 0.5, 0.2])
    found = Prediction(boxes=boxes, labels=torch.tensor([1, 0, 1]), scores=scores, masks=masks, names=("b", "a", "b"))
    assert found.above(0.5).summary() == "1 b, 1 a"
    assert torch.equal(found.above(0.5).boxes, boxes[:2])
    assert torch.equal(found.above(0.5).masks, masks[:2])
    assert found.above(0.95).summary() == "nothing"
    assert len(found.scores) == 3
    segmentation = Prediction(segmentation=torch.zeros(2, 2))
    assert segmentation.above(0.9) is segmentation
