"""Damaged image and annotation files: every result is a sentence, or samples that a model can be trained on.

`python -m tests.fuzz.loaders --count 1000 --seed 0`; `--only 123` repeats one case. A case writes a small data set
(image folder, pack, tar shards, COCO file or mask folder), damages one of its files, opens it and reads all of it. Each
case runs in a process of its own, so that a crash in a decoder is found.
"""

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.data.annotated.files import annotation, content, dense_config, dense_recipe, write_coco, write_pair
from tests.data.conftest import encoded, eval_config, noise, recipe, write_pack, write_tar
from tokamix.data import create_dataset
from tokamix.data.annotated import loader as annotated
from tokamix.data.annotated.rle import import_mask_tools
from tokamix.data.images import loader as images

FORMS = ("PNG", "JPEG", "WEBP")
SECONDS = 60  # until a case counts as hung
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 10**6, 2**40, 10**400, -0.5, 1e308, float("nan"), float("inf"), "", "7", "x", "é\udcff"),
    *([], [1], [[]], [[1, 2]], {}, {"size": [32, 40], "counts": "0"}, {"size": [1, 1], "counts": [-1, 2]}),
)


def image_folder(root: Path, draw: random.Random) -> str:
    for part in ("train", "val"):
        for label, name in enumerate(("ant", "bee")):
            for i in range(3):
                form = draw.choice(FORMS)
                path = root / part / name / f"{i}.{form.lower()}"
                path.parent.mkdir(parents=True, exist_ok=True)
                picture(10 * label + i, form, draw).save(path)
    return str(root)


def pack(root: Path, draw: random.Random) -> str:
    for part in ("train", "val"):
        encodings = [encoded(noise(i), draw.choice(FORMS)) for i in range(6)]
        write_pack(root / f"photos_{part}.npz", encodings, [0, 1] * 3)
    return f"{root}/photos_train.npz,{root}/photos_val.npz"


def shards(root: Path, draw: random.Random) -> str:
    for part in ("train", "val"):
        samples = []
        for i in range(6):
            form = draw.choice(FORMS)
            label = {"cls": str(i % 2).encode()} if i % 2 else {"json": json.dumps({"label": i % 2}).encode()}
            samples.append({form.lower(): encoded(noise(i), form), **label})
        write_tar(root / f"{part}-0.tar", samples)
    if draw.random() < 0.5:
        (root / "classes.txt").write_text("ant\nbee\n")
        (root / "sizes.json").write_text(json.dumps({"train-0.tar": 6, "val-0.tar": 6}))
    return f"wds:{root}/train-0.tar,{root}/val-0.tar"


