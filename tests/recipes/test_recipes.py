"""Recipes: the schema and its errors, every file against the papers' numbers, and the page about them."""

import dataclasses
import json
import logging
import re
from functools import cache
from pathlib import Path

import pytest
import timm
import yaml
from timm.data import create_transform

import tokamix
from tokamix.recipes import (
    FOLDER,
    ClassifyRecipe,
    DetectRecipe,
    SegmentRecipe,
    create_recipe,
    list_recipes,
    load_recipe,
)
from tokamix.recipes.tables import fill, key_rows, measured_rows
from tokamix.study.rows import read_rows, write_row
from tokamix.study.schema import load_study

NAMES = [name for name in list_recipes() if load_recipe(name).task == "classify"]
OURS = {
    "cifar10_fast",
    "cifar100_fast",
    "cifar100_nano",
    "imagenette_nano",
    "cifar100_pyramid",
    "convert",
    "digits",
    "finetune",
    "imagenette",
    "shapes",
    "small",
}
ROOT = Path(__file__).parent.parent.parent

# what the papers state: epochs, batch, learning rate at that batch, weight decay, drop path, printed top-1
STATED = {
    "amixer_tiny": (300, 1024, 1e-3, 0.05, 0.2, None),
    "amixer_small": (300, 1024, 1e-3, 0.05, 0.35, None),
    "amixer_base": (300, 1024, 1e-3, 0.05, 0.5, None),
    "amixer_deit_small": (300, 1024, 1e-3, 0.05, 0.1, 80.3),
    "amixer_cifar10": (200, 512, 1e-4, 1e-4, 0.2, None),
    "amixer_cifar100": (200, 512, 1e-4, 1e-4, 0.2, None),
    "amixer_cars": (1000, 512, 1e-4, 1e-4, 0.2, None),
    "amixer_flowers": (1000, 512, 1e-4, 1e-4, 0.2, None),
    "atmnet_xtiny": (300, 1024, 1e-3, 0.05, 0.1, 79.7),
    "atmnet_tiny": (300, 1024, 1e-3, 0.05, 0.1, 82.0),
    "atmnet_small": (300, 1024, 1e-3, 0.05, 0.2, 83.1),
    "atmnet_base": (300, 1024, 1e-3, 0.05, 0.3, 83.5),
    "atmnet_large": (300, 1024, 1e-3, 0.05, 0.3, 83.8),
    "atmnet_large_384": (30, 512, 5e-6, 1e-8, 0.3, 84.8),
    "stvit_small": (300, 1024, 1e-3, 0.05, 0.1, 83.6),
    "stvit_base": (300, 1024, 1e-3, 0.05, 0.4, 84.8),
    "stvit_large": (300, 1024, 1e-3, 0.05, 0.4, 85.3),
    "stvit_small_384": (30, 512, 1e-5, 1e-8, 0.1, 85.0),
    "stvit_base_384": (30, 512, 1e-5, 1e-8, 0.4, 86.0),
    "stvit_large_384": (30, 512, 1e-5, 1e-8, 0.6, 86.4),
    "deit_small_sima": (300, 1024, 1e-3, 0.05, 0.05, 79.8),
    "deit_small_sima_1head": (300, 1024, 1e-3, 0.05, 0.05, 79.4),
    "deit_small_sima_relu": (300, 1024, 1e-3, 0.05, 0.05, 79.6),
    "cvt_13_sima": (300, 1024, 1e-3, 0.05, 0.05, 81.4),
    "xcit_tiny_12_p8_sima": (400, 1024, 1e-3, 0.05, 0.05, 79.4),
    "xcit_tiny_20_p16_sima": (400, 1024, 1e-3, 0.05, 0.05, 79.2),
    "xcit_tiny_24_p16_sima": (400, 1024, 1e-3, 0.05, 0.05, 79.8),
    "xcit_small_12_p16_sima": (400, 1024, 1e-3, 0.05, 0.05, 82.1),
    "deit_tiny_cb": (300, 1024, 1e-3, 0.05, 0.1, None),
    "deit_small_cb": (300, 1024, 1e-3, 0.05, 0.1, 80.5),
    "deit_base_cb": (300, 1024, 1e-3, 0.05, 0.2, None),
    "deit_tiny_distilled_cb": (300, 1024, 1e-3, 0.05, 0.1, 74.7),
    "deit_tiny_distilled_cbs": (300, 1024, 1e-3, 0.05, 0.1, 75.3),
    "deit_small_distilled_cb": (300, 1024, 1e-3, 0.05, 0.1, 81.3),
    "deit_small_distilled_cbs": (300, 1024, 1e-3, 0.05, 0.1, 81.6),
    "deit_base_distilled_cb": (300, 1024, 1e-3, 0.05, 0.2, 83.5),
    "deit_base_distilled_cbs": (300, 1024, 1e-3, 0.05, 0.2, 83.6),
    "pvt_small_cb": (120, 1024, 1e-3, 0.05, 0.1, 77.3),
    "pvt_v2_b0_cb": (120, 1024, 1e-3, 0.05, 0.1, None),
    "localvit_tiny_cb": (150, 1024, 1e-3, 0.05, 0.1, None),
    "swin_tiny_cb": (120, 1024, 1e-3, 0.05, 0.2, 79.5),
    "pit_s_cb": (300, 1024, 1e-3, 0.05, 0.1, None),
    "deit_small_cifar100": (300, 1024, 1e-3, 0.05, 0.1, 74.73),
    "deit_small_cb_cifar100": (300, 1024, 1e-3, 0.05, 0.1, 75.43),
}


