"""Makes tables with confidence intervals from finished runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.staleness_study.methods import ETAS, METHODS, REFERENCE, UNBOUNDED, runs_as
from benchmarks.staleness_study.sweep import Plan, jobs_of, key_of

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


def drift(record: Record) -> float:
    """Return KL(mu, pi_old), the mean over the steps."""
    return record["kl"]


class Results:
    """Runs of one setting. A cell counts once it has a run of every seed."""

    def __init__(self, records: Sequence[Record], setting: str, seeds: Sequence[int]) -> None:
        self.setting = setting
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

    def has_cell(self, method: str, eta: int) -> bool:
        """Return whether the method has runs of its own at this eta."""
        return (method, eta) in self._runs

    def interval(self, measure: Measure, method: str, eta: int) -> Interval | None:
        runs = self.cell(method, eta)
        return Interval.of([measure(run) for run in runs.values()]) if runs else None

    def change(self, measure: Measure, method: str, eta: int) -> Interval | None:
        """Return the change from eta 0 of the same method, paired by seed."""
        return difference(measure, self.cell(method, eta), self.cell(method, 0))

    def lead(self, measure: Measure, method: str, eta: int, reference: str = REFERENCE) -> Interval | None:
        """Return the lead over another method at the same eta, paired by seed."""
        return difference(measure, self.cell(method, eta), self.cell(reference, eta))


def difference(measure: Measure, runs: Mapping[int, Record], others: Mapping[int, Record]) -> Interval | None:
    """Return how far runs are above others of the same seeds; None if there are none."""
    if not runs or not others:
        return None
    return Interval.of([measure(run) - measure(others[seed]) for seed, run in runs.items()])


def eta_name(eta: int) -> str:
    return "unbounded" if eta == UNBOUNDED else str(eta)


def levels_table(results: Results, measure: Measure, digits: int = 1) -> str:
    """Return a table of method by eta: mean and half-width."""

    def cell(method: str, eta: int) -> str:
        interval = results.interval(measure, method, eta)
        return "" if interval is None else f"{interval.mean:.{digits}f} ± {interval.half:.{digits}f}"

    return _table(results, ETAS, cell)


def changes_table(results: Results, measure: Measure) -> str:
    """Return a table of method by eta: change from eta 0, bold if the interval does not contain 0."""
    return _table(results, ETAS[1:], lambda method, eta: _signed(results.change(measure, method, eta)))


def leads_table(results: Results, measure: Measure, reference: str = REFERENCE) -> str:
    """Return a table of method by eta: lead over a method, bold if the interval does not contain 0."""

    def cell(method: str, eta: int) -> str:
        if runs_as(method, eta) == runs_as(reference, eta):
            return "0" if results.cell(method, eta) else ""
        return _signed(results.lead(measure, method, eta, reference))

    others = [method for method in results.methods() if method != reference]
    etas = [eta for eta in ETAS if results.cell(reference, eta)]
    return _table(results, etas, cell, others)


def differences_table(results: Results, others: Results, measure: Measure) -> str:
    """Return a table of method by eta: difference from the same cell of another setting."""

    def cell(method: str, eta: int) -> str:
        return _signed(difference(measure, results.cell(method, eta), others.cell(method, eta)))

    return _table(results, ETAS, cell)


def at_best_rate(
    by_rate: Mapping[float, Results], method: str, eta: int
) -> tuple[float, dict[int, float]] | None:
    """Return the learning rate of the best final accuracy, and the accuracy of each seed at its rate.

    The rate of a seed is the best one for the other seeds, so that no run helps to choose itself. None unless
    the cell has run at every rate.
    """
    runs = {rate: results.cell(method, eta) for rate, results in by_rate.items()}
    if not all(runs.values()):
        return None
    seeds = list(next(iter(runs.values())))

    def chosen(judges: Sequence[int]) -> float:
        return max(runs, key=lambda rate: sum(final(runs[rate][seed]) for seed in judges))

    rates = {seed: chosen([judge for judge in seeds if judge != seed]) for seed in seeds}
    return chosen(seeds), {seed: final(runs[rate][seed]) for seed, rate in rates.items()}


def best_rates_table(by_rate: Mapping[float, Results], etas: Sequence[int]) -> str:
    """Return a table of method by eta: final accuracy at the best learning rate, and this rate."""

    def cell(method: str, eta: int) -> str:
        if (chosen := at_best_rate(by_rate, method, eta)) is None:
            return ""
        rate, accuracies = chosen
        interval = Interval.of(list(accuracies.values()))
        return f"{interval.mean:.1f} ± {interval.half:.1f} ({rate * 1e4:g})"

    return _rates_table(by_rate, etas, cell)


def best_rate_leads_table(by_rate: Mapping[float, Results], etas: Sequence[int]) -> str:
    """Return a table of method by eta: lead over the reference, each at its own best rate."""

    def cell(method: str, eta: int) -> str:
        ours, theirs = (at_best_rate(by_rate, name, eta) for name in (method, REFERENCE))
        if method == REFERENCE or ours is None or theirs is None:
            return ""
        return _signed(Interval.of([accuracy - theirs[1][seed] for seed, accuracy in ours[1].items()]))

    return _rates_table(by_rate, etas, cell)


def _rates_table(
    by_rate: Mapping[float, Results], etas: Sequence[int], cell: Callable[[str, int], str]
) -> str:
    rows = ["| eta | " + " | ".join(map(eta_name, etas)) + " |", "|---" * (len(etas) + 1) + "|"]
    for method in METHODS:
        texts = [cell(method, eta) for eta in etas]
        # Fresh batches alone say nothing of a method that shares them with the reference.
        if any(text for eta, text in zip(etas, texts, strict=True) if eta):
            rows.append(f"| `{method}` | " + " | ".join(texts) + " |")
    return "\n".join(rows)


def dropped_table(engines: Sequence[Results]) -> str:
    """Return a table of the failures that ``correction.negative`` drops under engines that round."""
    rows = [
        "| engine | method | eta | abs log(pi_old / mu) | dropped in the first mini-batch | in all of them "
        "| final accuracy, % |",
        "|---|---|---|---|---|---|---|",
    ]
    for results in engines:
        for method in results.methods():
            for eta in ETAS:
                if not (runs := results.cell(method, eta)):
                    continue
                gap = _mean(runs, lambda run: run["gap"])
                shares = (
                    Interval.of([100 * run[name] for run in runs.values()])
                    for name in ("dropped_first", "dropped")
                )
                texts = [f"{share.mean:.1f} ± {share.half:.1f} %" for share in shares]
                accuracy = Interval.of([final(run) for run in runs.values()])
                rows.append(
                    f"| {results.setting} | `{method}` | {eta_name(eta)} | {gap:.4f} | {' | '.join(texts)} | "
                    f"{accuracy.mean:.1f} ± {accuracy.half:.1f} |"
                )
    return "\n".join(rows)


def coverage(plan: Plan, seeds: Sequence[int], records: Sequence[Record]) -> str:
    """Return how much of the plan has run, its cost, and the cells that lack runs."""
    done = {key_of(record): record for record in records}
    jobs = jobs_of(plan, seeds)
    present = [done[job.key] for job in jobs if job.key in done]
    cost = sum(record["cpu_s"] for record in present)
    mean = cost / max(1, len(present))
    lines = [
        f"{len(present)} of the plan's {len(jobs)} runs are done. They took {cost:,.0f} s of CPU, "
        f"{mean:.1f} s each; at this mean, the whole plan takes {mean * len(jobs):,.0f} s, on two cores "
        f"{mean * len(jobs) / 2 / 60:.0f} minutes."
    ]
    lacking: dict[tuple[str, int], list[str]] = {}
    for job in jobs:
        if job.key not in done:
            methods = lacking.setdefault((job.setting.name, job.eta), [])
            if f"`{job.method}`" not in methods:
                methods.append(f"`{job.method}`")
    if lacking:
        lines += ["", "Not run, or not with every seed:", ""]
    lines += [
        f"- {setting}, eta {eta_name(eta)}: {', '.join(methods)}"
        for (setting, eta), methods in lacking.items()
    ]
    return "\n".join(lines)


def _signed(interval: Interval | None) -> str:
    if interval is None:
        return ""
    text = f"{interval.mean:+.1f} ± {interval.half:.1f}"
    return f"**{text}**" if abs(interval.mean) > interval.half else text


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation. Equal values share the mean of their ranks."""
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, place, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


