"""One of several processes that evaluate together; torchrun starts it with a folder, where it writes what it got."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.evaluate.test_detection import detections, real_like
from tests.evaluate.test_segmentation import CLASSES, made_up
from tests.train.tiny import TINY, tiny_data
from tokamix.data import AnnotatedImage, DatasetSplits, create_dataset
from tokamix.data.shapes import Shapes, ShapeScenes
from tokamix.evaluate import CocoAP, MeanIoU, evaluate
from tokamix.models._registry import create_model


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
    dataset = create_dataset(str(folder), "detect").val
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


class Counted(ShapeScenes):
    """Scenes that count how often they are asked for to be looked at, which needs no masks."""

    asked = 0

    def scene(self, i: int, masks: bool = True) -> AnnotatedImage:
        self.asked += not masks
        return super().scene(i, masks)


def whole(folder: Path) -> dict:
    """What the functions behind `tokamix eval` say, and how much of the data this process saw."""
    answers: dict = {}
    for task in ("segment", "detect"):
        part = Counted(Shapes(7, 32, part="b", large=2), task)
        answers[task] = evaluate(folder / task, DatasetSplits("few", part, part, part.classes, task), device="cpu")
        answers[f"{task} asked"] = part.asked
    model, data = model_and_data()
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    answers["classify"] = evaluate(model, data, device="cpu", batch_size=5)
    return answers | {"classify asked": sum(seen)}


def model_and_data() -> tuple[torch.nn.Module, DatasetSplits]:
    torch.manual_seed(0)
    model = create_model(str(TINY.model), num_classes=4, img_size=8, **TINY.model_kwargs)
    return model, tiny_data()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world, folder = dist.get_rank(), dist.get_world_size(), Path(sys.argv[1])
    answers = segmentation(rank, world) | detection(rank, world, folder) | whole(folder)
    (folder / f"{rank}.json").write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()
