"""DINO runs of a second on the tiny images."""

from pathlib import Path
from typing import Any

from tests.train.tiny import TINY, tiny_data
from tokamix.data import DatasetSplits
from tokamix.recipes import DinoRecipe
from tokamix.train import RunResult, train

TINY_DINO = DinoRecipe(
    name="tiny_dino",
    model=TINY.model,
    model_kwargs=TINY.model_kwargs,
    image_size=8,
    local_size=4,
    local_crops=2,
    out_dim=24,
    head_dim=16,
    bottleneck_dim=8,
    epochs=3,
    batch_size=16,
    lr=2e-3,
    warmup_epochs=1,
    weight_decay_end=0.2,
    clip_grad=0.5,
    clip_per_parameter=True,
    teacher_momentum=0.9,
    teacher_temp_start=0.03,
    teacher_temp_warmup=2,
    knn_k=5,
)


def run(output: Path, data: DatasetSplits | str | None = None, **settings: Any) -> RunResult:
    """Train the tiny backbone; settings of the recipe and arguments of `train` may both be given."""
    recipe = {key: value for key, value in settings.items() if key in TINY_DINO.to_dict()}
    others = {key: value for key, value in settings.items() if key not in recipe}
    model = others.pop("network", None)
    options = {"quiet": True, "device": "cpu", **others}
    return train(model, data or tiny_data(), TINY_DINO.replace(**recipe), output, **options)
