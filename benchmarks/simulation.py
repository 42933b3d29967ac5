"""A real run, and the simulation of it with the constants fitted to its own trace: step time and mean lag.

    python -m benchmarks.simulation RUN

RUN is the folder of a run on this machine or another, for example of `make quickstart`. Step times are from
the beginning of the first step to the end of the last one, divided by the number of steps.
"""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from slipstream.backend.simulate.command import Options, read
from slipstream.backend.simulate.compare import compare
from slipstream.backend.simulate.report import Report, print_fit
from slipstream.backend.simulate.trace import read_trace
from slipstream.configs.violations import RecipeError

METRICS = "metrics.jsonl"


def real_lag(run: Path, steps: int) -> float:
    """Mean head lag of the trajectories of the last ``steps`` steps: each has equally many."""
    lines = [json.loads(line) for line in (run / METRICS).read_text(encoding="utf-8").splitlines()]
    heads = [line["staleness/head_mean"] for line in lines if "staleness/head_mean" in line]
    return sum(heads[-steps:]) / steps


def measure(run: Path, console: Console) -> dict[str, Any]:
    trace = read_trace(run)
    steps = len(trace.end_S)
    overrides = ["simulate.compare=false", f"run.steps={steps}"]
    works, fitted = read(Options(str(run / "recipe.yaml"), overrides, fit=run))
    found = compare(works[0]).own
    lag = real_lag(run, steps)
    print_fit(fitted, console)
    table = Table("mean", "real", "simulated", "ratio")
    per_step = [
        ("step, s", trace.seconds_per_step, found.makespan_s / steps),
        ("of it, waiting for the batch, s", float(trace.wait_S.mean()), found.wait_s / steps),
        ("of it, training, s", float(trace.train_S.mean()), found.train_s / steps),
        ("of it, publishing, s", float(trace.publish_S.mean()), found.publish_s / steps),
        ("head lag, versions", lag, found.mean_lag),
    ]
    for what, real, simulated in per_step:
        table.add_row(what, f"{real:.3f}", f"{simulated:.3f}", f"{simulated / real:.3f}" if real else "")
    console.print(table)
    for line in Report(works[0], fitted, ()).costs:
        console.print(f"  {line}", style="dim", markup=False)
    return {
        "steps": steps,
        "step_s_real": round(trace.seconds_per_step, 4),
        "step_s_simulated": round(found.makespan_s / steps, 4),
        "step_ratio": round(found.makespan_s / steps / trace.seconds_per_step, 4),
        "lag_real": round(lag, 4),
        "lag_simulated": round(found.mean_lag, 4),
        "lag_ratio": round(found.mean_lag / lag, 4) if lag else None,
    }


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m benchmarks.simulation RUN")
    try:
        found = measure(Path(sys.argv[1]), Console(highlight=False, width=120))
    except RecipeError as error:
        raise SystemExit(str(error)) from None
    print(json.dumps(found))


if __name__ == "__main__":
    main()