def test_every_row_exists() -> None:
    assert set(NAMES) == OURS | set(STATED)


@pytest.mark.parametrize("name", STATED)
def test_stated_numbers(name: str) -> None:
    r = load_recipe(name)
    assert (r.epochs, r.batch_size, pytest.approx(r.peak_lr), r.weight_decay, r.drop_path, r.top1) == STATED[name]
    assert (r.mixup, r.cutmix, r.random_erasing, r.label_smoothing) == (0.8, 1.0, 0.25, 0.1)
    assert r.augment == "rand-m9-mstd0.5-inc1"
    assert r.optimizer == "adamw"
    assert r.image_size == (384 if name.endswith("_384") else 224)
    assert re.fullmatch(r"(AMixer|ATMNet|STViT|SimA|CB), .*(section|Table).*", r.source)


def test_settings_of_single_rows() -> None:
    """Settings that only one paper or one row has."""
    recipes = {name: load_recipe(name) for name in STATED}
    assert {n for n, r in recipes.items() if r.drop_path_later} == {"stvit_large"}
    assert recipes["stvit_large"].drop_path_later == {260: 0.6}
    assert {r.ema for n, r in recipes.items() if n.startswith("atmnet")} == {0.99996}
    assert {n for n, r in recipes.items() if r.ema and not n.startswith("atmnet")} == {"amixer_deit_small"}
    transfer = {n for n, r in recipes.items() if r.finetune and r.image_size == 224}
    assert transfer == {"amixer_cars", "amixer_cifar10", "amixer_cifar100", "amixer_flowers"}
    assert {n for n, r in recipes.items() if r.clip_grad == 1} == transfer
    assert {n for n, r in recipes.items() if r.eval_mode} == {n for n in recipes if n.endswith("_384")}
    assert {n for n, r in recipes.items() if r.distillation == "hard"} == {n for n in recipes if "distilled" in n}
    assert {r.crop_pct for n, r in recipes.items() if n.endswith("_sima")} == {1.0}
    assert {r.warmup_epochs for n, r in recipes.items() if n.startswith("deit_base")} == {10}
    swin = recipes["swin_tiny_cb"]  # rates of config.py, scaled by batch / 512 in main.py
    scale = swin.batch_size / 512
    assert (swin.peak_lr, swin.min_lr, swin.warmup_lr) == (5e-4 * scale, 5e-6 * scale, 5e-7 * scale)
    once = {n for n, r in recipes.items() if r.repeated_augmentation == 1}
    assert {n for n in recipes if re.match(r"deit_(tiny|small).*_cbs?", n)} <= once
    assert not {n for n in once if n.startswith(("atmnet", "stvit", "xcit", "deit_base", "pvt"))}


