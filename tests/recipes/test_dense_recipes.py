"""Recipes for segmentation and detection: the papers' tables row by row, iterations, rows, and their errors."""

from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from tokamix.dense.saved import create_dense_model
from tokamix.recipes import FOLDER, DetectRecipe, SegmentRecipe, list_recipes, load_recipe, recipe_rows
from tokamix.tasks import METHODS

NAMES = [name for name in list_recipes() if load_recipe(name).task in ("segment", "detect")]
OURS = {"shapes_segment", "shapes_detect", "small_segment", "small_detect"}
ATMNET = ("atmnet_xtiny", "atmnet_tiny", "atmnet_small", "atmnet_base", "atmnet_large")
SEGMENT_DEPTH = (0.1, 0.1, 0.2, 0.2, 0.2)  # ATMNet, section 4.2
DETECT_DEPTH = (0.1, 0.1, 0.3, 0.5, 0.6)  # section 4.3

# what the papers state: method, length, batch, learning rate, weight decay
STATED = {
    "atmnet_semantic_fpn": ("semantic_fpn", 40_000, 32, 2e-4, 0.01),
    "atmnet_semantic_fpn_atmfpn": ("semantic_fpn", 40_000, 32, 2e-4, 0.01),
    "atmnet_upernet": ("upernet", 160_000, 16, 6e-5, 0.01),
    "atmnet_retinanet_1x": ("retinanet", 12, 16, 1e-4, 1e-4),
    "atmnet_retinanet_3x": ("retinanet", 36, 16, 1e-4, 1e-4),
    "atmnet_mask_rcnn_1x": ("mask_rcnn", 12, 16, 1e-4, 0.05),
    "atmnet_mask_rcnn_1x_atmfpn": ("mask_rcnn", 12, 16, 1e-4, 0.05),
    "atmnet_mask_rcnn_3x": ("mask_rcnn", 36, 16, 1e-4, 0.05),
    "atmnet_cascade_1x": ("cascade_mask_rcnn", 12, 16, 1e-4, 0.05),
    "atmnet_cascade_3x": ("cascade_mask_rcnn", 36, 16, 1e-4, 0.05),
    "stvit_mask_rcnn_1x": ("mask_rcnn", 12, 16, 1e-4, 0.05),
    "stvit_mask_rcnn_3x": ("mask_rcnn", 36, 16, 1e-4, 0.05),
    "stvit_cascade_1x": ("cascade_mask_rcnn", 12, 16, 1e-4, 0.05),
    "stvit_cascade_3x": ("cascade_mask_rcnn", 36, 16, 1e-4, 0.05),
    "stvit_upernet": ("upernet", 160_000, 16, 6e-5, 0.01),
    "amixer_semantic_fpn": ("semantic_fpn", 80_000, 16, 1e-4, 1e-4),
    "sima_mask_rcnn_3x": ("mask_rcnn", 36, 16, 1e-4, 0.05),
    "xcit_mask_rcnn_3x": ("mask_rcnn", 36, 16, 1e-4, 0.05),
    "xcit_semantic_fpn": ("semantic_fpn", 80_000, 16, 6e-5, 0.01),
    "xcit_upernet": ("upernet", 160_000, 16, 6e-5, 0.01),
}
# Tables 2 to 6 of ATMNet, xT to L: mIoU, or box AP and mask AP
PRINTED = {
    "atmnet_semantic_fpn": [(43.0,), (45.8,), (47.3,), (47.7,), (48.1,)],
    "atmnet_upernet": [(44.3, 45.4), (46.5, 47.6), (48.4, 49.5), (48.7, 49.8), (50.1, 51.1)],
    "atmnet_retinanet_1x": [(41.2,), (43.6,), (45.4,), (45.6,), (46.1,)],
    "atmnet_retinanet_3x": [(43.7,), (45.8,), (46.3,), (47.7,), (48.1,)],
    "atmnet_mask_rcnn_1x": [(42.8, 39.5), (44.8, 41.0), (46.0, 42.0), (46.5, 42.5), (47.4, 43.2)],
    "atmnet_mask_rcnn_3x": [(45.0, 41.1), (47.1, 42.7), (48.1, 43.4), (49.0, 43.9), (49.5, 44.5)],
    "atmnet_cascade_1x": [(47.6, 41.3), (49.4, 42.8), (51.0, 44.2), (51.3, 44.6), (51.8, 44.8)],
    "atmnet_cascade_3x": [(50.0, 43.5), (51.3, 44.6), (51.5, 44.8), (52.5, 45.6), (53.3, 46.3)],
}


