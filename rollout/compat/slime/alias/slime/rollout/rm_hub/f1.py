"""F1 of words, as in question answering."""

import re
import string
from collections import Counter

_CLOSED = {"yes", "no", "noanswer"}
"""Answers that are right as a whole, or not at all."""


def normalize_answer(s: str) -> str:
    """Return the words of a text in lower case, without punctuation and articles."""
    bare = s.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(?:an?|the)\b", " ", bare).split())


def f1_score(prediction, ground_truth):
    """Return (F1, precision, recall) of the words of a prediction."""
    if prediction is None:
        return 0, 0, 0
    given, expected = normalize_answer(prediction), normalize_answer(ground_truth)
    if given != expected and {given, expected} & _CLOSED:
        return 0, 0, 0
    words, reference = given.split(), expected.split()
    shared = (Counter(words) & Counter(reference)).total()
    if not shared:
        return 0, 0, 0
    precision, recall = shared / len(words), shared / len(reference)
    return 2 * precision * recall / (precision + recall), precision, recall
