"""Trajectories that begin with the same tokens compute these once. Pure: numpy in, index lists out.

In the order of their tokens, trajectories stand as the leaves of their prefix tree do. Each takes the tokens
that it has in common with the one before it, whose tokens may be taken in turn, and adds its own:

    p p p a a       prompt and first completion
    . . . b b b     takes the prompt
    . . . b c       takes the prompt and one token of a completion

The states of a token depend on the ids up to it and on their positions, which are the same in both. Loss,
policy versions and advantages belong to trajectories and may differ.

Invariants (asserted by the tests):

- the own tokens of a micro-batch's trajectories are the nodes of their prefix tree, each once;
- no micro-batch exceeds the budget, by its own tokens or those with loss, unless a single trajectory does;
- every rank has the same number of micro-batches, and every trajectory is in one of them;
- the dearest rank computes at most (1 - ``WORTH``) of what it would without sharing, or nothing changes.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from slipstream.backend.batch.packing import Pack, distribute
from slipstream.rollout.tokens.routes import NO_ROUTE

WORTH = 0.1
"""Share of the FLOPs of the dearest rank that must be saved. Keys are gathered once more for trajectories
that take tokens, and their attention has a mask in place of a causal kernel: below this little is gained."""

MASK_PAIRS = 2**26
"""Pairs of a query and a key for which attention to taken tokens holds a mask at one time, without a GPU."""

PARTS = (1, 4)
"""Parts into which trees may be cut for a rank's share. Few share the most, many are easier to balance."""


def tree_order(tokens: Sequence[np.ndarray]) -> list[int]:
    """Return the places of trajectories in the order of their token ids, which are below 2**32, or of the
    numbers of ``keyed``."""
    keys = [ids.astype(">u8" if ids.dtype == np.uint64 else ">u4").tobytes() for ids in tokens]
    return sorted(range(len(keys)), key=lambda place: keys[place])


def taken(tokens: Sequence[np.ndarray]) -> np.ndarray:
    """Return how many tokens each trajectory has in common with the one before it, int64 [N].

    >>> taken([np.array([7, 8, 9]), np.array([7, 8, 1, 2]), np.array([7])]).tolist()
    [0, 2, 1]
    """
    taken_N = np.zeros(len(tokens), np.int64)
    for place, (before, ids) in enumerate(pairwise(tokens), start=1):
        n = min(len(before), len(ids))
        differs = np.flatnonzero(before[:n] != ids[:n])
        taken_N[place] = differs[0] if len(differs) else n
    return taken_N


def keyed(tokens: Sequence[np.ndarray], routes: Sequence[npt.NDArray[np.uint16] | None]) -> list[np.ndarray]:
    """Return a number for each token, which is that of tokens with the same id and the same experts.

    routes: the engine's experts of the tokens of each trajectory (``Trajectory.routes_TW``); None: not known.
    The numbers are hashes (uint64), which different tokens as good as never have in common; a sort of rows
    of experts takes a hundred times as long.
    """
    widths = {routes_TW.shape[1] for routes_TW in routes if routes_TW is not None}
    if not widths:
        return list(tokens)
    unknown = np.full((1, max(widths)), NO_ROUTE, np.uint16)
    return [
        _hashed(ids, unknown if routes_TW is None else routes_TW)
        for ids, routes_TW in zip(tokens, routes, strict=True)
    ]


_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93], np.uint64)
_HALF = np.uint64(32)
_HASHED_ROWS = 4096
"""Tokens hashed at one time, so that their experts stay in a cache."""


def _hashed(ids: np.ndarray, routes_TW: npt.NDArray[np.uint16]) -> np.ndarray:
    """Return a hash of each token's id and experts, uint64 [T]. A single row of experts is that of all."""
    routes_TW = np.pad(routes_TW, ((0, 0), (0, -routes_TW.shape[1] % 4)))
    block_TB = np.ascontiguousarray(routes_TW).view(np.uint64)
    hash_T = ids.astype(np.uint64)
    for start in range(0, len(hash_T), _HASHED_ROWS):
        part_t = hash_T[start : start + _HASHED_ROWS]
        block_tB = block_TB if len(block_TB) == 1 else block_TB[start : start + _HASHED_ROWS]
        for column in range(block_tB.shape[1]):
            part_t *= _MULTIPLIERS[0]
            part_t ^= part_t >> _HALF
            part_t *= _MULTIPLIERS[1]  # else the highest bits of a column would reach few of the next one's
            part_t ^= block_tB[:, column]
        part_t *= _MULTIPLIERS[0]
        part_t ^= part_t >> _HALF
    return hash_T


