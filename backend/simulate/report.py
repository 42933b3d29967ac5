"""The tables that ``slipstream simulate`` prints, and the same results as one JSON document."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from slipstream.backend.monitor.tables import Columns, pairs_table, rows_table
from slipstream.backend.monitor.units import count, seconds
from slipstream.backend.simulate.account import Outcome
from slipstream.backend.simulate.advice import cost_model
from slipstream.backend.simulate.compare import Comparison, SimulatedRun, Work
from slipstream.backend.simulate.fit import Fitted, Residual
from slipstream.backend.simulate.gpu_split import model_of
from slipstream.backend.simulate.schedules import BOUNDS, INTERRUPTS

HISTOGRAM_WIDTH = 40
"""Characters of the longest bar."""


@dataclass(frozen=True)
class Report:
    """Everything that one call has simulated: one comparison for each size of the cluster."""

    work: Work
    fitted: Fitted | None
    comparisons: tuple[Comparison, ...]


# ---- for people


def print_report(report: Report, console: Console) -> None:
    """Print every table, and the cost model below them."""
    if report.fitted:
        print_fit(report.fitted, console)
    for comparison in report.comparisons:
        console.print(*_tables(report.work, comparison))
    if len(report.comparisons) > 1:
        console.print(_sizes(report.comparisons))
    print_costs(report.work, console)


def print_fit(fitted: Fitted, console: Console) -> None:
    """Print how well the cost model fits the run that it was fitted to."""
    console.print(rows_table("fitted to the run's trace", fitted.residuals, FIT))
    for note in fitted.notes:
        console.print(f"  {note}", style="dim", markup=False)
    console.print()


def print_costs(work: Work, console: Console) -> None:
    console.print(" Cost model of these figures", style="bold")
    for line in cost_model(work):
        console.print(Padding(Text(line, style="dim"), (0, 0, 0, 2)))
    console.print()


def _measured(text: Callable[[Outcome], str], stalled: str = "") -> Callable[[SimulatedRun], str]:
    """Return a cell that shows ``stalled`` for a run without an outcome."""
    return lambda run: text(run.outcome) if run.outcome else stalled


FIT: Columns[Residual] = {
    "observed": lambda residual: residual.what,
    "number": lambda residual: residual.measured,
    "mean": lambda residual: seconds(residual.mean),
    "rms residual": lambda residual: seconds(residual.rms),
    "of the mean": lambda residual: f"{residual.rms / (residual.mean or np.inf):.0%}",
}
SPLIT: Columns[SimulatedRun] = {
    "training": lambda run: run.layout.trainer_gpus,
    "generating": lambda run: run.layout.engine_gpus,
}
TOKENS: Columns[SimulatedRun] = {
    "tokens/s": _measured(lambda outcome: count(outcome.tokens_per_s), stalled="stalls"),
}
IDLE: Columns[SimulatedRun] = {
    "trainer idle": _measured(lambda outcome: f"{outcome.trainer_idle:.0%}"),
    "engines idle": _measured(lambda outcome: f"{outcome.engine_idle:.0%}"),
}


def _tables(work: Work, comparison: Comparison) -> Iterator[Table]:
    recipe, lags = comparison.recipe, comparison.outcome.head_lags
    policy = work.config.rollout.consumption.type
    title = f"{work.config.run.name}: {policy} on {recipe.layout}"
    yield pairs_table(title, _facts(work, comparison.outcome))
    yield rows_table(
        "trained trajectories by head lag",
        lags,
        {
            "lag": lambda lag: lag,
            "share": lambda lag: f"{lags[lag] / sum(lags.values()):.1%}",
            "": lambda lag: "█" * max(1, round(HISTOGRAM_WIDTH * lags[lag] / max(lags.values()))),
        },
    )
    if not comparison.schedules:
        return

    def speedup(run: SimulatedRun, stalled: str = "") -> str:
        ratio = comparison.speedup(run)
        return f"{ratio:.2f}x" if ratio is not None else "" if run.outcome else stalled

    def max_lag(run: SimulatedRun) -> str:
        if run.outcome is None:
            return ""
        return f"{run.outcome.max_lag}{'!' if run.outcome.max_lag > run.schedule.bound else ''}"

    def remark(run: SimulatedRun) -> str:
        recommended = "recommended" if run is comparison.recommended else ""
        return f"{recommended} (the recipe's)" if run is recipe else recommended

    base = comparison.synchronous.schedule.name
    yield rows_table(
        f"schedules, speed-up in trained tokens/s over: {base} (! more than eta)",
        comparison.schedules,
        {
            "schedule": lambda run: run.schedule.name,
            "eta": lambda run: run.schedule.bound,
            "interrupt": lambda run: run.schedule.interrupt,
            **TOKENS,
            "speed-up": speedup,
            **IDLE,
            "max lag": max_lag,
            "mean": _measured(lambda outcome: f"{outcome.mean_lag:.2f}"),
            "wasted": _measured(lambda outcome: f"{outcome.tokens_wasted:.1%}"),
        },
        left=["interrupt"],
        section=lambda run: run.schedule.bound,
    )
    interrupts = {
        mode: lambda bound, mode=mode: speedup(comparison.variant(bound, mode), stalled="stalls")
        for mode in INTERRUPTS
    }
    yield rows_table(f"speed-up of {policy} over {base}", BOUNDS, {"eta": str, **interrupts})
    columns = {**SPLIT, **TOKENS, **IDLE, "": remark}
    yield rows_table(f"splits of {recipe.layout.gpus} GPUs", comparison.splits, columns)


def _facts(work: Work, outcome: Outcome) -> dict[str, str]:
    steps, engines = np.array(outcome.step_s), outcome.engine_s
    lost = ", ".join(f"{number} {loss}" for loss, number in outcome.losses.items() if number) or "none"
    groups = work.config.rollout.batch_size
    facts = {
        "time": f"{seconds(outcome.makespan_s)} for {outcome.steps} steps of {groups} groups",
        "throughput": f"{outcome.tokens_per_s:,.0f} trained tokens/s, "
        f"{outcome.trajectories_per_s:.4g} trajectories/s",
        "step": f"{seconds(steps.mean())} on average, {seconds(float(np.median(steps)))} median, "
        f"{seconds(steps.max())} at most",
        "trainer": f"idle {outcome.trainer_idle:.1%}: waits for batches "
        f"{outcome.wait_s / outcome.makespan_s:.1%}, publishes {outcome.publish_s / outcome.makespan_s:.1%}",
        "engines": f"idle {outcome.engine_idle:.1%}: nothing to do {engines.idle / engines.total:.1%}, "
        f"paused {engines.paused / engines.total:.1%}, down {engines.down / engines.total:.1%}; prefill "
        f"{engines.prefill / engines.total:.1%}; {outcome.running:.1f} requests run on each while it decodes",
        "head lag": f"{outcome.max_lag} at most, {outcome.mean_lag:.2f} on average",
        "waste": f"{outcome.groups_wasted:.2%} of the groups, {outcome.tokens_wasted:.2%} of the generated "
        f"tokens; groups never trained: {lost}; {count(outcome.tokens_masked)} tokens masked",
    }
    if outcome.engine_failures or outcome.failed_attempts:
        numbers = f"{outcome.engine_failures} of engines, {outcome.failed_attempts} attempts at episodes"
        facts["failures"] = "\n".join([numbers, *outcome.failures])
    return facts


def _sizes(comparisons: tuple[Comparison, ...]) -> Table:
    smallest = comparisons[0].recipe

    def scaling(run: SimulatedRun) -> str:
        faster = run.tokens_per_s / smallest.tokens_per_s
        return f"{faster / (run.layout.gpus / smallest.layout.gpus):.0%}"

    columns = {"GPUs": lambda run: run.layout.gpus, **SPLIT, **TOKENS, "scaling": scaling, **IDLE}
    return rows_table("sizes of the cluster", [comparison.recipe for comparison in comparisons], columns)


# ---- for programs

OUTCOME_KEYS = """
    makespan_s steps tokens_per_s trajectories_per_s step_s_mean step_s_p50 step_s_p90 trainer_idle
    engine_idle engine_s requests_per_engine max_lag mean_lag head_lags token_lags trajectories tokens_trained
    tokens_generated tokens_masked groups_wasted tokens_wasted groups losses tokens_lost retractions
    requests_resent failed_attempts engine_failures failures_by_kind effective undone_s
