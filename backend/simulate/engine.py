"""One inference engine as a model: every running request gets one token per decode step.

All running requests advance together, so that their progress is one number: P, the tokens that a request
running from the start would have. A request that joined at P0 and wants n tokens ends at P0 + n, whoever
comes and goes meanwhile; only the time at which P gets there changes. So an engine needs a heap of ends and
one timer for the next of them, and a version published at P splits each answer at P - P0.

    P stands still     while prompts are prefilled, while paused for an update, while nothing runs
    P grows by 1       in step_s + request_s * running seconds (times ``slowdown`` beside training)
"""

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Any

from slipstream.backend.simulate.trajectory import Spans, joined
from slipstream.configs.schema.simulate import EngineModel
from slipstream.rollout.engine.client import EngineAddress

EPSILON = 1e-5
"""Tokens. Sums of seconds are exact to about this much of a token after months of virtual time."""

KV_START = 0.9
"""A request starts beside others only if the KV memory is used up to this share then: they will grow."""


class Request:
    """One answer to be generated; it may move from engine to engine, and keeps what it has."""

    __slots__ = (
        "done",
        "end",
        "engine",
        "future",
        "length",
        "order",
        "prompt_tokens",
        "retractions",
        "spans",
        "start",
    )

    def __init__(self, order: int, prompt_tokens: int, length: int, future: Any) -> None:
        self.order = order
        """Of all requests of the run: decides where nothing else does."""
        self.prompt_tokens = prompt_tokens
        self.length = length
        """Tokens of the whole answer."""
        self.future = future
        self.engine: Engine | None = None
        """Where it runs or queues."""
        self.done = 0
        """Tokens that it had when it joined its engine."""
        self.spans: Spans = ()
        """Versions of those."""
        self.retractions = 0
        self.start = 0.0
        """P of its engine when it joined."""
        self.end = -1.0
        """P of its engine when it is complete; -1 while it does not run."""


