"""Shard-to-shard publishing: rate, requests and stall with a real engine, and plans for real models.

    python -m benchmarks.publish                # ten minutes
    python -m benchmarks.publish --parts stall  # some of: rate, stall, faults, plans

Rate: 0.9 billion parameters in bfloat16 from two tensor-parallel ranks to one engine, against the fastest of
bare sends of the same bytes by the same processes. Stall: the quickstart's policy to an engine that
generates, against the same requests without weights, in turns. Faults: seconds of the version
in which an engine is struck, for the engines that are well. Plans: the bytes on the fullest link between
trainer and engines, at 45 GB/s, and the time in which the slowest rank makes its plan.
"""

import json

from rich.console import Console

from benchmarks.harness import parser
from benchmarks.publish import faults, plans, rate, stall
from slipstream.backend.monitor.tables import Columns, rows_table, table_console

PARTS = ("rate", "stall", "faults", "plans")

Row = tuple[str, plans.Planned]
TABLE: Columns[Row] = {
    "plan": lambda row: row[0],
    "GB into an engine": lambda row: f"{row[1].model_bytes / 1e9:.0f}",
    "most out of a rank": lambda row: f"{max(row[1].traffic.out.values()) / 1e9:.1f} GB",
    "most into a rank": lambda row: f"{max(row[1].traffic.into.values()) / 1e9:.1f} GB",
    "fullest link": lambda row: f"{row[1].fullest_s:.2f} s",
    "uncopied": lambda row: f"{row[1].traffic.uncopied / sum(row[1].traffic.out.values()):.1%}",
    "messages of a rank": lambda row: f"{max(row[1].traffic.messages.values())}",
    "its peers": lambda row: f"{max(row[1].traffic.peers.values())}",
    "plan of a rank": lambda row: f"{row[1].plan_s:.2f} s",
}


def rate_document(console: Console) -> dict[str, object]:
    measured = rate.measure()
    gb = measured.n_bytes / 1e9
    requests = ", ".join(f"{path} {count}" for path, count in measured.requests.items())
    console.print(
        f"{gb:.2f} GB from {rate.LAYOUT.world_size} ranks to an engine: {measured.shards_s:.2f} s "
        f"({gb / measured.shards_s:.2f} GB/s); bare sends {measured.bare_s:.2f} s "
        f"({gb / measured.bare_s:.2f} GB/s); ratio {measured.ratio:.2f}; {measured.staging_mb:.0f} MB beside "
        f"the weights; requests: {requests}"
    )
    return {
        "shards_ratio": round(measured.ratio, 3),
        "requests": sum(measured.requests.values()),
        "staging_mb": round(measured.staging_mb, 1),
        "shards_gb_per_s": round(gb / measured.shards_s, 3),
    }


def stall_document(console: Console) -> dict[str, object]:
    measured = stall.measure()
    for name, whole, parts in (
        ("stall of an update", measured.shards_s, measured.shards_parts_s),
        ("its requests alone", measured.floor_s, measured.floor_parts_s),
    ):
        steps = ", ".join(f"{step} {1e3 * seconds:.1f}" for step, seconds in parts.items())
        console.print(f"{name}, ms: {1e3 * whole:.1f} ({steps})")
    console.print(f"{measured.n_bytes / 1e6:.1f} MB; ratio {measured.ratio:.2f}")
    return {"stall_s": round(measured.shards_s, 4), "stall_ratio": round(measured.ratio, 3)}


FAULTS: Columns[faults.Cost] = {
    "fault": lambda cost: cost.fault.name,
    "version before": lambda cost: f"{cost.seconds[0]:.2f} s",
    "struck": lambda cost: f"{cost.seconds[1]:.2f} s",
    "version after": lambda cost: f"{cost.seconds[2]:.2f} s",
    "updated": lambda cost: ", ".join(cost.reports[1].updated),
    "the struck engine's version": lambda cost: cost.stamped,
}


def faults_document(console: Console) -> dict[str, object]:
    costs = [faults.measure(fault) for fault in faults.FAULTS]
    console.print(
        rows_table(f"faults; weights.answer_timeout_s {faults.TIMEOUTS.answer_s:g} s", costs, FAULTS)
    )
    return {"fault_s": {cost.fault.name: round(cost.seconds[1], 2) for cost in costs}}


def plans_document(console: Console) -> dict[str, object]:
    rows = [(name, plans.planned(fleet)) for name, fleet in plans.FLEETS.items()]
    console.print(rows_table("plans", rows, TABLE))
    return {
        "plan_s": round(max(row.plan_s for _, row in rows), 3),
        "fullest_link_s": {name: round(row.fullest_s, 3) for name, row in rows},
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    chosen = options.parse_args().parts
    console = table_console()
    documents = {
        "rate": rate_document,
        "stall": stall_document,
        "faults": faults_document,
        "plans": plans_document,
    }
    result: dict[str, object] = {}
    for part in PARTS:
        if part in chosen:
            result |= documents[part](console)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
