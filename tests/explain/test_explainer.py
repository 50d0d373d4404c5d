"""Explainers and their answers."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

import tokamix
from tests.explain.models import column, images, pyramid
from tokamix.explain import QUESTIONS, Explainer, capture, load_explainer
from tokamix.explain.capture import CapturedLayer
from tokamix.explain.mixing import mixing_row
from tokamix.explain.receptive_field import layer_receptive_field, receptive_field
from tokamix.inference import InferenceConfig

PHOTO = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)


def explainer(mixer: str, **kwargs) -> Explainer:
    model = pyramid(mixer, **kwargs).float()
    config = InferenceConfig.from_model(model, ("cat", "dog", "owl"), image_size=32)
    return Explainer(model, config, mixer)


OWN = {
    "softmax": {"query_key_norms", "rollout", "attention_entropy"},
    "sima": {"query_key_norms"},
    "active_token": {"sampled_positions"},
    "super_token": {"super_token_regions", "super_token_association", "super_token_attention"},
    "weight_mixing": {"weight_bank"},
    "pooling": set(),
}
COMMON = {"mixing_row", "receptive_field", "saliency", "mixing_distance", "token_similarity", "effective_rank"}


def test_every_question_is_asked_here() -> None:
    assert set(QUESTIONS) == COMMON | set().union(*OWN.values())


@pytest.mark.parametrize("mixer", OWN)
def test_every_question_has_an_answer(mixer: str) -> None:
    explanation = explainer(mixer)(PHOTO)
    assert set(explanation.questions()) == COMMON | OWN[mixer]
    assert explanation.rgb.shape == (32, 32, 3)
    assert explanation.probabilities.sum() == pytest.approx(1)
    for key in explanation.questions():
        answer = explanation.ask(key, position=(0.3, 0.8))
        assert answer.values.dtype == np.float32
        assert len(answer.values) == len(answer.panels)
        assert np.isfinite(answer.values[0]).all()
        assert answer.style == QUESTIONS[key].style
        assert answer.values.ndim == (2 if answer.style == "curve" else 3)
        assert (answer.layer is None) == ("layer" not in QUESTIONS[key].uses)
        assert explanation.ask(key, position=(0.3, 0.8)) is answer  # kept


def test_the_latest_answers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[Explainer.__module__], "MAX_ANSWERS", 3)
    explanation = explainer("softmax")(PHOTO)
    first, other = explanation.ask("mixing_row", 0, (0, 0)), explanation.ask("mixing_row", 0, (0, 0.99))
    for x in (0.4, 0.6):
        assert explanation.ask("mixing_row", 0, (0, 0)) is first
        explanation.ask("mixing_row", 0, (0.99, x))
    assert explanation.ask("mixing_row", 0, (0, 0)) is first
    assert explanation.ask("mixing_row", 0, (0, 0.99)) is not other


def test_answers_are_those_of_the_functions() -> None:
    explanation = explainer("softmax")(PHOTO)
    answer = explanation.ask("mixing_row", layer=1, position=(0.99, 0.0), head=1)
    assert (answer.layer, answer.grid, answer.token, answer.head) == ("stages.1.blocks.0.mixer", (4, 4), (3, 0), 1)
    torch.testing.assert_close(torch.from_numpy(answer.values[0]), mixing_row(explanation.capture[1], (3, 0))[0, 1])
    mean = explanation.ask("mixing_row", layer=1, position=(0.99, 0.0))
    assert mean.values[0].sum() == pytest.approx(1, abs=1e-5)


def test_curves_have_a_line_for_each_head() -> None:
    answer = explainer("softmax")(PHOTO).ask("mixing_distance")
    assert answer.panels == ("mean", "head 1", "head 2")
    assert answer.values.shape == (3, 3)  # by layer
    assert np.isnan(answer.values[2, 0])  # the first stage has one head
    assert answer.unit == "px"


def test_receptive_field_of_a_layer_is_that_of_its_level() -> None:
    model, image = column("pooling"), images(1)[0]
    layers: list[CapturedLayer] = list(capture(model, image[None]))
    for level, layer in enumerate(layers):
        field = layer_receptive_field(model, image, layer, (3, 4), probes=None)
        torch.testing.assert_close(field, receptive_field(model, image, (3, 4), level))
    assert not any(module._forward_hooks for module in model.modules())


def test_load_explainer(classifier_run, tmp_path) -> None:
    loaded = load_explainer(classifier_run, device="cpu")
    assert loaded.name == classifier_run.name
    assert loaded(PHOTO).probabilities.shape == (len(loaded.config.class_names),)
    untrained = load_explainer("columnar_tiny_sima", device="cpu")
    assert untrained.name == "columnar_tiny_sima"
    module = load_explainer(nn.Sequential(column("softmax")), device="cpu")
    assert module.name == "Sequential"
    with pytest.raises(ValueError, match="softmx"):
        load_explainer("columnar_tiny_softmx", device="cpu")


@pytest.mark.parametrize(("task", "method"), [("segment", "semantic_fpn"), ("detect", "retinanet")])
def test_segmenters_and_detectors(task: str, method: str) -> None:
    create = tokamix.create_segmenter if task == "segment" else tokamix.create_detector
    model = create(method, "pyramid_nano_super_token", num_classes=3).eval()
    config = InferenceConfig(task=task, class_names=("a", "b", "c"), scale=(96, 64))
    explanation = Explainer(model, config)(PHOTO)
    assert explanation.capture[0].grid[0] == 16
    assert "saliency" not in explanation.questions()
    assert explanation.ask("super_token_regions", layer=0).values.shape[1:] == explanation.capture[0].grid
    assert np.isfinite(explanation.ask("receptive_field", layer=0).values).all()
    with pytest.raises(ValueError, match="is not a classifier"):
        _ = explanation.target


def test_bad_input() -> None:
    explanation = explainer("super_token")(PHOTO)
    with pytest.raises(ValueError, match="there is no question 'mixing_rows'; "):
        explanation.ask("mixing_rows")
    with pytest.raises(ValueError, match="no layer of super_token can answer 'weight_bank': Weight bank"):
        explanation.ask("weight_bank")
    with pytest.raises(ValueError, match="has no head 5: it has 2, from 0"):
        explanation.ask("mixing_row", layer=-1, head=5)
    softmax = explainer("softmax")(PHOTO)
    with pytest.raises(ValueError, match=r"stages.0.blocks.0.mixer \(softmax\) cannot answer 'weight_bank'; no layer"):
        softmax.ask("weight_bank", layer=0)
    with pytest.raises(ValueError, match=r"position \(2, 0.5\) is outside of the image"):
        softmax.ask("mixing_row", position=(2, 0.5))
