"""Visual question answering with ViLT."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.data import DatasetSplits, Loader
from tokamix.data.batches import IndexOrder
from tokamix.data.loading import BatchReader, WorkerLoader
from tokamix.inference import InferenceConfig, evaluation_mode
from tokamix.recipes import Recipe
from tokamix.train.setup.accelerator import Accelerator
from tokamix.train.tasks.task import LoaderOptions, Logs, Position
from tokamix.vqa import VqaDataset, VqaModel, create_vqa, open_vqa, vqa_accuracy

INPUTS = ("pixel_values", "pixel_mask", "input_ids", "token_type_ids", "attention_mask")


class Vqa:
    """Answers as classes with soft targets, measured by VQA's accuracy."""

    metric = "vqa"
    metric_names: Mapping[str, str] = MappingProxyType({"vqa": "VQA accuracy"})
    inference: InferenceConfig  # never set: the preprocessing is that of Hugging Face

    def __init__(self, recipe: Recipe, data: str | DatasetSplits) -> None:
        self.recipe = recipe
        self.splits = open_vqa(data, recipe.min_answer_count) if isinstance(data, str | Path) else data
        if self.splits.task != "vqa":
            raise ValueError(f"task vqa needs questions about images, but {self.splits.name} is for another task")

    def create_model(self, model: str | nn.Module | None, checkpoint: str | Path | None, pretrained: bool) -> Any:
        """Load the pretrained ViLT that the recipe or the command names, with a new head."""
        if isinstance(model, nn.Module) or checkpoint is not None:
            raise ValueError("task vqa starts from a ViLT by name: use --model with a folder or a name on the Hub")
        torch.manual_seed(self.recipe.seed)  # of the new head
        self.name = model or self.recipe.model
        if self.name is None:
            raise ValueError("task vqa needs a ViLT: use --model with a folder or a name on the Hub")
        self.model: VqaModel = create_vqa(self.name, self.splits.classes, self.recipe.context_broadcast)
        return self.model.network

    def title(self) -> str:
        """The model's name, and context broadcasting where it is used."""
        kind = self.recipe.context_broadcast
        return f"{self.name} with {kind}" if kind else str(self.name)

    def config(self) -> dict[str, Any]:
        """The content of config.json, for `tokamix.vqa.load_vqa`."""
        return {
            "task": "vqa",
            "architecture": "ViltForQuestionAnswering",
            "vilt": self.model.network.config.to_dict(),
            "context_broadcast": self.recipe.context_broadcast,
            "num_classes": self.splits.num_classes,
            "label_names": list(self.splits.classes),
        }

    def create_loaders(self, options: LoaderOptions) -> tuple[Loader, Loader]:
        """Create the training and the validation loader."""
        parallel = (options.batch_size, options.rank, options.world_size)
        loaders = []
        for split, train in ((self.splits.train, True), (self.splits.val, False)):
            order = IndexOrder(len(split), *parallel, train, self.recipe.seed)
            reader = VqaReader(split, order, self.model._replace(network=_ConfigOnly(self.model.network.config)))
            loaders.append(VqaLoader(reader, options.device, (0.5,), (0.5,), options.workers, options.corrupt))
        return loaders[0], loaders[1]

    def prepare(self, model: nn.Module, accelerator: Accelerator | None) -> None:
        """Nothing to prepare."""

    def compile(self, model: nn.Module, graphs: bool) -> None:
        """Nothing is compiled: recipes of this task refuse `compile`."""

    def loss(self, model: nn.Module, images: Any, targets: Any, position: Position) -> tuple[Tensor, Logs]:
        """Binary cross-entropy of each answer, summed over the answers, as ViLT is fine-tuned."""
        logits = model(**images).logits
        loss = F.binary_cross_entropy_with_logits(logits.float(), targets["scores"]) * logits.shape[1]
        return loss, {"loss": loss}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, loader: Any, pad_to: int | None = None) -> dict[str, float]:
        """VQA's accuracy in percent over all processes.

        Images of different sizes are not padded to one batch: context broadcasting would average over the padding.
        """
        questions = self.splits.val.questions
        total = torch.zeros(2, dtype=torch.float64, device=loader.device)
        with evaluation_mode(model):
            for inputs, targets in loader.epoch(0):
                for part, chosen in _group_by_size(inputs):
                    labels = model(**part).logits.argmax(1).tolist()
                    for label, index in zip(labels, targets["index"][chosen].tolist(), strict=True):
                        accuracy = vqa_accuracy(self.splits.classes[label], questions[index].answers)
                        total += torch.tensor([accuracy, 1.0], dtype=torch.float64, device=total.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
        return {"vqa": 100 * (total[0] / total[1]).item()}

    def draw_predictions(self, model: nn.Module) -> None:
        """Nothing to draw."""

    def write_report(self, folder: Path, model: nn.Module) -> None:
        """Save the tokenizer, which `load_vqa` needs."""
        self.model.tokenizer.save_pretrained(folder / "tokenizer")


class _ConfigOnly:
    """A network's config alone: loader processes prepare inputs and need no weights."""

    def __init__(self, config: Any) -> None:
        self.config = config


class VqaReader(BatchReader):
    """Decodes images and tokenizes questions in a loader process.

    Args:
        dataset: the questions.
        order: which of them form each batch.
        model: prepares the inputs.
    """

    def __init__(self, dataset: VqaDataset, order: IndexOrder, model: VqaModel) -> None:
        super().__init__(dataset, order)
        self.model = model

    def decode(self, item: int) -> Any:
        """The image of a question, and the question's number."""
        return self.dataset.image(item), item

    def collate(self, samples: list[tuple[int, int, Any]]) -> tuple[Any, ...]:
        """Tensors of ViLT's inputs, the soft targets (B, answers), and the numbers of the questions."""
        if not samples:
            return tuple(torch.empty(0) for _ in range(len(INPUTS) + 2))
        images, numbers = zip(*(sample for *_, sample in samples), strict=True)
        inputs = self.model.inputs(images, [self.dataset.questions[i].text for i in numbers])
        scores = torch.zeros(len(numbers), len(self.dataset.classes))
        for row, number in enumerate(numbers):
            for label, score in self.dataset.scores(number).items():
                scores[row, label] = score
        return *(inputs[name] for name in INPUTS), scores, torch.tensor(numbers)


class VqaLoader(WorkerLoader):
    """Batches of ViLT's inputs as a dict, and targets `scores` (B, answers) and `index` (B,)."""

    def to_device(self, epoch: int, step: int, *parts: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Transfer the tensors of a batch."""
        moved = [part.to(self.device, non_blocking=True) for part in parts]
        inputs = dict(zip(INPUTS, moved, strict=False))
        return inputs, {"scores": moved[-2], "index": moved[-1]}


def _group_by_size(inputs: Mapping[str, Tensor]) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Parts of a batch whose images have the same size, without padding, and their places in the batch."""
    mask = inputs["pixel_mask"]
    sizes = torch.stack([mask[:, :, 0].sum(1), mask[:, 0].sum(1)], 1)  # height, width
    groups = []
    for height, width in sizes.unique(dim=0).tolist():
        chosen = ((sizes[:, 0] == height) & (sizes[:, 1] == width)).nonzero().flatten()
        part = {name: values[chosen] for name, values in inputs.items()}
        part["pixel_values"] = part["pixel_values"][..., :height, :width]
        part["pixel_mask"] = part["pixel_mask"][:, :height, :width]
        groups.append((part, chosen))
    return groups
