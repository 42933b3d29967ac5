"""Users teach the served quickstart policy through a judge model: by its votes, by its hints, and by both.

    python -m benchmarks.judges [--seeds 0 1 2] [--ways reward hints both] [--figure docs/judges.png]

Users send problems through the gateway, say `thanks` or `wrong` of the answers, and explain every other
`wrong`. A scripted judge reads that: its votes give scores (`reward`), a teacher scores the answers given the
judge's hints (`hints`), or both. The teacher is the start policy. Each way gets equally many turns of users
and the same settings, and the judge is down for a third of the time. Held-out problems, which no user asks,
are asked at temperature 0 before and after, through the same gateway. The lists in the last line are gains in
percentage points, one for each seed.
"""

import asyncio
import json
import tempfile
import time
from pathlib import Path

from benchmarks.harness import parser
from benchmarks.judges.run import WAYS, Outcome, learn, prepare
from benchmarks.judges.server import DOWN_S, PERIOD_S
from benchmarks.staleness_study.report import Interval
from slipstream.backend.monitor.tables import Columns, rows_table, table_console

TABLE: Columns[Outcome] = {
    "way": lambda row: row.way,
    "seed": lambda row: row.seed,
    "before": lambda row: f"{row.before:.1%}",
    "after": lambda row: f"{row.after:.1%}",
    "with the hint": lambda row: f"{row.with_hint[0]:.1%} -> {row.with_hint[1]:.1%}",
    "gain, points": lambda row: f"{row.gain:+.1f}",
    "turns": lambda row: f"{row.turns:,}",
    "trained": lambda row: f"{row.trained:,}",
    "questions refused": lambda row: f"{row.refused:.0%}",
    "largest lag": lambda row: row.max_lag,
    "seconds": lambda row: f"{row.seconds:.0f}",
    "audit": lambda row: "clean" if not row.discrepancies else f"{row.discrepancies} discrepancies",
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS)
    options.add_argument("--figure", type=Path, help="PNG to write")
    chosen = options.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slipstream-judges-") as folder:
        root = Path(folder)
        outcomes: list[Outcome] = []
        for seed in chosen.seeds:
            prepare(root, seed)
            for way in chosen.ways:
                outcomes.append(asyncio.run(learn(root, seed, way)))
                print(outcomes[-1], flush=True)
    outcomes.sort(key=lambda outcome: (WAYS.index(outcome.way), outcome.seed))
    table = rows_table("what users say, as votes and as hints", outcomes, TABLE, section=lambda row: row.way)
    table_console().print(table)
    gains = {way: [row.gain for row in outcomes if row.way == way] for way in chosen.ways}
    for way, values in gains.items():
        interval = Interval.of(values)
        print(f"{way}: {interval.mean:+.1f} points, 95 % interval of the mean +- {interval.half:.1f}")
    if chosen.figure is not None:
        from benchmarks.judges.figure import draw  # matplotlib takes a second to load

        down = f"the judge is down for {DOWN_S:g} of every {PERIOD_S:g} s; "
        down += "the teacher is the start policy, given the hint"
        chosen.figure.write_bytes(draw(outcomes, down))
    print(
        json.dumps(
            {
                **gains,
                "before": [round(row.before, 3) for row in outcomes],
                "after": [round(row.after, 3) for row in outcomes],
                "with_hint": [[round(share, 3) for share in row.with_hint] for row in outcomes],
                "turns": [row.turns for row in outcomes],
                "turns_trained": [row.trained for row in outcomes],
                "discrepancies": sum(row.discrepancies for row in outcomes),
                "seconds": round(time.monotonic() - began, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
