"""A simulation as tables, and as one JSON document."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from slipstream.backend.monitor.units import count, seconds
from slipstream.backend.simulate.account import Outcome
from slipstream.backend.simulate.compare import Comparison, Run, Work
from slipstream.backend.simulate.costs import cost_model
from slipstream.backend.simulate.fit import Fitted
from slipstream.backend.simulate.gpu_split import GpuSplit, model_of
from slipstream.backend.simulate.schedules import BOUNDS, INTERRUPTS

BAR = 40
"""Characters of the longest bar of a histogram."""


@dataclass(frozen=True)
class Report:
    """All that one call has simulated: one comparison for each size of the cluster."""

    work: Work
    fitted: Fitted | None
    comparisons: tuple[Comparison, ...]

    @property
    def costs(self) -> list[str]:
        return cost_model(self.work.config, model_of(self.work.config), self.work.lengths)


# ---- for people


def print_report(report: Report, console: Console) -> None:
    if report.fitted:
        print_fit(report.fitted, console)
    for comparison in report.comparisons:
        _print_own(report, comparison, console)
        if comparison.schedules:
            _print_schedules(report, comparison, console)
            _print_bounds(comparison, console)
            _print_splits(comparison, console)
        if comparison.schedules or len(report.comparisons) == 1:
            _print_costs(report, console)
    if len(report.comparisons) > 1:
        _print_sizes(report, console)
        _print_costs(report, console)


def print_fit(fitted: Fitted, console: Console) -> None:
    table = _table("fitted to the run's trace", "observed", "number", "mean", "rms residual", "of the mean")
    for one in fitted.residuals:
        share = one.rms / one.mean if one.mean else 0.0
        table.add_row(one.what, str(one.measured), seconds(one.mean), seconds(one.rms), f"{share:.0%}")
    console.print(table)
    for note in fitted.notes:
        console.print(f"  {note}", style="dim", markup=False)
    console.print()


def _print_own(report: Report, comparison: Comparison, console: Console) -> None:
    own, config = comparison.own, report.work.config
    steps = np.array(own.step_s)
    engines = own.engine_s
    lost = ", ".join(f"{number} {loss}" for loss, number in own.losses.items() if number) or "none"
    rows = [
        ("time", f"{seconds(own.makespan_s)} for {own.steps} steps of {config.rollout.batch_size} groups"),
        (
            "throughput",
            f"{own.tokens_per_s:,.0f} trained tokens/s, {own.trajectories_per_s:.4g} trajectories/s",
        ),
        (
            "step",
            f"{seconds(float(np.mean(steps)))} on average, {seconds(float(np.median(steps)))} median, "
            f"{seconds(float(np.max(steps)))} at most",
        ),
        (
            "trainer",
            f"idle {own.trainer_idle:.1%}: waits for batches {own.wait_s / own.makespan_s:.1%}, "
            f"publishes {own.publish_s / own.makespan_s:.1%}",
        ),
        (
            "engines",
            f"idle {own.engine_idle:.1%}: nothing to do {engines.idle / engines.total:.1%}, paused "
            f"{engines.paused / engines.total:.1%}, down {engines.down / engines.total:.1%}; prefill "
            f"{engines.prefill / engines.total:.1%}; {own.running:.1f} requests run on each while it decodes",
        ),
        ("head lag", f"{own.max_lag} at most, {own.mean_lag:.2f} on average"),
        (
            "waste",
            f"{own.groups_wasted:.2%} of the groups, {own.tokens_wasted:.2%} of the generated tokens; "
            f"groups never trained: {lost}; {count(own.tokens_masked)} tokens masked",
        ),
    ]
    if own.failed_attempts or own.engine_failures:
        rows.append(
            ("failures", f"{own.engine_failures} of engines, {own.failed_attempts} attempts at episodes")
        )
        rows += [("", text) for text in own.failures]
    title = f"{config.run.name}: {report.work.config.rollout.consumption.type} on {comparison.layout}"
    table = _table(title, None, None)
    for label, value in rows:
        table.add_row(label, Text(value))
    console.print(table)
    _print_histogram(own, console)


def _print_histogram(own: Outcome, console: Console) -> None:
    table = _table("trained trajectories by head lag", "lag", "share", None)
    most, total = max(own.head_lags.values(), default=1), sum(own.head_lags.values())
    for lag, number in own.head_lags.items():
        table.add_row(str(lag), f"{number / total:.1%}", "█" * max(1, round(BAR * number / most)))
    console.print(table)


COLUMNS = (
    "eta",
    "interrupt",
    "tokens/s",
    "speed-up",
    "trainer idle",
    "engines idle",
    "max lag",
    "mean",
    "wasted",
)


def _print_schedules(report: Report, comparison: Comparison, console: Console) -> None:
    base = comparison.synchronous.schedule.name
    table = _table(
        f"schedules, speed-up in trained tokens/s over: {base} (! more than eta)", "schedule", *COLUMNS
    )
    bound = None
    for run in comparison.schedules:
        if bound is not None and run.schedule.bound != bound:
            table.add_section()
        bound = run.schedule.bound
        table.add_row(run.schedule.name, str(bound), run.schedule.interrupt, *_figures(comparison, run))
    console.print(table)


def _figures(comparison: Comparison, run: Run) -> list[str]:
    found, speedup = run.outcome, comparison.speedup(run)
    if found is None or speedup is None:
        return ["stalls", *[""] * 6]
    over = "!" if found.max_lag > run.schedule.bound else ""
    return [
        count(found.tokens_per_s),
        f"{speedup:.2f}x",
        f"{found.trainer_idle:.0%}",
        f"{found.engine_idle:.0%}",
        f"{found.max_lag}{over}",
        f"{found.mean_lag:.2f}",
        f"{found.tokens_wasted:.1%}",
    ]


def _print_bounds(comparison: Comparison, console: Console) -> None:
    """The speed-up of the recipe's own policy by bound and interrupt mode."""
    title = f"speed-up of {comparison.policy} over {comparison.synchronous.schedule.name}"
    table = _table(title, "eta", *INTERRUPTS)
    for bound in BOUNDS:
        cells = []
        for interrupt in INTERRUPTS:
            speedup = comparison.speedup(comparison.of(bound, interrupt))
            cells.append(f"{speedup:.2f}x" if speedup else "stalls")
        table.add_row(str(bound), *cells)
    console.print(table)


