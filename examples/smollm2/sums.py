"""The task: a number of two digits plus a small one, asked behind some examples in the same chat.

    system      You are a calculator.
    user        17 + 2
    assistant   19
    ...
    user        48 + 3

SmolLM2-135M-Instruct answers with sentences unless it has such examples. With them it is right on some of the
sums, and its samples are right on fewer: there is something to reward and something to learn.

The module uses the standard library only, and takes every random choice from a seed.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SYSTEM = "You are a calculator."
SHOTS = 4
"""Examples in each prompt. They are the same in all, and neither trained nor held out."""
HELD_OUT = 64
"""Held-out prompts. The standard error of an accuracy over them is at most 6.3 percentage points."""

Message = dict[str, str]


@dataclass(frozen=True)
class Problem:
    """One prompt, and the only response that is right."""

    prompt: Sequence[Message]
    label: str


def problems(seed: int, largest: int) -> tuple[list[Problem], list[Problem]]:
    """Return the problems to train on and those to hold out: all sums of two digits, none in both.

    `largest` is the largest second number. The first number has two digits, and so has the sum.
    """
    sums = [(first, second) for second in range(1, largest + 1) for first in range(10, 100 - second)]
    random.Random(seed).shuffle(sums)
    shots, held_out, train = sums[:SHOTS], sums[SHOTS : SHOTS + HELD_OUT], sums[SHOTS + HELD_OUT :]
    head: list[Message] = [{"role": "system", "content": SYSTEM}]
    for first, second in shots:
        head += [user(first, second), {"role": "assistant", "content": str(first + second)}]
    return tuple(
        [Problem([*head, user(first, second)], str(first + second)) for first, second in part]
        for part in (train, held_out)
    )


def user(first: int, second: int) -> Message:
    return {"role": "user", "content": f"{first} + {second}"}


def write(path: Path, problems: Sequence[Problem]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(f"{json.dumps(asdict(problem))}\n" for problem in problems))
