"""The quickstart's task: a running sum, written out one operand at a time.

    prompt    a3b5c8d9              tag, digit, tag, digit, ...
    response  a33b58c86d95#5        per operand: tag, operand copied, sum modulo 10; then '#' and the last sum

A policy of two layers learns this task in seconds, because the copied operand splits each step into an
attention look-up and an addition of two digits. Response lengths have a long tail (9 to 63 tokens), as in
real rollouts. And the task leaves room for RL by construction: the warm start uses *noisy* demonstrations, in
which the sum after an 8 or a 9 is mostly one too high. The greedy policy then has a bad habit that its
samples break now and then, and a reward on the final answer alone is enough to unlearn it.

The module uses the standard library only, and takes every random choice from the `random.Random` it is given.
"""

import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

TAGS = "abcdefghijklmnopqrstuvwxyz"

MIN_OPERANDS = 2
MAX_OPERANDS = 20
"""Gives a response of 63 tokens with its end: long enough for a tail, short enough for two cores."""
MEAN_EXTRA_OPERANDS = 4.5
"""Mean of the exponentially distributed operands beyond the minimum: most prompts are short, few are long."""

HABIT_OPERANDS = frozenset({8, 9})
HABIT_RATE = 0.7
"""Probability of the habit. Above 1/2 it wins every greedy step; below 1, samples can still be right."""


@dataclass(frozen=True)
class Problem:
    """One prompt and the only text that is right after '#' in its response."""

    prompt: str
    label: str


def problem_of(operands: Sequence[int]) -> Problem:
    """Return the problem that asks for the sum of `operands` (digits, at most 26) modulo 10."""
    prompt = "".join(f"{tag}{operand}" for tag, operand in zip(TAGS, operands, strict=False))
    return Problem(prompt, str(sum(operands) % 10))


def operands_of(prompt: str) -> list[int]:
    """Return the digits of a prompt, in order."""
    return [int(digit) for digit in prompt[1::2]]


def noisy_demonstration(prompt: str, rng: random.Random, habit_rate: float = HABIT_RATE) -> str:
    """Return a response with the bad habit, without the end-of-sequence token.

    An 8 or a 9 adds one too many to the sum with probability `habit_rate`.
    """
    steps, total = [], 0
    for tag, operand in zip(TAGS, operands_of(prompt), strict=False):
        slips = operand in HABIT_OPERANDS and rng.random() < habit_rate
        total = (total + operand + slips) % 10
        steps.append(f"{tag}{operand}{total}")
    return f"{''.join(steps)}#{total}"


def is_correct(response: str, label: str) -> bool:
    """True if a finished response, without its end token, ends in `label`. Its steps do not count."""
    _, mark, answer = response.partition("#")
    return mark == "#" and answer == label


def sample_problem(
    rng: random.Random, *, mean_extra: float = MEAN_EXTRA_OPERANDS, max_operands: int = MAX_OPERANDS
) -> Problem:
    """Draw a problem, train or held-out. The warm start's curriculum moves both settings of the length."""
    count = MIN_OPERANDS + int(rng.expovariate(1.0 / mean_extra))
    return problem_of([rng.randrange(10) for _ in range(min(count, max_operands))])


def is_held_out(prompt: str) -> bool:
    """True if a prompt belongs to the held-out half of all prompts.

    This depends on the string alone, so sets stay disjoint whatever seeds and runs they were drawn with. A
    share smaller than one half would leave too few distinct prompts of two operands.
    """
    return zlib.crc32(prompt.encode()) % 2 == 1


def train_problems(
    rng: random.Random, *, mean_extra: float = MEAN_EXTRA_OPERANDS, max_operands: int = MAX_OPERANDS
) -> Iterator[Problem]:
    """Yield problems that are not held out, without end. Short problems repeat."""
    while True:
        problem = sample_problem(rng, mean_extra=mean_extra, max_operands=max_operands)
        if not is_held_out(problem.prompt):
            yield problem


def train_set(seed: int, count: int) -> list[Problem]:
    """Return the problems that RL trains on."""
    return list(islice(train_problems(random.Random(f"train-{seed}")), count))


def held_out_set(seed: int, count: int) -> list[Problem]:
    """Return `count` distinct held-out problems, disjoint from every train set and from the warm start."""
    rng = random.Random(f"held-out-{seed}")
    chosen: dict[str, Problem] = {}
    while len(chosen) < count:
        problem = sample_problem(rng)
        if is_held_out(problem.prompt):
            chosen[problem.prompt] = problem
    return list(chosen.values())
