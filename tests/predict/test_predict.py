"""`tokamix predict`: what is written, what is drawn, and pictures that cannot be read."""

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from tests.train.tiny_dense import run, tiny_scenes
from tokamix.cli import app
from tokamix.data.annotated.transforms import transform_for_eval
from tokamix.predict import Prediction, Predictor, class_map, find_pictures, load_predictor, predict, read_picture
from tokamix.predict.draw import Things, class_colours, class_picture, colour, draw_segmentation, draw_things


@pytest.fixture(scope="module")
def segmenter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that knows a few scenes."""
    folder = tmp_path_factory.mktemp("segmenter")
    settings = {"iterations": 60, "eval_every": 60, "lr": 1e-2, "method_kwargs": {"width": 32, "neck_width": 32}}
    run("segment", folder, tiny_scenes("segment", train=8, val=0, side=48), crop_size=48, **settings)
    return folder


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detector")
    settings = {"iterations": 60, "eval_every": 60, "method": "mask_rcnn", "hflip": 0.0}
    data = tiny_scenes("detect", train=4, val=0, side=64)
    run("detect", folder, data, **settings, method_kwargs={"width": 32, "regions": 32})
    return folder


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Scenes as files of several forms, in a folder."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    scenes = tiny_scenes("detect", train=4, val=0, side=64)
    for i, name in enumerate(("a.png", "b.jpg", "c.webp", "d.png")):
        Image.fromarray(scenes.train.scene(i).image.permute(1, 2, 0).numpy()).save(folder / name)
    Image.new("RGB", (400, 1), (90, 120, 200)).save(folder / "line.png")
    return folder


def call(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(args), env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_segment(segmenter: Path, pictures: Path, tmp_path: Path) -> None:
    """A palette picture whose values are classes, and an overlay with a legend; sizes are the pictures' own."""
    out = call("predict", str(pictures), "--run", str(segmenter), "--output", str(tmp_path / "out"), "--device", "cpu")
    assert "a.png: background" in out
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {f"{n}_{kind}.png" for n in ("a", "b", "c", "d", "line") for kind in ("overlay", "classes")}
    found = load_predictor(segmenter, "cpu")(pictures / "a.png")
    with Image.open(tmp_path / "out" / "a_classes.png") as classes:
        assert (classes.mode, classes.size) == ("P", (64, 64))
        assert torch.equal(torch.from_numpy(np.array(classes)).long(), found.segmentation)
    with Image.open(tmp_path / "out" / "line_classes.png") as line:
        assert line.size == (400, 1)
    with Image.open(tmp_path / "out" / "a_overlay.png") as overlay:
        assert overlay.width > overlay.height >= 480  # enlarged, and the legend beside it


def test_detect(detector: Path, pictures: Path, tmp_path: Path) -> None:
    """One JSON file that the reference tools read, with the boxes and masks that the model gave."""
    coco = pytest.importorskip("pycocotools.coco").COCO
    problems = predict(detector, [pictures], tmp_path / "out", device="cpu", score=0.1)
    assert problems == []
    told = coco(str(tmp_path / "out" / "detections.json"))
    assert [Path(image["file_name"]).name for image in told.dataset["images"]] == [
        *("a.png", "b.jpg", "c.webp", "d.png", "line.png")
    ]
    found = load_predictor(detector, "cpu", score=0.1)(pictures / "a.png")
    entries = [entry for entry in told.dataset["annotations"] if entry["image_id"] == 1]
    assert len(entries) == len(found.boxes) > 0
    for n, entry in enumerate(entries):
        left, top, width, height = entry["bbox"]
        assert found.boxes[n].tolist() == pytest.approx([left, top, left + width, top + height], abs=0.02)
        assert entry["score"] == pytest.approx(float(found.scores[n]), abs=1e-4)
        assert np.array_equal(told.annToMask(entry), found.masks[n].numpy())
        assert told.cats[entry["category_id"]]["name"] == found_name(detector, int(found.labels[n]))
    fewer = load_predictor(detector, "cpu", score=0.9)(pictures / "a.png")
    assert len(fewer.boxes) < len(found.boxes)
    with Image.open(tmp_path / "out" / "a_classes.png") as classes:
        assert torch.equal(torch.from_numpy(np.array(classes)).long(), class_map(found))


def found_name(folder: Path, label: int) -> str:
    return json.loads((folder / "config.json").read_text())["label_names"][label]


