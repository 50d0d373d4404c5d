"""Classification with a teacher: DeiT's distillation, arXiv 2012.12877, section 4, and Hinton's, arXiv 1503.02531."""

import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.recipes import Recipe
from tokamix.train.setup.teacher import Teacher
from tokamix.train.tasks import Logs, Moment
from tokamix.train.tasks.classify import Classify


class Distill(Classify):
    """Learn from labels and from a teacher's answers to the same, mixed images.

    A student with a distillation token answers labels and teacher with one token each, one without answers both with
    the same logits. The soft loss is the mean divergence of an image times tau squared, as the paper's equation 2 has
    it; DeiT's code divides it by the number of classes besides.
    """

    def __init__(self, recipe: Recipe, num_classes: int, teacher: Teacher) -> None:
        super().__init__(recipe, num_classes)
        self.teacher = teacher

    def prepare(self, model: nn.Module) -> None:
        """Ask a student with a distillation token for both of its answers."""
        if hasattr(model, "set_distilled_training"):
            model.set_distilled_training(True)  # type: ignore[operator]

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor, moment: Moment) -> tuple[Tensor, Logs]:
        """The loss of a batch, and what to report of it."""
        images, target = self.mixed(images, labels, moment)
        answers = model(images)
        to_labels, to_teacher = answers if isinstance(answers, (tuple, list)) else (answers, answers)
        label_loss = self.cross_entropy(to_labels, target)
        teacher_loss = self.distance(to_teacher.float(), self.teacher(images))
        alpha = self.recipe.distill_alpha
        loss = (1 - alpha) * label_loss + alpha * teacher_loss
        return loss, {"loss": loss, "teacher_loss": teacher_loss, **self.report(to_labels, target)}

    def distance(self, logits: Tensor, teacher: Tensor) -> Tensor:
        """Hard: cross-entropy with the teacher's choice. Soft: divergence from its distribution at temperature tau."""
        if self.recipe.distillation == "hard":
            return F.cross_entropy(logits, teacher.argmax(1))
        tau = self.recipe.distill_tau
        student, taught = F.log_softmax(logits / tau, 1), F.log_softmax(teacher / tau, 1)
        return F.kl_div(student, taught, reduction="batchmean", log_target=True) * tau**2
