"""`create_dataset`: data sets by name or path, for every task."""

from typing import Literal

from tokamix.data.splits import DatasetSplits


def create_dataset(
    source: str, task: Literal["classify", "segment", "detect"] = "classify", seed: int = 0
) -> DatasetSplits:
    """Open a data set by name or path and return its training and validation splits.

    Args:
        source: what `open_images` (classification) or `open_annotated` (segmentation, detection) accepts.
        task: "classify", "segment" or "detect".
        seed: seed of generated images (`shapes`); held-out splits do not depend on it.
    """
    if task == "classify":
        from tokamix.data.images.sources import open_images

        return open_images(source, seed)
    if task not in ("segment", "detect"):
        raise ValueError(f"the task is {task!r}, but must be classify, segment or detect")
    from tokamix.data.annotated.datasets import open_annotated

    return open_annotated(source, task, seed)
