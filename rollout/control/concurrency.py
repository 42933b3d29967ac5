"""How many trajectories to generate at one time: as many as the engines have KV memory for, and no more.

Too few leave the engines' batches small. Too many wait in the engines' queues, where they grow stale and are
retracted, that is computed again, when the memory of the running ones runs out. What is right depends on how
long answers become, which changes while a policy learns. So it is found as a congestion window is: pressure
makes it smaller at once, calm makes it larger in small steps.

    cut    memory nearly full, or requests retracted for lack of it     limit * CUT
    trim   requests keep waiting in the engines                         limit - as many as wait
    hold   somebody waits, or memory is fairly full                     the dead band between the others
    grow   nobody waits, memory is free, the limit is used up           limit + limit / GROW

A pure state machine that owns no clock, task or client: observations are pushed in, ``limit`` is read out.
Lowering the limit ends nothing that runs, so it takes effect only as requests end. Until then (``in_use``
above ``limit``) the same pressure is still seen, and is not answered by a second cut.

    >>> controller = ConcurrencyController(maximum=100)
    >>> controller.observe([EngineLoad(running=100, waiting=0, kv_use=0.99)], in_use=100)
    >>> controller.limit
    80
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

KV_FULL = 0.95
"""Above this share of an engine's KV memory in use, the tokens of the next seconds no longer fit beside the
running requests, and SGLang retracts some of them."""

KV_FREE = 0.80
"""Below this share there is room for more. It is so far below KV_FULL that no single step of growth crosses
the band between them, and a limit that is in the band stays."""

CUT = 0.8
"""Share of the limit that is left by a cut: KV_FULL times it lies just below KV_FREE, so that one cut ends
the pressure and one step of growth brings the limit back into the band."""

GROW = 16
"""One step of growth is this fraction of the limit, at least 1: doubling takes about a dozen steps, slow
enough for the memory of requests that have just started to show before many more follow."""

QUEUE_TOLERATED = 1 / 16
"""Waiting requests per running one that are left alone: a short queue keeps an engine's batch full."""

PATIENCE = 3
"""Observations that a queue must last before it is trimmed, and calm ones before a step of growth: a shorter
queue is the burst that follows an update or a batch of new prompts."""

USED = 0.9
"""Share of the limit that must be in use for growth: where there is not enough work, calm says nothing."""

FORGET = 30
"""Calm observations at the last known ceiling until it is tried again: a minute at one every two seconds, so
that in a steady state pressure is the exception, and a change of the workload is still found."""

MINIMUM = 8
"""The limit never falls below this: so few requests fit in any engine, and with fewer a run hardly moves."""


@dataclass(frozen=True)
class EngineLoad:
    """What one engine says of itself."""

    running: int
    waiting: int
    kv_use: float
    """Share of the KV memory that running requests hold, 0 to 1."""
    retracted: int = 0
    """Requests lately retracted for lack of KV memory. SGLang counts them with `enable_metrics` only."""
    taken_s: float = 0.0
    """When it was taken, by the engine's clock: tells one sample from the next."""


class ConcurrencyController:
    """Push observations of all engines in, read ``limit`` out."""

    def __init__(self, *, maximum: int, minimum: int = MINIMUM) -> None:
        """Starts at ``maximum``: engines queue what does not fit, and their queues soon tell how much that
        is, whereas a start from below would leave them idle.
        """
        self._minimum = max(1, min(minimum, maximum))
        self._maximum = maximum
        self._ceiling: int | None = None
        """Where growth stops for a while: pressure came from just above."""
        self._calm = 0
        self._unsettled = 0
        """Observations until the last lowering has shown what it does."""
        self._queues: deque[int] = deque(maxlen=PATIENCE)
        self.limit = maximum
        self.cuts = 0
        self.trims = 0

    def observe(self, loads: Sequence[EngineLoad], in_use: int) -> None:
        """``loads`` of the engines that answered; ``in_use``: requests under way, wherever they are."""
        if not loads:
            return
        kv_use = max(load.kv_use for load in loads)
        waiting = sum(load.waiting for load in loads)
        self._queues.append(int(waiting - QUEUE_TOLERATED * sum(load.running for load in loads)))
        queue = min(self._queues) if len(self._queues) == PATIENCE else 0
        self._unsettled = PATIENCE if in_use > self.limit else max(0, self._unsettled - 1)
        if queue > 0:
            # Need not wait for the last lowering to show: as the queue drains, so does in_use.
            self.trims += self._lower(in_use - queue, ceiling=in_use - queue)
        if kv_use > KV_FULL or any(load.retracted for load in loads):
            self._calm = 0
            if not self._unsettled:
                base = min(self.limit, in_use)
                self.cuts += self._lower(int(base * CUT), ceiling=base - base // GROW)
        elif waiting == 0 and kv_use < KV_FREE and in_use >= USED * self.limit:
            self._grow()

    def disturbed(self) -> None:
        """The engines were stopped for an update: the queue behind it is not one of too many requests."""
        self._queues.clear()

    def _lower(self, limit: int, ceiling: int) -> bool:
        self._calm = 0
        limit = max(self._minimum, limit)
        if limit >= self.limit:
            return False
        self.limit, self._ceiling = limit, max(limit, ceiling)
        self._unsettled = PATIENCE
        return True

    def _grow(self) -> None:
        self._calm += 1
        if self._calm >= FORGET:
            self._ceiling = None
        top = self._maximum if self._ceiling is None else self._ceiling
        if self._calm >= PATIENCE and self.limit < top:
            self.limit = min(top, self.limit + max(1, self.limit // GROW))
            self._calm = 0
