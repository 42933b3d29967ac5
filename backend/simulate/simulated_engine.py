"""Model of one inference engine: every running request gets one token per decode step.

All running requests advance together, so that a single number describes their progress: P, the tokens that a
request running from the start would have. A request that joins at P0 and needs n tokens ends at P0 + n,
whichever requests come and go meanwhile; only the time at which P gets there changes. An engine therefore
needs a heap of ends and a timer for the next of them, and a version published at P splits each completion
after P - P0 tokens.

    P stands still     while prompts are prefilled, during the pause for an update, and while nothing runs
    P grows by 1       in step_s + request_s * running seconds (times ``slowdown`` beside training)
"""

import asyncio
import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable

from slipstream.backend.simulate.trajectory import Spans, joined
from slipstream.configs.schema.simulate import EngineModel
from slipstream.rollout.engine.client import EngineAddress

EPSILON = 1e-5
"""Precision of P in tokens: rounding errors of times stay below it for months of virtual time."""

KV_START = 0.9
"""Largest share of the KV memory in use after a request starts beside others: all of them will grow."""


class Request:
    """One completion to be generated. It may move between engines and keeps its tokens."""

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

    def __init__(self, order: int, prompt_tokens: int, length: int, future: asyncio.Future[None]) -> None:
        self.order = order
        """Number of the request in the run, which breaks ties."""
        self.prompt_tokens = prompt_tokens
        self.length = length
        """Tokens of the whole completion."""
        self.future = future
        """Done when the completion is."""
        self.engine: Engine | None = None
        """Engine on which the request runs or queues."""
        self.done = 0
        """Tokens that the completion had when the request joined its engine."""
        self.spans: Spans = ()
        """Version spans of these tokens."""
        self.retractions = 0
        self.start = 0.0
        """P of the engine when the request joined."""
        self.end = -1.0
        """P of the engine when the completion ends; -1 while the request does not run."""