CAUSES = ("eta", "lr * eta", "KL(mu, pi_old)")
RESAMPLES = 2000
"""Draws of seeds, with replacement, for the intervals of the correlations."""


def correlations_table(results: Mapping[float, Results], methods: Sequence[str]) -> str:
    """Return how the final accuracy of stale cells goes with eta, with lr * eta, and with the measured KL.

    ``results``: by learning rate. Cells are those with a bound above 0. ``methods``: those with a row each;
    another row has them together, and the last one all methods. In brackets: 95 % intervals from
    resampled seeds.
    """
    present = list(dict.fromkeys(method for result in results.values() for method in result.methods()))
    rows = [
        "| | cells | " + " | ".join(CAUSES) + " | lr * eta against eta |",
        "|---" * (len(CAUSES) + 3) + "|",
    ]
    groups = {f"`{method}`": [method] for method in methods} | {
        " and ".join(f"`{method}`" for method in methods): list(methods),
        "all methods": present,
    }
    for name, members in groups.items():
        cells = [
            (lr, eta, list(runs.values()))
            for lr, result in results.items()
            for method in members
            for eta in ETAS
            if eta > 0 and result.has_cell(method, eta) and (runs := result.cell(method, eta))
        ]
        figures, differences = _correlations(cells)
        rows.append(f"| {name} | {len(cells)} | {' | '.join(figures)} | {differences} |")
    return "\n".join(rows)


