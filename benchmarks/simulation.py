"""A real run against its simulation with constants fitted to its own trace: step time and mean lag.

    python -m benchmarks.simulation RUN

RUN is the folder of a run on any machine, for example of `make quickstart`. The step time is the time from
the beginning of the first step to the end of the last step, divided by the number of steps.
"""

import json
import sys
from pathlib import Path

from rich.console import Console

from slipstream.backend.monitor.tables import Columns, rows_table, table_console
from slipstream.backend.simulate.compare import compare
from slipstream.backend.simulate.inputs import Options, read
from slipstream.backend.simulate.report import print_costs, print_fit
from slipstream.backend.simulate.trace import read_trace
from slipstream.configs.violations import RecipeError

METRICS = "metrics.jsonl"


def real_lag(run: Path, steps: int) -> float:
    """Return the mean head lag over the last ``steps`` steps, each of which has as many trajectories."""
    lines = [json.loads(line) for line in (run / METRICS).read_text(encoding="utf-8").splitlines()]
    heads = [line["staleness/head_mean"] for line in lines if "staleness/head_mean" in line]
    return sum(heads[-steps:]) / steps


TABLE: Columns[tuple[str, float, float]] = {
    "mean": lambda row: row[0],
    "real": lambda row: f"{row[1]:.3f}",
    "simulated": lambda row: f"{row[2]:.3f}",
    "ratio": lambda row: f"{row[2] / row[1]:.3f}" if row[1] else "",
}


def measure(run: Path, console: Console) -> dict[str, float | None]:
    """Simulate the run, and print and return both sides."""
    trace = read_trace(run)
    steps = len(trace.end_S)
    overrides = ["simulate.compare=false", f"run.steps={steps}"]
    works, fitted = read(Options(str(run / "recipe.yaml"), overrides, fit=run), lambda config: None)
    assert fitted is not None
    outcome = compare(works[0]).outcome
    step_s, lag = outcome.makespan_s / steps, real_lag(run, steps)
    rows = [
        ("step, s", trace.seconds_per_step, step_s),
        ("  waiting for the batch, s", float(trace.wait_S.mean()), outcome.wait_s / steps),
        ("  training, s", float(trace.train_S.mean()), outcome.train_s / steps),
        ("  publishing, s", float(trace.publish_S.mean()), outcome.publish_s / steps),
        ("head lag, versions", lag, outcome.mean_lag),
    ]
    print_fit(fitted, console)
    console.print(rows_table("the run and its simulation", rows, TABLE))
    print_costs(works[0], console)
    return {
        "steps": steps,
        "step_s_real": round(trace.seconds_per_step, 4),
        "step_s_simulated": round(step_s, 4),
        "step_ratio": round(step_s / trace.seconds_per_step, 4),
        "lag_real": round(lag, 4),
        "lag_simulated": round(outcome.mean_lag, 4),
        "lag_ratio": round(outcome.mean_lag / lag, 4) if lag else None,
    }


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m benchmarks.simulation RUN")
    try:
        document = measure(Path(sys.argv[1]), table_console())
    except RecipeError as error:
        raise SystemExit(str(error)) from None
    print(json.dumps(document))


if __name__ == "__main__":
    main()
