"""Random schedules of the control core in large numbers, with every policy, admission and bound.

    python -m tests.control_sweep --seeds 20 --examples 2000

Each seed is a task of its own, on as many cores as there are. Prints a line per seed and, as the last line,
one JSON object. Exit code 1 if a property was violated; its schedule is printed, and the other seeds still
run.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import hypothesis
from hypothesis.stateful import run_state_machine_as_test

from tests.unit.control_schedules import Schedule

STEPS = 50
"""Largest number of events in a schedule."""


def sweep(seed: int, examples: int) -> tuple[Counter[str], str]:
    """Run the schedules of one seed. Return how often what happened, and the violation, or an empty text."""
    Schedule.totals.clear()
    settings = hypothesis.settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    violation = ""
    try:
        run_state_machine_as_test(hypothesis.seed(seed)(Schedule), settings=settings)
    except Exception:
        violation = traceback.format_exc()
    return Schedule.totals, violation


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--seeds", type=int, default=20, help="number of seeds")
    arguments.add_argument("--first", type=int, default=1, help="the first seed")
    arguments.add_argument("--examples", type=int, default=2000, help="schedules for each seed")
    arguments.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = arguments.parse_args()
    began = time.perf_counter()
    totals: Counter[str] = Counter()
    violations = 0
    seeds = range(options.first, options.first + options.seeds)
    with ProcessPoolExecutor(options.jobs) as pool:
        results = [pool.submit(sweep, seed, options.examples) for seed in seeds]
        for seed, result in zip(seeds, results, strict=True):
            counts, violation = result.result()
            totals.update(counts)
            violations += bool(violation)
            print(
                f"seed {seed}: {counts['examples']} examples, {counts['restarts']} restarts, "
                f"{counts['batches']} batches, {int(bool(violation))} violations",
                flush=True,
            )
            if violation:
                print(violation, flush=True)
    seconds = round(time.perf_counter() - began)
    print(json.dumps({**totals, "violations": violations, "seconds": seconds}))
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
