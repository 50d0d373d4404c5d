"""One of several processes that evaluate together; torchrun starts it with a folder, where it writes what it got."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from tests.evaluate.test_detection import detections, real_like
from tests.evaluate.test_segmentation import CLASSES, made_up
from tokamix.data import open_scenes
from tokamix.evaluate import CocoAP, MeanIoU


def segmentation(rank: int, world: int) -> dict:
    shared, lonely = MeanIoU(CLASSES), MeanIoU(CLASSES)
    for i in range(rank, 5, world):
        shared.update(*made_up(i))
    if rank == 0:
        lonely.update(*made_up(0))
    return {"pixels": shared.compute(), "pixels of one": lonely.compute()}


def detection(rank: int, world: int, folder: Path) -> dict:
    if rank == 0:
        real_like(folder)
    dist.barrier()
    dataset = open_scenes(str(folder), "detect").val
    shared, lonely = CocoAP(dataset, masks=True), CocoAP(dataset)
    for i in range(rank, len(dataset), world):
        shared.update(i, detections(dataset.scene(i), i))
    if rank == 1:
        lonely.update(0, detections(dataset.scene(0), 0))
    answers = {"things": shared.compute(), "things of one": lonely.compute()}
    if rank == 1:
        found = detections(dataset.scene(1), 1)
        shared.update(1, {**found, "masks": found["masks"][:, 1:]})
    try:
        shared.compute()
    except ValueError as error:
        answers["error"] = str(error)
    return answers


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world, folder = dist.get_rank(), dist.get_world_size(), Path(sys.argv[1])
    answers = segmentation(rank, world) | detection(rank, world, folder)
    (folder / f"{rank}.json").write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()
