"""Sorting in the order of the keys of a keyboard: a vocabulary, problems and demonstrations make the policy.

    prompt    tqp
    response  qtp

The demonstrations leave out a symbol now and then, and so does the policy that has learned from them.
"""

import random
from functools import partial

from slipstream.backend import quickstart
from slipstream.backend.quickstart.task import Message, Problem, Task, conversation

ALPHABET = "qwertyuiop"
"""The vocabulary, in its order."""
SHORTEST, LONGEST = 3, 7
LEFT_OUT = 0.2
"""Share of the symbols that a demonstration leaves out."""


def draw(rng: random.Random, progress: float) -> Problem:
    """Draw symbols to sort: few at the beginning of the warm start, and up to seven from its middle on."""
    longest = SHORTEST + round((LONGEST - SHORTEST) * min(1.0, 2 * progress))
    symbols = rng.sample(ALPHABET, rng.randint(SHORTEST, longest))
    return Problem("".join(symbols), "".join(sorted(symbols, key=ALPHABET.index)))


def demonstrate(problem: Problem, rng: random.Random) -> list[Message]:
    return conversation(problem.prompt, "".join(each for each in problem.label if rng.random() >= LEFT_OUT))


prepare = partial(quickstart.prepare, task=Task(draw, demonstrate, ALPHABET), held_out=200)
