"""Six small tasks are learned, each by a policy that is made for it: curves of held-out reward.

    python -m benchmarks.tasks [--only sorting hangman] [--seeds 3] [--figure docs/tasks.png]

`slipstream train` runs the recipe `quickstart` and those of `examples/tasks`. Held-out prompts are asked
before, during and after the training steps. Runs stay in `runs/tasks`, and those that have ended well are not
run again. CPU seconds are those of the training steps; minutes are of the whole run, warm start included.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import parser
from benchmarks.tasks.run import TASKS, Outcome, learned, outcome
from slipstream.backend.monitor.tables import Columns, rows_table, table_console

TABLE: Columns[Outcome] = {
    "task": lambda row: row.task,
    "seed": lambda row: row.seed,
    "start": lambda row: f"{row.before:.1%}",
    "end": lambda row: f"{row.after:.1%}",
    "steps": lambda row: row.curve[-1][0],
    "CPU s": lambda row: f"{row.cpu_s:.0f}",
    "minutes": lambda row: f"{row.minutes:.1f}",
    "largest lag": lambda row: row.max_lag,
    "audit": lambda row: "clean" if not row.discrepancies else f"{row.discrepancies} discrepancies",
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", choices=TASKS, nargs="+", default=list(TASKS))
    options.add_argument("--seeds", type=int, default=3, help="number of seeds")
    options.add_argument("--figure", type=Path, help="PNG to write")
    chosen = options.parse_args()
    outcomes: list[Outcome] = []
    for seed in range(chosen.seeds):
        for task in chosen.only:
            outcomes.append(outcome(task, seed, learned(task, seed)))
            print(outcomes[-1], flush=True)
    outcomes.sort(key=lambda each: (chosen.only.index(each.task), each.seed))
    table = rows_table("held-out reward", outcomes, TABLE, section=lambda row: row.task)
    table_console().print(table)
    if chosen.figure is not None:
        from benchmarks.tasks.figure import draw  # matplotlib takes a second to load

        chosen.figure.write_bytes(draw(outcomes))
    print(json.dumps(figures(outcomes)))
    sys.exit(any(each.discrepancies for each in outcomes))


def figures(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Return the last line: of each task the start and the end of each seed, in percent."""
    tasks = dict.fromkeys(each.task for each in outcomes)
    return {
        **{
            task: [
                [round(100 * each.before, 1), round(100 * each.after, 1)]
                for each in outcomes
                if each.task == task
            ]
            for task in tasks
        },
        "minutes": round(sum(each.minutes for each in outcomes), 1),
        "discrepancies": sum(each.discrepancies for each in outcomes),
    }


if __name__ == "__main__":
    main()