def coco(root: Path, draw: random.Random) -> str:
    tools = import_mask_tools()
    for part, first in (("train", 10), ("val", 50)):
        entries = []
        for i in range(6):
            box = [draw.uniform(0, 20), draw.uniform(0, 16), draw.uniform(4, 18), draw.uniform(4, 14)]
            entry = annotation(i + 1, first + i // 2, box, draw.choice((3, 7, 90)))
            mask = np.zeros((32, 40), dtype=np.uint8, order="F")
            mask[4:20, 3:30] = 1
            if i == 1:
                runs = tools.encode(mask)
                entry["segmentation"] = {"size": [32, 40], "counts": runs["counts"].decode()}
            elif i == 2:
                entry |= {"segmentation": {"size": [32, 40], "counts": [100, 200, 980]}, "iscrowd": 1}
            entries.append(entry)
        write_coco(root, part, content(3, entries, first))
    return str(root)


def masks(root: Path, draw: random.Random) -> str:
    for part in ("train", "val"):
        for i in range(3):
            values = np.random.default_rng(i).integers(0, 3, (20, 24)).astype(np.uint8)
            write_pair(root / "images" / part, root / "masks" / part, f"{part}{i}", values, palette=bool(i % 2))
    (root / "classes.txt").write_text("sky\ntree\nroad\n")
    return str(root)


def picture(seed: int, form: str, draw: random.Random) -> Image.Image:
    mode = draw.choice(("RGB", "L") if form == "JPEG" else ("RGB", "L", "P", "RGBA"))
    return noise(seed, draw.choice((9, 20, 33)), draw.choice((8, 17, 40))).convert(mode)


KINDS = {"image folder": image_folder, "pack": pack, "shards": shards, "COCO file": coco, "mask folder": masks}


def damage(path: Path, draw: random.Random) -> str:
    """Change one file; returns how."""
    if path.suffix == ".json" and draw.random() < 0.8:
        return damage_json(path, draw)
    data = bytearray(path.read_bytes())
    kind = draw.choice(("flip bits", "cut", "delete", "insert", "zero", "repeat", "swap", "empty"))
    at, length = draw.randrange(len(data) or 1), draw.choice((1, 2, 8, 64, 512))
    if draw.random() < 0.3:
        at = draw.randrange(min(len(data), 64) or 1)  # headers are more interesting than pixels
    if kind == "flip bits":
        for _ in range(length):
            place = min(len(data) - 1, max(0, at + draw.randrange(-8, 9)))
            data[place] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "delete":
        del data[at : at + length]
    elif kind == "insert":
        data[at:at] = draw.randbytes(length)
    elif kind == "zero":
        data[at : at + length] = bytes(len(data[at : at + length]))
    elif kind == "repeat":
        data[at:at] = data[at : at + length]
    elif kind == "swap":
        data[at:] = data[:at] + data[at:]
    else:
        data.clear()
    path.write_bytes(bytes(data))
    return kind


def damage_json(path: Path, draw: random.Random) -> str:
    """Replace, remove or repeat a value somewhere in a JSON file."""
    root = json.loads(path.read_text())
    holder, depth = root, draw.randrange(6)
    for _ in range(depth):
        values = holder.values() if isinstance(holder, dict) else holder
        holder = draw.choice([value for value in values if value and isinstance(value, dict | list)] or [holder])
    key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    kind = draw.choice(("replace", "replace", "remove", "repeat"))
    if kind == "remove":
        del holder[key]
    elif kind == "repeat" and isinstance(holder, list):
        holder.insert(0, holder[key])
    else:
        holder[key] = draw.choice(VALUES)
    path.write_text(json.dumps(root))
    return f"{kind} {key!r}"


def read_images(source: str, corrupt: Any) -> None:
    """Read a data set for classification, as training and evaluation do."""
    splits = create_dataset(source)
    count = len(splits.classes)
    loaders = [
        images.create_train_loader(splits.train, recipe(batch_size=2), batch_size=2, corrupt=corrupt),
        images.create_eval_loader(splits.val, eval_config(class_names=splits.classes), batch_size=2, corrupt=corrupt),
    ]
    for loader in loaders:
        for pixels, labels in loader.epoch(0):
            assert pixels.shape[1:] == (3, 16, 16), pixels.shape
            assert pixels.isfinite().all()
            assert len(labels) == len(pixels)
            assert ((labels >= 0) & (labels < count)).all(), labels


def read_annotated(source: str, task: Any, corrupt: Any) -> None:
    """Read a data set for segmentation or detection, as training and evaluation do."""
    splits = create_dataset(source, task=task)
    count = len(splits.classes)
    method = {} if splits.train.has_masks or task == "segment" else {"method": "retinanet"}
    plan = dense_recipe(task, batch_size=2, **method)
    loaders = [
        annotated.create_train_loader(splits.train, plan, batch_size=2, corrupt=corrupt),
        annotated.create_eval_loader(splits.val, dense_config(task), batch_size=2, corrupt=corrupt),
    ]
    for loader in loaders:
        for pixels, targets in loader.epoch(0):
            assert all(image.isfinite().all() for image in pixels)
            if isinstance(targets, torch.Tensor):
                assert ((targets < count) | (targets == 255)).all()
                continue
            for image, target in zip(pixels, targets, strict=True):
                check_target(image, target, count)
    if task == "detect":
        json.dumps(splits.val.coco_dict())


def check_target(image: torch.Tensor, target: dict[str, Any], classes: int) -> None:
    """Boxes with an area inside the image, labels of the classes, masks of the image's size."""
    if "segmentation" in target:
        assert ((target["segmentation"] < classes) | (target["segmentation"] == 255)).all()
    if "boxes" not in target:
        return
    boxes, (height, width) = target["boxes"], image.shape[-2:]
    assert boxes.isfinite().all()
    assert (boxes[:, 2:] > boxes[:, :2]).all(), boxes
    assert (boxes >= 0).all(), boxes
    assert (boxes[:, 2] <= width + 1e-3).all(), boxes
    assert (boxes[:, 3] <= height + 1e-3).all(), boxes
    assert ((target["labels"] >= 0) & (target["labels"] < classes)).all()
    if target.get("masks") is not None:
        assert target["masks"].shape == (len(boxes), height, width)


def run_case(seed: int, number: int) -> str:
    """Run one case; returns its kind and its result."""
    draw = random.Random(f"{seed} {number}")
    kind = draw.choice(list(KINDS))
    corrupt = draw.choice(("raise", "skip"))
    with tempfile.TemporaryDirectory() as folder:
        source = KINDS[kind](Path(folder), draw)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        if kind == "COCO file" and draw.random() < 0.7:
            files = [path for path in files if path.suffix == ".json"]
        path = draw.choice(files)
        how = damage(path, draw)
        try:
            if kind in ("COCO file", "mask folder"):
                task = "segment" if kind == "mask folder" else draw.choice(("segment", "detect"))
                read_annotated(source, task, corrupt)
            else:
                read_images(source, corrupt)
        except ValueError as error:
            text = str(error)
            if folder not in text and "sizes.json" not in text:
                raise AssertionError(f"{how} in {path.name}: the error names no file: {error!r}") from error
            return f"{kind}: error that names the file"
        except Exception as error:
            raise AssertionError(f"{how} in {path.name}: {type(error).__name__}: {error}") from error
    return f"{kind}: read"


def run_forked(seed: int, number: int) -> str:
    """Run one case in a process of its own; an AssertionError tells what is wrong."""
    with tempfile.TemporaryFile() as report:
        child = os.fork()
        if child == 0:
            signal.alarm(SECONDS)
            try:
                text = "ok " + run_case(seed, number)
            except BaseException:
                text = traceback.format_exc()
            report.write(text.encode(errors="replace"))
            report.flush()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        report.seek(0)
        text = report.read().decode()
    assert not os.WIFSIGNALED(status), f"ended by signal {os.WTERMSIG(status)} (14: no end in {SECONDS} s)"
    assert text.startswith("ok "), text
    return text.removeprefix("ok ")


def main() -> int:
    """Run the cases; returns the number of wrong ones."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("tokamix").setLevel(logging.ERROR)  # skipped images
    warnings.simplefilter("ignore")  # Pillow's, about damaged tags
    numbers = range(options.count) if options.only is None else [options.only]
    tally: Counter[str] = Counter()
    wrong, begun = 0, time.monotonic()
    print(f"seed {options.seed}, {len(numbers):,} damaged data sets", flush=True)
    for number in numbers:
        if number and number % 100 == 0:
            print(f"{number:,} cases, {time.monotonic() - begun:.0f} s", flush=True)
        try:
            tally[run_forked(options.seed, number)] += 1
        except AssertionError as error:
            wrong += 1
            print(f"WRONG case {number} (--seed {options.seed} --only {number}): {error}", flush=True)
    print("\n| damaged files | cases |\n|---|---|")
    for name, count in sorted(tally.items()):
        print(f"| {name} | {count} |")
    print(f"\n{wrong} of {len(numbers):,} cases wrong, in {(time.monotonic() - begun) / 60:.1f} minutes")
    return wrong


if __name__ == "__main__":
    sys.exit(min(1, main()))
