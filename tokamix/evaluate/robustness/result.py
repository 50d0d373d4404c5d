"""Results of the robustness suite."""

from dataclasses import dataclass, field

from torch import Tensor

from tokamix.evaluate.robustness.calibration import Calibration
from tokamix.evaluate.robustness.conditions import CLEAN, Condition


@dataclass
class ModelRobustness:
    """Results of one model.

    Attributes:
        title: name of the model in tables and plots.
        scores: for each condition, whether each image was classified correctly.
        calibration: on unchanged images; None if it was not measured.
        notes: sentences about the match of the classes and skipped images.
    """

    title: str
    scores: dict[Condition, Tensor] = field(default_factory=dict)
    calibration: Calibration | None = None
    notes: list[str] = field(default_factory=list)

    def accuracy(self, condition: Condition = CLEAN) -> float:
        """Accuracy under a condition in percent."""
        return 100 * self.scores[condition].double().mean().item()


@dataclass
class RobustnessResult:
    """Results of all models on the same images.

    Attributes:
        models: in the given order.
        data: name of the data set.
        num_images: that were evaluated.
        total_images: of the split.
        split: "val" or "train".
    """

    models: list[ModelRobustness]
    data: str
    num_images: int
    total_images: int
    split: str