def shared_plan(
    plan: Sequence[Sequence[Pack]],
    tokens: Sequence[np.ndarray],
    flops: Callable[[np.ndarray], np.ndarray],
    *,
    loss_N: np.ndarray,
    budget: int,
    multiple: int = 1,
) -> tuple[list[list[Pack]], np.ndarray]:
    """Return the packs of a mini-batch by [rank][micro-batch], and the tokens that each trajectory of the
    batch takes from the one before it in its pack, int64 [N].

    plan: the packs without sharing. tokens: ids of all trajectories of the batch. flops: operations of a
    forward pass over trajectories of given lengths. loss_N: tokens with loss of each trajectory, for which
    the budget must suffice as well, because the LM head computes them for each trajectory. budget, multiple:
    as in ``packing.distribute``. Where sharing saves too little, the plan stays and nothing is taken.
    """
    best, least = [list(packs) for packs in plan], (1 - WORTH) * dearest(plan, tokens, flops)
    members = sorted(place for packs in plan for pack in packs for place in pack)
    taken_N = np.zeros(len(tokens), np.int64)
    if len(members) < 2:
        return best, taken_N
    forest = _Forest(members, tokens, flops, loss_N)
    for parts in PARTS:
        limit = np.inf if len(plan) == 1 else forest.cost(0, len(members)) / (len(plan) * multiple * parts)
        found = forest.distributed(budget, limit, ranks=len(plan), multiple=multiple)
        cost, taken_here_N = dearest(found, tokens, flops, shares=True), taken_in(found, tokens)
        if cost < least and taken_here_N.any():
            best, least, taken_N = found, cost, taken_here_N
    return best, taken_N


def taken_in(plan: Sequence[Sequence[Pack]], tokens: Sequence[np.ndarray]) -> np.ndarray:
    """Return what each trajectory takes from the one before it in its pack, int64 [N]."""
    taken_N = np.zeros(len(tokens), np.int64)
    for pack in (pack for packs in plan for pack in packs):
        taken_N[pack] = taken([tokens[place] for place in pack])
    return taken_N


def dearest(
    plan: Sequence[Sequence[Pack]],
    tokens: Sequence[np.ndarray],
    flops: Callable[[np.ndarray], np.ndarray],
    *,
    shares: bool = False,
) -> float:
    """Return the operations of the rank that computes most."""
    length_N = np.array([len(ids) for ids in tokens], np.int64)
    cost_N = flops(length_N)
    if shares:
        cost_N = cost_N - flops(taken_in(plan, tokens))
    return max(float(sum(cost_N[pack].sum() for pack in packs)) for packs in plan)


class _Forest:
    """The prefix trees of some trajectories: runs of places in their order.

    A run [first, end) computes each of its tokens once. Its first trajectory takes nothing.
    """

    def __init__(
        self,
        members: Sequence[int],
        tokens: Sequence[np.ndarray],
        flops: Callable[[np.ndarray], np.ndarray],
        loss_N: np.ndarray,
    ) -> None:
        self._order = [members[i] for i in tree_order([tokens[place] for place in members])]
        ids = [tokens[place] for place in self._order]
        length_N = np.array([len(each) for each in ids], np.int64)
        self._taken_N = taken(ids)
        self._taken_cost_N = flops(self._taken_N)
        self._own = np.cumsum([0, *(length_N - self._taken_N)])
        self._losses = np.cumsum([0, *loss_N[self._order]])
        self._costs = np.cumsum([0.0, *(flops(length_N) - self._taken_cost_N)])

    def length(self, first: int, end: int) -> int:
        """Return the tokens that a run computes, or those with loss if these are more."""
        own = self._own[end] - self._own[first] + self._taken_N[first]
        return int(max(own, self._losses[end] - self._losses[first]))

    def cost(self, first: int, end: int) -> float:
        """Return the operations of a forward pass over a run."""
        return float(self._costs[end] - self._costs[first] + self._taken_cost_N[first])

    def runs(self, budget: int, limit: float) -> list[tuple[int, int]]:
        """Return runs that keep to ``budget`` tokens and ``limit`` operations; single trajectories need not.

        A run that is too large is cut where its neighbours have the least in common, near its middle.
        """
        found: list[tuple[int, int]] = []
        open_runs = [(0, len(self._order))]
        while open_runs:
            first, end = open_runs.pop()
            fits = self.length(first, end) <= budget and self.cost(first, end) <= limit
            if end - first == 1 or fits:
                found.append((first, end))
                continue
            inner = self._taken_N[first + 1 : end]
            cuts = first + 1 + np.flatnonzero(inner == inner.min())
            cut = int(cuts[np.argmin(np.abs(cuts - (first + end) / 2))])
            open_runs += [(cut, end), (first, cut)]
        return found

    def distributed(self, budget: int, limit: float, *, ranks: int, multiple: int) -> list[list[Pack]]:
        """Return packs of whole runs by [rank][micro-batch], each in the order of its tokens."""
        runs = self.runs(budget, limit)
        packs = distribute(
            range(len(runs)),
            [self.length(*run) for run in runs],
            [self.cost(*run) for run in runs],
            ranks=ranks,
            budget=budget,
            multiple=multiple,
        )
        return [
            [[self._order[i] for run in sorted(pack) for i in range(*runs[run])] for pack in of_rank]
            for of_rank in packs
        ]
