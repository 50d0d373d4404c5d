"""Visual question answering: data in VQAv2's format, its accuracy, and Hugging Face's ViLT as the model."""

from tokamix.vqa.data import Question, VqaDataset, open_vqa
from tokamix.vqa.metric import normalize_answer, vqa_accuracy
from tokamix.vqa.model import VqaModel, create_vqa, load_vqa

__all__ = [
    "Question",
    "VqaDataset",
    "VqaModel",
    "create_vqa",
    "load_vqa",
    "normalize_answer",
    "open_vqa",
    "vqa_accuracy",
]
