"""What segmentation and detection share."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from tokamix.compile import compile_blocks
from tokamix.data.annotated.datasets import AnnotatedImage, DatasetSplits
from tokamix.data.decode import DataError
from tokamix.inference import InferenceConfig
from tokamix.layers import BatchNorm
from tokamix.predict import Prediction, Predictor, draw
from tokamix.predict.draw import Colour, contact_sheet
from tokamix.recipes import Recipe
from tokamix.train.tasks import Logs, Moment

_log = logging.getLogger("tokamix")
SHOWN = 4  # validation images on the sheet


class Dense:
    """The model has its own losses; predictions can be looked at.

    Args:
        recipe: how it is trained.
        opened: the data.
        config: what config.json says of the model.
    """

    metric = ""
    masks = False  # whether the model has those of things
    shown: Mapping[str, str] = MappingProxyType({})

    def __init__(self, recipe: Recipe, opened: DatasetSplits, config: dict[str, Any]) -> None:
        self.recipe, self.opened = recipe, opened
        self.inference = InferenceConfig.from_dict(config["inference"])
        self.scenes: list[AnnotatedImage] | None = None
        self.warned = False

    def prepare(self, model: nn.Module) -> None:
        """BatchNorm takes its statistics over all processes, for each has few of the large images; compile the body."""
        if dist.is_initialized() and dist.get_world_size() > 1 and any(map(_is_batch_norm, model.modules())):
            if dist.get_backend() == "nccl":
                convert_sync_batchnorm(model)  # timm's, which keeps what else is in its norms
            else:
                _log.warning("BatchNorm sees the images of each process alone: PyTorch joins them on GPUs only")
        if self.recipe.compile:  # not the heads, which see another number of things each time
            compile_blocks(model.backbone, graphs=False, dynamic=None)  # type: ignore[arg-type]

    def loss(self, model: nn.Module, images: Any, targets: Any, moment: Moment) -> tuple[Tensor, Logs]:
        """The sum of the model's losses, and each of them."""
        losses = model(images, targets)
        loss = torch.stack([value.float() for value in losses.values()]).sum()
        return loss, {"loss": loss, **{key: value for key, value in losses.items() if len(losses) > 1}}

    def picture(self, model: nn.Module) -> Image.Image | None:
        """Image, truth and prediction for the first validation images; no run ends for want of it."""
        try:
            return self._picture(model)
        except Exception as error:  # whatever it is, the numbers and weights are worth more
            if not self.warned:
                _log.warning("there is no picture of predictions: %s: %s", type(error).__name__, error)
            self.warned = True
            return None

    def _picture(self, model: nn.Module) -> Image.Image:
        if self.scenes is None:
            self.scenes = list(islice(self._decoded(), SHOWN))
        predictor = Predictor(model, self.inference)
        rows, used = [], set()
        for scene in self.scenes:
            found, truth = predictor(scene.image), self.truth(scene)
            overlays = [draw(scene.image, one, predictor.classes, legend=False) for one in (truth, found)]
            rows.append([to_pil_image(scene.image), *overlays])
            maps = [one.segmentation for one in (truth, found) if one.segmentation is not None]
            used |= {i for classes in maps for i in classes.unique().tolist()}
        return contact_sheet(rows, ("image", "truth", "prediction"), self.legend(used), side=320)

    def _decoded(self) -> Iterator[AnnotatedImage]:
        """The validation scenes that can be read; who reads them all has said which cannot."""
        for i in range(len(self.opened.val)):
            with suppress(DataError):
                yield self.opened.val.scene(i, masks=self.masks)

    def truth(self, scene: AnnotatedImage) -> Prediction:
        """What a perfect model would answer."""
        raise NotImplementedError

    def legend(self, used: set[int]) -> list[tuple[str, Colour]]:
        """What the colours of classes mean."""
        return []


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
