"""Latency of Mask R-CNN: ours on ATMNet-T, and torchvision's on a ResNet-50."""

import contextlib
import time
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import maskrcnn_resnet50_fpn

from tokamix.bench.models import ModelRow, Timed, check_error
from tokamix.dense import GraphedModel, create_detector
from tokamix.ops.dispatch import use_backend

LOGIT_STD = 0.6  # standard deviation of class logits
OURS, TORCHVISION = "mask_rcnn atmnet_tiny", "torchvision maskrcnn_resnet50_fpn"
CLASSES = 80
# each side in the best mode it can run in: torchvision's heads wait for the GPU, so only its backbone can be a graph
BEST_MODE = {OURS: "graphed", TORCHVISION: "backbone graphs"}


def scale_class_logits(detector: nn.Module, layer: nn.Linear, images: Any) -> None:
    """Centre and scale the class logits so that about a hundred detections pass the threshold, as after training.

    Args:
        detector: changed in place.
        layer: its last layer for classes.
        images: what the detector is called with.
    """
    logits: list[Tensor] = []
    hook = layer.register_forward_hook(lambda layer, inputs, out: logits.append(out))
    detector(images)
    hook.remove()
    mean = logits[0].mean(0)
    scale = LOGIT_STD / (logits[0] - mean).std()
    layer.weight.data *= scale
    layer.bias.data = -mean * scale


class TimedDetector(Timed):
    """Mask R-CNN with random weights and about a hundred detections, from images to pasted masks.

    bfloat16 autocast on a GPU, float32 on a CPU.

    Args:
        name: OURS or TORCHVISION.
        compiled: "" for eager, or `BEST_MODE` of the side.
        size: height and width of the images.
        batch: images per call.
        device: "cuda" or "cpu".
        kwargs: passed to `create_detector`, or to torchvision's model.
    """

    model: Any
    call: Any

    @torch.no_grad()
    def __init__(
        self,
        name: str,
        compiled: str = "",
        size: tuple[int, int] = (800, 1280),
        batch: int = 1,
        device: str = "cuda",
        **kwargs: Any,
    ) -> None:
        torch.manual_seed(0)
        self.device, self.name = device, name
        self.images = torch.randn(batch, 3, *size, device=device)
        given: Any = self.images
        layer: Any
        if name == OURS:
            self.model = create_detector("mask_rcnn", "atmnet_tiny", CLASSES, **kwargs)
            layer = self.model.stages[0].classify
        else:
            options = {"num_classes": CLASSES + 1, "min_size": min(size), "max_size": max(size), **kwargs}
            self.model = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, **options)
            layer, given = self.model.roi_heads.box_predictor.cls_score, list(self.images)  # a list, as it requires
        self.model.to(device).eval()
        scale_class_logits(self.model, layer, given)
        with self._precision():
            self.error = self._compare_maps()
        self.call, self.given = self.model, given
        dtype = "bf16" if device == "cuda" else "fp32"
        self.row = ModelRow(name, "infer", f"{size[0]}x{size[1]}", batch, dtype, compiled, "auto")
        self.step = self._detect

    def _precision(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")

    def _maps(self) -> Tensor:
        """The feature maps that the heads get, as one vector."""
        images = self.images[:1]
        maps = self.model.neck(self.model.backbone(images)) if self.name == OURS else self.model.backbone(images)
        return torch.cat([m.flatten().float() for m in (maps.values() if isinstance(maps, dict) else maps)])

    def _compare_maps(self) -> float:
        fast = self._maps()
        with use_backend("eager"):
            plain = self._maps()
            with torch.autocast(self.device, enabled=False):
                exact = self._maps()
        return check_error(fast, plain, exact)

    @torch.inference_mode()
    def _detect(self) -> list[dict[str, Tensor]]:
        with self._precision():
            return self.call(self.given)

    def first_call(self) -> None:
        """Compile and call once."""
        start = time.perf_counter()
        if self.row.compiled == BEST_MODE[OURS]:
            with self._precision():
                self.call = GraphedModel(self.model, self.images)
        elif self.row.compiled:
            self.model.backbone = torch.compile(self.model.backbone, mode="reduce-overhead")
        prepared = time.perf_counter() - start
        super().first_call()
        self.row.first_call_s += prepared

    def check(self) -> float:
        """The error of the feature maps against float32; without detections the masks would cost nothing."""
        if not len(self._detect()[0]["boxes"]):
            raise RuntimeError(f"not timed, because {self.name} detects nothing")
        self.row.error = self.error
        return self.error
