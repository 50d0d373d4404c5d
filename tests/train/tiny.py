"""Runs of a second: a few learnable images, a tiny model, a recipe."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tokamix.data import ArrayDataset, DatasetSplits
from tokamix.recipes import ClassifyRecipe
from tokamix.train import RunResult, train

TINY = ClassifyRecipe(
    name="tiny",
    model="columnar_tiny_softmax",
    model_kwargs={"patch_size": 4, "dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2},
    image_size=8,
    epochs=3,
    batch_size=16,
    lr=5e-3,
    warmup_epochs=1,
    crop_scale=None,
    hflip=0.0,
)

# settings whose results do not depend on the number of processes: no dropout; mixed pairs stay in one process
PARALLEL: dict[str, Any] = {"log_every": 1, "save_every": 3, "ema": 0.9, "clip_grad": 1.0, "epochs": 2}
PARALLEL |= {"mixup": 0.8, "cutmix": 1.0, "random_erasing": 0.3, "crop_padding": 1, "hflip": 0.5}


def tiny_data(classes: int = 4, train: int = 80, val: int = 37, channels: int = 3, seed: int = 0) -> DatasetSplits:
    """Noise over stripes whose direction and width define the class."""
    line = torch.arange(8)
    stripes = [(line // width) % 2 for width in (1, 2)]
    patterns = [pattern for stripe in stripes for pattern in (stripe[:, None].expand(8, 8), stripe.expand(8, 8))]

    def part(count: int, shift: int) -> ArrayDataset:
        draw = torch.Generator().manual_seed(seed + shift)
        labels = torch.arange(count) % classes
        images = torch.randint(0, 120, (count, channels, 8, 8), generator=draw, dtype=torch.uint8)
        for image, label in zip(images, labels.tolist(), strict=True):
            image += (110 * patterns[label]).byte()
        return ArrayDataset(images, labels, [f"class {i}" for i in range(classes)])

    return DatasetSplits("tiny", part(train, 0), part(val, 1), tuple(f"class {i}" for i in range(classes)))


def run(output: Path | None, data: DatasetSplits | str | None = None, **settings: Any) -> RunResult:
    """Train the tiny model; settings of the recipe and arguments of `train` may both be given."""
    recipe = {key: value for key, value in settings.items() if key in TINY.to_dict()}
    others = {key: value for key, value in settings.items() if key not in recipe}
    model = others.pop("network", None)
    return train(
        model, data or tiny_data(), TINY.replace(**recipe), output, **{"quiet": True, "device": "cpu", **others}
    )


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a run: state, best and last weights."""
    files = {"state": folder / "state" / "state.safetensors"}
    files |= {name: folder / f"{name}.safetensors" for name in ("model", "last")}
    return {f"{kind}/{name}": tensor for kind, file in files.items() for name, tensor in load_file(file).items()}


def assert_same_bits(first: Path, second: Path) -> None:
    """Two runs ended with the same weights, averages and optimizer states, to the last bit."""
    one, two = state_of(first), state_of(second)
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), f"{name} differs by {(one[name] - two[name]).abs().max()}"
