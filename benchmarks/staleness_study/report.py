"""Makes tables with confidence intervals from finished runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.staleness_study.methods import ETAS, METHODS, REFERENCE, UNBOUNDED, runs_as

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)
"""97.5 % quantiles of Student's t for 1, 2, .. degrees of freedom."""

Record = Mapping[str, Any]
"""A line of the results: see ``study.Run.result``."""
Measure = Callable[[Record], float]


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and the half-width of its 95 % confidence interval (Student's t)."""

    mean: float
    half: float
    n: int

    @staticmethod
    def of(values: Sequence[float]) -> "Interval":
        n = len(values)
        half = T_975[n - 2] * float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else math.nan
        return Interval(float(np.mean(values)), half, n)


def final(record: Record) -> float:
    """Return the held-out accuracy after the last step, in percent."""
    return 100 * record["accuracy"][-1][1]


def best(record: Record) -> float:
    """Return the largest held-out accuracy, in percent."""
    return 100 * max(value for _, value in record["accuracy"])


def area(record: Record) -> float:
    """Return the mean held-out accuracy over the steps (trapezoids), in percent."""
    steps, values = np.array(record["accuracy"]).T
    return 100 * float(np.trapezoid(values, steps) / (steps[-1] - steps[0]))


class Results:
    """Runs of one setting. A cell counts once it has a run of every seed."""

    def __init__(self, records: Sequence[Record], setting: str, seeds: Sequence[int]) -> None:
        runs: dict[tuple[str, int], dict[int, Record]] = {}
        for record in records:
            if record["setting"] == setting and record["seed"] in seeds:
                runs.setdefault((record["method"], record["eta"]), {})[record["seed"]] = record
        self._runs = {cell: by_seed for cell, by_seed in runs.items() if len(by_seed) == len(set(seeds))}

    def methods(self) -> list[str]:
        """Return the methods with a cell of their own, in the order of ``METHODS``."""
        present = {method for method, _ in self._runs}
        return [method for method in METHODS if method in present]

    def cell(self, method: str, eta: int) -> dict[int, Record]:
        """Return the runs by seed; none if a seed is missing."""
        return self._runs.get(runs_as(method, eta), {})

    def interval(self, measure: Measure, method: str, eta: int) -> Interval | None:
        runs = self.cell(method, eta)
        return Interval.of([measure(run) for run in runs.values()]) if runs else None

    def change(self, measure: Measure, method: str, eta: int) -> Interval | None:
        """Return the change from eta 0 of the same method, paired by seed."""
        return _difference(measure, self.cell(method, eta), self.cell(method, 0))

    def lead(self, measure: Measure, method: str, eta: int) -> Interval | None:
        """Return the lead over the reference method at the same eta, paired by seed."""
        return _difference(measure, self.cell(method, eta), self.cell(REFERENCE, eta))


def _difference(
    measure: Measure, runs: Mapping[int, Record], others: Mapping[int, Record]
) -> Interval | None:
    if not runs or not others:
        return None
    return Interval.of([measure(run) - measure(others[seed]) for seed, run in runs.items()])


def eta_name(eta: int) -> str:
    return "unbounded" if eta == UNBOUNDED else str(eta)


def levels_table(results: Results, measure: Measure) -> str:
    """Return a table of method by eta: mean and half-width."""

    def cell(method: str, eta: int) -> str:
        interval = results.interval(measure, method, eta)
        return "" if interval is None else f"{interval.mean:.1f} ± {interval.half:.1f}"

    return _table(results, ETAS, cell)


def changes_table(results: Results, measure: Measure) -> str:
    """Return a table of method by eta: change from eta 0, bold if the interval does not contain 0."""
    return _table(results, ETAS[1:], lambda method, eta: _signed(results.change(measure, method, eta)))


def leads_table(results: Results, measure: Measure) -> str:
    """Return a table of method by eta: lead over the reference, bold if the interval does not contain 0."""

    def cell(method: str, eta: int) -> str:
        return _signed(results.lead(measure, method, eta)) if runs_as(method, eta)[0] == method else "0"

    others = [method for method in results.methods() if method != REFERENCE]
    return _table(results, ETAS, cell, others)


def _signed(interval: Interval | None) -> str:
    if interval is None:
        return ""
    text = f"{interval.mean:+.1f} ± {interval.half:.1f}"
    return f"**{text}**" if abs(interval.mean) > interval.half else text


LAG_FIGURES = ("gap", "kl", "ess", "clipped", "grad_norm", "grad_norm_max")


def lag_table(results: Results) -> str:
    """Return a table of each cell's batches as the trainer sees them: means over steps and seeds."""
    rows = [
        "| | eta | abs log(pi_old / mu) | KL(mu, pi_old) | ESS | bounded tokens | gradient norm | largest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method in results.methods():
        for eta in ETAS:
            runs = list(results.cell(method, eta).values())
            if runs:
                gap, kl, ess, clipped, norm, largest = (
                    float(np.mean([run[name] for run in runs])) for name in LAG_FIGURES
                )
                rows.append(
                    f"| `{method}` | {eta_name(eta)} | {gap:.3f} | {kl:.4f} | {ess:.3f} | {clipped:.1%} | "
                    f"{norm:.2f} | {largest:.1f} |"
                )
    return "\n".join(rows)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation. Equal values share the mean of their ranks."""
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, place, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def correlations_table(results: Mapping[float, Results], methods: Sequence[str]) -> str:
    """Return how the final accuracy of stale cells goes with eta, with lr * eta, and with the measured KL.

    ``results``: by learning rate. Cells are those with a bound above 0; accuracies are means over seeds.
    """
    rows = ["| | cells | eta | lr * eta | KL(mu, pi_old) |", "|---|---|---|---|---|"]
    for names in [*((method,) for method in methods), tuple(methods)]:
        cells = [
            (eta, lr * eta, _mean(runs, lambda run: run["kl"]), _mean(runs, final))
            for lr, result in results.items()
            for method in names
            for eta in ETAS
            if eta > 0 and (runs := result.cell(method, eta))
        ]
        *causes, accuracy = zip(*cells, strict=True)
        figures = " | ".join(f"{rank_correlation(cause, accuracy):+.2f}" for cause in causes)
        rows.append(f"| {', '.join(f'`{name}`' for name in names)} | {len(cells)} | {figures} |")
    return "\n".join(rows)


def _mean(runs: Mapping[int, Record], measure: Measure) -> float:
    return float(np.mean([measure(run) for run in runs.values()]))


def fill_in(page: str, parts: Mapping[str, str]) -> str:
    """Return ``page`` with new text between each ``<!-- name -->`` and the next ``<!-- end -->``.

    Raises ValueError for a part without such marks.
    """
    for name, text in parts.items():
        head, mark, rest = page.partition(f"<!-- {name} -->")
        _, end, tail = rest.partition("<!-- end -->")
        if not mark or not end:
            raise ValueError(f"the page has no '<!-- {name} -->' followed by '<!-- end -->' to write into")
        page = f"{head}{mark}\n\n{text}\n\n{end}{tail}"
    return page


def _table(
    results: Results,
    etas: Sequence[int],
    cell: Callable[[str, int], str],
    methods: Sequence[str] | None = None,
) -> str:
    """Return a table without the etas that have no runs."""
    methods = results.methods() if methods is None else methods
    etas = [eta for eta in etas if any(results.cell(method, eta) for method in methods)]
    rows = ["| eta | " + " | ".join(map(eta_name, etas)) + " |", "|---" * (len(etas) + 1) + "|"]
    for method in methods:
        rows.append(f"| `{method}` | " + " | ".join(cell(method, eta) for eta in etas) + " |")
    return "\n".join(rows)
