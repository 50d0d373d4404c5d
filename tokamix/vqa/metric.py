"""VQA's accuracy, by the rule of the official script.

The script is GT-Vision-Lab/VQA:PythonEvaluationTools/vqaEvaluation/vqaEval.py; the code is our own. An answer
that three of the other annotators gave is fully correct.
"""

import re
from collections.abc import Sequence

PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DIGITS = {word: str(number) for number, word in enumerate(NUMBERS)} | {"none": "0"}
ARTICLES = ("a", "an", "the")
# words of which the script restores one missing apostrophe
CONTRACTIONS = (  # noqa: SIM905
    "ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd "
    "he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've "
    "needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've "
    "somebody'll somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll "
    "that's there'd there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've "
    "weren't what'll what're what's what've when's where'd where's where've who'd who'd've who'll who's who've "
    "why'll why're why's won't would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're "
    "you've"
).split()
RESTORED = {
    word[:place] + word[place + 1 :]: word
    for word in CONTRACTIONS
    for place, letter in enumerate(word)
    if letter == "'"
} | {"somebody'd": "somebodyd"}  # as in the script


def vqa_accuracy(prediction: str, answers: Sequence[str]) -> float:
    """Accuracy of an answer, from 0 to 1: the mean over all annotators of min(1, agreeing others / 3).

    Args:
        prediction: the model's answer.
        answers: of the annotators, ten in VQAv2.
    """
    predicted = normalize_answer(prediction)
    given = [strip_punctuation(answer) for answer in answers] if len(set(answers)) > 1 else list(answers)
    same = [answer == predicted for answer in given]
    return sum(min(1.0, (sum(same) - own) / 3) for own in same) / len(same)


def normalize_answer(text: str) -> str:
    """Answer without punctuation and articles, in lower case, with digits for number words."""
    text = strip_punctuation(text.replace("\n", " ").replace("\t", " ").strip())
    words = [DIGITS.get(word, word) for word in text.lower().split()]
    return " ".join(RESTORED.get(word, word) for word in words if word not in ARTICLES)


def strip_punctuation(text: str) -> str:
    """Remove punctuation next to a space, replace other punctuation by a space, and remove periods but in numbers.

    All of it is removed where the text has a number such as 1,000.
    """
    number = re.search(r"\d,\d", text)
    out = text
    for mark in PUNCTUATION:
        out = out.replace(mark, "" if number or f"{mark} " in text or f" {mark}" in text else " ")
    return re.sub(r"\.(?!\d)", "", out)
