"""Cost of the data pipeline: python benchmarks/data.py [workers].

1. A ViT-S (patch 4, 32 px, batch 1024) trained from a data set on the GPU, against the same steps on one fixed batch:
the difference is the pipeline's share of the step. 2. Folders of JPEGs at 224 px through worker processes, against
timm's loader with the same transforms.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain, count, islice
from pathlib import Path

import timm
import torch
from PIL import Image
from timm.data import ImageDataset
from timm.data import create_loader as timm_create_loader
from torch.nn.functional import cross_entropy

from tokamix.compile import compile_blocks
from tokamix.data import ArrayDataset, create_dataset, mix
from tokamix.data.images.loader import create_train_loader
from tokamix.recipes import ClassifyRecipe

STRONG = {"augment": "rand-m9-mstd0.5-inc1", "random_erasing": 0.25}
SMALL = {
    "crop and flip": {"crop_scale": None, "crop_padding": 4},
    "resized crop, RandAugment, erasing": STRONG,
    "3-augment, jitter": {"augment": "3-augment", "color_jitter": 0.3},
}


def seconds(step, batches: Iterator, steps: int) -> float:
    """Seconds of one step after a warm-up."""
    for batch in islice(batches, 10):
        step(*batch)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for batch in islice(batches, steps):
        step(*batch)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def resident(batch: int = 1024, steps: int = 60) -> None:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(256, (50_000, 3, 32, 32), dtype=torch.uint8, generator=draw)
    data = ArrayDataset(images, torch.randint(100, (50_000,), generator=draw), [str(i) for i in range(100)])
    model = timm.create_model("vit_small_patch16_224", img_size=32, patch_size=4, num_classes=100).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    compile_blocks(model, graphs=True)  # as in training

    def step(images: torch.Tensor, targets: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for name, values in SMALL.items():
        recipe = ClassifyRecipe(name=name, image_size=32, batch_size=batch, mixup=0.8, cutmix=1.0, **values)
        loader = create_train_loader(data, recipe, batch_size=batch, device="cuda")
        batches = chain.from_iterable(loader.epoch(epoch) for epoch in count())
        mixed = (mix(images, labels, recipe, 100, (0, i)) for i, (images, labels) in enumerate(batches))
        fixed_batch = next(mixed)
        fixed = seconds(step, (fixed_batch for _ in count()), steps)
        trained = seconds(step, mixed, steps)
        alone = seconds(lambda *_: None, mixed, steps)
        share = (trained - fixed) / trained
        print(
            f"{name:36} fixed batch {fixed * 1e3:6.2f} ms, with data {trained * 1e3:6.2f} ms: {share:6.1%};"
            f" pipeline alone {alone * 1e3:5.2f} ms = {alone / fixed:.1%}"
        )


def folders(workers: int, batch: int = 64, num_images: int = 16_384) -> None:
    with tempfile.TemporaryDirectory() as root:
        for i in range(num_images):
            folder = Path(root) / str(i % 8)
            folder.mkdir(exist_ok=True)
            if i < 64:
                coarse = torch.randint(256, (60, 80, 3), dtype=torch.uint8).numpy()
                image = Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC)
                image.save(folder / f"{i}.jpg", quality=92)
            else:
                (folder / f"{i}.jpg").hardlink_to(folder / f"{i % 64}.jpg")
        recipe = ClassifyRecipe(name="folder", batch_size=batch, **STRONG)
        train = create_dataset(root).train
        ours = create_train_loader(train, recipe, batch_size=batch, device="cuda", workers=workers)
        theirs = timm_create_loader(
            ImageDataset(root),
            (3, 224, 224),
            batch,
            is_training=True,
            re_prob=0.25,
            re_mode="pixel",
            auto_augment=STRONG["augment"],
            color_jitter=None,
            interpolation="bicubic",
            num_workers=workers,
            pin_memory=True,
        )
        for _ in range(2):  # alternately, twice each
            for name, epoch in (("tokamix", lambda: ours.epoch(0)), ("timm", lambda: iter(theirs))):
                start, num_seen = time.perf_counter(), 0
                for step, (images, _) in enumerate(epoch()):
                    if step == 4 * workers:  # the batches decoded in advance are used up
                        torch.cuda.synchronize()
                        start, num_seen = time.perf_counter(), 0
                    num_seen += len(images)
                torch.cuda.synchronize()
                print(f"{name:8} {num_seen / (time.perf_counter() - start):8.0f} images/s with {workers} workers")


if __name__ == "__main__":
    resident()
    folders(int(sys.argv[1]) if len(sys.argv) > 1 else 16)