@pytest.mark.parametrize("name", NAMES)
def test_files(name: str, tmp_path: Path) -> None:
    """A file names its source, survives a round trip through YAML, and names models that exist."""
    recipe = load_recipe(name)
    assert recipe.name == name
    assert (recipe.source == "ours") == (name in OURS)
    path = tmp_path / "copy.yaml"
    path.write_text(recipe.to_yaml())
    assert load_recipe(path) == recipe
    assert load_recipe(str(path), {"seed": 3}).seed == 3
    for processes in (1, 2, 4, 8):
        assert recipe.micro_batch(processes) * processes * recipe.accumulate == recipe.batch_size
    if recipe.augment:
        create_transform(64, is_training=True, auto_augment=recipe.augment)
    if recipe.teacher:
        assert timm.is_model_pretrained(recipe.teacher)
    if recipe.top1 and recipe.data == "ImageNet" and recipe.image_size == 224:
        printed = timm.models.get_pretrained_cfg(recipe.model).notes or ()
        assert not printed or f"top1={recipe.top1}" in printed
    text = next(FOLDER.rglob(f"{name}.yaml")).read_text()
    assert max(map(len, text.splitlines())) <= 120


@cache
def drop_path_of(model: str, rate: float | None, kwargs: str) -> float:
    options = yaml.safe_load(kwargs) | ({} if rate is None else {"drop_path_rate": rate})
    built = tokamix.create_model(model, num_classes=7, device="meta", **options)
    return max((m.drop_prob or 0.0 for m in built.modules() if type(m).__name__ == "DropPath"), default=0.0)


