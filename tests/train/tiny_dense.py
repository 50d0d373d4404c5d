"""Dense runs of a few seconds: a few generated images with annotations, a tiny body, recipes."""

from pathlib import Path
from typing import Any

from tokamix.data.shapes import AnnotatedShapes, Shapes
from tokamix.data.splits import DatasetSplits
from tokamix.recipes import DetectRecipe, Recipe, SegmentRecipe
from tokamix.train import RunResult, train

COMMON: dict[str, Any] = {
    "model": "test_resnet",
    "iterations": 6,
    "eval_every": 3,
    "batch_size": 4,
    "lr": 5e-3,
    "min_lr": 0.0,
    "schedule": "poly",
    "warmup_iterations": 0,
    "clip_grad": 1.0,
    "interpolation": "bilinear",
}
SEGMENT = SegmentRecipe(
    name="tiny_segment",
    method="semantic_fpn",
    method_kwargs={"width": 16, "neck_width": 16},
    crop_size=32,
    **COMMON,
)
DETECT = DetectRecipe(name="tiny_detect", method="retinanet", method_kwargs={"width": 16}, **COMMON)
RECIPES: dict[str, Recipe] = {"segment": SEGMENT, "detect": DETECT}


def tiny_scenes(task: str, train: int = 10, val: int = 5, side: int = 32) -> DatasetSplits:
    """A few annotated images; with `val=0` the training images are used for validation too."""
    counts = {"a": train, "b": val} if val else {"a": train}
    parts = [AnnotatedShapes(Shapes(count, side, part=part, large=2), task) for part, count in counts.items()]
    return DatasetSplits("tiny scenes", parts[0], parts[-1], parts[0].classes, task)


def run(task: str, output: Path, data: Any = None, **settings: Any) -> RunResult:
    """Train; settings of the recipe and arguments of `train` may both be given."""
    recipe = RECIPES[task]
    values = {key: value for key, value in settings.items() if key in recipe.to_dict()}
    others = {key: value for key, value in settings.items() if key not in values}
    model = others.pop("backbone", None)
    common = {"quiet": True, "device": "cpu", **others}
    return train(model, data or tiny_scenes(task), recipe.replace(**values), output, **common)
