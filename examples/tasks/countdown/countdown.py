"""Countdown: signs between three numbers that give the target. A calculator says whether a try is right.

    prompt  14 5 2 = 11
    policy  [calc(e="14+5+2 = 11")]
    tool    no
    policy  [calc(e="14+5-2 = 11")]
    tool    no
    policy  [calc(e="14-5+2 = 11")]
    tool    yes
    policy  14-5+2

The demonstrations try the signs in one order, and often give up after a wrong result.
"""

import random
import re
from functools import partial

from slipstream import Prompt, Trajectory
from slipstream.backend import quickstart
from slipstream.backend.quickstart.task import Message, Problem, Task
from slipstream.rollout.workflow.environment import ToolError

SIGNS = ["++", "+-", "-+", "--"]
"""In the order in which they are tried."""
GIVES_UP = 0.5
"""Probability that a demonstration ends with a wrong result."""

TERM = re.compile(r"(\d+)([+-])(\d+)([+-])(\d+)")


def value_of(expression: str) -> int | None:
    """Return the value of three numbers with signs between them; None: it is something else."""
    parts = TERM.fullmatch(expression)
    if parts is None:
        return None
    first, sign, second, last_sign, third = parts.groups()
    return int(first) + int(sign + second) + int(last_sign + third)


async def calc(e: str) -> str:
    """Say whether three numbers with signs between them have a value, such as ``14-5+2 = 11``."""
    expression, _, target = e.partition(" = ")
    value = value_of(expression)
    if value is None:
        raise ToolError("no term")
    return "yes" if str(value) == target else "no"


def tries(numbers: str) -> list[str]:
    first, second, third = numbers.split()
    return [f"{first}{sign}{second}{last_sign}{third}" for sign, last_sign in SIGNS]


def draw(rng: random.Random, progress: float) -> Problem:
    first, (second, third) = rng.randint(10, 20), rng.sample(range(1, 6), 2)
    numbers = f"{first} {second} {third}"
    answer = rng.choice(tries(numbers))
    return Problem(f"{numbers} = {value_of(answer)}", answer)


def demonstrate(problem: Problem, rng: random.Random) -> list[Message]:
    messages = [{"role": "system", "content": "calc"}, {"role": "user", "content": problem.prompt}]
    (numbers, _, target), expression = problem.prompt.partition(" = "), ""
    for expression in tries(numbers):
        messages += [
            {"role": "assistant", "content": f'[calc(e="{expression} = {target}")]'},
            {"role": "tool", "content": "yes" if expression == problem.label else "no"},
        ]
        if expression == problem.label or rng.random() < GIVES_UP:
            break
    return [*messages, {"role": "assistant", "content": expression}]


def score(prompt: Prompt, response: str, trajectory: Trajectory) -> float:
    """Return 1 for the numbers of the prompt with signs that give the target, else 0."""
    numbers, _, target = str(prompt.messages()[-1]["content"]).partition(" = ")
    return float(value_of(response) == int(target) and re.split(r"[+-]", response) == numbers.split())


NUMBERS = list(map(str, range(31)))
prepare = partial(
    quickstart.prepare,
    task=Task(draw, demonstrate, [*NUMBERS, "+", "-", " ", " = ", '[calc(e="', '")]', "calc", "yes", "no"]),
    held_out=120,
    warm_start_steps=200,
)
