"""Users read streams while the weights change: every answer must arrive whole, in every interrupt mode.

    python -m benchmarks.streaming [--clients 200] [--updates 20] [--modes retract abort] [--kill]

For each mode, `slipstream serve` runs two engines, a trainer and a gateway, and learns from its users. They
read streams of several protocols all the time, and what they have got is compared with the gateway's journal.
With `--kill`, one of the engines is killed half-way.

`first_s` is the median time to the first part of an answer, and `pause_s` the median of the longest times
between two parts of an answer. Prints a table and, as the last line, one JSON object by mode. Exit code 1 if
any answer was not right.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import parser
from benchmarks.streaming.run import Load, Result, measure
from slipstream.backend.monitor.tables import Columns, rows_table, table_console

MODES = ("retract", "in_place", "abort", "drain")


def figures(result: Result) -> dict[str, Any]:
    """Return the figures of a mode."""
    sums = result.account
    return {
        "answers": sums.answers,
        "tokens": sums.tokens,
        "updates": result.updates,
        "crossing": sums.crossing,
        "failed": sums.failed,
        "truncated": sums.truncated,
        "duplicated": sums.duplicated,
        "altered": sums.altered,
        "ends_wrong": sums.ends_wrong,
        "spans_wrong": sums.spans_wrong,
        "repeats": sums.repeats,
        "repeats_wrong": sums.repeats_wrong,
        "ties": sums.ties,
        "first_s": round(statistics.median(sums.firsts_s), 2),
        "pause_s": round(statistics.median(sums.pauses_s), 2),
        "longest_pause_s": round(max(sums.pauses_s), 2),
        "audit_clean": result.is_audit_clean,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--clients", type=int, default=200)
    options.add_argument("--updates", type=int, default=20)
    options.add_argument("--tokens", type=int, default=200, help="largest length of an answer")
    options.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    options.add_argument("--kill", action="store_true", help="kill an engine half-way")
    arguments = options.parse_args()
    results: dict[str, Result] = {}
    for mode in arguments.modes:
        load = Load(mode, arguments.clients, arguments.updates, arguments.tokens, arguments.kill)
        with tempfile.TemporaryDirectory(prefix="slipstream-streaming-") as scratch:
            results[mode] = measure(load, Path(scratch))
        for example in results[mode].account.examples:
            print(f"{mode}: {example}", file=sys.stderr)
    by_mode = {mode: figures(result) for mode, result in results.items()}
    columns: Columns[str] = {
        "": lambda name: name.replace("_", " "),
        **{mode: lambda name, mode=mode: by_mode[mode][name] for mode in by_mode},
    }
    table_console().print(rows_table("streaming", next(iter(by_mode.values())), columns))
    print(json.dumps(by_mode))
    sys.exit(not all(result.account.is_clean and result.is_audit_clean for result in results.values()))


if __name__ == "__main__":
    main()
