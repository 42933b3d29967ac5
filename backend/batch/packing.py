"""Which trajectories go into which micro-batch of which data-parallel rank. Pure: numpy in, index lists out.

Pack first, distribute second. Best-fit decreasing says how many micro-batches a mini-batch needs; rounded up,
every rank gets equally many, whatever is in them. The trajectories are then spread over the ranks, longest
first, each to the rank that has the least to compute so far. Only where the budget is so tight that one of
them finds no room that way, the packs themselves are dealt.

What a trajectory costs is given (``flops``): attention makes a long one dearer than its tokens tell,
and ranks with as many tokens each would wait for the one with the longest.

Invariants (asserted by the tests):

- every trajectory is in exactly one micro-batch of one mini-batch on one rank;
- all ranks have the same number of micro-batches in a mini-batch, no more than best-fit decreasing needs,
  rounded up (pipelines and collectives stay in step);
- no micro-batch is over the budget, unless a single trajectory is;
- a micro-batch is idle, which is to have no trajectory, only where every other one of the mini-batch has a
  single one: 3 trajectories that fill the budget cannot be dealt evenly to 2 ranks;
- the costs of a rank's micro-batches rise to the middle and fall again. Ranks that meet in every micro-batch
  (experts) meet in ones of similar cost; a pipeline, which fills at the pace of the first one and drains at
  that of the last, has the cheapest there, and neighbours that differ little.

Costs are added one by one and compared as Python floats: every rank finds the same plan on any machine.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

import numpy as np

Pack = list[int]
"""Indices of the trajectories in one micro-batch; none: the rank idles along with the others."""


def schedule(
    length_N: np.ndarray,
    cost_N: np.ndarray,
    *,
    minibatches: int,
    ranks: int,
    budget: int,
    rng: np.random.Generator,
    multiple: int = 1,
) -> list[list[list[Pack]]]:
    """[mini-batch][rank][micro-batch] of packs. The same on every rank for the same ``rng`` state.

    ``length_N`` is in tokens, of which a micro-batch has room for ``budget``; ``cost_N`` is in whatever
    the ranks should have equally much of. Every rank has as many micro-batches as the others, a
    ``multiple`` of them.

    Raises ValueError when there are fewer trajectories than that: a rank would have nothing to do.
    """
    lengths, costs = length_N.tolist(), cost_N.tolist()
    return [
        distribute(part.tolist(), lengths, costs, ranks=ranks, budget=budget, multiple=multiple)
        for part in split_minibatches(len(lengths), minibatches, rng)
    ]


def split_minibatches(n: int, minibatches: int, rng: np.random.Generator) -> list[np.ndarray]:
    """A random partition of n trajectories into ``minibatches`` parts of nearly equal size."""
    return np.array_split(rng.permutation(n), minibatches)


def distribute(
    indices: Sequence[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    *,
    ranks: int,
    budget: int,
    multiple: int = 1,
) -> list[list[Pack]]:
    """[rank][micro-batch] of packs for one mini-batch, the trajectories ``indices``."""
    if len(indices) < ranks * multiple:
        raise ValueError(
            f"{len(indices)} trajectories cannot keep {ranks} data-parallel ranks busy, "
            f"with at least {multiple} micro-batches each"
        )
    longest_first = sorted(indices, key=lambda i: (-lengths[i], i))
    packs = pack(longest_first, lengths, budget)
    each = -(-len(packs) // (ranks * multiple)) * multiple
    dealt = spread(longest_first, lengths, costs, ranks=ranks, each=each, budget=budget)
    if dealt is None:
        dealt = deal(divide(packs, costs, ranks * each), costs, ranks)
    return [_cheapest_outside(packs_of_rank, costs) for packs_of_rank in dealt]


def pack(longest_first: Sequence[int], lengths: Sequence[int], budget: int) -> list[Pack]:
    """Best-fit decreasing: each trajectory goes into the fullest pack that has room for it."""
    packs: list[Pack] = []
    room: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    for index in longest_first:
        at = bisect_left(room, (lengths[index], 0))
        if at == len(room):
            packs.append([])
            left, number = max(budget, lengths[index]), len(packs) - 1
        else:
            left, number = room.pop(at)
        packs[number].append(index)
        insort(room, (left - lengths[index], number))
    return packs


def spread(
    longest_first: Sequence[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    *,
    ranks: int,
    each: int,
    budget: int,
) -> list[list[Pack]] | None:
    """``each`` packs on every rank, or None where a trajectory finds no room.

    The next trajectory goes to the rank of the least cost so far that has room for it, there into the fullest
    pack that has. The last ones go into what would idle otherwise.
    """
    dealt: list[list[Pack]] = [[[] for _ in range(each)] for _ in range(ranks)]
    # Of each rank, ascending: (tokens left, pack).
    room = [[(budget, number) for number in range(each)] for _ in range(ranks)]
    having_room = [(0.0, rank) for rank in range(ranks)]  # heap of (cost so far, rank)
    without: list[tuple[int, float, int]] = []  # heap of (-largest room, cost so far, rank)
    idle = ranks * each
    for index, remaining in zip(longest_first, range(len(longest_first), 0, -1), strict=True):
        alone = remaining <= idle
        needed = budget if alone else min(lengths[index], budget)
        while without and -without[0][0] >= needed:
            _, cost, rank = heappop(without)
            heappush(having_room, (cost, rank))
        while having_room and room[having_room[0][1]][-1][0] < needed:
            cost, rank = heappop(having_room)
            heappush(without, (-room[rank][-1][0], cost, rank))
        if not having_room:
            return None
        cost, rank = having_room[0]
        left, number = room[rank].pop(bisect_left(room[rank], (needed, 0)))
        idle -= not dealt[rank][number]
        dealt[rank][number].append(index)
        insort(room[rank], (left - min(lengths[index], budget), number))
        heapreplace(having_room, (cost + costs[index], rank))
    return dealt


def divide(packs: Sequence[Pack], costs: Sequence[float], count: int) -> list[Pack]:
    """``count`` packs: the dearest is halved again and again; idle ones once each has a single trajectory."""
    found = list(packs)
    while len(found) < count:
        divisible = [p for p in found if len(p) > 1]
        if not divisible:
            return found + [[] for _ in range(count - len(found))]
        dearest = max(divisible, key=lambda p: _cost(p, costs))
        found.remove(dearest)
        found += [dearest[::2], dearest[1::2]]
    return found


def deal(packs: Sequence[Pack], costs: Sequence[float], ranks: int) -> list[list[Pack]]:
    """Packs to ranks, equally many each: in rounds of similar cost, the dearest to who has least so far."""
    ordered = sorted(packs, key=lambda p: -_cost(p, costs))
    dealt: list[list[Pack]] = [[] for _ in range(ranks)]
    total = [0.0] * ranks
    for start in range(0, len(ordered), ranks):
        order = sorted(range(ranks), key=lambda rank: total[rank])
        for rank, one in zip(order, ordered[start : start + ranks], strict=True):
            dealt[rank].append(one)
            total[rank] += _cost(one, costs)
    return dealt


def _cheapest_outside(packs: Sequence[Pack], costs: Sequence[float]) -> list[Pack]:
    ascending = sorted(packs, key=lambda p: _cost(p, costs))
    return ascending[::2] + ascending[1::2][::-1]


def _cost(one: Pack, costs: Sequence[float]) -> float:
    return sum(costs[i] for i in one)


@dataclass(frozen=True)
class Balance:
    """How good a plan is. All figures are 1 at best."""

    fill: float
    """Tokens / (micro-batches * budget)."""
    imbalance: float
    """Cost of the dearest rank / mean over ranks: what ranks that meet once in a mini-batch wait."""
    lockstep: float
    """The same if they meet in every micro-batch, as they do for experts that are spread over them."""


def balance(
    plan: Sequence[Sequence[Sequence[Pack]]], length_N: np.ndarray, cost_N: np.ndarray, budget: int
) -> Balance:
    """Of a plan by ``schedule``: all mini-batches of a step, one after the other."""
    costs = cost_N.tolist()
    by_minibatch = [np.array([[_cost(one, costs) for one in rank] for rank in part]) for part in plan]
    mean = sum(cost_RM.sum(1).mean() for cost_RM in by_minibatch)
    return Balance(
        fill=float(length_N.sum() / (sum(cost_RM.size for cost_RM in by_minibatch) * budget)),
        imbalance=float(sum(cost_RM.sum(1).max() for cost_RM in by_minibatch) / mean),
        lockstep=float(sum(cost_RM.max(0).sum() for cost_RM in by_minibatch) / mean),
    )
