"""The task: a sum of three numbers, of which a calculator adds two at a time.

    prompt    7-9+4
    policy    [calc(e="7-9")]
    tool      -2
    policy    [calc(e="-2+4")]
    tool      2
    policy    2

The policy only copies, and never adds. The warm start's demonstrations have a bad habit in the use of the
tool: where the prompt has a minus, they mostly tell the calculator to add. The greedy policy then does so
always, and its samples break the habit now and then. A reward of the last answer alone unlearns it.

The module uses the standard library only, and takes every random choice from the `random.Random` it is given.
"""

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

HABIT_RATE = 0.7
"""Probability of the habit. Above 1/2 it wins every greedy turn; below 1, samples can still be right."""

TURNS = 3
"""Completions of an episode that goes as demonstrated."""


@dataclass(frozen=True)
class Problem:
    """One prompt, and the only answer that is right."""

    prompt: str
    label: str


@dataclass(frozen=True)
class Exchange:
    """One turn of a demonstration."""

    answer: str
    result: str | None
    """What the tool returns; None: the turn has no call."""


def call(expression: str) -> str:
    """Return a call of the calculator as the policy writes it."""
    return f'[calc(e="{expression}")]'


def problem_of(prompt: str) -> Problem:
    """Return the problem that a prompt asks."""
    first, sign, second, last_sign, third = prompt
    return Problem(prompt, str(_value(_value(int(first), sign, second), last_sign, third)))


def demonstration(prompt: str, rng: random.Random, habit_rate: float = HABIT_RATE) -> list[Exchange]:
    """Return the turns of a conversation with the bad habit: a minus becomes a plus with this probability."""
    result, exchanges = int(prompt[0]), list[Exchange]()
    for sign, digit in ((prompt[1], prompt[2]), (prompt[3], prompt[4])):
        used = "+" if sign == "-" and rng.random() < habit_rate else sign
        answer = call(f"{result}{used}{digit}")
        result = _value(result, used, digit)
        exchanges.append(Exchange(answer, str(result)))
    return [*exchanges, Exchange(str(result), None)]


def is_held_out(prompt: str) -> bool:
    """Return whether a prompt belongs to the held-out half of all prompts, whatever the seed."""
    return zlib.crc32(prompt.encode()) % 2 == 1


def train_prompts(rng: random.Random) -> Iterator[str]:
    """Yield prompts that are not held out, without end."""
    while True:
        prompt = _prompt(rng)
        if not is_held_out(prompt):
            yield prompt


def held_out_set(seed: int, count: int) -> list[Problem]:
    """Return `count` distinct held-out problems."""
    rng = random.Random(f"held-out-{seed}")
    chosen: dict[str, Problem] = {}
    while len(chosen) < count:
        prompt = _prompt(rng)
        if is_held_out(prompt):
            chosen[prompt] = problem_of(prompt)
    return list(chosen.values())


def _prompt(rng: random.Random) -> str:
    first, second, third = (rng.randrange(1, 10) for _ in range(3))
    return f"{first}{rng.choice('+-')}{second}{rng.choice('+-')}{third}"


def _value(result: int, sign: str, digit: str) -> int:
    return result + int(digit) if sign == "+" else result - int(digit)
