"""Distillation teachers: any timm model, checkpoint or ONNX file that returns logits."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from json import loads
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import resolve_model_data_config
from torch import Tensor

from tokamix.checkpoint import load_checkpoint, read_checkpoint, unwrap
from tokamix.compile import compile_blocks
from tokamix.inference import load_model
from tokamix.models._registry import create_model

_log = logging.getLogger("tokamix")
Statistics = tuple[Sequence[float], Sequence[float]]


class Teacher:
    """Logits for the student's images, which are converted to the teacher's normalisation and size."""

    def __init__(
        self,
        logits: Callable[[Tensor], Tensor],
        own: Statistics,
        student: Statistics,
        size: tuple[int, int] | None,
        device: torch.device,
    ) -> None:
        self.logits = logits
        self.size = size
        self.scale, self.shift = _convert(student, own, device)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Logits, in float32."""
        images = images * self.scale + self.shift
        if self.size is not None and images.shape[2:] != self.size:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        return self.logits(images).float()


def load_teacher(
    source: str,
    num_classes: int,
    student: Statistics,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
    compiled: bool = False,
    image_size: int | None = None,
    class_names: Sequence[str] = (),
) -> Teacher:
    """Load a teacher.

    Args:
        source: a timm name (with its pretrained weights), `name@file` for a checkpoint of that model, the folder
            of a run, `hf-hub:user/name`, or an .onnx file. An ONNX file may state its normalisation as `mean` and `std`
            in its metadata; default: the student's.
        num_classes: of the data; the teacher must have as many.
        student: mean and std of the student's images.
        device: of the teacher.
        autocast: context manager of its forward passes.
        compiled: use torch.compile.
        image_size: side of its images; None: the student's, or the only one that it takes.
        class_names: of the data; the outputs of a run that has the same classes in another order are permuted.
    """
    if source.endswith(".onnx"):
        return _onnx_teacher(source, num_classes, student, device, image_size)
    model, names = _load_model(source)
    model.to(device).eval().requires_grad_(False)
    if model.num_classes != num_classes:
        raise ValueError(
            f"the teacher {source} has {model.num_classes} classes, but the data has {num_classes}; give one that was"
            " trained on the same classes"
        )
    order = _class_order(source, names, class_names)
    config = resolve_model_data_config(model)
    own = tuple(config["input_size"][1:]) if model.pretrained_cfg.get("fixed_input_size") else None
    size = _choose_size(source, own, image_size)
    if compiled:
        compile_blocks(model, graphs=False)

    def logits(images: Tensor) -> Tensor:
        with autocast():
            output = model(images)
        return output if order is None else output[:, order.to(output.device)]

    return Teacher(logits, (config["mean"], config["std"]), student, size, device)


def _load_model(source: str) -> tuple[Any, tuple[str, ...]]:
    """The model, and the names of its classes if it is a run's."""
    if Path(source).is_dir():
        model, inference = load_model(source)
        return model, inference.class_names if inference.has_class_names else ()
    name, at, file = source.partition("@")
    if at and not name.startswith("hf-hub:"):
        weights = unwrap(read_checkpoint(file))
        model = create_model(name)
        classifier = weights.get(f"{model.pretrained_cfg.get('classifier')}.weight")
        if classifier is not None and classifier.shape[0] != model.num_classes:
            model = create_model(name, num_classes=classifier.shape[0])
        load_checkpoint(model, weights)
        return model, ()
    if Path(source).suffix in (".pth", ".pt", ".safetensors", ".bin"):
        raise ValueError(f"{source} has weights but no model name; write NAME@{source}")
    return create_model(source, pretrained=True), ()


def _class_order(source: str, names: Sequence[str], wanted: Sequence[str]) -> Tensor | None:
    """The teacher's class for each class of the data; None if they are the same, or not known."""
    if not names or not wanted or tuple(names) == tuple(wanted):
        return None
    if set(names) != set(wanted):
        _log.warning(
            "the teacher %s has classes such as %r, but the data has %r: its outputs are taken in the data's order",
            *(source, *next(pair for pair in zip(names, wanted, strict=False) if pair[0] != pair[1])),
        )
        return None
    return torch.tensor([list(names).index(name) for name in wanted])


def _choose_size(source: str, own: Any, image_size: int | None) -> Any:
    """The size (H, W) of the teacher's images; None: the student's."""
    asked = (image_size, image_size) if image_size is not None else None
    if own is not None and asked is not None and asked != own:
        raise ValueError(
            f"the teacher {source} takes images of {own[0]}x{own[1]} only, but teacher_size is {image_size}; leave it"
            " out"
        )
    return asked or own


def _onnx_teacher(
    file: str, num_classes: int, student: Statistics, device: torch.device, image_size: int | None
) -> Teacher:
    try:
        import onnxruntime
    except ImportError:
        raise ValueError(f"the teacher {file} needs onnxruntime: pip install 'tokamix[onnx]'") from None
    if not Path(file).is_file():
        raise FileNotFoundError(f"there is no teacher {file}")
    wanted = ["CUDAExecutionProvider"] if device.type == "cuda" else []
    available = onnxruntime.get_available_providers()
    session = onnxruntime.InferenceSession(
        file, providers=[*(p for p in wanted if p in available), "CPUExecutionProvider"]
    )
    (entry,) = session.get_inputs()
    fixed = entry.shape[0] if isinstance(entry.shape[0], int) else None
    classes = session.get_outputs()[0].shape[-1]
    if isinstance(classes, int) and classes != num_classes:
        raise ValueError(f"the teacher {file} has {classes} classes, but the data has {num_classes}")
    metadata = session.get_modelmeta().custom_metadata_map
    known = "mean" in metadata and "std" in metadata
    own = (loads(metadata["mean"]), loads(metadata["std"])) if known else student
    sides = tuple(entry.shape[2:])
    size = _choose_size(file, sides if all(isinstance(side, int) for side in sides) else None, image_size)

    def logits(images: Tensor) -> Tensor:
        # a file exported for a fixed batch size gets the images in parts of that size
        parts = images.float().cpu().split(fixed or len(images))
        rows = [torch.from_numpy(session.run(None, {entry.name: _pad(part, fixed).numpy()})[0]) for part in parts]
        return torch.cat(rows)[: len(images)].to(device)

    return Teacher(logits, own, student, size, device)


def _pad(images: Tensor, size: int | None) -> Tensor:
    missing = (size or len(images)) - len(images)
    return torch.cat([images, images.new_zeros(missing, *images.shape[1:])]) if missing else images


def _convert(student: Statistics, own: Statistics, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scale and shift from one normalisation to the other."""
    (mean, std), (own_mean, own_std) = (
        [torch.tensor(values, device=device).view(1, -1, 1, 1) for values in statistics]
        for statistics in (student, own)
    )
    return std / own_std, (mean - own_mean) / own_std
