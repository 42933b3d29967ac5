"""Settings, seeds and cells of the study: `python -m benchmarks.staleness_study [--quick | --report]`."""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.staleness_study.figure import draw
from benchmarks.staleness_study.methods import ETAS, POSITIVES, REFERENCE, UNBOUNDED, cells
from benchmarks.staleness_study.report import (
    Results,
    area,
    best,
    changes_table,
    correlations_table,
    fill_in,
    final,
    lag_table,
    leads_table,
    levels_table,
)
from benchmarks.staleness_study.study import Setting, read_results, sweep

DOCS = Path(__file__).parents[2] / "docs"
PAGE, RESULTS, FIGURE = (DOCS / f"staleness_study.{suffix}" for suffix in ("md", "jsonl", "png"))
POLICIES = Path("runs/.staleness-study")

STANDARD = Setting("standard", lr=2.5e-4, steps=48, eval_every=8, held_out=300)
GENTLE = Setting("gentle", lr=1.5e-4, steps=48, eval_every=8, held_out=300)
HARSH = Setting("harsh", lr=4e-4, steps=48, eval_every=8, held_out=300)
SETTINGS = (GENTLE, STANDARD, HARSH)
UNIFORM = replace(STANDARD, name="uniform", lag="uniform")
OVERRATING = replace(STANDARD, name="overrating", judge="overrating")
BFLOAT16 = replace(STANDARD, name="bfloat16", engine="bfloat16")
SEEDS = (0, 1, 2, 3, 4)
"""Learning rates and the number of steps were chosen with other seeds, 100 and 101."""

FIRST = ("naive", "decoupled")
OTHERS = ("interpolated", "decayed_clip", "m2po", "dppo", "cispo")
CHECKS = ("unweighted", "negative")
TAPERED = ("topr", "asymmetric")
PLAN = (
    (STANDARD, list(cells(FIRST, ETAS))),
    (STANDARD, list(cells(OTHERS, (8, 0)))),
    (GENTLE, list(cells(FIRST, (0, 8)))),
    (STANDARD, list(cells(OTHERS, (16,)))),
    (HARSH, list(cells(FIRST, (0, 8)))),
    (GENTLE, list(cells(FIRST, (16,)))),
    (STANDARD, list(cells(CHECKS, (8, 16, 0)))),
    (STANDARD, list(cells(("drift",), (16, 8)))),
    (OVERRATING, list(cells((REFERENCE, POSITIVES, "negative"), (16, 0)))),
    (STANDARD, list(cells((POSITIVES, *TAPERED), (16, 8, 0)))),
    (OVERRATING, list(cells((*TAPERED, "dppo"), (16, 0)))),
    (BFLOAT16, list(cells(("negative", "negative_relative"), (0,)))),
    (STANDARD, list(cells(("drift_admission",), (16,)))),
    (UNIFORM, list(cells((*FIRST, "dppo", "negative"), (16, 8)))),
    (STANDARD, list(cells((POSITIVES, *TAPERED, "drift"), (4,)))),
    (HARSH, list(cells((*OTHERS, "negative", POSITIVES, *TAPERED, "drift"), (16,)))),
    (GENTLE, list(cells((*OTHERS, "negative", POSITIVES, *TAPERED), (16,)))),
    (HARSH, list(cells((*OTHERS, "negative", POSITIVES, *TAPERED), (4, 0)))),
    (GENTLE, list(cells((*OTHERS, "negative", POSITIVES, *TAPERED), (4, 0)))),
    (STANDARD, list(cells(OTHERS, (4, UNBOUNDED)))),
    (HARSH, list(cells(FIRST, (4, 16)))),
    (STANDARD, list(cells(OTHERS + CHECKS, ETAS))),
    (GENTLE, list(cells(FIRST, ETAS))),
    (HARSH, list(cells(FIRST, ETAS))),
)
"""Settings with their cells (method, eta), the most important first."""

say = partial(print, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.staleness_study",
        description="Do the runs that docs/staleness_study.jsonl lacks, then write tables and figure.",
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--quick", action="store_true", help="two short runs that are not kept: one minute")
    only.add_argument("--report", action="store_true", help="tables and figure of the existing runs")
    options = parser.parse_args()
    # With one thread, no run waits for a busy core, and a seed gives the same sums on every machine.
    torch.set_num_threads(1)
    if options.quick:
        quick()
        return
    if not options.report:
        for setting, chosen in PLAN:
            sweep(setting, chosen, SEEDS, RESULTS, POLICIES, say)
    report()


def quick() -> None:
    setting = Setting("quick", lr=STANDARD.lr, steps=12, eval_every=6, held_out=100)
    with TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        sweep(setting, [(REFERENCE, 0), ("naive", 4)], [100], results, Path(folder), say)


def report() -> None:
    records = list(read_results(RESULTS).values())
    by_rate = {setting.lr: Results(records, setting.name, SEEDS) for setting in SETTINGS}
    parts = {"correlations": correlations_table(by_rate, FIRST)}
    drawn: dict[str, Results] = {}
    for setting in SETTINGS:
        results = Results(records, setting.name, SEEDS)
        if results.methods():
            drawn[f"{setting.name}: learning rate {setting.lr * 1e4:g}e-4"] = results
        parts |= {
            f"{setting.name}: final": levels_table(results, final),
            f"{setting.name}: change": changes_table(results, final),
            f"{setting.name}: lead": leads_table(results, final),
            f"{setting.name}: area": levels_table(results, area),
            f"{setting.name}: area lead": leads_table(results, area),
            f"{setting.name}: best": levels_table(results, best),
            f"{setting.name}: lag": lag_table(results),
        }
    overrated = Results(records, OVERRATING.name, SEEDS)
    parts["overrating: final"] = levels_table(overrated, final)
    parts["overrating: lead"] = leads_table(overrated, final)
    PAGE.write_text(fill_in(PAGE.read_text(encoding="utf-8"), parts), encoding="utf-8")
    FIGURE.write_bytes(draw(drawn, "Held-out accuracy after training on stale batches"))
    say(f"wrote {PAGE} and {FIGURE}: {len(records)} runs")


if __name__ == "__main__":
    main()
