"""Hands every wrong input in, lets every episode fail, and prints each message."""

import sys
import tempfile
from pathlib import Path

from tests.wrong_inputs import (
    data,
    failing_episodes,
    failing_plugins,
    logs,
    machine,
    models,
    plugins,
    recipes,
    spellings,
    supervised,
)
from tests.wrong_inputs.episodes import let_fail
from tests.wrong_inputs.inputs import hand_in
from tests.wrong_inputs.world import make_model

INPUTS = {
    "recipe": recipes.CASES,
    "data": data.CASES,
    "model": models.CASES,
    "plug-in": plugins.CASES,
    "sft": supervised.CASES,
    "machine": machine.CASES,
    "log": logs.CASES,
    "spelling": spellings.CASES,
}


def main() -> int:
    """Return the exit code: 0 if everything was told."""
    told = number = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        for kind, cases in INPUTS.items():
            for case in cases:
                number += 1
                result = hand_in(case, folder / str(number), folder / "model")
                told += not result.problems
                show(f"{kind}: {case.name}", result.message, result.problems)
        for case in failing_plugins.CASES:
            number += 1
            message = failing_plugins.let_fail(case)
            problems = tuple(failing_plugins.problems_of(case, message))
            told += not problems
            show(f"plug-in at work: {case.name}", message, problems)
        named = 0
        for place, case in enumerate(failing_episodes.CASES):
            result = let_fail(case, folder / f"episode-{place}")
            named += not result.problems
            show(f"episode: {case.name}", result.message, result.problems)
    episodes = len(failing_episodes.CASES)
    print(f"told {told} of {number}, episodes {named} of {episodes}")
    return int(told < number or named < episodes)


def show(name: str, message: str, problems: tuple[str, ...]) -> None:
    """Print a message, and what is wrong with it."""
    print(f"{'NOT TOLD' if problems else 'told'}  {name}")
    print("".join(f"    {line}\n" for line in message.splitlines()), end="")
    print("".join(f"    !! {problem}\n" for problem in problems), flush=True)


if __name__ == "__main__":
    sys.exit(main())
