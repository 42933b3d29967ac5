"""Packing of lengths into micro-batches: how full, how evenly over the ranks, and in how much time.

    python -m benchmarks.packing

The first table packs 10,000 trajectories of log-normal length for 8 data-parallel ranks; a layer of hidden
size 4,096 stands for the model. The peers' figures were measured with their own code on the same lengths, on
one core of this kind of machine. The second table has smaller steps, which are harder to balance: as they are
planned, and as they would be if whole packs were dealt to the ranks.
"""

import json
import time
from dataclasses import dataclass
from statistics import median

import numpy as np

from slipstream.backend.batch.packing import Balance, balance, deal, divide, pack, schedule
from slipstream.backend.monitor.tables import Columns, rows_table, table_console

BUDGET = 32_768
HIDDEN = 4096
REPEATS = 9
SMALLER = ((256, 8), (1024, 8), (1024, 32))
"""Trajectories of a step and data-parallel ranks."""


@dataclass(frozen=True)
class Row:
    """Quality of one packing."""

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


TABLE: Columns[tuple[str, Row]] = {
    "": lambda item: item[0],
    "s": lambda item: f"{item[1].seconds:.3g}",
    "packs": lambda item: item[1].microbatches,
    "fill": lambda item: item[1].fill,
    "imbalance": lambda item: item[1].imbalance,
    "lock-step": lambda item: "" if item[1].lockstep is None else item[1].lockstep,
    "over": lambda item: item[1].over_budget,
}


def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw lengths, with their FLOPs per layer."""
    length_N = np.clip(np.random.default_rng(0).lognormal(np.log(2000), 1.2, n), 16, BUDGET).astype(np.int64)
    return length_N, 12.0 * length_N * HIDDEN**2 + 2.0 * length_N**2 * HIDDEN


def planned(length_N: np.ndarray, cost_N: np.ndarray, ranks: int) -> list[list[list[list[int]]]]:
    episode_N = np.arange(len(length_N))
    return schedule(
        length_N, cost_N, episode_N, minibatches=1, ranks=ranks, budget=BUDGET, rng=np.random.default_rng(0)
    )


def measure() -> Row:
    length_N, cost_N = draw(10_000)
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        plan = planned(length_N, cost_N, 8)
        seconds.append(time.perf_counter() - began)
    packs = [indices for rank in plan[0] for indices in rank]
    quality = balance(plan, length_N, cost_N, BUDGET)
    return Row(
        round(median(seconds), 4),
        len(packs),
        round(quality.fill, 5),
        round(quality.imbalance, 6),
        round(quality.lockstep, 5),
        sum(length_N[indices].sum() > BUDGET and len(indices) > 1 for indices in packs),
    )


def smaller(n: int, ranks: int) -> tuple[Balance, Balance]:
    """Return the balance of a step as it is planned, and with whole packs dealt."""
    length_N, cost_N = draw(n)
    costs = cost_N.tolist()
    packs = pack(np.argsort(-length_N, kind="stable").tolist(), length_N.tolist(), BUDGET)
    dealt = deal(divide(packs, costs, -(-len(packs) // ranks) * ranks), costs, ranks)
    plan = planned(length_N, cost_N, ranks)
    return balance(plan, length_N, cost_N, BUDGET), balance([dealt], length_N, cost_N, BUDGET)


def main() -> None:
    ours = measure()
    steps = [(f"{n:,}, {ranks}", *smaller(n, ranks)) for n, ranks in SMALLER]
    columns: Columns[tuple[str, Balance, Balance]] = {
        "trajectories, ranks": lambda step: step[0],
        "fill": lambda step: f"{step[1].fill:.4f}",
        "imbalance": lambda step: f"{step[1].imbalance:.4f}",
        "imbalance, packs dealt": lambda step: f"{step[2].imbalance:.4f}",
        "lock-step": lambda step: f"{step[1].lockstep:.4f}",
        "lock-step, packs dealt": lambda step: f"{step[2].lockstep:.4f}",
    }
    console = table_console()
    console.print(rows_table("10,000 trajectories, 8 ranks", {"ours": ours, **PEERS}.items(), TABLE))
    console.print(rows_table("smaller steps", steps, columns))
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