def test_every_schedule_exists() -> None:
    assert set(NAMES) == OURS | set(STATED)


@pytest.mark.parametrize("name", STATED)
def test_stated_numbers(name: str) -> None:
    r = load_recipe(name)
    length = r.iterations or r.epochs
    assert (r.method, length, r.batch_size, r.peak_lr, r.weight_decay) == STATED[name]
    assert r.finetune
    assert r.optimizer == "adamw"
    if r.task == "segment":
        assert (r.schedule, r.min_lr, r.crop_size, r.scale, r.scale_range) == ("poly", 0, 512, (2048, 512), (0.5, 2.0))
        assert r.cat_max == 0.75
        assert r.photometric
    else:
        assert (r.schedule, r.scale) == ("step", (1333, 800))
        assert r.milestones == ((8, 11) if name.endswith(("1x", "atmfpn")) else (27, 33))
        assert r.scales == (() if r.epochs == 12 else tuple(range(480, 801, 32)))
        assert r.crop_then_scale == name.startswith(("xcit", "sima"))


@pytest.mark.parametrize("name", PRINTED)
def test_rows_of_atmnet(name: str) -> None:
    rows = recipe_rows(name)
    assert tuple(row.model for row in rows) == ATMNET
    assert tuple(row.drop_path for row in rows) == (SEGMENT_DEPTH if rows[0].task == "segment" else DETECT_DEPTH)
    assert [tuple(row.printed.values()) for row in rows] == PRINTED[name]


def test_schedules_of_the_methods() -> None:
    fpn, upernet, xcit = map(load_recipe, ("atmnet_semantic_fpn", "atmnet_upernet", "xcit_semantic_fpn"))
    assert (fpn.power, fpn.warmup_iterations) == (0.9, 0)
    for r in (upernet, xcit):
        assert (r.power, r.warmup_iterations, r.warmup_ratio) == (1.0, 1500, 1e-6)
    assert load_recipe("stvit_upernet", model="stvit_base").drop_path == 0.3
    assert load_recipe("sima_mask_rcnn_3x").printed == {"box_ap": 44.8, "mask_ap": 40.3}


@pytest.mark.parametrize("name", NAMES)
def test_files(name: str, tmp_path: Path) -> None:
    """A file survives a round trip through YAML, names its source, and its batch can be divided among processes."""
    for recipe in recipe_rows(name):
        assert recipe.name == name
        assert (recipe.source == "ours") == (name in OURS)
        path = tmp_path / "copy.yaml"
        path.write_text(recipe.to_yaml())
        assert load_recipe(path) == recipe
        for processes in (1, 2, 4) if name in OURS else (8,):
            assert recipe.micro_batch(processes) * processes == recipe.batch_size
    (file,) = FOLDER.rglob(f"{name}.yaml")
    assert max(map(len, file.read_text().splitlines())) <= 120


@pytest.mark.parametrize("name", NAMES)
def test_models_build(name: str) -> None:
    """Method, neck, backbone and stochastic depth fit together, on the meta device."""
    recipe = load_recipe(name)
    config = {"task": recipe.task, "method": recipe.method, "neck": recipe.neck, "num_classes": 5}
    config |= {"backbone": recipe.model or "atmnet_xtiny", "method_args": recipe.method_kwargs}
    config["backbone_args"] = recipe.model_kwargs | {"device": "meta"}
    model = create_dense_model(config, drop_path=recipe.drop_path)
    assert model.method == recipe.method
    assert model.num_classes == 5
    deepest = max((m.drop_prob or 0.0 for m in model.modules() if type(m).__name__ == "DropPath"), default=0.0)
    assert deepest == pytest.approx(recipe.drop_path or 0.0)


def test_rows_in_user_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: atmnet_mask_rcnn_1x\nepochs: 13\n")
    mine = load_recipe(path, model="atmnet_large")
    assert (mine.model, mine.drop_path, mine.epochs, mine.printed) == ("atmnet_large", 0.6, 13, {})
    assert load_recipe("atmnet_mask_rcnn_1x").model == "atmnet_tiny"
    assert load_recipe("atmnet_mask_rcnn_1x", ["model=atmnet_base"]).drop_path == 0.5
    other = load_recipe("atmnet_mask_rcnn_1x", model="stvit_small")  # not in the table: the file's own values
    assert (other.model, other.drop_path, other.printed) == ("atmnet_tiny", None, {})
    path.write_text("rows: [atmnet_tiny]\n")
    with pytest.raises(ValueError, match=r"rows is .*, but must be a mapping of models to their values"):
        load_recipe(path)