def test_pictures_that_cannot_be_read(segmenter: Path, pictures: Path, tmp_path: Path) -> None:
    """They are named, the others done all the same, and the command says that something failed."""
    (pictures / "bad.png").write_bytes(b"no picture")
    (pictures / "cut.png").write_bytes((pictures / "a.png").read_bytes()[:-400])
    arguments = ["predict", str(pictures), str(tmp_path / "gone.png"), "--run", str(segmenter), "--device", "cpu"]
    out = call(*arguments, "--output", str(tmp_path / "out"), code=1)
    for words in ("bad.png is not a picture, or corrupt", "cut.png is corrupt or truncated", "gone.png does not exist"):
        assert words in out
    assert "Traceback" not in out
    assert (tmp_path / "out" / "d_overlay.png").is_file()
    assert not (tmp_path / "out" / "bad_overlay.png").exists()
    nothing = tmp_path / "nothing"
    out = call("predict", str(tmp_path / "gone.png"), "--run", str(segmenter), "--output", str(nothing), code=1)
    assert "gone.png does not exist" in out
    assert "nothing was done" in out
    assert "everything is in" not in out
    assert not nothing.exists()
    (tmp_path / "empty").mkdir()
    assert "holds no picture" in call("predict", str(tmp_path / "empty"), "--run", str(segmenter), code=1)
    assert "there is no run" in call("predict", str(pictures), "--run", str(tmp_path / "none"), code=1)
    assert "neither a run's folder nor a timm model's" in call("predict", str(pictures), "--run", str(pictures), code=1)


def test_pictures_lie_as_the_camera_says(tmp_path: Path) -> None:
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 10
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    for name in ("a.png", "b.webp"):
        Image.fromarray(pixels).save(tmp_path / name, exif=exif, lossless=True)
        turned = read_picture(tmp_path / name)
        assert torch.equal(turned.permute(1, 2, 0), torch.from_numpy(np.rot90(pixels, -1).copy()))
    Image.fromarray(pixels).convert("RGBA").save(tmp_path / "c.png", exif=exif)
    assert read_picture(tmp_path / "c.png").shape == (3, 3, 2)


def test_names_do_not_collide(segmenter: Path, pictures: Path, tmp_path: Path) -> None:
    """Files of one name get numbers, and none that another file has in its own name."""
    (tmp_path / "more").mkdir()
    more = [tmp_path / "more" / name for name in ("A.jpg", "a.jpg", "a_2.jpg")]
    for file in more:
        file.write_bytes((pictures / "b.jpg").read_bytes())
    predict(segmenter, [pictures / "a.png", tmp_path / "more"], tmp_path / "out", device="cpu")
    names = {p.name.removesuffix("_overlay.png") for p in (tmp_path / "out").glob("*_overlay.png")}
    assert names == {"a", "A_2", "a_3", "a_2_2"}
    assert find_pictures([tmp_path / "more"]) == more