@pytest.mark.parametrize("name", [name for name in NAMES if load_recipe(name).model])
def test_models_build(name: str) -> None:
    """On the meta device, with the recipe's arguments and stochastic depth."""
    recipe = load_recipe(name)
    assert recipe.model is not None
    rate = drop_path_of(recipe.model, recipe.drop_path, repr(recipe.model_kwargs))
    assert rate == pytest.approx(recipe.drop_path or 0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("epoch=3", "there is no key 'epoch'; did you mean epochs?"),
        ("qqq=3", r"there is no key 'qqq'; the keys are name, source"),
        ("epochs=many", "epochs is 'many', but must be a whole number of at least 1"),
        ("epochs=0", "epochs is 0, but must be a whole number of at least 1"),
        ("epochs=1.5", r"epochs is 1\.5, but must be a whole number"),
        ("epochs=true", "epochs is True, but must be a whole number"),
        ("lr=.nan", "lr is nan, but must be a number of at least 0"),
        ("lr=-1e-3", r"lr is -0\.001, but must be a number of at least 0"),
        ("mixup_prob=2", "mixup_prob is 2, but must be a number of at least 0 and of at most 1"),
        ("crop_pct=0", "crop_pct is 0, but must be a number above 0 and of at most 1, or none"),
        ("lr=1" + "0" * 400, "lr is 10*, but must be a number of at least 0"),
        ("epochs.x=1", "epochs is 40, which has no 'x' to set"),
        ("compile=3", "compile is 3, but must be true or false"),
        ("model=3", "model is 3, but must be a string, or none"),
        ("precision=fp8", "precision is 'fp8', but must be one of fp32, bf16, fp16"),
        ("task=paint", "task is 'paint', but must be one of classify, segment, detect"),
        ("betas=[0.9]", r"but must be a list of 2 values, each a number of at least 0 and below 1, or none"),
        ("betas=0.9", r"betas is 0\.9, but must be a list of 2 values"),
        ("model_kwargs=3", "model_kwargs is 3, but must be a mapping of a string to a value"),
        ("drop_path_later={1: 7}", "but must be a mapping of a whole number to a number of at least 0 and below 1"),
        ("drop_path_later={99: 0.1}", "drop_path_later names epoch 99 of 40; set it to {} for no change"),
        ("drop_path=1", "drop_path is 1, but must be a number of at least 0 and below 1, or none"),
        ("accumulate=3", "batch_size 32 cannot be divided by accumulate 3"),
        ("warmup_epochs=40", "warmup_epochs 40 must be below epochs 40; set it lower"),
        ("min_lr=1", r"min_lr 1 is above the learning rate 0\.002 at batch 32"),
        ("optimizer=admw", "timm has no optimizer 'admw'; did you mean adamw?"),
        ("optimizer=zzzzzz", r"timm has no optimizer 'zzzzzz'; timm.optim.list_optimizers\(\) lists them"),
        ("augment=much", "augment is 'much', but must be none or start with one of 3-augment"),
        ("crop_scale=[0.9, 0.1]", "crop_scale is .*, but must be two rising numbers above 0"),
        ("crop_padding=2", "crop_scale and crop_padding are two kinds of crop"),
        ("repeated_augmentation=33", "33 copies of an image do not fit into a batch of 32"),
        ("distillation=hard", "hard distillation needs a teacher"),
        ("teacher=resnet18", "the teacher resnet18 is not used; set distillation to hard or soft"),
        ("lr", "'lr' is not an override: write key=value, such as lr=1e-3"),
        ("lr=[1", r"the value of 'lr=\[1' is not valid YAML"),
    ],
)
def test_bad_values(setting: str, message: str, tmp_path: Path) -> None:
    write(tmp_path, mine="epochs: 40\nbatch_size: 32\nlr: 2e-3\n")
    with pytest.raises(ValueError, match=message) as error:
        load_recipe(tmp_path / "mine.yaml", [setting])
    assert "\n" not in str(error.value)


def test_good_values() -> None:
    recipe = load_recipe(
        "digits", ["lr=1e-3", "epochs=1e2", "model_kwargs.depth=6", "clip_grad=none", "drop_path=null"]
    )
    assert (recipe.lr, recipe.epochs, recipe.clip_grad, recipe.drop_path) == (1e-3, 100, None, None)
    assert recipe.model_kwargs == load_recipe("digits").model_kwargs | {"depth": 6}
    assert type(recipe.epochs) is int
    assert type(load_recipe("digits", ["warmup_epochs=2"]).warmup_epochs) is float
    assert load_recipe("digits", {"betas": (0.9, 0.95)}).betas == (0.9, 0.95)
    assert load_recipe("digits", ["model_kwargs.eps=1e-6"]).model_kwargs["eps"] == 1e-6
    assert load_recipe("digits", ["distillation=soft", "teacher=resnet18"]).teacher == "resnet18"
    assert load_recipe("digits").distillation == "none"
    assert load_recipe("digits", ["drop_path_later.20=0.2"]).drop_path_later == {20: 0.2}
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.lr = 1.0
    with pytest.raises(ValueError, match="recipe digits: epochs is -1"):
        recipe.replace(epochs=-1)
    with pytest.raises(ValueError, match="recipe digits: there is no key 'epoch'; did you mean epochs"):
        recipe.replace(epoch=3)
    assert recipe.replace(epochs=30).epochs == 30
    assert create_recipe({"name": "mine"}) == ClassifyRecipe(name="mine")


