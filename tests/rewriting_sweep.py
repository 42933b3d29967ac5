"""Random conversations of agents that rewrite what they send again, in large numbers.

    python -m tests.rewriting_sweep --conversations 20000   # a quarter of an hour

Prints each next state that is not what was said after its answer, and as the last line one JSON object with
how many were paired, and why nothing could tell whose the others are. Exit code 1 if more than one of two
thousand was wrong: users of one key who say and hear the same, and whose histories are cut and rewritten at
once, are told apart by the oracle alone.
"""

import argparse
import json
import sys
from collections import Counter

from tests.unit.rewriting_agents import World

ALLOWED = 1 / 2000
"""Largest share of wrong next states."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--conversations", type=int, default=4000, help="number of seeds")
    arguments.add_argument("--first", type=int, default=0, help="the first seed")
    options = arguments.parse_args()
    paired, problems = 0, 0
    untold: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.conversations):
        world = World(seed, restarts=seed % 2 == 1).run()
        paired += world.told
        untold += world.reasons
        problems += len(world.problems)
        for problem in world.problems:
            print(problem, flush=True)
    result = {
        "conversations": options.conversations,
        "paired": paired,
        "problems": problems,
        "untold": untold,
    }
    print(json.dumps(result))
    sys.exit(problems > ALLOWED * paired)


if __name__ == "__main__":
    main()
