r"""Reads votes in answers: ``\boxed{1}``, ``\boxed{-1}`` or ``\boxed{0}``, and ``[HINT_START]...[HINT_END]``.

Reasoning before the answer does not count: a model weighs several scores in it. Of the rest, the last score
and the last hint count.
"""

import re

from slipstream.rollout.reward.model.votes import Vote
from slipstream.rollout.reward.reasoning import answer_in

BOX = "\\boxed"

_CONTENT = re.compile(r"\s*\{\s*([-+]?\d+(?:\.0*)?)\s*\}")
_HINT = re.compile(r"\[HINT_START\](.*?)\[HINT_END\]", re.DOTALL)

SCORES = (1.0, -1.0, 0.0)
DECISIONS = (1.0, -1.0)


def read_score(text: str) -> Vote | None:
    """Return the score of 1, -1 or 0 in an answer, with a hint if there is one; None: there is no score."""
    return _vote(text, SCORES)


def read_hint(text: str) -> Vote | None:
    """Return the decision in an answer, 1 for yes and -1 for no, with its hint; None: there is none."""
    return _vote(text, DECISIONS)


def _vote(text: str, scores: tuple[float, ...]) -> Vote | None:
    answer = answer_in(text)
    box = answer.rfind(BOX)
    content = _CONTENT.match(answer, box + len(BOX)) if box >= 0 else None
    if content is None or (score := float(content[1])) not in scores:
        return None
    hints = _HINT.findall(answer)
    hint = hints[-1].strip() if hints else ""
    return Vote(score, hint or None)
