"""Which part of a text is reasoning, and whether a reward reads it. Pure."""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, cast

MARKERS = (
    ("<think>", "</think>"),
    ("<mm:think>", "</mm:think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)
"""Begin and end of reasoning, as the chat templates of models have them. An answer follows the end."""

Reading = Literal["auto", "cut", "keep"]
Markers = Sequence[tuple[str, str]]

_READ_ALL = ("Regex", "ComputeScore", "Remote")
"""Rewards of ours whose arguments say what they look for, or whose code is the user's."""

_OURS = "slipstream.rollout.reward."


def answer_in(text: str, markers: Markers = MARKERS, *, is_begun: bool = False) -> str:
    """Return what follows the reasoning. Reasoning without an end is no answer.

    ``is_begun``: the prompt ends with the begin of the reasoning.
    """
    end = max((text.rfind(end) + len(end) for _, end in markers if end in text), default=-1)
    if end >= 0:
        return text[end:]
    return "" if is_begun or any(begin in text for begin, _ in markers) else text


def markers_of(template: str, vocabulary: Collection[str]) -> Markers:
    """Return the markers that a model has: its chat template, or its vocabulary, contains the end."""
    return [pair for pair in MARKERS if pair[1] in template or pair[1] in vocabulary]


def reads_reasoning(reading: Reading, path: str, args: Mapping[str, object]) -> bool:
    """True if the reward at ``path`` gets the reasoning too.

    With ``auto`` it does unless it comes with Slipstream and reads an answer, and so do all of its parts. One
    whose arguments name a mark of reasoning gets it.
    """
    if reading != "auto":
        return reading == "keep"
    name = path.rpartition(".")[2]
    is_named = any(mark in repr(args) for pair in MARKERS for mark in pair)
    if not path.startswith(_OURS) or name in _READ_ALL or is_named:
        return True
    parts = args.get("parts") if name == "Weighted" else None
    if not isinstance(parts, Mapping):
        return False
    each = [cast("Mapping[str, object]", part) for part in cast("Mapping[str, object]", parts).values()]
    return any(reads_reasoning("auto", str(part.get("path")), {}) for part in each)