def _print_splits(comparison: Comparison, console: Console) -> None:
    best = comparison.recommended
    table = _table(
        f"splits of {comparison.layout.gpus} GPUs",
        "training",
        "generating",
        "tokens/s",
        "trainer idle",
        "engines idle",
        None,
    )
    for run in comparison.splits:
        found = run.outcome
        table.add_row(
            str(run.layout.trainer_gpus),
            str(run.layout.engine_gpus),
            *(
                [count(found.tokens_per_s), f"{found.trainer_idle:.0%}", f"{found.engine_idle:.0%}"]
                if found
                else ["stalls"] * 3
            ),
            ("recommended" if run is best else "")
            + (" (the recipe's)" if run.layout == comparison.layout else ""),
        )
    console.print(table)


def _print_sizes(report: Report, console: Console) -> None:
    first = report.comparisons[0]
    table = _table(
        "sizes of the cluster",
        "GPUs",
        "training",
        "generating",
        "tokens/s",
        "scaling",
        "trainer idle",
        "engines idle",
    )
    for one in report.comparisons:
        scaling = one.own.tokens_per_s / first.own.tokens_per_s / (one.layout.gpus / first.layout.gpus)
        table.add_row(
            str(one.layout.gpus),
            str(one.layout.trainer_gpus),
            str(one.layout.engine_gpus),
            count(one.own.tokens_per_s),
            f"{scaling:.0%}",
            f"{one.own.trainer_idle:.0%}",
            f"{one.own.engine_idle:.0%}",
        )
    console.print(table)


def _print_costs(report: Report, console: Console) -> None:
    console.print(" Cost model of these figures", style="bold")
    for line in report.costs:
        console.print(Padding(Text(line, style="dim"), (0, 0, 0, 2)))
    console.print()


