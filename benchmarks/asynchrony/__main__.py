"""Measures the time to the same held-out accuracy on two cores, for several bounds on the lag.

    python -m benchmarks.asynchrony [--etas 0 1 2 4 8] [--seeds 0 1 2] [--steps 64] [--target 0.75]

The recipe is the quickstart's with a policy of four times the width, so that training and generation have
about equal shares of a synchronous step. Every cell is a whole run of `slipstream train`. Its checkpoints are
evaluated when all runs are done, on held-out problems by greedy decoding; the time of a checkpoint is that of
the training steps alone. Runs of a seed share policy, prompts and held-out problems. `speed-up` is the time
of eta 0 over that of another eta, paired by seed. Each run is also simulated with constants that were fitted
to its own trace.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.asynchrony.run import Outcome, outcomes, train
from benchmarks.harness import parser
from benchmarks.staleness_study.report import Interval
from slipstream.backend.monitor.tables import Columns, rows_table, table_console

Row = tuple[int, list[Outcome], list[float], list[float]]
"""An eta, its runs, the speed-ups to the target by seed, and those of a step."""


def table(target: float) -> Columns[Row]:
    return {
        "eta": lambda row: row[0],
        "step, s": lambda row: f"{mean(run.step_s for run in row[1]):.2f}",
        "waiting": lambda row: f"{mean(run.waiting for run in row[1]):.0%}",
        "training": lambda row: f"{mean(run.training for run in row[1]):.0%}",
        "mean lag": lambda row: f"{mean(run.mean_lag for run in row[1]):.1f}",
        "at the end": lambda row: f"{mean(run.curve[-1].accuracy for run in row[1]):.1%}",
        f"s to {target:.0%}": lambda row: _times(row[1], target),
        "speed-up": lambda row: _interval(row[2]),
        "of a step": lambda row: _interval(row[3]),
        "simulated / real step": lambda row: " ".join(
            f"{run.simulated_step_s / run.step_s:.2f}" for run in row[1]
        ),
    }


def mean(values: Iterable[float]) -> float:
    return statistics.mean(values)


def _times(runs: Sequence[Outcome], target: float) -> str:
    times = [run.seconds_to(target) for run in runs]
    return " ".join("-" if seconds is None else f"{seconds:.0f}" for seconds in times)


def _interval(values: Sequence[float]) -> str:
    if not values:
        return ""
    interval = Interval.of(values)
    return f"{interval.mean:.2f} ± {interval.half:.2f}" if interval.n > 1 else f"{interval.mean:.2f}"


def rows_of(found: Sequence[Outcome], target: float) -> list[Row]:
    """Return a row for each eta. The base of a speed-up is the run of the same seed with the least eta."""
    etas = sorted({run.eta for run in found})
    by_cell = {(run.eta, run.seed): run for run in found}
    rows: list[Row] = []
    for eta in etas:
        runs = [run for run in found if run.eta == eta]
        bases = [by_cell[etas[0], run.seed] for run in runs]
        pairs = [
            (base.seconds_to(target), run.seconds_to(target)) for base, run in zip(bases, runs, strict=True)
        ]
        to_target = [base / own for base, own in pairs if base is not None and own is not None]
        of_a_step = [base.step_s / run.step_s for base, run in zip(bases, runs, strict=True)]
        rows.append((eta, runs, to_target, of_a_step))
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--etas", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--steps", type=int, default=64)
    options.add_argument("--target", type=float, default=0.75, help="held-out accuracy")
    options.add_argument(
        "--root", type=Path, help="folder for the runs, which are kept; default: a temporary one"
    )
    chosen = options.parse_args()
    began, found = time.monotonic(), list[Outcome]()
    with tempfile.TemporaryDirectory(prefix="slipstream-asynchrony-") as temporary:
        root = chosen.root or Path(temporary)
        for seed in chosen.seeds:
            for eta in chosen.etas:
                train(root, eta, seed, chosen.steps)
        for seed in chosen.seeds:
            for run in outcomes(root, chosen.etas, seed):
                found.append(run)
                points = ", ".join(f"{point.seconds:.0f} s {point.accuracy:.0%}" for point in run.curve)
                print(f"eta {run.eta}, seed {seed}: {run.step_s:.2f} s a step; {points}", flush=True)
    rows = rows_of(found, chosen.target)
    table_console().print(rows_table("what asynchrony gives", rows, table(chosen.target)))
    print(
        json.dumps(
            {
                "speed_up": {str(row[0]): [round(value, 3) for value in row[2]] for row in rows},
                "step_speed_up": {str(row[0]): [round(value, 3) for value in row[3]] for row in rows},
                "simulated_over_real": [round(run.simulated_step_s / run.step_s, 3) for run in found],
                "discrepancies": sum(run.discrepancies for run in found),
                "seconds": round(time.monotonic() - began, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
