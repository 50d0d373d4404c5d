"""Overfit a detector or segmenter on sixteen real images, the shortest check that it can learn.

`python benchmarks/overfit_dense.py detect coco:PATH` or `... segment masks:PATH` trains and evaluates on the same
images and writes the curve to `--figure`.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tokamix.data import AnnotatedDataset, AnnotatedImage, DatasetSplits, create_dataset
from tokamix.recipes import load_recipe
from tokamix.train import train

NUM_OBJECTS = range(1, 9)  # per image; images with crowds are left out
TITLES = {"box_ap": "box AP", "mask_ap": "mask AP", "miou": "mIoU"}
METHODS = {"detect": "Mask R-CNN", "segment": "Semantic FPN"}
TARGETS = {"box_ap": 60, "miou": 85}
# a small model from scratch, without augmentation
SETTINGS = [
    "model=stvit_small",
    "model_kwargs={dims: [64, 96, 128, 192], depths: [1, 1, 2, 1], num_heads: [1, 2, 2, 3]}",
    *("finetune=false", "drop_path=0", "hflip=0", "photometric=false", "scales=[]", "scale_range=none"),
    *("batch_size=8", "lr=1e-3", "warmup_iterations=50", "iterations=500", "eval_every=50", "ema=none"),
    *("schedule=poly", "min_lr=0", "milestones=[]"),
]
SIZES = {"detect": ["scale=[384, 384]"], "segment": ["scale=[256, 256]", "crop_size=256"]}


class Subset(AnnotatedDataset):
    """A few images of a data set."""

    def __init__(self, dataset: AnnotatedDataset, indices: list[int]) -> None:
        self.dataset, self.indices = dataset, indices
        self.classes, self.has_masks = dataset.classes, dataset.has_masks
        self.category_ids = getattr(dataset, "category_ids", ())

    def __len__(self) -> int:
        return len(self.indices)

    def sample(self, i: int, masks: bool = True) -> AnnotatedImage:
        """Image i of the subset with its annotations."""
        return self.dataset.sample(self.indices[i], masks)

    def name_of(self, i: int) -> str:
        """Name of image i."""
        return self.dataset.name_of(self.indices[i])

    def image_id(self, i: int) -> int:
        """COCO id of image i."""
        return self.dataset.image_id(self.indices[i])


def select_images(dataset: AnnotatedDataset, task: str, count: int) -> list[int]:
    """Indices of the first images with 1 to 8 objects and no crowd."""
    if task == "segment":
        return list(range(count))
    indices = []
    for i in range(len(dataset)):
        sample = dataset.sample(i, masks=False)
        if len(sample.labels) in NUM_OBJECTS and not sample.crowd.any():
            indices.append(i)
        if len(indices) == count:
            break
    return indices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["detect", "segment"])
    parser.add_argument("data")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--figure", type=Path, default=None)
    args = parser.parse_args()
    dataset = create_dataset(args.data, args.task).train
    few = Subset(dataset, select_images(dataset, args.task, args.images))
    recipe = load_recipe(f"small_{args.task}", [*SETTINGS, *SIZES[args.task], *args.set])
    output = args.output or Path(tempfile.mkdtemp())
    begun = time.perf_counter()
    data = DatasetSplits(f"{len(few)} images", few, few, dataset.classes, args.task)
    result = train(None, data, recipe, output, resume=False, workers=args.workers)
    shown = [key for key in TITLES if key in result.epochs[-1]]
    print(", ".join(f"{TITLES[key]} {result.epochs[-1][key]:.1f}" for key in shown), end="")
    print(f" on {len(few)} images after {recipe.iterations} steps, {time.perf_counter() - begun:.0f} s")
    if args.figure:
        draw(result.epochs, f"{METHODS[args.task]}, {len(few)} images, overfitted", args.figure)


def draw(rows: Sequence[Mapping], title: str, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(5, 3.2), layout="constrained")
    steps = [row["update"] for row in rows]
    for key in (key for key in TITLES if key in rows[-1]):
        axis.plot(steps, [row[key] for row in rows], marker=".", label=f"{TITLES[key]} {rows[-1][key]:.1f}")
        if key in TARGETS:
            axis.axhline(TARGETS[key], color="grey", lw=0.8, ls=":")
    axis.set(xlabel="step", ylabel="percent", xlim=(0, None), ylim=(0, 100), title=title)
    axis.legend(frameon=False, loc="lower right")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
