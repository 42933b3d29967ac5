"""Distribution of trajectories over micro-batches and data-parallel ranks. Pure: numpy in, index lists out.

Pack first, distribute second. Best-fit decreasing determines how many micro-batches a mini-batch needs. That
number is rounded up so that every rank gets equally many. The trajectories are then spread over the ranks,
longest first, each to the rank with the least cost so far. If the budget is so tight that a trajectory finds
no room that way, the packs themselves are dealt to the ranks.

The caller gives the cost of each trajectory (``flops``). Attention makes a long trajectory dearer than its
number of tokens suggests, so ranks with equally many tokens would wait for the one with the longest.

Invariants (asserted by the tests):

- every trajectory is in exactly one micro-batch of one mini-batch on one rank;
- all ranks have the same number of micro-batches in a mini-batch, at most the number that best-fit decreasing
  needs, rounded up (pipelines and collectives stay in step);
- no micro-batch exceeds the budget, unless a single trajectory does;
- a micro-batch is idle (empty) only if every other one of the mini-batch has a single trajectory:
  3 trajectories that fill the budget cannot be dealt evenly to 2 ranks;
- the costs of a rank's micro-batches rise to the middle and fall again. Ranks that meet in every micro-batch
  (expert parallelism) meet in ones of similar cost. A pipeline fills at the pace of its first micro-batch and
  drains at that of its last; both are the cheapest, and neighbours differ little.

Costs are summed one by one and compared as Python floats: every rank computes the same plan on any machine.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

import numpy as np

Pack = list[int]
"""Indices of the trajectories in one micro-batch; empty: the rank idles in step with the others."""


def schedule(
    length_N: np.ndarray,
    cost_N: np.ndarray,
    episode_N: np.ndarray,
    *,
    minibatches: int,
    ranks: int,
    budget: int,
    rng: np.random.Generator,
    multiple: int = 1,
) -> list[list[list[Pack]]]:
    """Return packs by [mini-batch][rank][micro-batch]: the same on every rank for the same ``rng`` state.

    length_N: tokens of each trajectory; a micro-batch has room for ``budget`` tokens. cost_N: the quantity to
    balance over ranks, in any unit. episode_N: number of each trajectory's episode, ascending from 0; all
    trajectories of an episode are in one mini-batch. All ranks get the same number of micro-batches, a
    multiple of ``multiple``.

    A rank idles in a mini-batch of too few trajectories, and a batch of too few has fewer mini-batches.
    """
    lengths, costs = length_N.tolist(), cost_N.tolist()
    return [
        distribute(part.tolist(), lengths, costs, ranks=ranks, budget=budget, multiple=multiple)
        for part in split_minibatches(episode_N, minibatches, rng)
    ]


def split_minibatches(episode_N: np.ndarray, minibatches: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Return a random partition of trajectories into ``minibatches`` parts with nearly equally many episodes.

    episode_N: as in ``schedule``. No part is empty: there are fewer parts if there are fewer episodes.
    """
    episodes = len(np.unique(episode_N))
    parts = np.array_split(rng.permutation(episodes), min(minibatches, episodes))
    return [np.flatnonzero(np.isin(episode_N, part)) for part in parts]