def test_masks_are_not_kept(detector: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is seen in a picture is gone when the next but one is looked at, of segmenters and detectors."""
    alive: list[weakref.ref] = []
    kept: list[int] = []
    real = Predictor.__call__

    def watched(self: Predictor, picture: torch.Tensor) -> Prediction:
        gc.collect()
        kept.append(sum(one() is not None for one in alive))
        alive.append(weakref.ref(found := real(self, picture)))
        return found

    monkeypatch.setattr(Predictor, "__call__", watched)
    predict(detector, [pictures], tmp_path / "out", device="cpu")
    assert len(kept) == 5
    assert max(kept) <= 1


def test_a_prediction_that_fails(detector: Path, pictures: Path, tmp_path: Path) -> None:
    """Nothing of what was done before is lost, and no half of a file is left."""

    def say(text: str) -> None:
        if "c.webp" in text:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        predict(detector, [pictures], tmp_path / "out", device="cpu", say=say)
    told = json.loads((tmp_path / "out" / "detections.json").read_text())
    assert [Path(image["file_name"]).name for image in told["images"]] == ["a.png", "b.jpg", "c.webp"]
    assert not list((tmp_path / "out").glob("*.part"))


def test_many_classes(tmp_path: Path) -> None:
    """More classes than a palette has make a picture of 16 bits."""
    labels = torch.tensor([[0, 255, 256], [3, 365, 1]])
    class_picture(labels, [str(i) for i in range(366)]).save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.mode == "I;16"
        assert np.array_equal(np.array(picture), labels.numpy())
    assert class_picture(labels.clamp(max=254), [str(i) for i in range(255)]).mode == "P"


def test_pictures_are_seen_as_in_evaluation(segmenter: Path) -> None:
    """To the pixel, also a single column, with which torch has a fault of its own."""
    predictor = load_predictor(segmenter, "cpu")
    predictor.config = predictor.config.replace(scale=(400, 40))
    mean, std = (torch.tensor(getattr(predictor.config, key))[:, None, None] for key in ("mean", "std"))
    for size in ((800, 1), (50, 70), (7, 90)):
        image = torch.randint(256, (3, *size), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
        scene = replace(tiny_scenes("detect").train.scene(0), image=image, masks=None)
        expected = (transform_for_eval(scene, predictor.config).image.float() / 255 - mean) / std
        seen = predictor._seen(image)
        assert seen.shape == expected.shape
        assert (seen - expected).abs().max() < 1e-6


def test_eval_of_a_run(segmenter: Path) -> None:
    """The command rebuilds the model from the folder; data of other classes is refused in a sentence."""
    out = call("eval", str(segmenter), "--data", "shapes:32", "--device", "cpu", "--workers", "0", "--batch-size", "32")
    assert "mIoU" in out
    assert "IoU of background" in out
    assert "unknown" not in out
    wrong = call("eval", str(segmenter), "--data", "shapes:32", "--device", "cpu", "--set", "lr=1", code=1)
    assert "'lr' is not an inference option" in wrong
    wrong = call("eval", str(segmenter), "--data", "shapes:32", "--image-size", "7", code=1)
    assert "image_size has no effect for task segment" in wrong
    out = call("eval", str(segmenter / "last.safetensors"), "--data", "shapes:32", "--device", "cpu", "--workers", "0")
    assert "mIoU" in out


def test_eval_of_a_detector(detector: Path) -> None:
    """What only segmenters do is refused."""
    for setting in ("test_flip=true", "test_scales=[0.5,1]", "window=64"):
        wrong = call("eval", str(detector), "--data", "shapes:32", "--device", "cpu", "--set", setting, code=1)
        assert f"{setting.partition('=')[0]} has no effect for task detect; choose from" in wrong


def test_train_by_command(tmp_path: Path) -> None:
    settings = "iterations=2 eval_every=2 warmup_iterations=0 batch_size=4 crop_size=32 scale=none"
    flags = [word for setting in settings.split() for word in ("--set", setting)]
    common = ["train", "--data", "shapes:32", "--device", "cpu", "--workers", "0", "--output", str(tmp_path / "a")]
    out = call(*common, "--task", "segment", "--recipe", "shapes_segment", *flags)
    assert "semantic_fpn with test_resnet on shapes:32: 1 epochs of 2 steps" in out
    assert "mIoU" in out
    assert f"% in epoch 1; everything is in {tmp_path / 'a'}" in out
    wrong = call(*common, "--task", "detect", "--recipe", "shapes_segment", code=1)
    assert "the recipe shapes_segment is for the task segment, not detect" in wrong
    assert "has semantic_fpn, upernet" in call(*common, "--recipe", "shapes_segment", "--set", "method=fcn", code=1)
    assert "names no model; give one with --model" in call(*common, "--task", "detect", code=1)


def test_drawing() -> None:
    """What is drawn is where it should be, in its own colour; pictures are enlarged until they can be read."""
    image = torch.full((3, 40, 60), 128, dtype=torch.uint8)
    labels = torch.zeros(40, 60, dtype=torch.int64)
    labels[10:30, 20:40], labels[:5] = 2, 255
    classes = ("background", "cat", "dog")
    picture = draw_segmentation(image, labels, classes, legend=False)
    factor = picture.width // 60
    assert picture.size == (60 * factor, 40 * factor)
    assert picture.width >= 480
    assert picture.getpixel((5 * factor, 35 * factor)) == (128, 128, 128)
    red, green, blue = picture.getpixel((30 * factor, 20 * factor))
    expected = [round(0.65 * value + 0.35 * 128) for value in class_colours(classes)[2]]
    assert [red, green, blue] == pytest.approx(expected, abs=1)
    wide = draw_segmentation(image, labels, classes)
    assert wide.width > picture.width
    mask = torch.zeros(1, 40, 60, dtype=torch.bool)
    mask[0, 10:30, 20:40] = True
    things = Things(torch.tensor([[20.0, 10, 40, 30]]), torch.tensor([1]), torch.tensor([0.75]), mask)
    drawn = draw_things(image, things, classes)
    assert drawn.getpixel((20 * factor, 20 * factor)) == colour(0)  # the box
    assert drawn.getpixel((5 * factor, 35 * factor)) == (128, 128, 128)
    nothing = Things(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0), mask[:0])
    assert draw_things(image, nothing, classes).getpixel((0, 0)) == (128, 128, 128)
    assert len({colour(i) for i in range(200)}) == 200
    few = torch.tensor([colour(i) for i in range(21)], dtype=torch.float32)
    assert torch.pdist(few).min() > 50  # one can be told from the other
    palette = class_picture(labels, classes)
    assert (palette.getpixel((30, 20)), palette.getpixel((30, 0))) == (2, 255)


def test_better_things_hide_others() -> None:
    masks = torch.zeros(2, 4, 4, dtype=torch.bool)
    masks[0, :2], masks[1, 1:] = True, True
    found = Prediction(
        boxes=torch.zeros(2, 4), labels=torch.tensor([4, 7]), scores=torch.tensor([0.9, 0.5]), masks=masks
    )
    assert class_map(found).tolist() == [[5] * 4, [5] * 4, [8] * 4, [8] * 4]
