"""Training time of `cifar100_fast`, or another recipe, on CIFAR-100, and the share of the data pipeline in a step.

`python benchmarks/train_cifar100.py a_train.npz,b_train.npz,test.npz` trains for real; without data, 50,000 + 10,000
random images show the same speed. `--epochs 6` is enough to measure the time of an epoch.
"""

import argparse
import tempfile
import time
import warnings
from collections import Counter
from itertools import chain, count
from pathlib import Path

import torch

from tokamix.data import ArrayDataset, DatasetSplits, create_dataset
from tokamix.data.images.loader import create_train_loader
from tokamix.recipes import load_recipe
from tokamix.train import train


def random_data() -> DatasetSplits:
    classes = [str(i) for i in range(100)]
    train_part, val_part = (
        ArrayDataset(torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8), torch.arange(n) % 100, classes)
        for n in (50_000, 10_000)
    )
    return DatasetSplits("random", train_part, val_part, tuple(classes))


def seconds_of_data(data: DatasetSplits, recipe, device: str, batches: int = 50) -> float:
    """Seconds per step of the data pipeline alone."""
    loader = create_train_loader(data.train, recipe, batch_size=recipe.batch_size, device=device)
    stream = chain.from_iterable(loader.epoch(number) for number in count())
    for i in range(batches + 5):
        if i == 5:
            torch.cuda.synchronize() if device == "cuda" else None
            begun = time.perf_counter()
        next(stream)
    torch.cuda.synchronize() if device == "cuda" else None
    return (time.perf_counter() - begun) / batches


def count_syncs(data: DatasetSplits, recipe) -> Counter:
    """Lines in which the host waits for the device during an epoch, and how often."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(None, data, recipe.replace(epochs=1, warmup_epochs=0, compile=False), tempfile.mkdtemp(), quiet=True)
    torch.cuda.set_sync_debug_mode("default")
    return Counter(f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="?", help="the packs, as `tokamix train --data` takes them")
    parser.add_argument("--recipe", default="cifar100_fast")
    parser.add_argument("--model", default=None)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = create_dataset(args.data) if args.data else random_data()
    overrides = [*args.set, f"epochs={args.epochs}", *(["warmup_epochs=0"] if args.epochs <= 10 else [])]
    recipe = load_recipe(args.recipe, overrides)
    output = args.output or Path(tempfile.mkdtemp())
    begun = time.perf_counter()
    result = train(args.model, data, recipe, output, device=device, resume=False, log_every=100)
    total = time.perf_counter() - begun
    steps = len(data.train) // recipe.batch_size
    step = sorted(row["seconds"] for row in result.epochs)[len(result.epochs) // 2] / steps
    first = result.epochs[0]["seconds"]
    print(f"{args.epochs} epochs: {total:.1f} s in total; first epoch {first:.1f} s, later ones {step * steps:.2f} s")
    print(f"top-1 {result.top1:.2f} %")
    share = seconds_of_data(data, recipe, device) / step
    print(
        f"step {step * 1e3:.2f} ms, {recipe.batch_size / step:,.0f} images/s; data alone is {100 * share:.1f} % of it"
    )
    hundred = total + (100 - args.epochs) * (total - first) / max(1, args.epochs - 1)
    print(f"100 epochs would take {hundred:.0f} s")
    if device == "cuda" and args.model is None:
        print(f"synchronisations in an epoch of {steps} steps:", dict(count_syncs(data, recipe).most_common(8)))


if __name__ == "__main__":
    main()
