"""`create_dataset`: data sets by name or path, for every task."""

import os
from pathlib import Path

from tokamix.data.splits import DatasetSplits
from tokamix.tasks import Task


def create_dataset(
    source: str | os.PathLike[str], task: Task = "classify", seed: int = 0, labels: bool = True
) -> DatasetSplits:
    """Open a data set by name or path and return its training and validation splits.

    Args:
        source: a name or path for `open_images` (classification) or `open_annotated` (segmentation, detection).
        task: "classify", "segment" or "detect".
        seed: seed of generated images (`shapes`); held-out splits do not depend on it.
        labels: False also opens a folder of images without class folders, for tasks that need no labels.
    """
    name = normalize_source(source)
    if task == "classify":
        from tokamix.data.images.sources import open_images

        return open_images(name, seed, labels)
    if task not in ("segment", "detect"):
        raise ValueError(f"the task is {task!r}, but must be classify, segment or detect")
    from tokamix.data.annotated.sources import open_annotated

    return open_annotated(name, task, seed)


def normalize_source(source: str | os.PathLike[str]) -> str:
    """Make paths absolute, so that `photos`, `photos/` and the absolute path are recorded as the same data.

    Names (`digits`, `CIFAR100`), `shapes`, `wds:` and `hf:` sources are not changed.
    """
    if isinstance(source, Path):
        return os.path.abspath(source.expanduser())
    source = os.fspath(source)
    kind, colon, rest = source.partition(":")
    if source == "digits" or kind in ("shapes", "wds", "hf"):
        return source
    prefix, rest = (f"{kind}:", rest) if colon and kind in ("coco", "masks") else ("", source)
    paths, question, options = rest.partition("?")
    parts = [os.path.expanduser(part.strip()) for part in paths.split(",")]
    return prefix + ",".join(os.path.abspath(p) if os.path.exists(p) else p for p in parts) + question + options
