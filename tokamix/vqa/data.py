"""Questions about images in VQAv2's format: questions and annotations as JSON, and images by their numbers."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from tokamix.data import DataError, DatasetSplits, decode_image
from tokamix.data.decode import image_files
from tokamix.vqa.metric import normalize_answer, vqa_accuracy

MIN_COUNT = 9  # questions with this answer; gives the 3,129 answers that models of VQAv2 choose from


class Question(NamedTuple):
    """A question about an image with the answers of the annotators."""

    text: str
    image: Path
    answers: tuple[str, ...]


class VqaDataset:
    """Questions of one split.

    Args:
        questions: of the split.
        classes: the answers that a model chooses from.
    """

    def __init__(self, questions: Sequence[Question], classes: Sequence[str]) -> None:
        self.questions, self.classes = questions, tuple(classes)
        self.index = {answer: i for i, answer in enumerate(classes)}

    def __len__(self) -> int:
        return len(self.questions)

    def image(self, i: int) -> Image.Image:
        """Decode the image of question i."""
        return decode_image(self.questions[i].image)

    def name_of(self, i: int) -> str:
        """File of the image of question i."""
        return str(self.questions[i].image)

    def scores(self, i: int) -> dict[int, float]:
        """Class -> accuracy of that answer to question i, the target of training; other answers have 0."""
        answers = self.questions[i].answers
        names = {normalize_answer(answer) for answer in answers}
        scores = {self.index[name]: vqa_accuracy(name, answers) for name in names if name in self.index}
        return {label: score for label, score in scores.items() if score > 0}


def open_vqa(folder: str | Path, min_count: int = MIN_COUNT) -> DatasetSplits:
    """Open a folder with the files of VQAv2, or others in its format.

    It has `*train*questions*.json`, `*train*annotations*.json`, the same for `val`, and images below it whose names end
    in their number, such as COCO_train2014_000000000009.jpg.

    Args:
        folder: see above.
        min_count: an answer becomes a class if it is the most frequent one of at least this many questions.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise DataError(f"the folder {root} does not exist; give one with VQAv2's questions, annotations and images")
    images = _find_images(root)
    frequent: Counter[str] = Counter()
    parts = []
    for split in ("train", "val"):
        questions = {entry["question_id"]: entry for entry in _read(root, split, "questions")}
        annotations = _read(root, split, "annotations")
        frequent.update(normalize_answer(entry["multiple_choice_answer"]) for entry in annotations)
        parts.append([_create_question(entry, questions, images, root) for entry in annotations])
        if not parts[-1]:
            raise DataError(f"the {split} annotations of {root} are empty")
    classes = sorted(answer for answer, count in frequent.items() if count >= min_count)
    if not classes:
        raise DataError(
            f"no answer in {root} occurs {min_count} times (min_answer_count); for small data use"
            " --set min_answer_count=1"
        )
    train, val = (VqaDataset(part, classes) for part in parts)
    return DatasetSplits(str(root), train, val, tuple(classes), task="vqa")


def _read(root: Path, split: str, kind: str) -> list[dict[str, Any]]:
    """The entries of questions or annotations of a split."""
    found = [path for path in sorted(root.glob(f"*{kind}*.json")) if split in path.name]
    if len(found) != 1:
        problem = "no file" if not found else f"{len(found)} files such as {found[0].name} and {found[1].name} for"
        raise DataError(f"{root} has {problem} *{split}*{kind}*.json; it needs exactly one")
    try:
        entries = json.loads(found[0].read_text())[kind]
        needed = ("question_id", "question", "image_id")
        needed = needed if kind == "questions" else ("question_id", "answers", "multiple_choice_answer")
        if missing := next((key for entry in entries for key in needed if key not in entry), None):
            raise DataError(f"{found[0]}: an entry of {kind!r} has no {missing!r}")
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise DataError(f"{found[0]} is not a file of VQAv2's {kind}: {type(error).__name__} {error}") from None
    return entries


def _create_question(
    entry: dict[str, Any], questions: dict[int, dict[str, Any]], images: dict[int, Path], root: Path
) -> Question:
    question = questions.get(entry["question_id"])
    if question is None:
        raise DataError(f"the annotations of {root} have question {entry['question_id']}, but the questions do not")
    if question["image_id"] not in images:
        raise DataError(
            f"{root} has no image with number {question['image_id']}, which question {entry['question_id']} is about"
        )
    answers = tuple(answer["answer"] for answer in entry["answers"])
    if not answers:
        raise DataError(f"question {entry['question_id']} of {root} has no answers")
    return Question(question["question"], images[question["image_id"]], answers)


def _find_images(root: Path) -> dict[int, Path]:
    """Number at the end of a file's name -> the file."""
    images: dict[int, Path] = {}
    for path in image_files(root):
        if number := re.search(r"(\d+)$", path.stem):
            other = images.setdefault(int(number[1]), path)
            if other != path:
                raise DataError(f"{other} and {path} have the same number; images are found by their numbers")
    return images
