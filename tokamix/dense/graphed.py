"""A segmenter or detector as one CUDA graph for images of one shape: a call costs one launch."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection.image_list import ImageList

from tokamix.compile import Recording, compile_blocks
from tokamix.dense.boxes import Sizes, Target
from tokamix.dense.detector import Detector
from tokamix.dense.segmenter import Segmenter


class GraphedModel:
    """A segmenter or detector in evaluation mode, captured as a CUDA graph; call it like the model.

    The model's blocks and heads are compiled in place. The precision at capture stays: create it inside
    `torch.autocast` or after `model.bfloat16()`. Weights may change afterwards, but only in place.

    Args:
        model: on a GPU.
        images: (B, 3, H, W), which fixes the shape of all inputs; a detector needs sides that are multiples of its
            largest backbone stride.
        compiled: compile parts of the model; without it the capture takes seconds instead of half a minute.
    """

    @torch.no_grad()
    def __init__(self, model: Segmenter | Detector, images: Tensor, compiled: bool = True) -> None:
        if not images.is_cuda or model.training:
            state = f"{images.device.type} images and a model in {'training' if model.training else 'evaluation'} mode"
            raise ValueError(f"a CUDA graph needs images on a GPU and a model in evaluation mode, got {state}")
        stride, sides = model.backbone.strides[-1], (images.shape[2], images.shape[3])
        if isinstance(model, Detector) and any(side % stride for side in sides):
            raise ValueError(f"a detector needs sides that are multiples of {stride} here, got {sides}; pad the images")
        self.model, self.sizes = model, [sides] * len(images)
        with _compiled(model) if compiled else nullcontext():
            self.recording = Recording(self._run, [images])

    def __call__(self, images: Tensor, sizes: Sizes | None = None) -> Tensor | list[Target]:
        """Logits, which the next call overwrites; or detections, scaled to `sizes` if given."""
        captured = self.recording.inputs[0].shape
        if images.shape != captured:
            raise ValueError(
                f"captured for images {tuple(captured)}, got {tuple(images.shape)}; create a new GraphedModel"
            )
        out = self.recording.replay([images])
        if isinstance(self.model, Detector):
            return self.model.postprocess(out, self.sizes, sizes)
        return out

    def _run(self, images: Tensor) -> Any:
        if isinstance(self.model, Detector):
            return self.model.detect(ImageList(images, self.sizes))
        return self.model(images)


@contextmanager
def _compiled(model: Segmenter | Detector) -> Iterator[None]:
    """Compile the blocks of the backbone and the parts after it for one image size."""
    compile_blocks(model.backbone, graphs=False)
    if isinstance(model, Detector):
        for part in model.parts_to_compile():
            part.compile(dynamic=False)
        yield
        return
    model.decode = torch.compile(model.decode, dynamic=False)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.decode  # copies of the model would keep using the weights of this one