def _correlations(cells: Sequence[tuple[float, int, Sequence[Record]]]) -> tuple[list[str], str]:
    """Return the correlation of accuracy with each of ``CAUSES``, and that of the second minus the first."""
    eta_C, way_C = [eta for _, eta, _ in cells], [lr * eta for lr, eta, _ in cells]
    kl_CS = np.array([[run["kl"] for run in runs] for *_, runs in cells])
    accuracy_CS = np.array([[final(run) for run in runs] for *_, runs in cells])

    def correlations(seeds: np.ndarray) -> list[float]:
        accuracy_C = accuracy_CS[:, seeds].mean(1).tolist()
        causes = (eta_C, way_C, kl_CS[:, seeds].mean(1).tolist())
        return [rank_correlation(cause, accuracy_C) for cause in causes]

    count = accuracy_CS.shape[1]
    measured = np.array(correlations(np.arange(count)))
    rng = np.random.default_rng(0)
    drawn = np.array([correlations(rng.integers(0, count, count)) for _ in range(RESAMPLES)])
    low, high = np.quantile(drawn, (0.025, 0.975), axis=0)
    figures = [
        f"{value:+.2f} ({below:+.2f} to {above:+.2f})"
        for value, below, above in zip(measured, low, high, strict=True)
    ]
    below, above = np.quantile(drawn[:, 1] - drawn[:, 0], (0.025, 0.975))
    return figures, f"{measured[1] - measured[0]:+.2f} ({below:+.2f} to {above:+.2f})"


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
        texts = [cell(method, eta) for eta in etas]
        if any(texts):
            rows.append(f"| `{method}` | " + " | ".join(texts) + " |")
    return "\n".join(rows)
