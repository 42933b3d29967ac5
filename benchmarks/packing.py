"""From lengths to micro-batches: how full, how even over the ranks, and in how much time.

    python -m benchmarks.packing

10,000 trajectories of log-normal length, for 8 data-parallel ranks; a layer of hidden size 4,096 stands for
the model. Peers' figures were measured with their own code on the same lengths, on one core of this kind of
machine. Then smaller steps, where there is less to even out with: as they are planned, and as they would be
if whole packs were dealt to the ranks.
"""

import json
import time
from dataclasses import dataclass
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from slipstream.backend.batch.packing import Balance, balance, deal, divide, pack, schedule

BUDGET = 32_768
HIDDEN = 4096
REPEATS = 9
SMALLER = ((256, 8), (1024, 8), (1024, 32))
"""Trajectories of a step and data-parallel ranks."""


@dataclass(frozen=True)
class Row:
    seconds: float
    microbatches: int
    fill: float
    imbalance: float
    lockstep: float | None
    over_budget: int


PEERS = {
    "AReaL ffd": Row(0.294, 1200, 0.9979, 1.00001, 1.003, 0),
    "AReaL kk": Row(5.72, 1200, 0.9979, 1.0005, 1.2, 0),
    "slime first-fit": Row(0.229, 1200, 0.9979, 1.0007, 1.42, 0),
    "slime by FLOPs": Row(19.1, 1200, 0.9979, 1.0078, None, 736),
    "verl": Row(11.3, 1200, 0.9979, 1.0, 1.002, 719),
}


def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths, and FLOPs per layer."""
    length_N = np.clip(np.random.default_rng(0).lognormal(np.log(2000), 1.2, n), 16, BUDGET).astype(np.int64)
    return length_N, 12.0 * length_N * HIDDEN**2 + 2.0 * length_N**2 * HIDDEN


def planned(length_N: np.ndarray, cost_N: np.ndarray, ranks: int) -> list[list[list[list[int]]]]:
    return schedule(length_N, cost_N, minibatches=1, ranks=ranks, budget=BUDGET, rng=np.random.default_rng(0))


def measure() -> Row:
    length_N, cost_N = draw(10_000)
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        plan = planned(length_N, cost_N, 8)
        seconds.append(time.perf_counter() - began)
    packs = [one for rank in plan[0] for one in rank]
    found = balance(plan, length_N, cost_N, BUDGET)
    return Row(
        round(median(seconds), 4),
        len(packs),
        round(found.fill, 5),
        round(found.imbalance, 6),
        round(found.lockstep, 5),
        sum(length_N[one].sum() > BUDGET and len(one) > 1 for one in packs),
    )


def smaller(n: int, ranks: int) -> tuple[Balance, Balance]:
    """Of a step as it is planned, and with whole packs dealt."""
    length_N, cost_N = draw(n)
    costs = cost_N.tolist()
    packs = pack(np.argsort(-length_N, kind="stable").tolist(), length_N.tolist(), BUDGET)
    dealt = deal(divide(packs, costs, -(-len(packs) // ranks) * ranks), costs, ranks)
    plan = planned(length_N, cost_N, ranks)
    return balance(plan, length_N, cost_N, BUDGET), balance([dealt], length_N, cost_N, BUDGET)


def main() -> None:
    ours = measure()
    table = Table("", "s", "packs", "fill", "imbalance", "lock-step", "over")
    for name, row in {"ours": ours, **PEERS}.items():
        figures = (row.microbatches, row.fill, row.imbalance, row.lockstep, row.over_budget)
        table.add_row(name, f"{row.seconds:.3g}", *("" if x is None else str(x) for x in figures))
    small = Table("trajectories, ranks", "fill", "imbalance", "packs dealt", "lock-step", "packs dealt")
    for n, ranks in SMALLER:
        found, dealt = smaller(n, ranks)
        figures = (found.fill, found.imbalance, dealt.imbalance, found.lockstep, dealt.lockstep)
        small.add_row(f"{n:,}, {ranks}", *(f"{x:.4f}" for x in figures))
    console = Console()
    console.print(table, small)
    print(
        json.dumps(
            {
                "fill": ours.fill,
                "imbalance": ours.imbalance,
                "lockstep": ours.lockstep,
                "over_budget": int(ours.over_budget),
                "pack_s": ours.seconds,
            }
        )
    )


if __name__ == "__main__":
    main()
