"""Decides how many trajectories are generated at one time: as many as fit into the engines' KV memory.

With too few, the engines' batches are small. With too many, requests wait in the engines' queues, where they
grow stale, and running requests are retracted, thus computed again, when the memory runs out. The right
number depends on the lengths of completions, which change while a policy learns. So it is controlled like a
TCP congestion window: pressure lowers the limit at once, calm raises it in small steps.

    cut    memory nearly full, or requests retracted for lack of it     limit * CUT
    trim   requests keep waiting in the engines                         limit - number of waiting requests
    hold   requests wait, or memory is fairly full                      the dead band between the others
    grow   nothing waits, memory is free, the limit is used up          limit + limit / GROW

A pure state machine that owns no clock, task or client: callers push observations in and read ``limit`` out.
Lowering the limit ends no running request, so it takes effect only as requests end. Until then (``in_use``
above ``limit``) the same pressure is still seen, and does not cause a second cut.

    >>> controller = ConcurrencyController(maximum=100)
    >>> controller.observe([EngineLoad(running=100, waiting=0, kv_use=0.99)], in_use=100)
    >>> controller.limit
    80
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

KV_FULL = 0.95
"""Share of an engine's KV memory in use above which the limit is cut: the tokens of the next seconds no
longer fit, and SGLang retracts some of the running requests."""

KV_FREE = 0.80
"""Share of KV memory in use below which the limit may grow. It lies so far below KV_FULL that no step of
growth crosses the band between them, and a limit inside the band stays."""

CUT = 0.8
"""Share of the limit that a cut leaves. KV_FULL * CUT lies just below KV_FREE, so that one cut ends the
pressure and one step of growth brings the limit back into the band."""

GROW = 16
"""Each step of growth adds 1 / GROW of the limit, at least 1. Doubling takes about a dozen steps: slow enough
for requests that have just started to show their memory before many more follow."""

QUEUE_TOLERATED = 1 / 16
"""Waiting requests for each running one that are tolerated: a short queue keeps an engine's batch full."""

PATIENCE = 3
"""Observations that a queue must last before it is trimmed, and calm observations before a step of growth. A
shorter queue is the burst that follows an update or a batch of new prompts."""

USED = 0.9
"""Share of the limit that must be in use for growth: where there is too little work, calm says nothing."""

FORGET = 30
"""Calm observations at the last known ceiling before growth beyond it is tried again: one minute, with one
observation every two seconds. So pressure is the exception in a steady state, and a change of the workload is
still noticed."""

MINIMUM = 8
"""Smallest limit: this many requests fit into any engine, and a run with fewer hardly makes progress."""


@dataclass(frozen=True)
class EngineLoad:
    """The load of one engine, as it reports it."""

    running: int
    """Running requests."""
    waiting: int
    """Requests in the engine's queue."""
    kv_use: float
    """Share of the KV memory that running requests hold, 0 to 1."""
    retracted: int = 0
    """Requests lately retracted for lack of KV memory. SGLang counts them only with `enable_metrics`."""
    taken_s: float = 0.0
    """Time of the sample by the engine's clock, in seconds. Tells samples apart."""


class ConcurrencyController:
    """Turns observations of all engines into ``limit``, the number of requests that may be under way."""

    def __init__(self, *, maximum: int, minimum: int = MINIMUM) -> None:
        """Start at ``maximum``. Engines queue what does not fit, and their queues soon show how much that is;
        a start from below would leave them idle.
        """
        self._minimum = max(1, min(minimum, maximum))
        self._maximum = maximum
        self._ceiling: int | None = None
        """Limit at which growth stops for a while, because pressure came from just above."""
        self._calm = 0
        self._unsettled = 0
        """Observations until the last lowering of the limit has shown its effect."""
        self._queues: deque[int] = deque(maxlen=PATIENCE)
        self.limit = maximum

    def observe(self, loads: Sequence[EngineLoad], in_use: int) -> None:
        """Take in one observation and adjust ``limit``.

        ``loads`` are those of the engines that reported one; ``in_use`` is the number of requests under way.
        """
        if not loads:
            return
        kv_use = max(load.kv_use for load in loads)
        waiting = sum(load.waiting for load in loads)
        self._queues.append(int(waiting - QUEUE_TOLERATED * sum(load.running for load in loads)))
        queue = min(self._queues) if len(self._queues) == PATIENCE else 0
        self._unsettled = PATIENCE if in_use > self.limit else max(0, self._unsettled - 1)
        if queue > 0:
            # This need not wait for the effect of the last lowering: in_use falls as the queue drains.
            self._lower(in_use - queue, ceiling=in_use - queue)
        if kv_use > KV_FULL or any(load.retracted for load in loads):
            self._calm = 0
            if not self._unsettled:
                base = min(self.limit, in_use)
                self._lower(int(base * CUT), ceiling=base - base // GROW)
        elif waiting == 0 and kv_use < KV_FREE and in_use >= USED * self.limit:
            self._grow()

    def disturbed(self) -> None:
        """Forget the queues: engines that were stopped for an update have them for no lack of memory."""
        self._queues.clear()

    def _lower(self, limit: int, ceiling: int) -> None:
        self._calm = 0
        limit = max(self._minimum, limit)
        if limit < self.limit:
            self.limit, self._ceiling = limit, max(limit, ceiling)
            self._unsettled = PATIENCE

    def _grow(self) -> None:
        self._calm += 1
        if self._calm >= FORGET:
            self._ceiling = None
        top = self._maximum if self._ceiling is None else self._ceiling
        if self._calm >= PATIENCE and self.limit < top:
            self.limit = min(top, self.limit + max(1, self.limit // GROW))
            self._calm = 0
