"""Train a classifier on a folder of images, then start from its weights for different classes.

Replace `create_photos` by your own folder: photos/train/cat/*.jpg, photos/val/cat/*.jpg, ...
"""

from pathlib import Path

import numpy as np
from PIL import Image

import tokamix

SMALL = {"patch_size": 8, "dim": 32, "depth": 2, "num_heads": 2}  # a small model, so that the example takes seconds


def create_photos(folder: Path, colours: dict[str, tuple[int, int, int]]) -> None:
    """Write noisy images of one colour per class."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 24), ("val", 8)):
        for name, colour in colours.items():
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                pixels = generator.normal(colour, 40, (32, 32, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{i}.png")


create_photos(Path("photos"), {"red": (200, 60, 60), "green": (60, 200, 60)})
settings = {"epochs": 4, "warmup_epochs": 1, "batch_size": 16, "image_size": 32, "model_kwargs": SMALL}
first = tokamix.train("columnar_tiny_sima", "photos", "small", "runs/first", overrides=settings, quiet=True)
print(f"from scratch: {first.top1:.1f} %")

# Different classes: the new classifier starts untrained, everything else from the checkpoint.
create_photos(Path("flowers"), {"blue": (60, 60, 200), "yellow": (200, 200, 60), "white": (230, 230, 230)})
second = tokamix.train(
    "columnar_tiny_sima",
    "flowers",
    "small",
    "runs/second",
    checkpoint="runs/first",
    overrides={**settings, "lr": 3e-4},
    quiet=True,
)
print(f"fine-tuned:   {second.top1:.1f} %")
print(tokamix.evaluate("runs/second", "flowers"))
