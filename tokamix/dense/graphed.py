"""Dense models at full speed: one CUDA graph for images of one shape, so that a call costs one launch."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection.image_list import ImageList

from tokamix.compile import compile_blocks
from tokamix.dense._detector import Detector, Sizes, Target
from tokamix.dense.segmenter import Segmenter

WARM_UP = 3  # calls, in which compilers and libraries choose their kernels


class GraphedModel:
    """A segmenter or detector in evaluation mode, recorded as a CUDA graph; it is called as the model is.

    The model's blocks and heads are compiled in place. Precision is that of the moment: record inside `torch.autocast`,
    or after `model.bfloat16()`. Weights may change afterwards, but only in place.

    Args:
        model: on a GPU.
        images: (B, 3, H, W) of the only shape it will take; for detectors sides must be multiples of the last stride.
        compiled: whether parts are compiled; without it recording takes seconds, not half a minute.
    """

    @torch.no_grad()
    def __init__(self, model: Segmenter | Detector, images: Tensor, compiled: bool = True) -> None:
        if not images.is_cuda or model.training:
            where = f"{images.device.type}, {'training' if model.training else 'evaluating'}"
            raise ValueError(f"a model is recorded on a GPU and in evaluation mode, this one is on {where}")
        stride, sides = model.backbone.strides[-1], (images.shape[2], images.shape[3])
        if isinstance(model, Detector) and any(side % stride for side in sides):
            raise ValueError(f"a detector is recorded for sides that are multiples of {stride}, got {sides}")
        self.model, self.sizes = model, [sides] * len(images)
        with torch.inference_mode(False):
            self.images = images.clone()  # may be written to in any mode
        with torch.cuda.device(images.device), _weights_cast_anew(), _compiled(model) if compiled else nullcontext():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    self._run()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = self._run()

    def __call__(self, images: Tensor, sizes: Sizes | None = None) -> Tensor | list[Target]:
        """Logits, which the next call writes over; or what is found, in images of `sizes` if they are given."""
        if images.shape != self.images.shape:
            raise ValueError(f"recorded for images {tuple(self.images.shape)}, got {tuple(images.shape)}; record again")
        with torch.cuda.device(self.images.device):
            self.images.copy_(images)
            self.graph.replay()
        if isinstance(self.model, Detector):
            return self.model.present(self.out, self.sizes, sizes)
        return self.out

    def _run(self) -> Any:
        if isinstance(self.model, Detector):
            return self.model.find(ImageList(self.images, self.sizes))
        return self.model(self.images)


@contextmanager
def _compiled(model: Segmenter | Detector) -> Iterator[None]:
    """The model with its blocks, and what stands behind them, compiled for one size of images."""
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
        del model.decode  # copies of the model would go on with this one's weights


@contextmanager
def _weights_cast_anew() -> Iterator[None]:
    """Without autocast's cache of cast weights, which are gone when the graph that read them is played again."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
