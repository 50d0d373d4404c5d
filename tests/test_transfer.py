"""`transfer` and `tokamix transfer`: one classifier, several data sets, one table."""

import csv
from pathlib import Path

import pytest
from PIL import Image

import tokamix
from tests.command import call
from tests.train.tiny import tiny_data
from tokamix.recipes import load_recipe
from tokamix.train import RunResult
from tokamix.transfer import DROP_PATH, RECIPES, _create_row, _fit_batch, _titles

SMALL = ["epochs=1", "batch_size=8", "image_size=8", "augment=none", "warmup_epochs=0"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two data sets with two and four classes."""
    root = tmp_path_factory.mktemp("data")
    images, labels = tiny_data().train.arrays()
    for i, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        for name, kept in (("stripes", 2), ("patterns", 4)):
            if label < kept:
                path = root / name / f"c{label}" / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return [root / "stripes", root / "patterns"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_transfer(classifier_run: Path, folders: list[Path], tmp_path: Path) -> None:
    """A run for each data set; the weights come from the checkpoint, and the same call returns the finished runs."""
    lines: list[str] = []
    options = {"overrides": SMALL, "device": "cpu", "progress": lines.append}
    rows = tokamix.transfer(classifier_run, [f"folder:{folders[0]},{folders[1]}"], tmp_path, **options)
    assert [(row.data, row.classes, row.recipe, row.epochs) for row in rows] == [
        ("stripes", 2, "amixer_cifar10", 1),
        ("patterns", 4, "amixer_cifar10", 1),
    ]
    assert len(lines) == 2
    assert rows[1].last > 60, "the classifier was trained on these images"
    assert rows[0].train_images + rows[0].val_images == 40
    with (tmp_path / "results.csv").open() as file:
        assert [float(row["last"]) for row in csv.DictReader(file)] == [row.last for row in rows]
    before = (tmp_path / "stripes" / "model.safetensors").stat().st_mtime_ns
    assert tokamix.transfer(classifier_run, list(map(str, folders)), tmp_path, **options) == rows
    assert (tmp_path / "stripes" / "model.safetensors").stat().st_mtime_ns == before


def test_the_batch_fits_data_and_cpu(
    classifier_run: Path, folders: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Few images get a small batch; the paper's batch is accumulated on a CPU; a given batch stays."""
    overrides = [value for value in SMALL if not value.startswith("batch_size")]
    common = {"overrides": overrides, "device": "cpu"}
    (row,) = tokamix.transfer(classifier_run, str(folders[1]), tmp_path / "a", **common)
    recipe = load_recipe(row.folder / "recipe.yaml")
    assert (recipe.batch_size, recipe.accumulate) == (8, 1)
    assert "patterns: batch 8 instead of 512 for 64 images; --batch-size sets it" in caplog.messages
    assert _fit_batch("amixer_cifar10", "CIFAR10", None, {}, "cpu") == {"accumulate": 16}
    assert _fit_batch("amixer_cifar10", "mine", 900, {}, "cpu") == {"batch_size": 64, "accumulate": 2}
    assert _fit_batch("amixer_cifar10", "mine", 900, {"batch_size": 512}, "cpu") == {}


def test_best_is_of_both_kinds_of_weights(tmp_path: Path) -> None:
    """The best epoch is never below the last one, also with EMA."""
    rows = [{"top1": 50.0, "ema_top1": 70.0}, {"epoch": 2}, {"top1": 60.0, "ema_top1": 65.0}]
    result = RunResult(tmp_path, {"top1": 65.0}, rows, last={"top1": 65.0})
    row = _create_row("mine", (2, 3, 4), "finetune", result)
    assert (row.last, row.best) == (65.0, 70.0)


def test_folders_of_the_same_name(classifier_run: Path, folders: list[Path], tmp_path: Path) -> None:
    """They get runs of their own; one folder in two spellings is refused."""
    named = [("/my/pets/photos", "photos"), ("digits", "digits"), ("/my/birds/photos", "photos")]
    assert _titles(named) == ["pets/photos", "digits", "birds/photos"]
    with pytest.raises(ValueError, match="two data sets are called b/c; rename a folder"):
        _titles([("/a/b/c", "c"), ("/d/b/c", "c")])
    with pytest.raises(ValueError, match=r"the data set .*stripes is given twice"):
        tokamix.transfer(classifier_run, [f"{folders[0]}", f"{folders[0]}/"], tmp_path, device="cpu")


def test_command(classifier_run: Path, folders: list[Path], tmp_path: Path) -> None:
    sets = [word for value in SMALL for word in ("--set", value)]
    weights = classifier_run / "last.safetensors"
    out = call("transfer", weights, "--to", folders[0], "-o", tmp_path, "--device", "cpu", "--workers", 0, *sets)
    assert "last top-1" in out
    assert "stripes 2 32 8 amixer_cifar10 1" in out


def test_recipes_of_the_paper() -> None:
    """Each data set of AMixer's Table 2 has its recipe, with the values of the supplement."""
    for name, epochs in (("cifar10", 200), ("cifar100", 200), ("stanfordcars", 1000), ("flowers102", 1000)):
        recipe = load_recipe(RECIPES[name])
        assert (recipe.data.lower(), recipe.epochs, recipe.lr, recipe.weight_decay) == (name, epochs, 1e-4, 1e-4)
        assert recipe.finetune
    assert load_recipe("amixer_small").drop_path == DROP_PATH["amixer_small"]
    assert load_recipe("amixer_base").drop_path == DROP_PATH["amixer_base"]
    assert load_recipe("amixer_deit_small").drop_path == DROP_PATH["amixer_deit_small"]


WRONG = {
    "no data": (
        ["RUN", "--to", "cifar11"],
        "there is no data set 'cifar11'; possible are a folder, a .npz file, digits",
    ),
    "cars": (
        ["RUN", "--to", "cars:nosuch"],
        "StanfordCars is not in nosuch; set TOKAMIX_DATA to the folder that has it",
    ),
    "empty": (["RUN", "--to", ","], "transfer needs at least one data set, such as cifar10,flowers102"),
    "twice": (["RUN", "--to", "digits,digits"], "the data set digits is given twice"),
    "no model": (["runs/nosuch", "--to", "digits"], "there is no run folder and no checkpoint file runs/nosuch"),
    "no weights": (["amixer_tiny", "--to", "digits"], "amixer_tiny has no pretrained weights; give a run's folder"),
    "segmenter": (["SEGMENTER", "--to", "digits"], "transfer is for classifiers, but the task of"),
    "recipe": (["RUN", "--to", "digits", "--recipe", "nosuch"], "there is no recipe 'nosuch'"),
    "key": (["RUN", "--to", "digits", "--set", "lrr=1"], "there is no key 'lrr'; did you mean lr"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str, classifier_run: Path, segmenter_run: Path, tmp_path: Path) -> None:
    """One sentence each, before any training."""
    arguments, message = WRONG[case]
    names = {"RUN": str(classifier_run), "SEGMENTER": str(segmenter_run)}
    out = call("transfer", *(names.get(word, word) for word in arguments), "-o", tmp_path / "out", code=1)
    assert message in out
    assert out.count("error:") == 1
    assert not (tmp_path / "out").exists()