def test_short_schedules(caplog: pytest.LogCaptureFixture) -> None:
    """Warm-up and stochastic depth scale with `epochs`; one notice says how."""
    with caplog.at_level(logging.WARNING, "tokamix"):
        short = load_recipe("deit_small_cb", ["epochs=3"])
    assert (short.epochs, short.warmup_epochs) == (3, 0.05)
    assert caplog.messages == ["epochs changed from 300 to 3, so the schedule scales: warmup_epochs 5 -> 0.05"]
    assert load_recipe("deit_small_cb", ["epochs=3", "warmup_epochs=1"]).warmup_epochs == 1
    assert load_recipe("stvit_large", ["epochs=30"]).drop_path_later == {26: 0.6}
    assert load_recipe("stvit_large", ["epochs=1"]).drop_path_later == {}


def test_task() -> None:
    assert isinstance(load_recipe("digits", task="classify"), ClassifyRecipe)
    assert isinstance(load_recipe("small_segment", task="segment"), SegmentRecipe)
    assert isinstance(load_recipe("small_detect"), DetectRecipe)
    with pytest.raises(ValueError, match="the recipe small_detect is for task detect, not segment; name another"):
        load_recipe("small_detect", task="segment")
    with pytest.raises(ValueError, match="recipe digits: crop_size belongs to task segment, not classify"):
        load_recipe("digits", ["crop_size=32"])


def test_batches() -> None:
    recipe = load_recipe("small", ["accumulate=4", "lr_per=256", "batch_size=128"])
    assert recipe.micro_batch(2) == 16
    assert recipe.peak_lr == recipe.lr / 2
    with pytest.raises(ValueError, match=r"cannot be divided by 3 processes .* set batch_size to a multiple of 12"):
        recipe.micro_batch(3)
    with pytest.raises(ValueError, match="cannot be divided by 64 processes"):
        recipe.micro_batch(64)


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


def test_user_files(tmp_path: Path) -> None:
    write(tmp_path, mine="extends: stvit_small\nepochs: 7\n", yours="extends: mine\nlr: 1e-2\nmodel_kwargs: {a: 1}\n")
    mine, yours = load_recipe(tmp_path / "mine.yaml"), load_recipe(tmp_path / "yours.yaml")
    assert (mine.name, mine.epochs, mine.model, mine.augment) == ("mine", 7, "stvit_small", "rand-m9-mstd0.5-inc1")
    assert (mine.top1, mine.source) == (None, "after stvit_small")  # not the paper's row any more
    assert (yours.name, yours.epochs, yours.lr, yours.model_kwargs) == ("yours", 7, 1e-2, {"a": 1})
    write(tmp_path, ours="extends: mine.yaml\n", digits="extends: digits\nlr: 1\n", empty="")
    assert load_recipe(tmp_path / "ours.yaml").epochs == 7
    assert load_recipe(tmp_path / "digits.yaml").model_kwargs == load_recipe("digits").model_kwargs
    assert load_recipe(tmp_path / "empty.yaml") == ClassifyRecipe(name="empty")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": "extends: b", "b": "extends: a"}, "extends itself, through a and b"),
        ({"a": "extends: a.yaml"}, "extends itself, through a"),
        ({"a": "extends: a"}, "there is no recipe 'a'"),
        ({"a": "extends: digit"}, "there is no recipe 'digit'; did you mean digits?"),
        ({"a": "extends: gone.yaml"}, r"there is no recipe file .*gone\.yaml"),
        ({"a": "- lr"}, "holds a list, but a recipe is lines of `key: value`"),
        ({"a": "lr: ["}, "is not a recipe in YAML"),
        ({"a": "lr: 1\nlr: 2"}, "is not a recipe in YAML: duplicate key lr"),
        ({"a": "extends: small\nlearning_rat: 1"}, "recipe a: there is no key 'learning_rat'"),
        ({"a": "3: 1"}, "recipe a: there is no key 3"),
        ({}, r"there is no recipe file .*a\.yaml"),
    ],
)
def test_bad_files(files: dict[str, str], message: str, tmp_path: Path) -> None:
    write(tmp_path, **files)
    with pytest.raises(ValueError, match=message) as error:
        load_recipe(tmp_path / "a.yaml")
    assert "\n" not in str(error.value)


