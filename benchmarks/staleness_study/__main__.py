"""Settings, seeds and cells of the study: `python -m benchmarks.staleness_study [--quick | --report]`."""

import argparse
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.staleness_study.methods import ETAS, POSITIVES, REFERENCE, cells
from benchmarks.staleness_study.report import (
    Results,
    best_rate_leads_table,
    best_rates_table,
    changes_table,
    correlations_table,
    coverage,
    differences_table,
    drift,
    dropped_table,
    fill_in,
    final,
    leads_table,
    levels_table,
)
from benchmarks.staleness_study.study import Setting
from benchmarks.staleness_study.sweep import Plan, ResultsInUse, read_results, sweep
from benchmarks.staleness_study.workers import WorkerFailed

FOLDER = Path(__file__).parent
PAGE, RESULTS, FIGURE, KL_FIGURE = (
    FOLDER / name for name in ("README.md", "results.jsonl", "accuracy.png", "drift.png")
)
POLICIES = Path("runs/.staleness-study")

STANDARD = Setting("standard", lr=2.5e-4, steps=48, eval_every=8, held_out=300)
GENTLE = Setting("gentle", lr=1.5e-4, steps=48, eval_every=8, held_out=300)
HARSH = Setting("harsh", lr=4e-4, steps=48, eval_every=8, held_out=300)
RATES = (GENTLE, STANDARD, HARSH)
UNIFORM = replace(STANDARD, name="uniform", lag="uniform")
OVERRATING = replace(STANDARD, name="overrating", judge="overrating")
OVERRATING_GENTLE = replace(GENTLE, name="overrating, gentle", judge="overrating")
BFLOAT16 = replace(STANDARD, name="bfloat16", engine="bfloat16")
FLOAT8 = replace(STANDARD, name="float8", engine="float8")
SETTINGS = (*RATES, UNIFORM, OVERRATING, OVERRATING_GENTLE, BFLOAT16, FLOAT8)
SEEDS = (0, 1, 2, 3, 4)
"""Learning rates and the number of steps were chosen with other seeds, 100 and 101."""

FIRST = ("naive", "decoupled")
OTHERS = ("negative", "dppo", "decayed_clip", "interpolated", "cispo", "m2po")
TAPERED = ("asymmetric", "topr", "drift")
LARGE = (8, 16)
"""Values of eta for which the page recommends something beside the default."""

PLAN: Plan = (
    (STANDARD, list(cells(FIRST, ETAS))),
    (GENTLE, list(cells(FIRST, ETAS))),
    (HARSH, list(cells(FIRST, ETAS))),
    (STANDARD, list(cells((*OTHERS, "unweighted"), ETAS))),
    (STANDARD, list(cells((POSITIVES, *TAPERED), (0, *LARGE)))),
    (STANDARD, list(cells((POSITIVES,), (4,)))),
    (OVERRATING, list(cells((REFERENCE, POSITIVES, "negative", "dppo", *TAPERED), (0, 16)))),
    (OVERRATING_GENTLE, list(cells((REFERENCE, "asymmetric"), (16,)))),
    (UNIFORM, list(cells((*FIRST, "negative", "dppo", POSITIVES, *TAPERED), (16,)))),
    (BFLOAT16, list(cells(("negative", "negative_relative"), (0,)))),
    (FLOAT8, list(cells(("negative", "negative_relative"), (0,)))),
    (GENTLE, list(cells((*OTHERS, POSITIVES, *TAPERED), (16,)))),
    (HARSH, list(cells((*OTHERS, POSITIVES, *TAPERED), (16,)))),
    (BFLOAT16, list(cells(("negative", "negative_relative"), (16,)))),
    (GENTLE, list(cells((*OTHERS, POSITIVES, *TAPERED), (8,)))),
    (HARSH, list(cells((*OTHERS, POSITIVES, *TAPERED), (8,)))),
    (GENTLE, list(cells((*OTHERS, POSITIVES, *TAPERED), (0,)))),
    (HARSH, list(cells((*OTHERS, POSITIVES, *TAPERED), (0,)))),
    (UNIFORM, list(cells((*FIRST, "negative", "dppo", POSITIVES, *TAPERED), (8,)))),
    (STANDARD, list(cells(("drift_admission",), (16,)))),
)

say = partial(print, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.staleness_study",
        description="Do the runs that results.jsonl lacks, then write tables and figures.",
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--quick", action="store_true", help="two short runs that are not kept: one minute")
    only.add_argument("--report", action="store_true", help="tables and figures of the existing runs")
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="processes that do runs, each with one thread (default: one for each core, %(default)s)",
    )
    options = parser.parse_args()
    if options.workers < 1:
        parser.error(f"--workers is {options.workers}; at least one process does the runs")
    try:
        if options.quick:
            quick(options.workers)
            return
        if not options.report:
            sweep(PLAN, SEEDS, RESULTS, POLICIES, say, workers=options.workers)
    except KeyboardInterrupt:
        sys.exit("stopped; the next call does the runs that are missing now")
    except (ResultsInUse, WorkerFailed) as error:
        sys.exit(str(error))
    report()


def quick(workers: int) -> None:
    setting = Setting("quick", lr=STANDARD.lr, steps=12, eval_every=6, held_out=100)
    with TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        plan = [(setting, [(REFERENCE, 0), ("naive", 4)])]
        sweep(plan, [100], results, Path(folder), say, workers=workers)


def report() -> None:
    from benchmarks.staleness_study.figure import draw, draw_over_kl  # matplotlib takes a second to load

    records = list(read_results(RESULTS).values())
    of = {setting.name: Results(records, setting.name, SEEDS) for setting in SETTINGS}
    by_rate = {setting.lr: of[setting.name] for setting in RATES}
    standard = of[STANDARD.name]
    parts = {
        "runs": coverage(PLAN, SEEDS, records),
        "best rate: final": best_rates_table(by_rate, (0, *LARGE)),
        "best rate: lead": best_rate_leads_table(by_rate, LARGE),
        "correlations": correlations_table(by_rate, FIRST),
        "uniform: final": levels_table(of["uniform"], final),
        "uniform: lead": leads_table(of["uniform"], final),
        "uniform: change": differences_table(of["uniform"], standard, final),
        "overrating: final": levels_table(of["overrating"], final),
        "overrating: lead": leads_table(of["overrating"], final),
        "overrating: control": leads_table(of["overrating"], final, POSITIVES),
        "overrating, gentle: final": levels_table(of[OVERRATING_GENTLE.name], final),
        "standard: control": leads_table(standard, final, POSITIVES),
        "dropped": dropped_table([of[BFLOAT16.name], of[FLOAT8.name]]),
    }
    for setting in RATES:
        results = of[setting.name]
        parts |= {
            f"{setting.name}: final": levels_table(results, final),
            f"{setting.name}: change": changes_table(results, final),
            f"{setting.name}: lead": leads_table(results, final),
            f"{setting.name}: drift": levels_table(results, drift, digits=3),
        }
    drawn = {f"{setting.name}: learning rate {setting.lr * 1e4:g}e-4": of[setting.name] for setting in RATES}
    PAGE.write_text(fill_in(PAGE.read_text(encoding="utf-8"), parts), encoding="utf-8")
    FIGURE.write_bytes(draw(drawn, "Held-out accuracy after training on stale batches"))
    KL_FIGURE.write_bytes(draw_over_kl(drawn, "Held-out accuracy over the measured drift", FIRST))
    say(f"wrote {PAGE}, {FIGURE} and {KL_FIGURE}: {len(records)} runs")


if __name__ == "__main__":
    main()
