"""`InferenceConfig` and `load_model`: preprocessing, class names, validation, every kind of source."""

import json
import shutil
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from timm.models import save_for_hf

from tokamix.inference import InferenceConfig, load_model, read_config
from tokamix.predict.predictor import preprocess, read_image

CONFIG = InferenceConfig(task="classify", class_names=("cat", "dog"))


def test_round_trip(tmp_path: Path) -> None:
    """Through a dictionary and through config.json, whose other keys stay."""
    config = InferenceConfig(
        task="detect", class_names=("cat", "dog"), scale=(1333, 800), category_ids=(3, 17), interpolation="bilinear"
    )
    assert InferenceConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    (tmp_path / "config.json").write_text(json.dumps({"method": "retinanet"}))
    config.save(tmp_path)
    assert InferenceConfig.load(tmp_path) == config
    assert read_config(tmp_path)["method"] == "retinanet"
    with pytest.raises(ValueError, match="unknown key 'colour'; it may be of a newer tokamix"):
        InferenceConfig.from_dict(config.to_dict() | {"colour": 1})
    with pytest.raises(ValueError, match=r"has no config\.json with the keys"):
        InferenceConfig.load(tmp_path / "nothing")


def test_from_model() -> None:
    """timm's preprocessing; for a different number of channels, the mean over the model's channels."""
    model = timm.create_model("test_resnet", num_classes=3)
    cfg = timm.data.resolve_model_data_config(model)
    config = InferenceConfig.from_model(model, ("a", "b", "c"))
    assert (config.image_size, config.crop_pct) == (cfg["input_size"][-1], cfg["crop_pct"])
    assert (config.mean, config.std, config.interpolation) == (cfg["mean"], cfg["std"], cfg["interpolation"])
    assert (config.in_chans, config.num_classes, config.has_class_names) == (3, 3, True)
    grey = InferenceConfig.from_model(model, in_chans=1, image_size=64)
    assert grey.mean == pytest.approx([sum(cfg["mean"]) / 3])
    assert InferenceConfig.from_model(model, in_chans=5).std == pytest.approx([sum(cfg["std"]) / 3] * 5)
    assert (grey.image_size, grey.class_names, grey.has_class_names) == (64, ("0", "1", "2"), False)
    own = InferenceConfig.from_model(torch.nn.Linear(2, 2))
    assert (own.mean, own.std, own.image_size) == (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, 224)
    imagenet = InferenceConfig.from_model(timm.create_model("test_resnet"))
    assert imagenet.class_names[0] == "tench, Tinca tinca"
    assert len(set(imagenet.class_names)) == 1000  # two classes are called "crane"
    cfg = {**model.pretrained_cfg, "crop_mode": "squash", "crop_pct": 1.0}
    squashed = InferenceConfig.from_model(timm.create_model("test_resnet", pretrained_cfg=cfg))
    assert (imagenet.crop_mode, squashed.crop_mode) == ("center", "squash")
    photo = Image.effect_noise((300, 200), 60).convert("RGB")
    expected = create_transform(**timm.data.resolve_data_config(pretrained_cfg=cfg))(photo)
    shown = preprocess(read_image(photo, squashed), squashed, torch.device("cpu"))
    torch.testing.assert_close(shown, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 0}, "image_size is 0, but must be a number of pixels from 1 on"),
        ({"image_size": 2.5}, r"image_size is 2\.5, but must be a number of pixels"),
        ({"crop_mode": "fit"}, "crop_mode is 'fit', but must be center or squash"),
        ({"crop_pct": 0}, "crop_pct is 0, but must be above 0 and at most 1"),
        ({"std": (1.0,)}, "mean has 3 values, but std has 1; give one per channel"),
        ({"score_threshold": 2}, "score_threshold is 2, but must be from 0 to 1"),
        ({"size": 7}, "'size' is not an inference option; choose from task, class_names, mean"),
        ({"window": 64}, "window has no effect for task classify; choose from mean, std, interpolation, image_size"),
        ({"task": "caption"}, "task is 'caption', but must be classify, segment or detect"),
    ],
)
def test_invalid_values(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CONFIG.replace(**changes)


def test_invalid_values_of_a_segmenter() -> None:
    config = InferenceConfig(task="segment", class_names=("sky", "sea"))
    with pytest.raises(ValueError, match=r"test_scales is \(\), but must be one or more positive factors"):
        config.replace(test_scales=())
    with pytest.raises(ValueError, match=r"scale is \(800,\), but must be two lengths in pixels"):
        config.replace(scale=[800])
    assert config.replace(scale=[800, 600], test_scales=[0.5, 1]).scale == (800, 600)
    assert config.scale is None


def test_folders_of_timm(tmp_path: Path) -> None:
    """A folder without an inference config gives timm's preprocessing and label names."""
    model = timm.create_model("test_resnet", num_classes=2).eval()
    save_for_hf(model, tmp_path, model_config={"label_names": ["cat", "dog"]})
    for source in (tmp_path, str(tmp_path), f"local-dir:{tmp_path}"):
        loaded, config = load_model(source)
        assert config == InferenceConfig.from_model(model, ("cat", "dog"))
        image = torch.randn(1, 3, 64, 64)
        assert torch.equal(loaded(image), model(image))
        assert not loaded.training


def test_every_task_is_loaded(classifier_run: Path, segmenter_run: Path, detector_run: Path) -> None:
    for run, task in ((classifier_run, "classify"), (segmenter_run, "segment"), (detector_run, "detect")):
        model, config = load_model(run)
        assert config.task == task
        assert not model.training
        weights = load_model(run / "last.safetensors")[0].state_dict()
        assert weights.keys() == model.state_dict().keys()
    assert config.category_ids
    assert config.class_names[0] == "circle"


def test_a_checkpoint_of_a_different_model(classifier_run: Path, segmenter_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the checkpoint does not fit ResNet"):
        load_model(classifier_run / "model.safetensors", model="test_resnet")
    config = read_config(segmenter_run)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((classifier_run / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"has no weights for .* parameters, such as"):
        load_model(tmp_path)


def test_weights_for_a_different_number_of_classes(classifier_run: Path, tmp_path: Path) -> None:
    """A classifier with random weights is no trained model."""
    shutil.copy(classifier_run / "config.json", tmp_path)
    weights = load_file(classifier_run / "model.safetensors")
    weights |= {name: torch.cat([weights[name]] * 2) for name in ("head.weight", "head.bias")}
    save_file(weights, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"other\.safetensors was not trained for 4 classes: its classifier has a"):
        load_model(tmp_path / "other.safetensors")
