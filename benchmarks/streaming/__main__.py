"""Users read streams while the weights change: every answer must arrive whole, in every interrupt mode.

    python -m benchmarks.streaming [--clients 200] [--updates 20] [--modes retract abort] [--kill]

For each mode, `slipstream serve` runs two engines, a trainer and a gateway, and learns from its users. They
read streams of several protocols all the time, and what they have got is compared with the gateway's journal.
With `--kill`, one of the engines is killed half-way.

Prints a table and, as the last line, one JSON object by mode. Exit code 1 if any answer was not right.
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
    found = {mode: figures(result) for mode, result in results.items()}
    columns: Columns[str] = {
        "": lambda name: name.replace("_", " "),
        **{mode: lambda name, mode=mode: found[mode][name] for mode in found},
    }
    table_console().print(rows_table("streaming", next(iter(found.values())), columns))
    print(json.dumps(found))
    sys.exit(not all(result.found.is_clean and result.is_audit_clean for result in results.values()))


if __name__ == "__main__":
    main()