DETECT = "task: detect\nmethod: retinanet\nbatch_size: 4\n"
SEGMENT = "task: segment\nmethod: upernet\ncrop_size: 32\nbatch_size: 4\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: segment\n", "task segment needs method: semantic_fpn or upernet"),
        ("task: detect\nmethod: upernet\n", "method is 'upernet', but must be one of retinanet, mask_rcnn"),
        ("method: upernet\n", "method belongs to task segment and detect, not classify; leave it out"),
        ("task: segment\nmethod: upernet\n", "task segment needs crop_size: the side"),
        (SEGMENT + "mixup: 0.8\n", "mixup belongs to task classify, not segment; leave it out"),
        (SEGMENT + "ema: 0.9\nema_half_life: 10\n", "ema 0.9 and ema_half_life 10 exclude each other; set one"),
        (SEGMENT + "iterations: 25\neval_every: 10\n", "iterations 25 cannot be divided by eval_every 10"),
        (
            SEGMENT + "iterations: 25\nwarmup_iterations: 25\n",
            "must be below iterations 25; .* warmup_iterations=0",
        ),
        (SEGMENT + "scales: [480, 512]\n", "scales belongs to task detect, not segment; leave it out"),
        (DETECT + "test_flip: true\n", "test_flip belongs to task segment, not detect; leave it out"),
        (DETECT + "test_scales: [0.5, 1]\n", "test_scales belongs to task segment, not detect; leave it out"),
        (DETECT + "window: 64\n", "window belongs to task segment, not detect; leave it out"),
        (DETECT + "scale_range: [0.5, 2]\n", "scale_range belongs to task segment, not detect; leave it out"),
        (SEGMENT + "schedule: step\n", r"milestones \[\] do not fit schedule step"),
        (SEGMENT + "milestones: [3]\n", r"milestones \[3\] do not fit schedule cosine"),
        (SEGMENT + "schedule: step\nmilestones: [30, 60]\n", r"must rise and stay below the 50 epochs"),
        (SEGMENT + "schedule: step\nmilestones: 3\n", "milestones is 3, but must be a list of values, each a number"),
        (SEGMENT + "scale_range: [2, 1]\n", "must be two rising numbers"),
        (SEGMENT + "scale: [512, 2048]\n", "must be the long side, then the short one"),
        (SEGMENT + "window: 64\nwindow_stride: 65\n", "window_stride 65 leaves gaps between windows of 64 px"),
        (SEGMENT + "printed: {miou: 400}\n", "printed is .*, but must be a mapping of a string to a number"),
    ],
)
def test_bad_values(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_recipe(tmp_path / "mine.yaml")
    assert "\n" not in str(error.value)


def test_epochs_and_iterations_are_not_mixed() -> None:
    with pytest.raises(ValueError, match="it has 40000 iterations, not epochs; set iterations="):
        load_recipe("atmnet_semantic_fpn", ["epochs=3"])
    by_epochs = load_recipe("atmnet_semantic_fpn", ["epochs=30", "iterations=none", "eval_every=none"])
    assert (by_epochs.num_epochs, load_recipe("atmnet_semantic_fpn").num_epochs) == (30, 10)


@pytest.mark.parametrize("schema", [SegmentRecipe, DetectRecipe])
def test_methods_exist(schema: type[SegmentRecipe | DetectRecipe]) -> None:
    """The methods of a schema are those of tokamix.dense, which recipes do not import."""
    task = get_args(get_type_hints(schema)["task"])[0]
    assert get_args(get_type_hints(schema)["method"]) == tuple(METHODS[task])


def test_short_schedules(caplog: pytest.LogCaptureFixture) -> None:
    """Warm-up, milestones and evaluation interval scale with the length, unless they are overridden themselves."""
    detect = load_recipe("atmnet_mask_rcnn_1x", ["epochs=3"])
    assert (detect.epochs, detect.milestones, detect.warmup_iterations) == (3, (2.0, 2.75), 125)
    assert "epochs changed from 12 to 3, so the schedule scales: warmup_iterations 500 -> 125" in caplog.text
    segment = load_recipe("atmnet_upernet", ["iterations=600"])
    assert (segment.warmup_iterations, segment.num_epochs) == (5, load_recipe("atmnet_upernet").num_epochs)
    assert load_recipe("atmnet_upernet", ["iterations=25"]).num_epochs == 5
    assert load_recipe("atmnet_mask_rcnn_1x", ["epochs=3", "milestones=[1]"]).milestones == (1,)
    small = load_recipe("small_segment", ["epochs=3"])
    assert small.warmup_iterations == 3
