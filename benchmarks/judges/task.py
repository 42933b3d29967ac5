"""The start policy, which has a bad habit after plain prompts and none after a hint; and what users say.

    plain       a3b9c8                             mostly wrong after an 8 or a 9
    with hint   a3b9c8\\n\\n[hint]\\ncarry right      right

The demonstrations of the warm start have both, so that the policy knows what the hint means. The policy after
the warm start is the teacher: given the hint, it scores answers that were sampled without the hint.
"""

import random
from collections.abc import Awaitable, Callable

from benchmarks.quickstart_users import WRONG
from slipstream.backend.quickstart.task import (
    Message,
    Problem,
    Task,
    conversation,
    demonstrate_habit,
    draw_sum,
    noisy_demonstration,
)
from slipstream.rollout.reward.model.hints import HEAD

HINT = "carry right"

HINTED_SHARE = 0.5
"""Share of the demonstrations with the hint."""


EXPLAINED_SHARE = 0.5
"""Share of the wrong answers of which a user says what to do. Others get the word `wrong` alone."""


def hinted(prompt: str) -> str:
    """Return the prompt with the hint, as a teacher reads it."""
    return f"{prompt}{HEAD}{HINT}"


def demonstrate(problem: Problem, rng: random.Random) -> list[Message]:
    """Return a conversation: the prompt of a problem, with or without the hint, and a response."""
    if rng.random() < HINTED_SHARE:
        return conversation(hinted(problem.prompt), noisy_demonstration(problem.prompt, rng, habit_rate=0))
    return demonstrate_habit(problem, rng)


START = Task(draw_sum, demonstrate)
"""What the start policy is made for."""


def explaining(rng: random.Random) -> Callable[[str], Awaitable[str]]:
    """Return what users say in place of the word that is true of an answer: some explain `wrong`."""

    async def said(word: str) -> str:
        return f"{WRONG}: {HINT}" if word == WRONG and rng.random() < EXPLAINED_SHARE else word

    return said