class Engine:
    """Runs and queues requests, and accounts for its time.

    ``finished`` is called with the engine's index and each complete request, ``drained`` when an engine that
    is held runs no request any more.
    """

    def __init__(
        self,
        index: int,
        model: EngineModel,
        loop: asyncio.AbstractEventLoop,
        finished: Callable[[int, Request], None],
        drained: Callable[[], None],
    ) -> None:
        self.index = index
        self.name = f"engine-{index}"
        self.running = 0
        self.idle_s = self.paused_s = self.prefill_s = self.decode_s = self.down_s = 0.0
        self.request_s = 0.0
        """Integral of the number of running requests over the time of decoding."""
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
        """Time at which all prompts that have joined are prefilled."""
        self._stall_left = 0.0
        """During a pause, the time of prefilling that was left when it began."""
        self._is_held = False
        self._ends: list[float] = []
        """Heap of values of P at which running requests end. Some are left over from requests that left."""
        self._running: dict[float, list[Request]] = {}
        """Running requests by the P of their end."""
        self._queue: deque[Request] = deque()
        self._newest: list[Request] = []
        """Running requests by age, for retraction; empty without a limit on the KV memory."""
        self._kv_base = 0.0
        """Tokens in the KV memory minus ``running * P``."""
        self._marks = [0.0]
        """Values of P at which the versions came."""
        self._versions = [0]
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    @property
    def address(self) -> EngineAddress:
        """The name of the engine, in the form in which trainers take it."""
        return EngineAddress(self.name, "", ranks=1, vocab_size=0, max_length=0, timeout_s=0.0)

    @property
    def kv_tokens(self) -> float:
        """Tokens in the KV memory."""
        return self._kv_base + self.running * self._progress

    # ---- requests

    def take(self, request: Request) -> None:
        """Run the request, or queue it if there is no room."""
        request.engine = self
        self._settle()
        if self._queue or not self._fits(request):
            self._queue.append(request)
        else:
            self._join(request)
            self._arm()

    def drop(self, request: Request) -> None:
        """Give up a request, whose ``done`` and ``spans`` then say what it had."""
        request.engine = None
        if request.end < 0:
            self._queue.remove(request)
            return
        self._settle()
        self._suspend(request)
        self._fill()
        self._arm()
        self._tell_drained()

    def spans_of(self, request: Request) -> Spans:
        """Return the version spans of the tokens that a request has by now."""
        if request.end < 0:
            return request.spans
        self._settle()
        tokens = self._generated(request)
        return joined(request.spans, self._versions_of(request.start, tokens)) if tokens else request.spans

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self._versions[-1]

    def fail(self) -> list[Request]:
        """Go down, and return all requests in order, each with the tokens that it had."""
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
        """Come back without requests. ``resume`` then sets the version."""
        self._settle()
        self.is_down = False

    # ---- versions

    def hold(self) -> None:
        """Start no request until ``resume``."""
        self._is_held = True

    def pause(self) -> None:
        """Stop decoding and prefilling until ``resume``."""
        self._settle()
        self._stall_left = max(0.0, self._stall_until - self._loop.time())
        self.is_paused = True

    def resume(self, version: int, *, reprefill: bool = False, resend: bool = False) -> None:
        """Continue with ``version``.

        ``reprefill``: the KV of all running requests is computed again first. ``resend``: each running
        request is also sent again.
        """
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
        """Account for the time up to now."""
        self._settle()

    # ---- internals. All but ``_settle`` need times that are settled.

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
        """Take a request off the engine, ``tokens`` tokens after it joined."""
        self._kv_base -= request.prompt_tokens + request.done - request.start
        if tokens:
            spans = self._versions_of(request.start, tokens)
            request.spans = joined(request.spans, spans) if request.done else spans
        request.done += tokens
        request.end = -1.0
        self._set_running(self.running - 1)

    def _suspend(self, request: Request) -> None:
        """Take an unfinished request off the engine. At least its last token is left to be generated."""
        at_end = self._running[request.end]
        at_end.remove(request)
        if not at_end:
            del self._running[request.end]
        self._leave(request, self._generated(request))

    def _generated(self, request: Request) -> int:
        """Return the tokens that an unfinished request has got here. At least its last one is left."""
        generated = int(self._progress - request.start + EPSILON)
        return min(generated, request.length - request.done - 1)

    def _set_running(self, running: int) -> None:
        self.running = running
        self._step_s = (self._model.step_s + self._model.request_s * running) * self._slowdown

    def _versions_of(self, start: float, tokens: int) -> Spans:
        """Return the version spans of ``tokens`` tokens from P = ``start`` on.

        A token that is in progress when a version comes is of that version.
        """
        marks, versions = self._marks, self._versions
        index = bisect_right(marks, start + EPSILON) - 1
        last = start + tokens - EPSILON
        if index + 1 == len(marks) or marks[index + 1] >= last:
            return ((versions[index], tokens),)
        spans, counted = [], 0
        while index + 1 < len(marks) and marks[index + 1] < last:
            until = int(marks[index + 1] - start + EPSILON)
            if until > counted:
                spans.append((versions[index], until - counted))
                counted = until
            index += 1
        spans.append((versions[index], tokens - counted))
        return tuple(spans)

    def _fill(self) -> None:
        while self._queue and self._fits(self._queue[0]):
            self._join(self._queue.popleft())

    def _retract(self) -> None:
        """Make room in the KV memory: the newest requests return to the queue, and keep their tokens."""
        limit = self._model.kv_tokens
        while limit is not None and self.running > 1 and self.kv_tokens > limit - EPSILON:
            request = self._newest.pop()
            if request.engine is self and request.end >= 0:
                self._suspend(request)
                request.retractions += 1
                self._queue.appendleft(request)

    def _arm(self) -> None:
        """Set the timer to when the next request ends or the memory is full. An early timer does no harm."""
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