def test_binary_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match="is not a recipe in YAML"):
        load_recipe(tmp_path / "a.yaml")


def test_unknown_recipe() -> None:
    with pytest.raises(ValueError, match=r"there is no recipe 'digit'; did you mean digits\?"):
        load_recipe("digit")
    with pytest.raises(ValueError, match=r"`tokamix recipes` lists them, and a file's name ends in \.yaml"):
        load_recipe("qqqqqqqq")


@pytest.mark.parametrize("name", ["cifar100_fast", "cifar100_pyramid", "imagenette"])
def test_measured_recipes(name: str) -> None:
    """A recipe has the settings of its measured runs, and the page has their results."""
    rows = [row for row in read_rows(ROOT / "results/studies/small_data.csv") if row["arm"] == name]
    page = (ROOT / "docs/recipes.md").read_text()
    (line,) = re.findall(rf"^\| `{name}` \|.* \(n = .*$", page, re.MULTILINE)
    assert f"(n = {len(rows)}" in line
    for row in rows:
        settings = json.loads(row["settings"])
        own = {key: settings[key] for key in ("name", "seed")} | {"data": None}
        assert load_recipe(name).replace(**own) == create_recipe({**settings, "data": None, "source": "ours"})
        assert f"{float(row['score']):.2f}" in line


def test_files_of_our_recipes_name_their_measured_end() -> None:
    """Result and seconds of training as in docs/recipes.md, or that there is no such run."""
    table = measured_rows()
    assert len(table) >= 12
    for name, _, _, result, seconds, _ in table:
        (path,) = FOLDER.glob(f"*/{name}.yaml")
        comments = " ".join(line[2:] for line in path.read_text().splitlines() if line.startswith("# "))
        if seconds:
            assert result.split()[0] in comments, (name, result)
            assert seconds in comments, (name, seconds)
        else:
            assert "ot run to its end yet" in comments or "not been run to its end yet" in comments, name


def test_ends_of_our_recipes(tmp_path: Path) -> None:
    """A finished run gives result, time and device; a recipe without one says so."""
    row = {"arm": "digits", "status": "finished", "score": "98.61", "model": "columnar_tiny_softmax", "data": "digits"}
    row |= {"train_images": "1438", "train_seconds": "12.4", "processes": "4", "gpu": "NVIDIA H200"}
    diverged = {**dict.fromkeys(row, ""), "arm": "shapes", "status": "diverged"}
    for line in (row, diverged):
        write_row(tmp_path / "recipes.csv", line, list(row))
    table = {first: rest for first, *rest in measured_rows(tmp_path / "recipes.csv")}
    measured = [
        "columnar_tiny_softmax",
        "digits, 1,438 images",
        "98.6 % top-1",
        "12 s",
        "NVIDIA H200, 4 runs at a time",
    ]
    assert table["digits"] == measured
    assert table["shapes"][2:] == table["small_detect"][2:] == ["not measured", "", ""]
    assert "cifar100_fast" not in table
    study = load_study("recipes")
    assert set(study.arms) <= set(table)
    assert set(table) - set(study.arms) == {"convert", "small_dino", "small_vqa"}  # need other data or weights


def test_page(tmp_path: Path) -> None:
    """The generated tables are up to date, the code runs, and the example is a recipe."""
    page = (ROOT / "docs/recipes.md").read_text()
    assert fill(page) == page, "run python -m tokamix.recipes.tables docs/recipes.md"
    assert all(meaning for *_, meaning in key_rows())
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(code, {})
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    write(tmp_path, flowers=example)
    assert load_recipe(tmp_path / "flowers.yaml").image_size == 160
