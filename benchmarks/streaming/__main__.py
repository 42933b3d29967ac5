"""Users read streams while the weights change: every answer must arrive whole, in every interrupt mode.

    python -m benchmarks.streaming [--clients N] [--updates N] [--modes retract in_place abort drain] [--kill]

For each mode, `slipstream serve` runs two engines, a trainer and a gateway, and learns from its users. They
read streams of several protocols all the time, and what they have got is compared with the gateway's journal.
With `--kill`, one of the engines is killed half-way.
"""

import json
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
    found = result.found
    return {
        "answers": found.answers,
        "tokens": found.tokens,
        "updates": result.updates,
        "crossing": found.crossing,
        "failed": found.failed,
        "truncated": found.truncated,
        "duplicated": found.duplicated,
        "altered": found.altered,
        "ends_wrong": found.ends_wrong,
        "spans_wrong": found.spans_wrong,
        "repeats": found.repeats,
        "repeats_wrong": found.repeats_wrong,
        "ties": found.ties,
        "first_s": round(found.first_s, 2),
        "pause_s": round(found.pause_s, 2),
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
        for example in results[mode].found.examples:
            print(f"{mode}: {example}", file=sys.stderr)
    rows = [{"mode": mode, **figures(result)} for mode, result in results.items()]
    columns: Columns[dict[str, Any]] = {
        name.replace("_", " "): lambda row, name=name: row[name] for name in rows[0]
    }
    table_console().print(rows_table("streaming", rows, columns))
    print(json.dumps({mode: figures(result) for mode, result in results.items()}))
    sys.exit(not all(result.found.is_clean and result.is_audit_clean for result in results.values()))


if __name__ == "__main__":
    main()
