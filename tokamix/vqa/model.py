"""Hugging Face's ViLT for question answering: from pretrained weights, and from the folder of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from safetensors.torch import load_file

from tokamix._construction import mark_config
from tokamix.data.decode import decode_image, first_line
from tokamix.inference import read_config
from tokamix.swap import insert_context_broadcast


class VqaModel(NamedTuple):
    """A ViLT with what prepares its inputs.

    Attributes:
        network: `transformers.ViltForQuestionAnswering`.
        tokenizer: of the questions.
        image_processor: resizes and normalises images.
        answers: in the order of the outputs.
    """

    network: Any
    tokenizer: Any
    image_processor: Any
    answers: tuple[str, ...]

    def inputs(self, images: Sequence[Image.Image], questions: Sequence[str]) -> dict[str, torch.Tensor]:
        """Tensors of a batch; questions are padded to one length, so that they do not depend on the batch."""
        length = self.network.config.max_position_embeddings
        text = self.tokenizer(
            list(questions), padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        )
        return {**self.image_processor(list(images), return_tensors="pt"), **text}

    @torch.no_grad()
    def answer(self, image: str | Path | Image.Image, question: str, top: int = 5) -> list[tuple[str, float]]:
        """The best answers to a question about an image, with scores from 0 to 1."""
        picture = image if isinstance(image, Image.Image) else decode_image(Path(image))
        device = self.network.device
        inputs = {key: value.to(device) for key, value in self.inputs([picture], [question]).items()}
        scores, labels = self.network(**inputs).logits[0].sigmoid().topk(min(top, len(self.answers)))
        return [(self.answers[i], score) for i, score in zip(labels.tolist(), scores.tolist(), strict=True)]


def create_vqa(name: str | Path, answers: Sequence[str], context_broadcast: str | None = None) -> VqaModel:
    """Load a pretrained ViLT with a new head for these answers.

    Args:
        name: a model on the Hub, such as dandelin/vilt-b32-mlm, or a folder of `save_pretrained` with a tokenizer.
        answers: the classes of the head.
        context_broadcast: kind of `insert_context_broadcast`, inserted after loading; None: unchanged.
    """
    transformers = import_transformers()
    labels = dict(enumerate(answers))
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it warns of the new head, which is meant
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        network = transformers.ViltForQuestionAnswering.from_pretrained(
            name, id2label=labels, label2id={text: i for i, text in labels.items()}, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{name} cannot be loaded as a ViLT: {first_line(error)}; give a folder of save_pretrained, or a name on"
            " the Hub such as dandelin/vilt-b32-mlm"
        ) from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    if context_broadcast is not None:
        insert_context_broadcast(network, context_broadcast)
    return VqaModel(network, tokenizer, _create_image_processor(network.config), tuple(answers))


def load_vqa(folder: str | Path) -> VqaModel:
    """Load the model of a run of task vqa, in evaluation mode."""
    values = read_config(folder)
    if values.get("task") != "vqa":
        raise ValueError(f"{folder} is not a run of task vqa; tokamix.inference.load_model loads other runs")
    transformers = import_transformers()
    config = transformers.ViltConfig.from_dict(values["vilt"])
    mark_config(config, [])  # the change is made below; a marked configuration creates no network
    network = transformers.ViltForQuestionAnswering(config)
    if values["context_broadcast"] is not None:
        insert_context_broadcast(network, values["context_broadcast"])
    network.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(Path(folder) / "tokenizer")
    return VqaModel(network.eval(), tokenizer, _create_image_processor(network.config), tuple(values["label_names"]))


def import_transformers() -> Any:
    """Import transformers, or say how to install it."""
    try:
        import transformers
    except ImportError:
        raise ImportError("task vqa needs Hugging Face's transformers: pip install 'tokamix[hf]'") from None
    return transformers


def _create_image_processor(config: Any) -> Any:
    """ViLT's preprocessing: the short side becomes `image_size`, both sides multiples of the patches."""
    size = {"shortest_edge": config.image_size}
    return import_transformers().ViltImageProcessor(size=size, size_divisor=config.patch_size)
