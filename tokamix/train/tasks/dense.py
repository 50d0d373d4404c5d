"""The common part of segmentation and detection."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from tokamix.checkpoint import read_checkpoint, unwrap
from tokamix.compile import compile_blocks
from tokamix.data import AnnotatedImage, DataError, DatasetSplits, Loader, create_dataset
from tokamix.data.annotated.loader import create_eval_loader, create_train_loader
from tokamix.dense.saved import create_dense_model, load_matching_weights
from tokamix.inference import InferenceConfig, read_config, read_construction
from tokamix.predict import Prediction, Predictor, draw_prediction
from tokamix.predict.draw import Colour, contact_sheet
from tokamix.recipes import Recipe
from tokamix.train.loop.optim import DropPathSchedule
from tokamix.train.output.reload import check_reload
from tokamix.train.setup.accelerator import Accelerator
from tokamix.train.setup.model import choose_model_name, unknown_argument
from tokamix.train.tasks.task import LoaderOptions, Logs, Position

_log = logging.getLogger("tokamix")
SHEET_IMAGES = 4  # validation images on the sheet of predictions
# keys of a recipe that are inference options as well
INFERENCE = ("scale", "interpolation", "window", "window_stride", "test_scales", "test_flip")


class Dense:
    """Trains a model that computes its own losses, and draws its predictions."""

    metric = ""
    metric_names: Mapping[str, str] = MappingProxyType({})
    masks = False  # whether the model predicts instance masks
    inference: InferenceConfig

    def __init__(self, recipe: Recipe, data: str | DatasetSplits) -> None:
        self.recipe = recipe
        self.splits = create_dataset(data, recipe.task, seed=recipe.seed) if isinstance(data, str) else data
        if self.splits.task == "classify":
            raise ValueError(
                f"task {recipe.task} needs annotated images, but {self.splits.name} has images with one label each"
            )
        self.samples: list[AnnotatedImage] | None = None
        self.warned = False

    def create_model(self, model: str | nn.Module | None, checkpoint: str | Path | None, pretrained: bool) -> Any:
        """Create the segmenter or detector from the recipe and a backbone's name.

        Weights are initialised from the recipe's seed. The checkpoint of a classifier gives the weights of the
        backbone; that of a segmenter or detector all weights that fit if the method is the same, else the backbone's.
        """
        recipe = self.recipe
        if isinstance(model, nn.Module):
            raise ValueError(f"task {recipe.task} creates its model itself; give the name of a backbone")
        saved = read_config(checkpoint) if checkpoint is not None else {}
        same_method = saved.get("method") == recipe.method
        body = read_construction(saved)
        if model is None and "construction" in saved:
            raise ValueError(
                f"{checkpoint} holds {saved['architecture']}, which cannot be a backbone; name one with --model"
            )
        saved_name = body["name"] or saved.get("backbone")
        name = choose_model_name(model, saved_name, recipe)
        saved_args: dict[str, Any] = body["arguments"] or saved.get("backbone_args") or {}
        self.model_config: dict[str, Any] = {
            "task": recipe.task,
            "method": recipe.method,
            "neck": recipe.neck,
            "backbone": name,
            "num_classes": self.splits.num_classes,
            "label_names": list(self.splits.classes),
            "method_args": dict(recipe.method_kwargs),
            "backbone_args": {**(saved_args if name == saved_name else {}), **recipe.model_kwargs},
        }
        torch.manual_seed(recipe.seed)
        weights = unwrap(read_checkpoint(checkpoint)) if checkpoint is not None and not same_method else None
        if weights and "method" not in saved and any(key.startswith("backbone.body.") for key in weights):
            _log.warning("%s does not name its method: only the backbone is loaded; give the run's folder", checkpoint)
        start = {"pretrained": pretrained, "checkpoint": weights}
        try:
            network = create_dense_model(self.model_config, drop_path=DropPathSchedule.initial_rate(recipe), **start)
        except TypeError as error:
            raise ValueError(
                f"neither {recipe.method} nor {name} has an argument {unknown_argument(error)!r}; change the recipe's"
                " method_kwargs, model_kwargs or drop_path"
            ) from error
        if same_method and checkpoint is not None:
            _load_matching(network, checkpoint, name)
        options = {key: getattr(recipe, key) for key in INFERENCE if hasattr(recipe, key)}
        self.inference = InferenceConfig.from_model(
            network.backbone.body,
            self.splits.classes,
            task=recipe.task,
            category_ids=tuple(self.splits.train.category_ids),
            **options,
        )
        self._check_data(network)
        return network

    def _check_data(self, network: Any) -> None:
        """Refuse data that the model cannot be evaluated on."""

    def title(self) -> str:
        """Method and backbone."""
        return f"{self.model_config['method']} with {self.model_config['backbone']}"

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return self.model_config | {"inference": self.inference.to_dict()}

    def create_loaders(self, options: LoaderOptions) -> tuple[Loader, Loader]:
        """Create the training and the validation loader."""
        common: Any = options._asdict()
        statistics: Any = {"mean": self.inference.mean, "std": self.inference.std}
        train_loader = create_train_loader(self.splits.train, self.recipe, **common, **statistics)
        return train_loader, create_eval_loader(self.splits.val, self.inference, **common)

    def prepare(self, model: nn.Module, accelerator: Accelerator | None) -> None:
        """Nothing to prepare."""

    def compile(self, model: nn.Module, graphs: bool) -> None:
        """Compile the backbone, not the heads: the number of objects changes with each image."""
        compile_blocks(model.backbone, graphs=False, dynamic=None)  # type: ignore[arg-type]

    def loss(self, model: nn.Module, images: Any, targets: Any, position: Position) -> tuple[Tensor, Logs]:
        """The sum of the model's losses, and each of them."""
        losses = model(images, targets)
        loss = torch.stack([value.float() for value in losses.values()]).sum()
        return loss, {"loss": loss, **{key: value for key, value in losses.items() if len(losses) > 1}}

    def draw_predictions(self, model: nn.Module) -> Image.Image | None:
        """Draw image, ground truth and prediction of the first validation images; a failure does not end the run."""
        try:
            return self._draw_predictions(model)
        except Exception as error:  # metrics and weights matter more than a drawing
            if not self.warned:
                _log.warning("predictions cannot be drawn: %s: %s", type(error).__name__, error)
            self.warned = True
            return None

    def _draw_predictions(self, model: nn.Module) -> Image.Image:
        if self.samples is None:
            self.samples = list(islice(self._readable_samples(), SHEET_IMAGES))
        predictor = Predictor(model, self.inference)
        rows, used = [], set()
        for sample in self.samples:
            predicted, target = predictor(sample.image), self.ground_truth(sample)
            overlays = [
                draw_prediction(sample.image, one, predictor.class_names, legend=False) for one in (target, predicted)
            ]
            rows.append([to_pil_image(sample.image), *overlays])
            class_maps = [one.segmentation for one in (target, predicted) if one.segmentation is not None]
            used |= {i for class_map in class_maps for i in class_map.unique().tolist()}
        return contact_sheet(rows, ("image", "ground truth", "prediction"), self.legend(used), side=320)

    def _readable_samples(self) -> Iterator[AnnotatedImage]:
        """The validation samples that can be decoded; the loader reports the others."""
        for i in range(len(self.splits.val)):
            with suppress(DataError):
                yield self.splits.val.sample(i, masks=self.masks)

    def ground_truth(self, sample: AnnotatedImage) -> Prediction:
        """The annotations as a prediction."""
        raise NotImplementedError

    def legend(self, used: set[int]) -> list[tuple[str, Colour]]:
        """Names and colours of the classes that are used."""
        return []

    def check_saved(self, folder: Path, model: nn.Module) -> None:
        """Reload the folder of a finished run and compare outputs."""
        check_reload(folder, model, self.inference)

    def write_report(self, folder: Path, model: nn.Module) -> None:
        """No report: metrics.csv has the numbers and predictions/ the drawings."""


def _load_matching(network: Any, checkpoint: str | Path, name: str) -> None:
    """Load all weights of a checkpoint that fit; the whole backbone must."""
    fresh = load_matching_weights(network, checkpoint)
    if missing := [parameter for parameter in fresh if parameter.startswith("backbone.")]:
        raise ValueError(f"{checkpoint} does not fit {name}: {len(missing)} weights are missing, such as {missing[0]}")
    for parameter in fresh:
        _log.warning("%s keeps its initial values: the checkpoint has none of that shape", parameter)
