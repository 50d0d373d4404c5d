"""`tokamix compare`: trainings, resuming, and the command with wrong input."""

import re
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import tokamix
from tests.cli.test_cli import call
from tokamix.compare import Candidate, compare
from tokamix.compare.measure import _curves
from tokamix.compare.report import Curves
from tokamix.compare.run import Job, _train_all
from tokamix.recipes import load_recipe
from tokamix.train import RunResult

pytestmark = pytest.mark.xdist_group("compare")

TINY = {"patch_size": 4, "dim": 8, "depth": 1, "num_heads": 2}
SHORT = {"epochs": 1, "warmup_epochs": 0, "batch_size": 4, "image_size": 16, "model_kwargs": TINY}


def write_images(folder: Path, count: int) -> Path:
    """Two classes of images of different sizes in a folder for each class."""
    generator = torch.Generator().manual_seed(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = torch.randint(0, 256, (20 + i, 24, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The command on digits, and its output."""
    pytest.importorskip("sklearn")
    output = tmp_path_factory.mktemp("digits")
    return output, call(*command(output))


def command(output: Path) -> list[str]:
    values = (f"epochs=1 warmup_epochs=0 batch_size=256 image_size=16 model_kwargs={TINY}").split(" ", 4)
    settings = [argument for value in values for argument in ("--set", value)]
    names = ["--data", "digits", "--mixers", "softmax, pooling", "--body", "columnar_tiny", "--recipe", "digits"]
    return ["compare", *names, *settings, "--seeds", "2", "--device", "cpu", "-o", str(output)]


def test_digits(digits: tuple[Path, str]) -> None:
    """The table and the page show the same numbers, for both seeds."""
    output, text = digits
    page = (output / "report.html").read_text()
    assert "columnar_tiny on digits" in page
    for mixer in ("softmax", "pooling"):
        row = next(line for line in text.partition("token mixer")[2].splitlines() if line.startswith(mixer))
        mean, low, high = re.findall(r"[\d.]+(?=\s%| to|\))", row)[:3]
        assert f"<td>{mean}\u00a0%<small>{low} to {high}</small></td>" in page
        assert sorted(p.name for p in (output / mixer).iterdir()) == ["seed0", "seed1"]
        recipe = load_recipe(output / mixer / "seed1" / "recipe.yaml")
        assert (recipe.model, recipe.seed, recipe.epochs) == (f"columnar_tiny_{mixer}", 1, 1)
    assert page.count("<article") == 2  # receptive fields
    assert "1 block, 4×4 tokens" in page  # noqa: RUF001


def test_the_default_recipe_fits_few_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A given batch and that of a named recipe stay."""
    data = str(write_images(tmp_path / "images", 50))
    made: list[int] = []

    def stop(candidates, recipe_for, *args, **options) -> None:
        made.append(recipe_for(candidates[0], 0).batch_size)

    monkeypatch.setattr(sys.modules[_train_all.__module__], "run_comparison", stop)
    compare(data, output=tmp_path)
    compare(data, output=tmp_path, overrides=["batch_size=64"])
    compare(data, output=tmp_path, recipe="digits", body="columnar_tiny", overrides={"model_kwargs": {}})
    assert made == [8, 64, load_recipe("digits").batch_size]


def test_accuracies_are_those_of_averaged_weights(tmp_path: Path) -> None:
    """Where there are some, as in the default recipe: the model of the run's folder has them."""
    rows = [{"train_loss": 2.0, "top1": 40.0, "ema_top1": 30.0}, {"train_loss": 1.0, "top1": 50.0, "ema_top1": 60.0}]
    assert _curves(RunResult(tmp_path, epochs=rows)) == Curves((2.0, 1.0), (30.0, 60.0))
    plain = [{key: value for key, value in row.items() if key != "ema_top1"} for row in rows]
    assert _curves(RunResult(tmp_path, epochs=plain)) == Curves((2.0, 1.0), (40.0, 50.0))


def test_resumes(digits: tuple[Path, str]) -> None:
    """Finished runs are not trained again; different settings are refused."""
    output, text = digits
    before = {path: path.stat().st_mtime_ns for path in output.rglob("last.safetensors")}
    assert len(before) == 4
    shown = [line for line in call(*command(output)).splitlines() if "after" in line]
    assert sorted(shown) == sorted(line for line in text.splitlines() if "after" in line)
    assert before == {path: path.stat().st_mtime_ns for path in output.rglob("last.safetensors")}
    refused = call(*command(output), "--set", "lr=0.5", code=1)
    assert "settings: lr was 0.002 and is 0.5" in refused


def test_folder_of_images(tmp_path: Path) -> None:
    """Through the API, with colour images; the pyramid has no map with enough tokens for receptive fields."""
    data = write_images(tmp_path / "images", 5)
    lines: list[str] = []
    small = {"dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]}
    comparison = tokamix.compare(
        str(data),
        ["sima", "pooling"],
        "pyramid_tiny",
        output=tmp_path / "out",
        overrides={"epochs": 1, "batch_size": 4, "image_size": 12, "model_kwargs": small},
        device="cpu",
        processes=1,
        progress=lines.append,
    )
    report = comparison.report
    assert [result.title for result in report.results] == ["sima", "pooling"]
    assert report.results[0].link == "https://arxiv.org/abs/2206.08898"
    assert (report.train_images + report.test_images, report.epochs, report.example) == (10, 1, None)
    assert report.body == "4 blocks in 4 stages, 3×3 tokens"  # noqa: RUF001
    assert len(lines) == 2
    assert comparison.page.read_text().count("<svg") == 4
    run = comparison.runs["sima"][0]
    assert isinstance(run, RunResult)
    assert report.results[0].accuracies == [run.epochs[-1]["top1"]]


def test_trainings_side_by_side_are_the_same(tmp_path: Path) -> None:
    """The weights do not depend on the number of processes."""
    data = str(write_images(tmp_path / "images", 5))
    options = {"resume": True, "device": "cpu", "workers": 0}

    def jobs(folder: str) -> list[Job]:
        return [
            Job(
                Candidate.from_registry(mixer),
                load_recipe("digits", {**SHORT, "model": f"columnar_tiny_{mixer}"}),
                data,
                tmp_path / folder / mixer,
                options,
            )
            for mixer in ("softmax", "super_token")
        ]

    assert len(list(_train_all(jobs("alone"), 1))) == 2
    assert len(list(_train_all(jobs("beside"), 2))) == 2
    for mixer in ("softmax", "super_token"):
        alone, beside = (tmp_path / name / mixer / "last.safetensors" for name in ("alone", "beside"))
        assert alone.read_bytes() == beside.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--mixers softmax,simma", "there is no mixer 'simma'; did you mean sima"),
        ("--mixers softmax", "a comparison needs at least 2 different mixers, got softmax"),
        ("--mixers softmax,softmax", "a comparison needs at least 2 different mixers, got softmax, softmax"),
        ("--mixers ,", "a comparison needs at least 2 different mixers, got none"),
        ("--body pyramid_tinny", "there is no body 'pyramid_tinny'; did you mean pyramid_tiny"),
        ("--body pyramid_tiny --recipe digits", "use --body columnar_tiny"),
        ("--recipe small_segment", "compare trains classifiers, and the recipe small_segment is for task segment"),
        ("--recipe smal", "there is no recipe 'smal'"),
        ("--data digitz", "did you mean digits?"),
        ("-o {file}/out", "cannot create the folder {file}/out: Not a directory; choose another --output"),
    ],
)
def test_wrong_input_is_one_sentence(arguments: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    arguments, text = (words.replace("{file}", str(tmp_path / "file")) for words in (arguments, text))
    out = call("compare", "--data", "digits", "-o", str(tmp_path / "out"), *arguments.split(), code=1)
    assert out.startswith("error: ")
    assert text in out
    assert "Traceback" not in out
    assert len(out.splitlines()) == 1


def test_seeds() -> None:
    with pytest.raises(ValueError, match="at least 1 seed, got 0"):
        tokamix.compare("digits", ["softmax", "sima"], seeds=0)


def test_arguments_of_one_mixer(tmp_path: Path) -> None:
    """The recipe has an argument of softmax attention that other mixers do not accept."""
    with pytest.raises(ValueError, match=r"cifar100_fast sets mixer_kwargs .* add --set model_kwargs.mixer_kwargs={}"):
        compare("digits", recipe="cifar100_fast", output=tmp_path)