def _table(title: str, *columns: str | None) -> Table:
    """Columns without a name have no header; the first one is text, the others are figures."""
    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        min_width=len(title) + 2,
        box=SIMPLE_HEAD,
        show_header=any(columns),
        pad_edge=True,
    )
    for number, name in enumerate(columns):
        left = number == 0 or name is None or name == "interrupt"
        table.add_column(name or "", justify="left" if left else "right")
    return table


# ---- for programs


def as_json(report: Report) -> str:
    """The same bytes for the same simulation."""
    work = report.work
    document = {
        "recipe": work.config.run.name,
        "seed": work.seed,
        "cost_model": model_of(work.config).model_dump(mode="json"),
        "cost_model_in_words": report.costs,
        "lengths": "given" if work.lengths is not None else "model",
        "fit": _fit_json(report.fitted) if report.fitted else None,
        "clusters": [_comparison_json(one) for one in report.comparisons],
    }
    return json.dumps(_rounded(document), indent=2) + "\n"


def _fit_json(fitted: Fitted) -> dict[str, Any]:
    return {"residuals": [vars(one) for one in fitted.residuals], "notes": list(fitted.notes)}


def _comparison_json(comparison: Comparison) -> dict[str, Any]:
    found = {
        "layout": _layout_json(comparison.layout),
        "run": _outcome_json(comparison.own) | {"step_s": list(comparison.own.step_s)},
    }
    if comparison.schedules:
        found |= {
            "baseline": comparison.synchronous.schedule.name,
            "schedules": [_run_json(comparison, run) for run in comparison.schedules],
            "splits": [_run_json(comparison, run) for run in comparison.splits],
            "recommended": _layout_json(comparison.recommended.layout),
        }
    return found


def _run_json(comparison: Comparison, run: Run) -> dict[str, Any]:
    schedule = run.schedule
    return {
        "schedule": schedule.name,
        "max_head_offpolicyness": schedule.bound,
        "interrupt": schedule.interrupt,
        "layout": _layout_json(run.layout),
        "speedup": comparison.speedup(run),
        "stalled": run.stalled or None,
        **(_outcome_json(run.outcome) if run.outcome else {}),
    }


def _layout_json(layout: GpuSplit) -> dict[str, Any]:
    return {
        "gpus": layout.gpus,
        "trainer_gpus": layout.trainer_gpus,
        "engines": layout.engines,
        "gpus_per_engine": layout.gpus_per_engine,
        "shared": layout.shared,
    }


def _outcome_json(found: Outcome) -> dict[str, Any]:
    steps, engines = np.array(found.step_s), found.engine_s
    return {
        "makespan_s": found.makespan_s,
        "steps": found.steps,
        "tokens_per_s": found.tokens_per_s,
        "trajectories_per_s": found.trajectories_per_s,
        "step_s_mean": float(steps.mean()),
        "step_s_p50": float(np.quantile(steps, 0.5)),
        "step_s_p90": float(np.quantile(steps, 0.9)),
        "trainer_idle": found.trainer_idle,
        "engine_idle": found.engine_idle,
        "engine_s": {
            name: getattr(engines, name) for name in ("decode", "prefill", "paused", "idle", "down")
        },
        "requests_per_engine": found.running,
        "max_lag": found.max_lag,
        "mean_lag": found.mean_lag,
        "head_lags": {str(lag): number for lag, number in found.head_lags.items()},
        "token_lags": {str(lag): number for lag, number in found.token_lags.items()},
        "trajectories": found.trajectories,
        "tokens_trained": found.tokens_trained,
        "tokens_generated": found.tokens_generated,
        "tokens_masked": found.tokens_masked,
        "groups_wasted": found.groups_wasted,
        "tokens_wasted": found.tokens_wasted,
        "groups": vars(found.counts),
        "losses": {str(loss): number for loss, number in found.losses.items()},
        "tokens_lost": {str(loss): number for loss, number in found.tokens_lost.items()},
        "retractions": found.retractions,
        "requests_resent": found.requests_resent,
        "failed_attempts": found.failed_attempts,
        "engine_failures": found.engine_failures,
    }


def _rounded(value: Any) -> Any:
    """Floats to nine significant digits: the last ones of a sum are noise."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(one) for one in value]
    return value
