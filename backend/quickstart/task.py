"""The quickstart's task: a running sum, written out one operand at a time.

    prompt    a3b5c8d9              tag, digit, tag, digit, ...
    response  a33b58c86d95#5        per operand: tag, operand copied, sum modulo 10; then '#' and the last sum

Why this task. A policy of two layers learns it in seconds, because the copied operand splits each step into
an attention look-up and one addition of two digits. Its answers are long-tailed (9 to 63 tokens), as real
rollouts are. And it leaves room for RL by construction: the warm start sees *noisy* demonstrations, in which
the sum after an 8 or a 9 is mostly one too high, so the greedy policy has a bad habit that its samples break
now and then. A reward on the final answer alone is enough to unlearn it.

Pure: the standard library only, and every random choice comes from the `random.Random` that is passed in.
"""

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

TAGS = "abcdefghijklmnopqrstuvwxyz"

MIN_OPERANDS = 2
MAX_OPERANDS = 20
"""A response of 63 tokens with its end: long enough for a tail, short enough for two cores."""
MEAN_EXTRA_OPERANDS = 4.5
"""Operands beyond the minimum, exponentially distributed: most prompts are short, a few are very long."""

HABIT_OPERANDS = frozenset({8, 9})
HABIT_RATE = 0.7
"""Above one half, the habit wins every greedy step; below one, samples still find the right sum."""


@dataclass(frozen=True)
class Problem:
    """One prompt and the only text that is right after '#' in its response."""

    prompt: str
    label: str


def problem_of(operands: Sequence[int]) -> Problem:
    """The problem that asks for the sum of `operands` (digits, at most 26) modulo 10."""
    prompt = "".join(f"{tag}{operand}" for tag, operand in zip(TAGS, operands, strict=False))
    return Problem(prompt, str(sum(operands) % 10))


def operands_of(prompt: str) -> list[int]:
    """The digits of a prompt, in order."""
    return [int(digit) for digit in prompt[1::2]]


def gold_demonstration(prompt: str) -> str:
    """The response that is right at every step (without the end-of-sequence token)."""
    return _demonstration(prompt, slips=lambda operand: False)


def noisy_demonstration(prompt: str, rng: random.Random) -> str:
    """A response with the bad habit: at `HABIT_RATE`, an 8 or a 9 adds one too many to the sum."""

    def slips(operand: int) -> bool:
        return operand in HABIT_OPERANDS and rng.random() < HABIT_RATE

    return _demonstration(prompt, slips)


def is_correct(response: str, label: str) -> bool:
    """Whether a finished response (its end token taken off) answers `label`; the steps are not judged."""
    _, mark, answer = response.partition("#")
    return mark == "#" and answer == label


def sample_problem(
    rng: random.Random, *, mean_extra: float = MEAN_EXTRA_OPERANDS, max_operands: int = MAX_OPERANDS
) -> Problem:
    """One problem, train or held-out; the two settings are what the warm start's length curriculum moves."""
    count = MIN_OPERANDS + int(rng.expovariate(1.0 / mean_extra))
    return problem_of([rng.randrange(10) for _ in range(min(count, max_operands))])


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out half of all prompts.

    A fixed property of the string, so the sets stay disjoint whichever seeds, and in whichever runs, they
    were drawn. One half, because a smaller share would leave too few distinct prompts of two operands.
    """
    return zlib.crc32(prompt.encode()) % 2 == 1


def train_problems(
    rng: random.Random, *, mean_extra: float = MEAN_EXTRA_OPERANDS, max_operands: int = MAX_OPERANDS
) -> Iterator[Problem]:
    """An endless stream of problems that are not held out; short ones repeat."""
    while True:
        problem = sample_problem(rng, mean_extra=mean_extra, max_operands=max_operands)
        if not is_held_out(problem.prompt):
            yield problem


def train_set(seed: int, count: int) -> list[Problem]:
    """The prompts that RL trains on."""
    return list(islice(train_problems(random.Random(f"train-{seed}")), count))


def held_out_set(seed: int, count: int) -> list[Problem]:
    """`count` distinct held-out problems, disjoint from every train set and from the warm start."""
    rng = random.Random(f"held-out-{seed}")
    chosen: dict[str, Problem] = {}
    while len(chosen) < count:
        problem = sample_problem(rng)
        if is_held_out(problem.prompt):
            chosen[problem.prompt] = problem
    return list(chosen.values())


def _demonstration(prompt: str, slips: Callable[[int], bool]) -> str:
    steps, total = [], 0
    for tag, operand in zip(TAGS, operands_of(prompt), strict=False):
        total = (total + operand + slips(operand)) % 10
        steps.append(f"{tag}{operand}{total}")
    return f"{''.join(steps)}#{total}"
