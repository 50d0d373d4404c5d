"""The robustness suite: several models in one table and one plot."""

import csv
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.command import call
from tests.train.tiny import run, tiny_data
from tokamix.evaluate import evaluate, report
from tokamix.evaluate.robustness import Condition, evaluate_robustness, measure_calibration
from tokamix.evaluate.robustness.conditions import CLEAN
from tokamix.evaluate.robustness.report import summarize
from tokamix.evaluate.robustness.statistics import difference_interval, mean_interval
from tokamix.inference import load_model


@pytest.fixture(scope="module")
def sima_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second model, which has hardly learned."""
    return run(tmp_path_factory.mktemp("runs") / "sima", network="columnar_tiny_sima", epochs=2).folder


def test_suite(classifier_run: Path, sima_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests of two models: each has a row for every condition, and clean and epsilon 0 are `evaluate`'s number."""
    monkeypatch.setattr(report, "draw_confusion", lambda confusion, names, path: path.touch())  # has its own test
    sources = {"softmax": classifier_run, "SimA": sima_run}
    lines: list[str] = []
    result = evaluate_robustness(
        sources, tiny_data(), epsilons=(0, 40), device="cpu", report=tmp_path, progress=lines.append
    )
    assert [line.partition(":")[0] for line in lines] == ["softmax", "SimA"]
    assert (result.num_images, result.total_images, result.split) == (37, 37, "val")
    for row, source in zip(result.models, sources.values(), strict=True):
        assert len(row.scores) == 1 + 5 + 5 + 2 + 2 + 15 * 5
        assert row.accuracy() == pytest.approx(evaluate(source, tiny_data(), device="cpu")["top1"])
        for test in ("fgsm", "pgd"):
            assert torch.equal(row.scores[Condition(test, 0)], row.scores[CLEAN])
        assert row.accuracy(Condition("pgd", 40)) <= row.accuracy(Condition("fgsm", 40)) < row.accuracy()
        assert 0 < row.calibration.ece < 100
        assert row.calibration.images.sum() == 37
    labels = [row.label for row in summarize(result)]
    assert labels[0] == "clean"
    assert {"Centre occlusion 45 %", "FGSM 40/255", "Corruptions severity 5", "Corruptions, all severities"} <= {
        *labels
    }
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * (90 + 1)
    chosen = next(row for row in rows if (row["model"], row["test"], row["level"]) == ("SimA", "pgd", "40"))
    first, second = (row.accuracy(Condition("pgd", 40)) for row in result.models)
    assert float(chosen["accuracy"]) == pytest.approx(second, abs=1e-3)
    assert float(chosen["difference"]) == pytest.approx(second - first, abs=2e-3)
    assert min(Image.open(tmp_path / "robustness.png").size) > 500
    for name in sources:
        assert {"confusion_matrix.csv", "per_class.csv", "mistakes.png"} <= {
            p.name for p in (tmp_path / name).iterdir()
        }


def test_limit(classifier_run: Path) -> None:
    """The same images for every model, and others than the first ones."""
    data = tiny_data()
    results = [evaluate_robustness(classifier_run, data, tests=(), limit=9, device="cpu") for _ in range(2)]
    assert (results[0].num_images, results[0].total_images) == (9, 37)
    assert torch.equal(*(result.models[0].scores[CLEAN] for result in results))
    module, _ = load_model(classifier_run)
    assert evaluate_robustness(module, data, tests=(), limit=99, device="cpu").num_images == 37


def test_calibration_against_its_formula() -> None:
    """The bins of the plot give torchmetrics' number."""
    confidence, correct = torch.rand(500), torch.rand(500) < 0.6
    result = measure_calibration(confidence, correct)
    assert result.images.sum() == 500
    gaps = (result.confidence - result.accuracy).abs() * result.images
    assert result.ece == pytest.approx(gaps.nansum().item() / 500, rel=1e-4)
    perfect = measure_calibration(torch.tensor([1.0, 1.0]), torch.tensor([True, True]))
    assert perfect.ece == 0


def test_intervals() -> None:
    """Wilson's interval for 0 and 1, by its known values; paired differences have none where nothing differs."""
    mean, low, high = mean_interval(torch.tensor([1.0] * 8 + [0.0] * 2))
    assert (mean, low, high) == pytest.approx((80.0, 49.02, 94.33), abs=0.01)
    assert mean_interval(torch.ones(10))[1:] == pytest.approx((72.25, 100), abs=0.01)
    scores = torch.tensor([0.2, 0.4, 0.6, 0.8])
    assert mean_interval(scores)[1:] == pytest.approx((24.69, 75.31), abs=0.01)
    assert difference_interval(scores, scores) == (0, 0, 0)
    assert difference_interval(torch.ones(4), torch.tensor([1, 1, 0, 0]))[0] == 50


def test_command(classifier_run: Path, sima_run: Path, image_folder: Path, tmp_path: Path) -> None:
    common = ("--data", image_folder, "--suite", "robustness", "--device", "cpu", "--workers", 0, "--split", "train")
    out = call(
        "eval", classifier_run, sima_run, *common, "--tests", "fgsm,calibration", "--epsilons", "2", "--limit", 7
    )
    assert "7 of 32 images (split train), fp32; accuracy in percent ± 95 % interval over the images" in out
    assert "FGSM 2/255" in out
    assert "ECE" in out


WRONG = {
    "epsilon": (["--epsilons", "1,300"], "epsilon is 300, but must be from 0 to 255, in units of 1/255"),
    "negative": (["--epsilons=-1"], "epsilon is -1, but must be from 0 to 255"),
    "no number": (["--epsilons", "8/255"], "--epsilons has '8/255', which is not a number"),
    "test": (["--tests", "fgsm,rain"], "there is no robustness test 'rain'; choose from occlusion, patch_drop, fgsm"),
    "limit": (["--limit", "0"], "limit is 0, but must be at least 1"),
    "fp16": (["--precision", "fp16"], "precision is 'fp16', but the robustness suite needs fp32 or bf16"),
    "split": (["--split", "all"], "the robustness suite evaluates split val or train, not all"),
    "skip": (["--corrupt", "skip"], "the suite stops at images that cannot be decoded; leave out --corrupt skip"),
    "set": (["--imagenet", "x=photos"], "there is no ImageNet test set 'x'; choose from a, r, sketch, v2, real"),
    "batch": (["--batch-size", "-3"], "batch_size is -3, but must be at least 1"),
    "twice": (["RUN"], "is given twice; give a mapping of titles to models"),
    "other classes": (["--data", "digits"], "the classes of digits are not those of the model"),
    "segmenter": (["SEGMENTER"], "the robustness suite is for classifiers, but the task of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str, classifier_run: Path, segmenter_run: Path, image_folder: Path) -> None:
    """One sentence each."""
    arguments, message = WRONG[case]
    names = {"RUN": str(classifier_run), "SEGMENTER": str(segmenter_run)}
    words = [names.get(word, word) for word in arguments]
    out = call("eval", classifier_run, "--data", image_folder, "--suite", "robustness", "--workers", 0, *words, code=1)
    assert message in out
    assert out.count("error:") == 1


def test_options_of_the_suite_without_it(classifier_run: Path, image_folder: Path) -> None:
    out = call("eval", classifier_run, "--data", image_folder, "--limit", 5, code=1)
    assert "--limit belongs to a suite; add --suite robustness, or leave it out" in out
    out = call("eval", classifier_run, classifier_run, "--data", image_folder, code=1)
    assert "2 models are given, but one is evaluated at a time without --suite" in out
