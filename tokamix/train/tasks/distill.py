"""Classification with a teacher: DeiT's distillation, arXiv 2012.12877, section 4, and Hinton's, arXiv 1503.02531."""

import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.data import DatasetSplits
from tokamix.recipes import Recipe
from tokamix.train.setup.accelerator import Accelerator
from tokamix.train.setup.teacher import Teacher, load_teacher
from tokamix.train.tasks.classify import Classify
from tokamix.train.tasks.task import Logs, Position


class Distill(Classify):
    """Train on labels and on a teacher's predictions for the same, mixed images.

    A student with a distillation token has one output for the labels and one for the teacher; others use the same
    logits for both. The soft loss is the mean divergence per image times tau squared, as in the paper's equation 2;
    DeiT's code additionally divides it by the number of classes.
    """

    def __init__(self, recipe: Recipe, data: str | DatasetSplits, teacher: Teacher | None = None) -> None:
        super().__init__(recipe, data)
        self.teacher = teacher

    def prepare(self, model: nn.Module, accelerator: Accelerator | None) -> None:
        """Load the teacher, and make a student with a distillation token return both outputs."""
        if hasattr(model, "set_distilled_training"):
            model.set_distilled_training(True)  # type: ignore[operator]
        if accelerator is not None:
            self.teacher = self.load_teacher(accelerator)

    def load_teacher(self, accelerator: Accelerator) -> Teacher:
        """Load the teacher of the recipe."""
        return load_teacher(
            str(self.recipe.teacher),
            self.splits.num_classes,
            (self.inference.mean, self.inference.std),
            accelerator.device,
            accelerator.autocast,
            self.recipe.compile,
            self.recipe.teacher_size,
            self.splits.classes,
        )

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor, position: Position) -> tuple[Tensor, Logs]:
        """Compute the loss of a batch, and the scalars to log."""
        assert self.teacher is not None
        images, target = self.mix(images, labels, position)
        outputs = model(images)
        label_logits, teacher_logits = outputs if isinstance(outputs, (tuple, list)) else (outputs, outputs)
        label_loss = self.cross_entropy(label_logits, target)
        teacher_loss = self.teacher_loss(teacher_logits.float(), self.teacher(images))
        alpha = self.recipe.distill_alpha
        loss = (1 - alpha) * label_loss + alpha * teacher_loss
        return loss, {"loss": loss, "teacher_loss": teacher_loss, **self.accuracy(label_logits, target)}

    def teacher_loss(self, logits: Tensor, teacher: Tensor) -> Tensor:
        """Hard: cross-entropy with the teacher's predicted class. Soft: divergence from its softened distribution."""
        if self.recipe.distillation == "hard":
            return F.cross_entropy(logits, teacher.argmax(1))
        tau = self.recipe.distill_tau
        student, target = F.log_softmax(logits / tau, 1), F.log_softmax(teacher / tau, 1)
        return F.kl_div(student, target, reduction="batchmean", log_target=True) * tau**2