"""
"""Keys of an outcome in their order: attributes of ``Outcome``, and the keys of ``DERIVED``."""

DERIVED: dict[str, Callable[[Outcome], object]] = {
    "step_s_mean": lambda outcome: np.mean(outcome.step_s),
    "step_s_p50": lambda outcome: np.quantile(outcome.step_s, 0.5),
    "step_s_p90": lambda outcome: np.quantile(outcome.step_s, 0.9),
    "engine_s": lambda outcome: {k: v for k, v in asdict(outcome.engine_s).items() if k != "requests"},
    "requests_per_engine": lambda outcome: outcome.running,
    "groups": lambda outcome: asdict(outcome.counts),
}


def as_json(report: Report) -> str:
    """Return a JSON document: the same bytes for the same simulation."""
    work, fitted = report.work, report.fitted
    document = {
        "recipe": work.config.run.name,
        "seed": work.seed,
        "cost_model": model_of(work.config).model_dump(mode="json"),
        "cost_model_in_words": cost_model(work),
        "lengths": "given" if work.lengths is not None else "model",
        "fit": {"residuals": list(map(asdict, fitted.residuals)), "notes": fitted.notes} if fitted else None,
        "clusters": list(map(_comparison_json, report.comparisons)),
    }
    # The last digits of a sum are noise: nine significant ones are kept.
    rounded = json.loads(json.dumps(document), parse_float=lambda text: float(f"{float(text):.9g}"))
    return json.dumps(rounded, indent=2) + "\n"


def _comparison_json(comparison: Comparison) -> dict[str, object]:
    outcome = comparison.outcome
    document: dict[str, object] = {
        "layout": asdict(comparison.layout),
        "run": _outcome_json(outcome) | {"step_s": outcome.step_s},
    }
    if comparison.schedules:
        document |= {
            "baseline": comparison.synchronous.schedule.name,
            "schedules": [_run_json(comparison, run) for run in comparison.schedules],
            "splits": [_run_json(comparison, run) for run in comparison.splits],
            "recommended": asdict(comparison.recommended.layout),
        }
    return document


def _run_json(comparison: Comparison, run: SimulatedRun) -> dict[str, object]:
    return {
        "schedule": run.schedule.name,
        "max_head_offpolicyness": run.schedule.bound,
        "interrupt": run.schedule.interrupt,
        "layout": asdict(run.layout),
        "speedup": comparison.speedup(run),
        "stalled": run.stalled or None,
        **(_outcome_json(run.outcome) if run.outcome else {}),
    }


def _outcome_json(outcome: Outcome) -> dict[str, object]:
    return {
        key: DERIVED[key](outcome) if key in DERIVED else getattr(outcome, key)
        for key in OUTCOME_KEYS.split()
    }
