"""One episode's way to the engines: its completions, and the record of them that survives this process.

    workflow ──generate──► completion grows ──► pieces of the record, every RECORD_EVERY_S
             ──returns───► trajectory       ──► the rest of the record, and a header

A workflow that runs again, in another process, sends the same requests in the same order. A request that was
complete before is answered from the record, a partial one is continued. When a request differs from the
recorded one (a tool gave another output), nothing that was recorded from there on is used.

Clients of an endpoint, which an agent is, may ask side by side, so that their requests come in another order
each time. One of them is answered by any completion of an earlier run whose token ids and sampling are the
same, each of which is used once (``extend``).

As long as every request continues the token ids of the request before and its completion, the record *is* the
beginning of the trajectory, and every token is sent once. Where a workflow does otherwise (branches, rewrites
its context, asks for several completions at a time), the record begins again with the request that does, and
the trajectory is sent as a whole.

    piece           0      1          2                       3
    chunk           P a    a a        P b b                   b
    request         0      0          1, starts over          1

Pieces of requests that run side by side follow each other in the record, too. Each piece names its request,
so that a completion is the sampled tokens of its request's pieces.

The experts of tokens, where the recipe asks for them, come with the end of a completion and follow its last
piece. A request that continues the record asks for those that are not in it, which begin with those of the
last sampled token.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.collection.collector.outbox import Outbox
from slipstream.rollout.collection.messages import PriorSample
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.sampling import LiveSampling, Sampling, starts_over
from slipstream.rollout.tokens.record import (
    CorruptRecord,
    DecodedChunk,
    PieceHeader,
    RoutesPart,
    begins_with,
    decode_parts,
    decode_piece,
    digest,
    encode_chunk,
    encode_routes,
    encode_trajectory,
    hashed_ids,
)
from slipstream.rollout.tokens.routes import Routes
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Completion, Finish, Trajectory

RECORD_EVERY_S = 2.0
"""Longest time that tokens which an engine has handed out are kept in this process only."""


class GrowingGenerator(Protocol):
    """A generator that continues a growing completion and tells when it has grown: the engine pool."""

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: Sampling,
        completion: GrowingCompletion,
        *,
        greedy: bool = False,
        grown: Callable[[], None] | None = None,
    ) -> None: ...


CLIENTS = 1 << 30
"""Number of the first request of a client. Those of the workflow itself are counted from 0."""


class _Request:
    """One request of the episode: how much of its completion the record holds."""

    __slots__ = ("call", "completion", "digest", "input_ids", "known", "recorded", "runs", "written_s")

    def __init__(
        self,
        call: int,
        input_ids: "array[int]",
        input_digest: bytes,
        completion: GrowingCompletion,
        now: float,
    ) -> None:
        self.call = call
        self.input_ids = input_ids
        self.digest = input_digest
        self.completion = completion
        self.recorded = self.known = len(completion.tokens)
        """Tokens that the record holds, and tokens that the engines have vouched for."""
        self.runs = len(completion.runs)
        self.written_s = now


class _Piece(NamedTuple):
    call: int
    tokens: int
    """Number of its sampled tokens."""
    end: int
    """Number of token ids of the record up to the end of the piece."""


class Recording:
    """The generator of one attempt at an episode, and its record. Single event loop.

    A further attempt has a ``Recording`` of its own, whose first piece takes the place of all before.
    """

    __slots__ = (
        "_begin",
        "_calls",
        "_checked",
        "_client_calls",
        "_clock",
        "_ended",
        "_engines",
        "_hashed",
        "_ids",
        "_is_closed",
        "_is_cut",
        "_key",
        "_logprobs",
        "_outbox",
        "_pieces",
        "_routed",
        "_running",
        "_stored",
        "_versions",
        "_wants_routes",
    )

    def __init__(
        self,
        engines: GrowingGenerator,
        outbox: Outbox,
        group: int,
        assignment: int,
        sample: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        wants_routes: bool = False,
    ) -> None:
        """``wants_routes``: ask for the experts of the tokens of the workflow's own requests."""
        self._engines = engines
        self._wants_routes = wants_routes
        self._routed = 0
        """Number of tokens of the record, from its beginning, whose experts it holds."""
        self._outbox = outbox
        self._key = (group, assignment, sample)
        self._clock = clock
        self._calls = 0
        self._client_calls = CLIENTS
        """Number of the next request of a client that no earlier run has answered."""
        self._ids = bytearray()
        """Token ids of the record, int32, since it began the last time."""
        self._hashed = hashed_ids()
        """Hash of these."""
        self._checked: tuple[array[int], int] = (array("i"), 0)
        """The request that was compared last, and how many ids of the record it begins with."""
        self._logprobs: array[float] = array("f")
        """Their log-probs, 0 for context."""
        self._pieces: list[_Piece] = []
        self._begin = 0
        """Number of the piece with which the record began the last time."""
        self._is_cut = False
        """The record was cut off before that piece, so that ``_ids`` are not known."""
        self._stored: dict[int, tuple[bytes, GrowingCompletion]] = {}
        """Completions of an earlier run by call, with the digests of their requests."""
        self._running: dict[asyncio.Task[object], _Request] = {}
        """Requests that the engines work on, by the tasks that wait for them."""
        self._ended: list[_Request] = []
        """Requests that have ended, but whose ends are not in the record."""
        self._versions: set[int] = set()
        """Policy versions of all tokens that the workflow has got."""
        self._is_closed = False

    def resume(self, prior: PriorSample, chunks: memoryview) -> int:
        """Take up the pieces of an earlier run of the episode. Return the number of sampled tokens in them.

        Raises CorruptRecord.
        """
        headers = [decode_piece(header) for _, header in prior.pieces]
        decoded = _with_routes(chunks)
        if len(headers) != len(decoded):
            raise CorruptRecord(f"{len(decoded)} chunks for {len(headers)} pieces")
        requests: dict[int, int] = {}
        for header, (chunk, routes) in zip(headers, decoded, strict=True):
            tokens, logprobs = chunk.tokens.tolist(), chunk.logprobs.tolist()
            lengths = [length for _, length in header.spans]
            if sum(lengths) != len(tokens) or any(length <= 0 for length in lengths):
                raise CorruptRecord(f"version spans {header.spans} for {len(tokens)} tokens")
            self._extend(header, chunk.context.tolist(), tokens, logprobs)
            _, completion = self._stored.setdefault(header.call, (header.input_digest, GrowingCompletion()))
            start = 0
            for version, length in header.spans:
                completion.add(version, tokens[start : start + length], logprobs[start : start + length])
                start += length
            completion.finish, completion.retractions = header.finish, header.retractions
            completion.matched = header.matched
            request = requests.setdefault(header.call, len(self._logprobs) - len(tokens))
            if routes is not None:
                self._resume_routes(completion, request, routes)
            self._client_calls = max(self._client_calls, header.call + 1)
        return sum(len(completion.tokens) for _, completion in self._stored.values())

    def _resume_routes(self, completion: GrowingCompletion, request: int, part: RoutesPart) -> None:
        """Take up the experts that follow the piece taken up last. ``request``: token ids of its request."""
        start = request + len(completion.tokens) - part.back
        if start < 0:
            raise CorruptRecord(f"routes of tokens before the {request} of their request")
        if completion.routes is None or completion.routes.end != start:
            completion.routes_from, completion.routes = start, None
        completion.add_routes(request, part.ids_RW)
        self._note_routes(Routes(request, start, part.ids_RW))

    def close(self) -> None:
        """End the attempt, with all running requests of its workflow: nobody waits for them.

        No piece may follow after ``answered``: call this method before the event loop goes on.
        """
        self._is_closed = True
        self._ended.clear()
        for task in self._running:
            task.cancel()

    # ---- Generator

    async def generate(self, input_ids: Sequence[int], sampling: SamplingConfig) -> Completion:
        """Return the completion of ``input_ids``, as ``rollout.workflow.Generator`` describes."""
        if self._is_closed:
            raise RuntimeError("the attempt at the episode has ended: its generator takes no more requests")
        ids = array("i", input_ids)  # a copy: the workflow may go on with its own list
        call, self._calls = self._calls, self._calls + 1
        input_digest = self._digest(ids)
        stored_digest, stored = self._stored.pop(call, (input_digest, None))
        if stored_digest != input_digest:
            self._forget(call)
            stored = None
        if stored is not None and stored.finish is not Finish.PARTIAL:
            return self._given(stored)
        completion = GrowingCompletion() if stored is None else stored
        if self._wants_routes and completion.routes is None:
            self.write_ends()  # else the record would lack the completion that the request continues
            completion.routes_from = self._routed if self._context_of(ids) is not None else 0
        await self._ask(_Request(call, ids, input_digest, completion, self._clock()), sampling, None)
        return self._given(completion)

    async def extend(
        self,
        input_ids: Sequence[int],
        sampling: LiveSampling,
        completion: GrowingCompletion,
        *,
        grown: Callable[[], None] | None = None,
    ) -> None:
        """Continue ``completion``, which is empty, as ``EnginePool.generate`` does, for a client.

        What an earlier run has sampled for an equal request comes first, and without the engines.
        """
        if self._is_closed:
            raise RuntimeError("the attempt at the episode has ended: its engines take no more requests")
        ids = array("i", input_ids)
        request_digest = self._digest(ids, sampling.told)
        call, stored = self._asked_before(request_digest, sampling, completion)
        if stored is not None:
            completion.take(stored, sampling.max_new_tokens)
            if completion.tokens and grown is not None:
                grown()
        request = _Request(call, ids, request_digest, completion, self._clock())
        try:
            if completion.is_due(sampling.max_new_tokens):
                await self._ask(request, sampling, grown)
        finally:
            self._versions.update(version for version, _ in completion.runs)

    def _asked_before(
        self, request_digest: bytes, sampling: LiveSampling, completion: GrowingCompletion
    ) -> tuple[int, GrowingCompletion | None]:
        """Return the number of a client's request, and what an earlier run has sampled for it."""
        # Log-probs of prompts and of alternatives are not recorded, and no grammar is entered in its middle.
        if not completion.wants_prompt and not sampling.top_logprobs:
            for call, (stored_digest, stored) in self._stored.items():
                is_usable = stored.finish is Finish.STOP or not starts_over(sampling)
                if stored_digest == request_digest and call >= CLIENTS and is_usable:
                    del self._stored[call]
                    return call, stored
        call, self._client_calls = self._client_calls, self._client_calls + 1
        return call, None

    async def _ask(self, request: _Request, sampling: Sampling, grown: Callable[[], None] | None) -> None:
        """Let the engines continue a completion, and record it while it grows. ``grown``: of the caller."""
        task = asyncio.current_task()
        assert task is not None
        completion = request.completion
        self.write_ends()

        def note_growth() -> None:
            now, request.known = self._clock(), len(completion.tokens)
            if now - request.written_s >= RECORD_EVERY_S or len(completion.runs) > request.runs > 0:
                self._write(request, now)
            if grown is not None:
                grown()

        is_whole = starts_over(sampling)
        self._running[task] = request
        try:
            await self._engines.generate(
                request.input_ids, sampling, completion, grown=None if is_whole else note_growth
            )
        except asyncio.CancelledError:
            if not is_whole:
                request.known = len(completion.tokens)
                self._write(request, self._clock())
            raise
        finally:
            del self._running[task]
        request.known = len(completion.tokens)
        self._ended.append(request)

    def _given(self, completion: GrowingCompletion) -> Completion:
        self._versions.update(version for version, _ in completion.runs)
        return completion.completion()

    def write_ends(self, older_than_s: float = 0.0) -> None:
        """Write completions that have ended, unless that was less than ``older_than_s`` seconds ago."""
        now = self._clock()
        while self._ended and now - self._ended[0].written_s >= older_than_s:
            self._write(self._ended.pop(0), now)

    # ---- the record

    def attest(self, versions: Iterable[int]) -> None:
        """Note policy versions of tokens that the episode has got, but that it has not asked for itself."""
        self._versions.update(versions)

    def accept(self, trajectory: Trajectory) -> None:
        """Raise ValueError for a trajectory with tokens of policy versions that no completion has had."""
        versions = {version for version, _, _ in trajectory.header.runs} - {UNSAMPLED}
        if unknown := versions - self._versions:
            raise ValueError(
                f"the trajectory has tokens of the policy versions {sorted(unknown)[:5]}, but the "
                f"completions are of {sorted(self._versions)}: take them from `Completion.versions()`"
            )

    def answered(self, trajectory: Trajectory) -> None:
        """Send the trajectory without its reward, and without the tokens that the record holds already."""
        start = self._common(trajectory)
        self._outbox.answered(
            *self._key,
            len(self._pieces) if start else 0,
            msgspec.structs.replace(trajectory.header, reward=None, reward_parts=()),
            encode_trajectory(trajectory, start, self._routed if start else 0),
        )

    def judged(self, trajectory: Trajectory, scores: bytes = b"") -> None:
        """Send the reward of the trajectory that was ``answered``, and encoded scores of a teacher that came
        with it."""
        self._outbox.judged(*self._key, trajectory.header, scores)

    def _common(self, trajectory: Trajectory) -> int:
        """Return the number of tokens of the record if it is the beginning of the trajectory, else 0."""
        n = len(self._logprobs)
        if self._begin or not 0 < n <= len(trajectory.tokens_T):
            return 0
        same_ids = np.array_equal(np.frombuffer(self._ids, np.int32), trajectory.tokens_T[:n])
        same = same_ids and np.array_equal(
            np.frombuffer(self._logprobs, np.float32), trajectory.logprobs_T[:n]
        )
        return n if same else 0

    def _write(self, request: _Request, now: float) -> None:
        """Send what is new of a completion as the next piece."""
        completion, start, end = request.completion, request.recorded, request.known
        is_whole = end == len(completion.tokens)
        finish = completion.finish if is_whole else Finish.PARTIAL
        if self._is_closed or (start == end and finish is Finish.PARTIAL):
            return
        context, begins_again = self._context(request)
        tokens, logprobs = completion.tokens[start:end], completion.logprobs[start:end]
        header = PieceHeader(
            request.call,
            request.digest,
            tuple(completion.spans(start, end)),
            finish,
            completion.retractions,
            begins_again,
            completion.matched if is_whole else None,
        )
        base = len(self._pieces)
        self._extend(header, context, tokens, logprobs)
        chunk = encode_chunk(context, tokens, logprobs)
        if is_whole and completion.routes is not None:
            chunk += self._routes_of(request, completion.routes)
        self._outbox.piece(*self._key, base, header, chunk)
        request.recorded, request.written_s, request.runs = end, now, len(completion.runs)

    def _routes_of(self, request: _Request, routes: Routes) -> bytes:
        """Return the experts that follow the piece written last, if the record holds the request as it is:
        requests side by side may have come between."""
        length = len(request.input_ids) + len(request.completion.tokens)
        first = max(routes.start, self._routed)
        if length != len(self._logprobs) or not self._note_routes(routes):
            return b""
        return encode_routes(length - first, routes.ids_RW[first - routes.start :])

    def _note_routes(self, routes: Routes) -> bool:
        """Note that the record holds experts. False if they add nothing, or leave out tokens before them."""
        if not routes.start <= self._routed < routes.end:
            return False
        self._routed = routes.end
        return True

    def _context(self, request: _Request) -> tuple[Sequence[int], bool]:
        """Return what the request adds to the record, and whether the record starts over with it."""
        if request.recorded:
            return (), False
        context = self._context_of(request.input_ids)
        return (request.input_ids, True) if context is None else (context, False)

    def _context_of(self, input_ids: "array[int]") -> "array[int] | None":
        """Return what follows the record in a request; None: it does not continue the record."""
        n, (checked, known) = len(self._logprobs), self._checked
        if self._is_cut or not begins_with(input_ids, self._ids, known if checked is input_ids else 0):
            return None
        self._checked = (input_ids, n)
        return input_ids[n:]

    def _digest(self, input_ids: "array[int]", sampling: bytes = b"") -> bytes:
        """Return the digest of a request: of what follows the record where the request continues it."""
        context = self._context_of(input_ids)
        return digest(input_ids, sampling) if context is None else digest(context, sampling, self._hashed)

    def _extend(
        self, header: PieceHeader, context: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]
    ) -> None:
        if header.starts_over:
            self._ids, self._logprobs = bytearray(), array("f")
            self._begin, self._is_cut, self._routed = len(self._pieces), False, 0
            self._hashed, self._checked = hashed_ids(), (array("i"), 0)
        added = array("i", context)
        added.extend(tokens)
        self._ids += added
        self._hashed.update(added)
        self._logprobs.extend([0.0] * len(context))
        self._logprobs.extend(logprobs)
        self._pieces.append(_Piece(header.call, len(tokens), len(self._logprobs)))

    def _forget(self, call: int) -> None:
        """Give up what is recorded of request ``call`` and of all later requests.

        The record is cut off where that begins. Requests side by side may lose pieces with it, which are
        written again.
        """
        self._stored = {number: kept for number, kept in self._stored.items() if number < call}
        first = next((i for i, piece in enumerate(self._pieces) if piece.call >= call), len(self._pieces))
        if first < len(self._pieces):
            del self._pieces[first:]
            self._cut_ids()
        for request in (*self._running.values(), *self._ended):
            request.recorded = sum(piece.tokens for piece in self._pieces if piece.call == request.call)

    def _cut_ids(self) -> None:
        """Keep the token ids of the pieces that are left, or note that they are not known."""
        left = len(self._pieces)
        if not left:
            self._begin, self._is_cut = 0, False
        elif left <= self._begin:
            self._is_cut = True
        n = 0 if self._is_cut or not left else self._pieces[-1].end
        del self._ids[4 * n :], self._logprobs[n:]
        self._routed = min(self._routed, n)
        self._hashed, self._checked = hashed_ids(self._ids), (array("i"), 0)


def _with_routes(data: memoryview) -> list[tuple[DecodedChunk, RoutesPart | None]]:
    """Return the chunks of ``data``, each with the routes that follow it. Raises CorruptRecord."""
    decoded: list[tuple[DecodedChunk, RoutesPart | None]] = []
    for part in decode_parts(data):
        if isinstance(part, DecodedChunk):
            decoded.append((part, None))
        elif isinstance(part, RoutesPart) and decoded:
            decoded[-1] = (decoded[-1][0], part)
    return decoded
