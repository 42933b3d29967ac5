"""What a small policy is made for (`Task`), and the quickstart's task: a running sum, one operand at a time.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

SYMBOLS = "abcdefghijklmnopqrstuvwxyz0123456789#+=-?. ,"
"""The vocabulary of the quickstart's policy."""

TAGS = "abcdefghijklmnopqrstuvwxyz"

MIN_OPERANDS = 2
MAX_OPERANDS = 20
"""Gives a response of 63 tokens with its end: long enough for a tail, short enough for two cores."""
MEAN_EXTRA_OPERANDS = 4.5
"""Mean of the exponentially distributed operands beyond the minimum: most prompts are short, few are long."""

CURRICULUM_UNTIL = 0.6
"""Share of the steps over which prompts grow to full length. Without it the policy learns nothing in time."""

DRAWS_PER_PROMPT = 100
"""Draws after which a set of distinct prompts is given up, for each prompt of it."""

HABIT_OPERANDS = frozenset({8, 9})
HABIT_RATE = 0.7
"""Probability of the habit. Above 1/2 it wins every greedy step; below 1, samples can still be right."""


@dataclass(frozen=True)
class Problem:
    """One prompt and what its reward needs: here the only text that is right after '#' in a response."""

    prompt: str
    label: str


Message = dict[str, str]
Draw = Callable[[random.Random, float], Problem]
"""Draws a problem. The number is the progress of the warm start, from 0 to 1: problems may become harder with
it. Prompts to train on and held-out ones are drawn with 1."""
Demonstrate = Callable[[Problem, random.Random], list[Message]]
"""Makes a conversation, of which the warm start teaches each message of the role `assistant`."""


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


def demonstrate_habit(problem: Problem, rng: random.Random) -> list[Message]:
    """Return the conversation with a noisy demonstration: `Demonstrate`."""
    return conversation(problem.prompt, noisy_demonstration(problem.prompt, rng))


def conversation(*contents: str) -> list[Message]:
    """Return messages of a user and the assistant, by turns."""
    roles = ("user", "assistant")
    return [{"role": roles[place % 2], "content": content} for place, content in enumerate(contents)]


def sample_problem(
    rng: random.Random, *, mean_extra: float = MEAN_EXTRA_OPERANDS, max_operands: int = MAX_OPERANDS
) -> Problem:
    """Draw a problem, train or held-out. The warm start's curriculum moves both settings of the length."""
    count = MIN_OPERANDS + int(rng.expovariate(1.0 / mean_extra))
    return problem_of([rng.randrange(10) for _ in range(min(count, max_operands))])


def draw_sum(rng: random.Random, progress: float) -> Problem:
    """Draw a problem that gets longer with the progress: `Draw`."""
    grown = min(1.0, progress / CURRICULUM_UNTIL)
    return sample_problem(
        rng,
        mean_extra=1.0 + (MEAN_EXTRA_OPERANDS - 1.0) * grown,
        max_operands=round(3 + (MAX_OPERANDS - 3) * grown),
    )


def is_held_out(prompt: str) -> bool:
    """True if a prompt belongs to the held-out half of all prompts.

    This depends on the string alone, so sets stay disjoint whatever seeds and runs they were drawn with. A
    share smaller than one half would leave too few distinct prompts of two operands.
    """
    return zlib.crc32(prompt.encode()) % 2 == 1


def train_problems(rng: random.Random, progress: float = 1.0, draw: Draw = draw_sum) -> Iterator[Problem]:
    """Yield problems that are not held out, without end. Short problems repeat."""
    while True:
        problem = draw(rng, progress)
        if not is_held_out(problem.prompt):
            yield problem


@dataclass(frozen=True)
class Task:
    """A vocabulary, problems and demonstrations, from which a small policy and its prompts are made.

    The two functions must be defined in modules: the processes of the warm start import them.
    """

    draw: Draw
    demonstrate: Demonstrate
    symbols: Sequence[str] = SYMBOLS
    """The vocabulary: characters, or texts of several characters that are one token each."""


SUMS = Task(draw_sum, demonstrate_habit)


def train_set(seed: int, count: int, draw: Draw = draw_sum) -> list[Problem]:
    """Return the problems that RL trains on."""
    return list(islice(train_problems(random.Random(f"train-{seed}"), draw=draw), count))


def held_out_set(seed: int, count: int, draw: Draw = draw_sum) -> list[Problem]:
    """Return `count` held-out problems of distinct prompts, disjoint from every train set and warm start.

    Raises ValueError if so many draws find fewer.
    """
    rng = random.Random(f"held-out-{seed}")
    chosen: dict[str, Problem] = {}
    for _ in range(DRAWS_PER_PROMPT * count):
        problem = draw(rng, 1.0)
        if is_held_out(problem.prompt):
            chosen[problem.prompt] = problem
            if len(chosen) == count:
                return list(chosen.values())
    raise ValueError(
        f"found {len(chosen)} distinct held-out prompts in {DRAWS_PER_PROMPT * count} draws; expected "
        f"{count}: ask for fewer, or draw from more"
    )
