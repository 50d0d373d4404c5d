"""Self-supervised training of a backbone: DINO, arXiv 2104.14294."""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.compile import compile_blocks
from tokamix.data import DatasetSplits, Loader, create_dataset
from tokamix.data.images.loader import create_eval_loader
from tokamix.data.images.multicrop import create_multicrop_loader
from tokamix.dense.backbone import ANY_SIZE_KWARGS
from tokamix.embed.features import effective_rank, extract_features, feature_std
from tokamix.evaluate.knn import measure_knn
from tokamix.inference import InferenceConfig, evaluation_mode
from tokamix.recipes import Recipe
from tokamix.train.loop.optim import cosine
from tokamix.train.setup.accelerator import Accelerator
from tokamix.train.tasks.classify import Classify
from tokamix.train.tasks.dino.loss import centered_softmax, multicrop_loss, sinkhorn, update_center
from tokamix.train.tasks.dino.network import DinoHead, DinoNetwork
from tokamix.train.tasks.task import LoaderOptions, Logs, Position

_log = logging.getLogger("tokamix")
# below these values on the validation images a run counts as collapsed
LEAST_INFORMATION = 0.01  # nats that the teacher's output tells about the image
LEAST_STD = 0.01
COLLAPSE_AFTER = 0.1  # fraction of the run; random weights tell little about images, too


class CollapseError(ValueError):
    """All images have come to get the same output."""


