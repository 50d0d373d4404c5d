"""VQA's accuracy against the official rule: worked out by hand, and by the script.

official.json has accuracies of 80 random sets of answers, by the rules of the script at GT-Vision-Lab/VQA c4e6a0e.
"""

import json
from pathlib import Path

import pytest

from tokamix.vqa import normalize_answer, vqa_accuracy


@pytest.mark.parametrize(("count", "accuracy"), [(0, 0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1), (10, 1)])
def test_agreement_of_ten_annotators(count: int, accuracy: float) -> None:
    """With 2 of 10: the two see one other, the eight see two: (2 * 1/3 + 8 * 2/3) / 10."""
    answers = ["red"] * count + [f"other {i}" for i in range(10 - count)]
    assert vqa_accuracy("red", answers) == pytest.approx(accuracy)


def test_accuracies_of_the_official_script() -> None:
    cases = json.loads((Path(__file__).parent / "official.json").read_text())
    assert len(cases) == 80
    for case in cases:
        assert vqa_accuracy(case["prediction"], case["answers"]) == pytest.approx(case["accuracy"]), case


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("A Dog.", "dog"),
        ("two", "2"),
        ("none", "0"),
        ("ten o'clock", "10 o'clock"),
        ("dont know", "don't know"),
        ("couldnt've", "couldn't've"),
        ("couldntve", "couldntve"),
        ("1,000", "1000"),
        ("red/white", "red white"),
        ("yes , please", "yes please"),
        ("3.5", "3.5"),
        ("u.s.", "us"),
        ("the\ncat\t", "cat"),
        ("black-and-white", "black and white"),
        ("shes", "shes"),
    ],
)
def test_normalized_answers(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


def test_ground_truth_is_cleaned_only_where_annotators_differ() -> None:
    """As in the script: ten equal answers stay as they are, so that punctuation in them never matches."""
    assert vqa_accuracy("yes", ["yes."] * 10) == 0
    assert vqa_accuracy("yes", ["yes."] * 5 + ["no"] * 5) == 1
    assert vqa_accuracy("yes", ["yes!"] * 5 + ["no"] * 5) == 0, "the mark becomes a space, which stays"
    assert vqa_accuracy("Two.", ["2"] * 10) == 1
    assert vqa_accuracy("2", ["two"] * 5 + ["no"] * 5) == 0, "number words of the ground truth stay"