class Engine:
    """``finished`` is told the engine and each complete request, ``drained`` that nothing runs any more."""

    def __init__(
        self,
        index: int,
        model: EngineModel,
        loop: Any,
        finished: Callable[[int, Request], None],
        drained: Callable[[], None],
    ) -> None:
        self.index = index
        self.name = f"engine-{index}"
        self.running = 0
        self.idle_s = self.paused_s = self.prefill_s = self.decode_s = self.down_s = 0.0
        self.request_s = 0.0
        """Of decoding, times the requests that ran meanwhile."""
        self.is_paused = self.is_down = False
        self._model = model
        self._prefill_s = 1 / model.prefill_tokens_per_s
        self._loop = loop
        self._finished = finished
        self._drained = drained
        self._slowdown = 1.0
        self._progress = 0.0
        self._settled_at = loop.time()
        self._step_s = model.step_s
        self._stall_until = 0.0
        """Prompts that have joined are prefilled by then."""
        self._stall_left = 0.0
        """While paused: how much of that was left."""
        self._is_held = False
        self._ends: list[float] = []
        """Heap of the values of P at which running requests end. Some of those may have left since."""
        self._running: dict[float, list[Request]] = {}
        """Running requests by their ends."""
        self._queue: deque[Request] = deque()
        self._newest: list[Request] = []
        """Running requests by age, for retraction; only with a limit on the KV memory."""
        self._kv_base = 0.0
        """Tokens in the KV memory less ``running * P``."""
        self._marks = [0.0]
        self._versions = [0]
        self._timer: Any = None
        self._timer_at = 0.0

    @property
    def address(self) -> EngineAddress:
        """The name of the engine, in the form in which trainers take it."""
        return EngineAddress(self.name, "", ranks=1, vocab_size=0, max_length=0, timeout_s=0.0)

    @property
    def kv_tokens(self) -> float:
        return self._kv_base + self.running * self._progress

    # ---- requests

    def take(self, request: Request) -> None:
        """Run the request, or queue it when there is no room."""
        request.engine = self
        self._settle()
        if self._queue or not self._fits(request):
            self._queue.append(request)
        else:
            self._join(request)
            self._arm()

    def drop(self, request: Request) -> None:
        """Nobody waits for the request any more; ``done`` and ``spans`` say what it had."""
        request.engine = None
        if request.end < 0:
            self._queue.remove(request)
            return
        self._settle()
        self._suspend(request)
        self._fill()
        self._arm()
        self._tell_drained()

    def fail(self) -> list[Request]:
        """Lose everything but what the requests had, and return them in order. The engine is empty then."""
        self._settle()
        running = (request for requests in self._running.values() for request in requests)
        lost = sorted([*running, *self._queue], key=lambda request: request.order)
        for request in lost:
            if request.end >= 0:
                self._suspend(request)
            request.engine = None
        self._ends, self._newest, self._stall_left, self._stall_until = [], [], 0.0, 0.0
        self._queue.clear()
        self.is_down = True
        self._tell_drained()
        return lost

    def restart(self) -> None:
        """Be there again, empty; ``resume`` says with which version."""
        self._settle()
        self.is_down = False

    # ---- versions

    def hold(self) -> None:
        """Start no request until ``resume``. ``drained`` is called once nothing runs."""
        self._is_held = True

    def pause(self) -> None:
        """Stand still until ``resume``."""
        self._settle()
        self._stall_left = max(0.0, self._stall_until - self._loop.time())
        self.is_paused = True

    def resume(self, version: int, *, reprefill: bool = False, resend: bool = False) -> None:
        """Go on with ``version``; ``reprefill``: after the KV of all running requests was computed again."""
        self._settle()
        stall = self._stall_left
        if reprefill:
            stall += self.kv_tokens * self._prefill_s
        if resend:
            stall += self.running * self._model.resend_s
        self._stall_until, self._stall_left = self._loop.time() + stall, 0.0
        self.is_paused = self._is_held = False
        self._marks.append(self._progress)
        self._versions.append(version)
        self._fill()
        self._arm()

    def slow_down(self, factor: float) -> None:
        """Decode steps take ``factor`` times their time from now on."""
        self._settle()
        self._slowdown = factor
        self._set_running(self.running)
        self._arm()

    def settle(self) -> None:
        """Bring the account of times up to now."""
        self._settle()

    # ----

    def _settle(self) -> None:
        now = self._loop.time()
        passed = now - self._settled_at
        if passed <= 0.0:
            return
        self._settled_at = now
        if self.is_down:
            self.down_s += passed
        elif self.is_paused:
            self.paused_s += passed
        elif not self.running:
            self.idle_s += passed
        else:
            stall = self._stall_until - now + passed
            if stall > 0.0:
                if stall >= passed:
                    self.prefill_s += passed
                    return
                self.prefill_s += stall
                passed -= stall
            self.decode_s += passed
            self.request_s += passed * self.running
            self._progress += passed / self._step_s

    def _fits(self, request: Request) -> bool:
        if self.is_paused or self._is_held or self.running >= self._model.max_running:
            return False
        if self._model.kv_tokens is None or not self.running:
            return True
        tokens = request.prompt_tokens + request.done
        return self.kv_tokens + tokens <= KV_START * self._model.kv_tokens

    def _join(self, request: Request) -> None:
        """The account of times must be settled."""
        tokens = request.prompt_tokens + request.done
        now, progress = self._settled_at, self._progress
        stall_until = self._stall_until
        self._stall_until = (stall_until if stall_until > now else now) + tokens * self._prefill_s
        request.start = progress
        request.end = end = progress + request.length - request.done
        self._kv_base += tokens - progress
        heapq.heappush(self._ends, end)
        at_end = self._running.get(end)
        if at_end is None:
            self._running[end] = [request]
        else:
            at_end.append(request)
        if self._model.kv_tokens is not None:
            self._newest.append(request)
            if len(self._newest) > 2 * self._model.max_running:
                self._newest = [r for r in self._newest if r.engine is self and r.end >= 0]
        self._set_running(self.running + 1)

    def _leave(self, request: Request, tokens: int) -> None:
        """The request runs no more, ``tokens`` after it joined."""
        self._kv_base -= request.prompt_tokens + request.done - request.start
        if tokens:
            spans = self._versions_of(request.start, tokens)
            request.spans = joined(request.spans, spans) if request.done else spans
        request.done += tokens
        request.end = -1.0
        self._set_running(self.running - 1)

    def _suspend(self, request: Request) -> None:
        """As far as it has come; its last token is left to be made."""
        at_end = self._running[request.end]
        at_end.remove(request)
        if not at_end:
            del self._running[request.end]
        had = int(self._progress - request.start + EPSILON)
        self._leave(request, min(had, request.length - request.done - 1))

    def _set_running(self, running: int) -> None:
        self.running = running
        self._step_s = (self._model.step_s + self._model.request_s * running) * self._slowdown

    def _versions_of(self, start: float, tokens: int) -> Spans:
        """Of ``tokens`` tokens from P = ``start`` on; one in progress when a version comes is of that."""
        marks, versions = self._marks, self._versions
        index = bisect_right(marks, start + EPSILON) - 1
        last = start + tokens - EPSILON
        if index + 1 == len(marks) or marks[index + 1] >= last:
            return ((versions[index], tokens),)
        spans, at = [], 0
        while index + 1 < len(marks) and marks[index + 1] < last:
            until = int(marks[index + 1] - start + EPSILON)
            if until > at:
                spans.append((versions[index], until - at))
                at = until
            index += 1
        spans.append((versions[index], tokens - at))
        return tuple(spans)

    def _fill(self) -> None:
        while self._queue and self._fits(self._queue[0]):
            self._join(self._queue.popleft())

    def _retract(self) -> None:
        """Make room in the KV memory: the newest running requests start again later, with what they have."""
        limit = self._model.kv_tokens
        while limit is not None and self.running > 1 and self.kv_tokens > limit - EPSILON:
            request = self._newest.pop()
            if request.engine is self and request.end >= 0:
                self._suspend(request)
                request.retractions += 1
                self._queue.appendleft(request)

    def _arm(self) -> None:
        """Have the timer ring when the next request ends or the memory is full; too early does no harm."""
        if self.is_paused or not self.running:
            return
        ends = self._ends
        while ends[0] not in self._running:
            heapq.heappop(ends)
        target = ends[0]
        if self._model.kv_tokens is not None and self.running > 1:
            target = min(target, self._progress + (self._model.kv_tokens - self.kv_tokens) / self.running)
        when = self._settled_at if self._settled_at > self._stall_until else self._stall_until
        if target > self._progress:
            when += (target - self._progress) * self._step_s
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._ring)
        self._timer_at = when

    def _ring(self) -> None:
        self._timer = None
        if self.is_paused:
            return
        self._settle()
        ends, due, ended = self._ends, self._progress + EPSILON, []
        while ends and ends[0] <= due:
            for request in self._running.pop(heapq.heappop(ends), ()):
                self._leave(request, request.length - request.done)
                request.engine = None
                ended.append(request)
        self._retract()
        self._fill()
        for request in ended:
            self._finished(self.index, request)
        self._arm()
        if ended:
            self._tell_drained()

    def _tell_drained(self) -> None:
        if self._is_held and not self.running:
            self._drained()
