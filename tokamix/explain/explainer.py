"""`Explainer`: a trained model that answers questions about images with named arrays.

explainer = load_explainer("runs/streets")
explanation = explainer("photo.jpg")  # one forward pass
explanation.ask("mixing_row", layer=3, position=(0.4, 0.6)).values
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import split_model_name_tag
from torch import Tensor, nn

from tokamix._hints import suggest
from tokamix.explain.capture import Capture, CapturedLayer, capture
from tokamix.explain.questions import QUESTIONS, Answer, Target
from tokamix.inference import InferenceConfig, choose_device, load_model
from tokamix.models import create_model
from tokamix.predict.predictor import ImageLike, preprocess, read_image

POSITION = (0.5, 0.5)
MAX_ANSWERS = 64  # that an explanation keeps; a receptive field has as many values as the image has pixels
MIN_SIDE = 4  # tokens on the shorter side of a grid that is worth a picture


@dataclass
class Explanation:
    """One image, one forward pass of a model, and the answers to questions about both.

    Attributes:
        model: the network.
        name: of the model.
        image: (C, H, W), normalised as the model expects.
        rgb: the same pixels (H, W, 3) from 0 to 1, for pictures.
        capture: the captured layers.
        classes: class names of the model; () unless it is a classifier.
    """

    model: Any
    name: str
    image: Tensor
    rgb: Tensor
    capture: Capture
    classes: tuple[str, ...] = ()
    _answers: dict[Any, Answer] = field(default_factory=dict, repr=False)

    @property
    def probabilities(self) -> Tensor:
        """Probability of each class."""
        if not self.classes:
            raise ValueError(f"{self.name} is not a classifier")
        return self.capture.output[0].float().softmax(0).cpu()

    @property
    def target(self) -> int:
        """Index of the predicted class."""
        return int(self.probabilities.argmax())

    def questions(self, layer: int | str | None = None) -> list[str]:
        """Keys of the questions that this model, or one of its layers, can be asked."""
        layers = list(self.capture) if layer is None else [self.capture[layer]]
        found = [key for key, question in QUESTIONS.items() if any(map(question.applies, layers))]
        if not all(captured.layer.kind == "softmax" for captured in self.capture):
            found = [key for key in found if key != "rollout"]
        return found if self.classes else [key for key in found if key != "saliency"]

    def layer_for(self, question: str, layer: int | str | None = None) -> CapturedLayer:
        """The layer to ask: the given one, or the last with the question's kind of mixer and a large enough grid."""
        asked = _question(question)
        if layer is not None:
            chosen = self.capture[layer]
            if not asked.applies(chosen):
                able = [captured.layer.index for captured in self.capture if asked.applies(captured)]
                others = f"choose from layers {', '.join(map(str, able))}" if able else "no layer of the model does"
                kind = f"{chosen.layer.name} ({chosen.layer.kind})"
                raise ValueError(f"{kind} cannot answer {question!r}; {others}")
            return chosen
        able_layers = [captured for captured in self.capture if asked.applies(captured)]
        if not able_layers:
            raise ValueError(f"no layer of {self.name} can answer {question!r}: {asked.title}")
        return next((c for c in reversed(able_layers) if min(c.grid) >= MIN_SIDE), able_layers[-1])

    def ask(
        self,
        question: str,
        layer: int | str | None = None,
        position: tuple[float, float] = POSITION,
        head: int | None = None,
    ) -> Answer:
        """Answer a question with named arrays; the latest are kept, so that asking again costs nothing.

        Args:
            question: a key of `tokamix.explain.QUESTIONS`.
            layer: index or name; None: the last one that can answer and whose grid is worth a picture.
            position: of the token in the image, in fractions of height and width.
            head: index; None: the mean over heads.
        """
        asked, chosen = _question(question), self.layer_for(question, layer)
        token = chosen.token_at(*position)
        about = {"layer": chosen.layer.name, "token": token, "head": head}
        key = (question, *(about[part] for part in asked.uses))
        answer = self._answers.pop(key, None) or self._answer(question, Target(self, chosen, token, head), about)
        self._answers[key] = answer  # the latest is last
        if len(self._answers) > MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]
        return answer

    def _answer(self, question: str, target: Target, about: dict[str, Any]) -> Answer:
        asked = QUESTIONS[question]
        if question not in self.questions():
            raise ValueError(f"{self.name} cannot answer {question!r}: {asked.title}")
        values, panels, unit = asked.answer(target)
        known: dict[str, Any] = {part: about[part] for part in asked.uses}
        grid = target.layer.grid if "layer" in asked.uses else None
        array = values.detach().float().cpu().numpy()
        return Answer(question, array, panels, asked.style, unit, grid=grid, **known)


class Explainer:
    """A model with its preprocessing; called with an image, it returns an `Explanation`.

    Args:
        model: the network, used in evaluation mode.
        config: preprocessing and class names.
        name: for titles.
    """

    def __init__(self, model: Any, config: InferenceConfig, name: str = "") -> None:
        self.model, self.config, self.name = model, config, name or type(model).__name__

    def __call__(self, image: ImageLike) -> Explanation:
        """Run the model once on a file, a PIL image, a tensor (3, H, W) or an array (H, W, 3) of uint8."""
        pixels = self.preprocess(image)
        result = capture(self.model, pixels[None])
        classes = self.config.class_names if self.config.task == "classify" else ()
        return Explanation(self.model, self.name, pixels, to_rgb(pixels, self.config), result, classes)

    def preprocess(self, image: ImageLike) -> Tensor:
        """Read, resize and normalise an image as in evaluation -> (C, H, W)."""
        device = next(self.model.parameters()).device
        return preprocess(read_image(image, self.config), self.config, device)


def load_explainer(
    model: str | Path | nn.Module, checkpoint: str | Path | None = None, device: str | None = None
) -> Explainer:
    """Load a model to explain.

    Args:
        model: a run's folder, a timm name (with pretrained weights if there are any), `hf-hub:user/name`, or a module.
        checkpoint: weights file for the model of that name.
        device: "cpu" or "cuda"; default: a GPU if there is one.
    """
    where = choose_device(device)
    if isinstance(model, nn.Module):
        return Explainer(model.to(where), InferenceConfig.from_model(model))
    name = Path(model).name if Path(model).exists() else str(model)
    if checkpoint is not None:
        network, config = load_model(checkpoint, model=str(model))
    elif is_untrained(model):
        network = create_model(str(model)).eval()
        config = InferenceConfig.from_model(network)
    else:
        network, config = load_model(model)
    return Explainer(network.to(where), config, name)


def is_untrained(model: str | Path) -> bool:
    """Whether a source is the name of a model without pretrained weights."""
    name = str(model)
    if (
        Path(name).exists()
        or name.startswith(("hf-hub:", "local-dir:"))
        or not timm.is_model(split_model_name_tag(name)[0])
    ):
        return False
    cfg = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return cfg is None or not cfg.has_weights


def to_rgb(image: Tensor, config: InferenceConfig) -> Tensor:
    """A normalised image (C, H, W) as RGB (H, W, 3) in 0..1; with one or many channels, the first as grey."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (config.mean, config.std))
    pixels = (image.cpu() * std + mean).clamp(0, 1)
    return (pixels if len(pixels) == 3 else pixels[:1].expand(3, -1, -1)).permute(1, 2, 0)


def _question(key: str) -> Any:
    if key not in QUESTIONS:
        raise ValueError(f"there is no question {key!r}; {suggest(key, QUESTIONS)}")
    return QUESTIONS[key]
