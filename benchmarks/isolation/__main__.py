"""Each loop of a run is slowed, stopped and killed in turn: do the others notice?

    python -m benchmarks.isolation                               about twenty minutes on two idle cores
    python -m benchmarks.isolation --only judge --results FILE   one loop; FILE keeps what was measured before
    python -m benchmarks.isolation --report --results FILE       tables and picture of what FILE has

A quickstart with prompts serves twelve users on two engines and learns from them. The trainer, the judge of
turns, the gateway or one of the engines is slowed ten times, stopped for 30 s, or killed. The rates of the
others are compared with those of the 30 s before. All rates are bounded by latency and not by processors:
users think between two requests, and episodes take their time, so that all processes together leave a good
part of two cores idle. Else a disturbance would show as less competition for them, or a restart as more.

`worst_rate` is the smallest of these shares over all disturbances; `audit` counts the discrepancies that
`slipstream audit` finds after each run.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks.isolation.course import LoopRun, disturb
from benchmarks.isolation.disturb import KINDS
from benchmarks.isolation.rates import RATES, others
from benchmarks.isolation.watched import LOOPS
from slipstream.backend.monitor.tables import Columns, rows_table, table_console
from slipstream.backend.quickstart import prepare

Results = dict[str, LoopRun]


def main() -> None:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.isolation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--only", choices=LOOPS, nargs="+", default=[], help="loops to disturb; else all")
    options.add_argument("--kinds", choices=KINDS, nargs="+", default=KINDS)
    options.add_argument("--results", type=Path, help="file that keeps what was measured")
    options.add_argument("--report", action="store_true", help="measure nothing")
    options.add_argument("--picture", type=Path, help="PNG to draw")
    options.add_argument("--inputs", type=Path, help="folder with the quickstart's inputs; else made anew")
    arguments = options.parse_args()
    results = _read(arguments.results)
    with tempfile.TemporaryDirectory(prefix="slipstream-isolation-") as scratch:
        if not arguments.report:
            inputs = arguments.inputs or Path(scratch) / "inputs"
            prepare(inputs / "policy", inputs / "train.jsonl", inputs / "heldout.jsonl", say=_say)
            for loop in arguments.only or LOOPS:
                root = Path(scratch) / loop
                root.mkdir()
                results[loop] = disturb(loop, arguments.kinds, root, inputs, _say)
                if arguments.results:
                    arguments.results.write_bytes(msgspec.json.encode(results))
    if not results:
        sys.exit("there is nothing to report")
    if arguments.picture:
        from benchmarks.isolation.picture import draw  # matplotlib takes a second to load

        arguments.picture.write_bytes(draw([results[loop] for loop in LOOPS if loop in results]))
    report(results)


def report(results: Results) -> None:
    """Print the tables and the JSON object."""
    runs = [results[loop] for loop in LOOPS if loop in results]
    console = table_console()
    rows = [Row(run, cell) for run in runs for cell in run.cells]
    console.print(rows_table("rates beside a disturbance, in per cent of those before it", rows, SHARES))
    console.print(rows_table("longest time without an event, s", rows, GAPS))
    console.print(rows_table("queues, and answers", rows, QUEUES))
    shares = [share for row in rows for share in row.cell.shares.values()]
    print(
        json.dumps(
            {
                "worst_rate": round(min(shares), 3),
                "audit": sum(len(run.discrepancies) for run in runs),
                "rates": {
                    f"{row.cell.loop} {row.cell.kind}": {
                        name: round(share, 3) for name, share in row.cell.shares.items()
                    }
                    for row in rows
                },
            }
        )
    )


class Row:
    """A row of the tables."""

    def __init__(self, run, cell) -> None:
        self.run = run
        self.cell = cell

    @property
    def name(self) -> str:
        return f"{self.cell.loop} {self.cell.kind}"

    def share(self, rate: str) -> str:
        calm, harmed = self.cell.rates[rate]
        text = f"{100 * harmed / calm:.0f} %" if calm else "-"
        return text if rate in others(self.cell.loop) else f"({text})"


SHARES: Columns[Row] = {
    "": lambda row: row.name,
    **{rate: lambda row, rate=rate: row.share(rate) for rate in RATES},
    "cores before": lambda row: f"{row.cell.cores[0]:.2f}",
    "cores": lambda row: f"{row.cell.cores[1]:.2f}",
}
GAPS: Columns[Row] = {
    "": lambda row: row.name,
    **{rate: lambda row, rate=rate: f"{row.cell.gaps_s[rate]:.1f}" for rate in RATES},
}
QUEUES: Columns[Row] = {
    "": lambda row: row.name,
    "p50, p99 before, s": lambda row: _pair(row.cell.latency_s),
    "p50, p99, s": lambda row: _pair(row.cell.latency_harmed_s),
    "publication before, s": lambda row: _pair((row.cell.publication_s[0], row.cell.stall_s[0])),
    "publication, s": lambda row: _pair((row.cell.publication_s[1], row.cell.stall_s[1])),
    **{
        name: lambda row, name=name: f"{row.cell.depths[name]:g}"
        for name in (
            "entries that the driver lacks",
            "turns without a verdict",
            "oldest turn without a verdict, s",
            "turns ready",
            "oldest turn ready, s",
            "groups ready",
        )
    },
}


def _pair(values: tuple[float, float] | None) -> str:
    return "-" if values is None else "{:.2f}, {:.2f}".format(*values)


def _read(path: Path | None) -> Results:
    if path is None or not path.exists():
        return {}
    return msgspec.json.decode(path.read_bytes(), type=dict[str, LoopRun])


def _say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.0f} s  {text}", flush=True)


BEGAN = time.monotonic()

if __name__ == "__main__":
    main()