class Dino(Classify):
    """A student learns a teacher's outputs for other crops of the same image; the teacher is the student's average.

    The saved model is the teacher's backbone without a classifier. During training, its features are measured by the
    k-NN accuracy on the validation images where the data has labels; training never uses them.
    """

    metric = "knn"
    # arguments that make timm's models take images of several sizes
    optional_arguments = MappingProxyType({key: value for options in ANY_SIZE_KWARGS for key, value in options.items()})
    network: DinoNetwork
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __init__(self, recipe: Recipe, data: str | DatasetSplits) -> None:
        self.recipe = recipe
        self.splits = create_dataset(data, labels=False, seed=recipe.seed) if isinstance(data, str) else data
        if self.splits.task != "classify":
            raise ValueError(f"task dino needs images without annotations, but {self.splits.name} has them")
        self.num_outputs = 0
        self.has_labels = self.splits.num_classes > 1
        names = {"knn": f"{recipe.knn_k}-NN"} if self.has_labels else {}
        self.metric_names: Mapping[str, str] = MappingProxyType(names | {"effective_rank": "effective rank"})
        self.metric = next(iter(self.metric_names))
        self.progress = 0.0
        if self.has_labels and (bank := min(recipe.knn_images, len(self.splits.train))) < recipe.knn_k:
            raise ValueError(
                f"{recipe.knn_k} neighbours cannot be found among {bank} training images; lower knn_k, such as --set"
                f" knn_k={max(1, bank // 10)}"
            )

    def create_model(self, model: str | nn.Module | None, checkpoint: str | Path | None, pretrained: bool) -> Any:
        """Create student and teacher from the backbone of the recipe, or from the given module."""
        recipe = self.recipe
        if isinstance(model, nn.Module) and getattr(model, "num_classes", None):
            model.reset_classifier(0)  # type: ignore[operator]
        backbone = super().create_model(model, checkpoint, pretrained)
        features = self._check_sizes(backbone)
        widths = (features, recipe.out_dim, recipe.head_dim, recipe.bottleneck_dim)
        head = DinoHead(*widths, recipe.norm_last_layer, recipe.head_batch_norm)
        self.network = DinoNetwork(backbone, head)
        return self.network

    def _check_sizes(self, backbone: nn.Module) -> int:
        """Number of features; refuses a backbone that does not take crops of both sizes."""
        recipe = self.recipe
        for size in dict.fromkeys((recipe.image_size, recipe.local_size if recipe.local_crops else recipe.image_size)):
            try:
                with torch.no_grad(), evaluation_mode(backbone):
                    features = backbone(torch.zeros(1, self.in_chans, size, size))
            except Exception as error:  # timm's models have no common one
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                raise ValueError(
                    f"{self.title()} does not take crops of both {recipe.image_size} px and {recipe.local_size} px"
                    f" ({reason}); choose another model, or sizes that it takes (image_size, local_size)"
                ) from error
            if not isinstance(features, Tensor) or features.ndim != 2:
                raise ValueError(f"{self.title()} does not return one vector for each image; choose another model")
        return features.shape[1]

    def _inference_config(self, network: nn.Module) -> InferenceConfig:
        return super()._inference_config(network).replace(class_names=())

    def saved_module(self, model: Any) -> nn.Module:
        """The teacher's backbone."""
        return model.teacher.backbone

    def create_loaders(self, options: LoaderOptions) -> tuple[Loader, Loader]:
        """Create the loader of training crops and that of whole validation images."""
        common: Any = options._asdict()
        config, train = self.inference, self.splits.train
        crops = create_multicrop_loader(train, self.recipe, mean=config.mean, std=config.std, **common)
        self.bank_loader = create_eval_loader(train.at_most(self.recipe.knn_images), config, **common)
        return crops, create_eval_loader(self.splits.val, config, **common)

    def prepare(self, model: nn.Module, accelerator: Accelerator | None) -> None:
        """Evaluate in the precision of training."""
        if accelerator is not None:
            self.autocast = accelerator.autocast

    def compile(self, model: Any, graphs: bool) -> None:
        """Compile the blocks of both backbones; the student runs once for each size of crops in a step."""
        for branch in (model.student, model.teacher):
            compile_blocks(branch.backbone, graphs, step=model)

    def loss(self, model: nn.Module, images: Any, labels: Tensor, position: Position) -> tuple[Tensor, Logs]:
        """Compute the loss of a batch of crops, and the scalars to log."""
        recipe, self.progress = self.recipe, position.progress
        if recipe.channels_last:
            images = [crops.contiguous(memory_format=torch.channels_last) for crops in images]
        student, teacher, features = model(images)
        batch = len(labels)
        temperature = self.teacher_temperature(position)
        if recipe.centering == "sinkhorn":
            targets = sinkhorn(teacher, temperature)
        else:
            targets = centered_softmax(teacher, self.network.center, temperature)
            update_center(self.network.center, teacher, recipe.center_momentum)
        student = F.log_softmax(student / recipe.student_temp, -1).unflatten(0, (-1, batch))
        loss = multicrop_loss(student, targets.unflatten(0, (-1, batch)))
        entropy, information = entropies(targets)
        return loss, {
            "loss": loss,
            "teacher_entropy": entropy,
            "teacher_information": information,
            "feature_std": feature_std(features),
        }

    def teacher_temperature(self, position: Position) -> float:
        """The teacher's temperature, which rises linearly at the start of the run."""
        recipe = self.recipe
        if not recipe.teacher_temp_warmup:
            return recipe.teacher_temp
        done = min(1.0, position.progress * recipe.num_epochs / recipe.teacher_temp_warmup)
        return recipe.teacher_temp_start + (recipe.teacher_temp - recipe.teacher_temp_start) * done

    def before_step(self, position: Position) -> None:
        """Freeze the last layer of the head at the start of the run."""
        if position.progress * self.recipe.num_epochs < self.recipe.freeze_last_layer:
            head = self.network.student.head
            head.directions.grad = head.norms.grad = None

    def after_step(self, position: Position) -> None:
        """Move the teacher towards the student."""
        self.network.update_teacher(cosine(self.recipe.teacher_momentum, 1.0, position.progress))

    def evaluate(self, model: nn.Module, loader: Loader, pad_to: int | None = None) -> dict[str, float]:
        """Measure the teacher's features on the validation images: k-NN accuracy, and signs of a collapse."""
        backbone = self.network.teacher.backbone
        metrics: dict[str, float] = {}
        with self.autocast():
            features, labels = extract_features(backbone, loader, pad_to)
            bank = extract_features(backbone, self.bank_loader, pad_to) if self.has_labels else None
        if bank is not None:
            k, classes = self.recipe.knn_k, self.splits.num_classes
            metrics["knn"] = measure_knn(*bank, features, labels, [k], num_classes=classes)[k]
        metrics |= {"effective_rank": effective_rank(features), "feature_std": float(feature_std(features))}
        with torch.no_grad():
            logits = torch.cat([self.network.teacher.head(part) for part in features.split(4096)])
            targets = centered_softmax(logits, self.network.center, self.recipe.teacher_temp)
            metrics["teacher_entropy"], metrics["teacher_information"] = map(float, entropies(targets))
        self._watch(metrics)
        return metrics

    def _watch(self, metrics: Mapping[str, float]) -> None:
        """Warn of a collapse, or end the run."""
        if self.progress < COLLAPSE_AFTER or (problem := describe_collapse(metrics)) is None:
            return
        cure = "lower lr or teacher_temp, raise teacher_momentum or batch_size, or try centering=sinkhorn"
        if self.recipe.stop_on_collapse:
            raise CollapseError(f"the run has collapsed: {problem}; {cure}, or set stop_on_collapse to false")
        _log.warning("the run seems to have collapsed: %s; %s", problem, cure)

    def write_report(self, folder: Path, model: nn.Module) -> None:
        """No report: a backbone has no classes. `tokamix probe` measures its features."""


def entropies(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Two signs of a collapse, of probabilities (N, K) of N images.

    Returns:
        the mean entropy of a row in nats: log(K) if all outputs are uniform; and the mutual information of image and
        output, which is the entropy of the mean row minus the first: 0 if all images have the same output.
    """
    each = torch.special.entr(probabilities).sum(-1).mean()
    return each, torch.special.entr(probabilities.mean(0)).sum() - each


def describe_collapse(metrics: Mapping[str, float]) -> str | None:
    """The sign of a collapse in words, if there is one."""
    if metrics["feature_std"] < LEAST_STD:
        return f"all validation images have nearly the same features (feature_std {metrics['feature_std']:.4f})"
    if metrics["teacher_information"] < LEAST_INFORMATION:
        return (
            "the teacher gives all validation images nearly the same output (teacher_information"
            f" {metrics['teacher_information']:.4f} nats, teacher_entropy {metrics['teacher_entropy']:.2f})"
        )
    return None
