"""What each of two processes does that evaluate together."""

import json
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.command import call
from tests.evaluate.test_detection import detections, write_dataset
from tests.evaluate.test_segmentation import CLASSES, random_pair
from tests.train.tiny import TINY, tiny_data
from tokamix.data import AnnotatedImage, DatasetSplits, create_dataset, shapes
from tokamix.data.shapes import AnnotatedShapes, Shapes
from tokamix.evaluate import CocoAP, MeanIoU, evaluate
from tokamix.models._registry import create_model

FEW = 8  # generated images of the command
COMMAND = ("--data", "shapes:32", "--device", "cpu", "--workers", 0, "--batch-size", 32)


def segmentation(rank: int, world_size: int) -> dict:
    shared, single = MeanIoU(CLASSES), MeanIoU(CLASSES)
    for i in range(rank, 5, world_size):
        shared.update(*random_pair(i))
    if rank == 0:
        single.update(*random_pair(0))
    return {"pixels": shared.compute(), "pixels of rank 0": single.compute()}


def detection(rank: int, world_size: int, folder: Path) -> dict:
    if rank == 0:
        write_dataset(folder)
    dist.barrier()
    dataset = create_dataset(str(folder), "detect").val
    shared, single = CocoAP(dataset, masks=True), CocoAP(dataset)
    for i in range(rank, len(dataset), world_size):
        shared.update(i, detections(dataset.sample(i), i))
    if rank == 1:
        single.update(0, detections(dataset.sample(0), 0))
    results = {"objects": shared.compute(), "objects of rank 1": single.compute()}
    if rank == 1:
        wrong = detections(dataset.sample(1), 1)
        shared.update(1, {**wrong, "masks": wrong["masks"][:, 1:]})
    try:
        shared.compute()
    except ValueError as error:
        results["error"] = str(error)
    return results


class CountingDataset(AnnotatedShapes):
    """Counts how many images are decoded for evaluation, which needs no masks."""

    decoded = 0

    def sample(self, i: int, masks: bool = True) -> AnnotatedImage:
        self.decoded += not masks
        return super().sample(i, masks)


def evaluate_all(runs: dict[str, str]) -> dict:
    """Metrics of `evaluate` for every task, and how many images this process decoded."""
    results: dict = {}
    for task, run in runs.items():
        part = CountingDataset(Shapes(7, 32, part="b", large=2), task)
        result = evaluate(run, DatasetSplits("few", part, part, part.classes, task), device="cpu")
        results |= {task: result.metrics, f"{task} decoded": part.decoded, f"{task} images": result.num_images}
    torch.manual_seed(0)
    model = create_model(str(TINY.model), num_classes=4, img_size=8, **TINY.model_kwargs)
    counts: list[int] = []
    model.register_forward_pre_hook(lambda _, inputs: counts.append(len(inputs[0])))
    result = evaluate(model, tiny_data(), device="cpu", batch_size=5)
    results |= {"classify": result.metrics, "classify decoded": sum(counts), "classify images": result.num_images}
    return results


def evaluate_together(folder: Path, runs: dict[str, str]) -> dict:
    """Evaluate with the other process; the environment has rank, world size and address, as torchrun sets them."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = segmentation(rank, world_size) | detection(rank, world_size, folder) | evaluate_all(runs)
    dist.barrier()
    dist.destroy_process_group()
    return results | {"printed": call("eval", runs["segment"], *COMMAND)}


def evaluate_as_rank_1(folder: Path, runs: dict[str, str]) -> None:
    """Evaluate in a process of its own, and print the results."""
    shapes.COUNTS["val"] = FEW
    print(json.dumps(evaluate_together(folder, runs)))
