"""Probing: k-NN, linear evaluation, fine-tuning, and their table."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import tokamix
from tests.command import call
from tests.train.tiny import TINY, tiny_data
from tokamix.data import DatasetSplits
from tokamix.evaluate import knn
from tokamix.evaluate.knn import measure_knn
from tokamix.evaluate.linear import _fit, measure_linear
from tokamix.probe import probe

SMALL = ["image_size=8", "epochs=2", "batch_size=16"]


def blobs(count: int, seed: int = 0, noise: float = 0.6) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    centres = torch.tensor([[2.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 0, 2.0, 1.0]])
    return centres[labels] + noise * torch.randn(count, 4, generator=draw), labels


def test_knn_is_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Votes of the k most similar images, weighted by exp(similarity / T), image by image; chunks change nothing."""
    (train, labels), (val, answers) = blobs(60, 0, 2.0), blobs(31, 1, 2.0)
    expected = {}
    for k in (1, 5, 40):
        right = 0
        for query, answer in zip(val.double(), answers.tolist(), strict=True):
            similarity = F.cosine_similarity(query[None], train.double())
            votes = [0.0] * 3
            for i in similarity.argsort(descending=True)[:k].tolist():
                votes[int(labels[i])] += math.exp(float(similarity[i]) / 0.07)
            right += votes.index(max(votes)) == answer
        expected[k] = 100 * right / len(val)
    assert measure_knn(train, labels, val, answers, (1, 5, 40)) == pytest.approx(expected)
    monkeypatch.setattr(knn, "QUERIES", 4)
    assert measure_knn(train, labels, val, answers, (1, 5, 40)) == pytest.approx(expected)


def test_linear_classifiers_reach_the_optimum() -> None:
    """Many epochs end where the gradient of the penalised cross-entropy is 0, for each pair of settings."""
    features, labels = blobs(90, noise=1.0)
    pairs = [(3.0, 0.05), (6.0, 0.2)]
    weights = _fit(features, labels, 3, pairs, epochs=400, seed=0).requires_grad_()
    ones = torch.cat([features, torch.ones(90, 1)], 1)
    for fitted, (_, decay) in zip(weights, pairs, strict=True):
        penalty = 0.5 * decay * (fitted[:-1] ** 2).sum()
        (gradient,) = torch.autograd.grad(F.cross_entropy(ones @ fitted, labels) + penalty, weights)
        assert gradient.abs().max() < 1e-4
        assert fitted.abs().max() > 0.1


def test_linear_settings_are_chosen_on_held_out_training_images() -> None:
    train, val = blobs(120, 0), blobs(90, 1)
    result = measure_linear(*train, *val, rates=(0.0, 0.3), epochs=20)
    assert result.lr == 0.3
    assert result.top1 > 90
    misled = measure_linear(*train, val[0], (val[1] + 1) % 3, rates=(0.0, 0.3), epochs=20)
    assert (misled.lr, misled.weight_decay, misled.held_out) == (result.lr, result.weight_decay, result.held_out)
    assert misled.top1 < 10


def test_probe_of_a_run(classifier_run: Path, tmp_path: Path) -> None:
    """A trained model's features are better than random ones; fine-tuning goes through the training loop."""
    options = {"recipe": "small", "overrides": SMALL, "output": tmp_path / "run", "device": "cpu"}
    result = probe(classifier_run, tiny_data(), methods=("knn", "linear", "finetune"), k=(5, 20), **options)
    random = tokamix.create_model(TINY.model, num_classes=4, img_size=8, **TINY.model_kwargs)
    random.pretrained_cfg = {**random.pretrained_cfg, "input_size": (3, 8, 8), "crop_pct": 1.0}
    untrained = probe(random, tiny_data(), k=(20,), device="cpu")
    assert result.knn[20] > 80
    assert result.linear.top1 >= untrained.linear.top1
    assert result.finetune.epochs[-1]["epoch"] == 2
    assert [row[0] for row in result.rows()] == ["5-NN", "20-NN", "linear", "fine-tuned"]
    assert result.num_images == (80, 37)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("classes")
    for name, colour in (("dark", 40), ("light", 200)):
        (root / name).mkdir()
        for i in range(10):
            Image.new("RGB", (9, 9), (colour, 5 * i, 90)).save(root / name / f"{i}.png")
    return root


def test_command(classifier_run: Path, folder: Path) -> None:
    text = call("probe", classifier_run, "--data", folder, "--workers", 0, "--device", "cpu")
    assert "16 features, 16 training images, 4 validation images" in text
    assert "10-NN 100.00 %" in text
    assert "20-NN" not in text  # there are 16 images
    assert "linear 100.00 % lr" in text


def test_bad_input(classifier_run: Path, segmenter_run: Path, folder: Path, tmp_path: Path) -> None:
    probe_run = ("probe", classifier_run, "--workers", 0, "--data")
    assert "50 neighbours cannot be found among 16 training images; use a smaller k" in call(
        *probe_run, folder, "--k", 50, code=1
    )
    assert "methods are ['svm'], but must be some of" in call(*probe_run, folder, "--method", "svm", code=1)
    assert "there is no data set" in call(*probe_run, tmp_path / "none", code=1)
    assert "the model's task is segment" in call("probe", segmenter_run, "--data", folder, code=1)
    data = tiny_data()
    with pytest.raises(ValueError, match="probing needs images with labels of two or more classes"):
        probe(classifier_run, DatasetSplits("plain", data.train, data.val, ("image",)), device="cpu")
    features, labels = blobs(12)
    with pytest.raises(ValueError, match="there are 12 training features, but 11 labels"):
        measure_knn(features, labels[1:], features, labels, (1,))
    with pytest.raises(ValueError, match="a validation image has label 2, but those of the training images end at 1"):
        measure_linear(features, labels.clamp(max=1), features, labels)
    with pytest.raises(ValueError, match="have 4 dimensions, but those for validation 3"):
        measure_knn(features, labels, features[:, :3], labels, (1,))
    with pytest.raises(ValueError, match=r"k is \[0\], but must be one or more numbers"):
        measure_knn(features, labels, features, labels, (0,))


def test_features_that_cannot_be_measured() -> None:
    features, labels = torch.randn(6, 4), torch.arange(6) // 2
    broken = features.clone()
    broken[1, 2] = torch.nan
    for measure in (measure_knn, measure_linear):
        with pytest.raises(ValueError, match="some training features are not finite"):
            measure(broken, labels, features, labels)
        with pytest.raises(ValueError, match="some validation features are not finite"):
            measure(features, labels, broken, labels)
    with pytest.raises(ValueError, match="one image of each class, so none can be held out"):
        measure_linear(features, torch.arange(6), features, torch.arange(6))
    assert measure_linear(features, labels.int(), features, labels.int()) == measure_linear(
        features, labels, features, labels
    )