def distribute(
    indices: Sequence[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    *,
    ranks: int,
    budget: int,
    multiple: int = 1,
) -> list[list[Pack]]:
    """Return packs by [rank][micro-batch] for one mini-batch: the trajectories ``indices``."""
    longest_first = sorted(indices, key=lambda i: (-lengths[i], i))
    packs = pack(longest_first, lengths, budget)
    packs_per_rank = -(-len(packs) // (ranks * multiple)) * multiple
    dealt = spread(longest_first, lengths, costs, ranks=ranks, packs_per_rank=packs_per_rank, budget=budget)
    if dealt is None:
        dealt = deal(divide(packs, costs, ranks * packs_per_rank), costs, ranks)
    return [_cheapest_outside(packs_of_rank, costs) for packs_of_rank in dealt]


def pack(longest_first: Sequence[int], lengths: Sequence[int], budget: int) -> list[Pack]:
    """Pack by best-fit decreasing: each trajectory goes into the fullest pack that has room for it."""
    packs: list[Pack] = []
    room: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    for index in longest_first:
        fullest = bisect_left(room, (lengths[index], 0))
        if fullest == len(room):
            packs.append([])
            left, number = max(budget, lengths[index]), len(packs) - 1
        else:
            left, number = room.pop(fullest)
        packs[number].append(index)
        insort(room, (left - lengths[index], number))
    return packs


def spread(
    longest_first: Sequence[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    *,
    ranks: int,
    packs_per_rank: int,
    budget: int,
) -> list[list[Pack]] | None:
    """Return ``packs_per_rank`` packs on every rank, or None if a trajectory finds no room.

    The next trajectory goes to the rank with the least cost so far that has room for it, and there into the
    fullest pack with room. The last trajectories go into the packs that would idle otherwise.
    """
    dealt: list[list[Pack]] = [[[] for _ in range(packs_per_rank)] for _ in range(ranks)]
    # For each rank, ascending: (tokens left, pack).
    room = [[(budget, number) for number in range(packs_per_rank)] for _ in range(ranks)]
    having_room = [(0.0, rank) for rank in range(ranks)]  # heap of (cost so far, rank)
    without: list[tuple[int, float, int]] = []  # heap of (-largest room, cost so far, rank)
    idle = ranks * packs_per_rank
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
    """Return ``count`` packs: halve the dearest again and again, then add idle packs.

    Idle packs are added only once every pack holds a single trajectory.
    """
    divided = list(packs)
    while len(divided) < count:
        divisible = [p for p in divided if len(p) > 1]
        if not divisible:
            return divided + [[] for _ in range(count - len(divided))]
        dearest = max(divisible, key=lambda p: _cost(p, costs))
        divided.remove(dearest)
        divided += [dearest[::2], dearest[1::2]]
    return divided


def deal(packs: Sequence[Pack], costs: Sequence[float], ranks: int) -> list[list[Pack]]:
    """Deal equally many packs to each rank.

    The packs are dealt in rounds of similar cost; in each round the dearest goes to the rank with the least
    cost so far.
    """
    ordered = sorted(packs, key=lambda p: -_cost(p, costs))
    dealt: list[list[Pack]] = [[] for _ in range(ranks)]
    total = [0.0] * ranks
    for start in range(0, len(ordered), ranks):
        order = sorted(range(ranks), key=lambda rank: total[rank])
        for rank, dealt_pack in zip(order, ordered[start : start + ranks], strict=True):
            dealt[rank].append(dealt_pack)
            total[rank] += _cost(dealt_pack, costs)
    return dealt


def _cheapest_outside(packs: Sequence[Pack], costs: Sequence[float]) -> list[Pack]:
    ascending = sorted(packs, key=lambda p: _cost(p, costs))
    return ascending[::2] + ascending[1::2][::-1]


def _cost(members: Pack, costs: Sequence[float]) -> float:
    return sum(costs[i] for i in members)


@dataclass(frozen=True)
class Balance:
    """Quality of a plan. Every figure is 1 at best."""

    fill: float
    """Tokens / (micro-batches * budget)."""
    imbalance: float
    """Cost of the dearest rank of each mini-batch / mean cost of a rank: ranks meet once per mini-batch."""
    lockstep: float
    """Cost of the dearest rank of each micro-batch / mean cost of a rank, if ranks meet in every micro-batch,
    as they do with expert parallelism."""


def balance(
    plan: Sequence[Sequence[Sequence[Pack]]], length_N: np.ndarray, cost_N: np.ndarray, budget: int
) -> Balance:
    """Return the balance of a plan by ``schedule``, over all mini-batches of a step."""
    costs = cost_N.tolist()
    by_minibatch = [
        np.array([[_cost(members, costs) for members in rank] for rank in minibatch]) for minibatch in plan
    ]
    mean = sum(cost_RM.sum(1).mean() for cost_RM in by_minibatch)
    return Balance(
        fill=float(length_N.sum() / (sum(cost_RM.size for cost_RM in by_minibatch) * budget)),
        imbalance=float(sum(cost_RM.sum(1).max() for cost_RM in by_minibatch) / mean),
        lockstep=float(sum(cost_RM.max(0).sum() for cost_RM in by_minibatch) / mean),
    )
