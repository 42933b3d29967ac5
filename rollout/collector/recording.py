"""One episode's way to the engines: its completions, and the record of them that survives this process.

    workflow ──generate──► completion grows ──► pieces of the record, every JOURNAL_EVERY_S
             ──returns───► trajectory       ──► the rest of the record, and a header

A workflow that runs again, in another process, sends the same requests in the same order. A request that was
complete before is answered from the record, a partial one is continued. When a request differs from the
recorded one (a tool gave another output), nothing that was recorded from there on is used.

As long as every request continues the token ids of the request before and its completion, the record *is* the
beginning of the trajectory, and every token is sent once. Where a workflow does otherwise (branches, rewrites
its context), the record begins again, and the trajectory is sent as a whole.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.collector.outbox import Outbox
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.messages import PriorSample
from slipstream.rollout.record import (
    CorruptRecord,
    PieceHeader,
    decode_chunks,
    decode_piece,
    digest,
    encode_chunk,
    encode_trajectory,
)
from slipstream.rollout.trajectory import Completion, Finish, Trajectory

JOURNAL_EVERY_S = 2.0
"""Longest time that tokens which an engine has handed out are kept in this process only."""


class GrowingGenerator(Protocol):
    """A generator that continues a growing completion and tells when it has grown: the engine pool."""

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingConfig,
        completion: GrowingCompletion,
        *,
        greedy: bool = False,
        grown: Callable[[], None] | None = None,
    ) -> None: ...


class _Request:
    """One request of the episode: how much of its completion the record holds."""

    __slots__ = (
        "call",
        "completion",
        "digest",
        "has_begun",
        "input_ids",
        "known",
        "recorded",
        "runs",
        "written_s",
    )

    def __init__(
        self,
        call: int,
        input_ids: Sequence[int],
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
        self.has_begun = self.recorded > 0
        """The record holds the request's token ids."""
        self.written_s = now


class Recording:
    """The generator of one episode, and its record. Single event loop."""

    __slots__ = (
        "_calls",
        "_clock",
        "_ended",
        "_engines",
        "_ids",
        "_key",
        "_logprobs",
        "_outbox",
        "_pieces",
        "_started_over",
        "_stored",
    )

    def __init__(
        self,
        engines: GrowingGenerator,
        outbox: Outbox,
        group: int,
        lease: int,
        sample: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = engines
        self._outbox = outbox
        self._key = (group, lease, sample)
        self._clock = clock
        self.again()

    def again(self) -> None:
        """Begin another attempt at the episode: nothing of the record counts any more."""
        self._calls = 0
        self._ids: array[int] = array("i")
        """Token ids of the record."""
        self._logprobs: array[float] = array("f")
        """Their log-probs, 0 for context."""
        self._pieces: list[tuple[int, int]] = []
        """Call of each piece, and the number of token ids of the record behind it."""
        self._started_over = False
        self._stored: dict[int, tuple[bytes, GrowingCompletion]] = {}
        """Completions by call, with the digests of their requests."""
        self._ended: list[_Request] = []
        """Requests that have ended, but whose ends are not in the record."""

    def resume(self, prior: PriorSample, chunks: memoryview) -> int:
        """Take up the pieces of an earlier run of the episode. Return the number of sampled tokens in them.

        Raises CorruptRecord.
        """
        headers = [decode_piece(header) for _, header in prior.pieces]
        for header, chunk in zip(headers, decode_chunks(chunks), strict=True):
            tokens, logprobs = chunk.tokens.tolist(), chunk.logprobs.tolist()
            self._extend(header, chunk.context.tolist(), tokens, logprobs)
            _, completion = self._stored.setdefault(header.call, (header.input_digest, GrowingCompletion()))
            start = 0
            for version, length in header.spans:
                completion.add(version, tokens[start : start + length], logprobs[start : start + length])
                start += length
            if start != len(tokens):
                raise CorruptRecord(f"spans of {start} tokens for {len(tokens)} tokens")
            completion.finish, completion.retractions = header.finish, header.retractions
        return sum(len(completion.tokens) for _, completion in self._stored.values())

    # ---- Generator

    async def generate(self, input_ids: Sequence[int], sampling: SamplingConfig) -> Completion:
        """Return the completion of ``input_ids``, as ``rollout.workflow.Generator`` describes."""
        call, self._calls = self._calls, self._calls + 1
        input_digest = digest(input_ids)
        stored_digest, stored = self._stored.get(call, (input_digest, None))
        if stored_digest != input_digest:
            self._forget(call)
            stored = None
        if stored is not None and stored.finish is not Finish.PARTIAL:
            return stored.completion()
        self.write_ends()
        completion = GrowingCompletion() if stored is None else stored
        request = _Request(call, input_ids, input_digest, completion, self._clock())

        def grown() -> None:
            now, request.known = self._clock(), len(completion.tokens)
            if now - request.written_s >= JOURNAL_EVERY_S or len(completion.runs) > request.runs > 0:
                self._write(request, now)

        try:
            await self._engines.generate(input_ids, sampling, completion, grown=grown)
        except asyncio.CancelledError:
            request.known = len(completion.tokens)
            self._write(request, self._clock())
            raise
        request.known = len(completion.tokens)
        self._stored[call] = (input_digest, completion)
        self._ended.append(request)
        return completion.completion()

    def write_ends(self, older_than_s: float = 0.0) -> None:
        """Write completions that have ended, unless that was less than ``older_than_s`` seconds ago."""
        now = self._clock()
        while self._ended and now - self._ended[0].written_s >= older_than_s:
            self._write(self._ended.pop(0), now)

    # ---- the record

    def answered(self, trajectory: Trajectory) -> None:
        """Send the whole trajectory without its reward, but for what the record holds of it already."""
        start = self._common(trajectory)
        self._outbox.answered(
            *self._key,
            len(self._pieces) if start else 0,
            msgspec.structs.replace(trajectory.header, reward=None),
            encode_trajectory(trajectory, start),
        )
        self._ended.clear()

    def judged(self, trajectory: Trajectory) -> None:
        """Send the reward of the trajectory that was ``answered``."""
        self._outbox.judged(*self._key, trajectory.header)

    def _common(self, trajectory: Trajectory) -> int:
        """Return the number of tokens of the record if the trajectory begins with them, else 0."""
        n = len(self._ids)
        if not n or n > len(trajectory.tokens_T):
            return 0
        same_ids = np.array_equal(np.frombuffer(self._ids, np.int32), trajectory.tokens_T[:n])
        same = same_ids and np.array_equal(
            np.frombuffer(self._logprobs, np.float32), trajectory.logprobs_T[:n]
        )
        return n if same else 0

    def _write(self, request: _Request, now: float) -> None:
        """Send what is new of a completion as the next piece."""
        completion, start, end = request.completion, request.recorded, request.known
        if start == end and completion.finish is Finish.PARTIAL:
            return
        context, starts_over = ((), False) if request.has_begun else self._context(request.input_ids)
        tokens, logprobs = completion.tokens[start:end], completion.logprobs[start:end]
        header = PieceHeader(
            request.call,
            request.digest,
            _spans(completion, start, end),
            completion.finish,
            completion.retractions,
            starts_over,
        )
        base = len(self._pieces)
        self._extend(header, context, tokens, logprobs)
        self._outbox.piece(*self._key, base, header, encode_chunk(context, tokens, logprobs))
        request.has_begun, request.recorded = True, end
        request.written_s, request.runs = now, len(completion.runs)

    def _context(self, input_ids: Sequence[int]) -> tuple[Sequence[int], bool]:
        """Return what the request adds to the record, and whether the record starts over with it."""
        n = len(self._ids)
        if array("i", input_ids[:n]) == self._ids:
            return input_ids[n:], False
        return input_ids, True

    def _extend(
        self, header: PieceHeader, context: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]
    ) -> None:
        if header.starts_over:
            self._ids, self._logprobs, self._started_over = array("i"), array("f"), True
        self._ids.extend(context)
        self._ids.extend(tokens)
        self._logprobs.extend([0.0] * len(context))
        self._logprobs.extend(logprobs)
        self._pieces.append((header.call, len(self._ids)))

    def _forget(self, call: int) -> None:
        """Give up what is stored of request ``call`` and of all later requests."""
        self._stored = {number: kept for number, kept in self._stored.items() if number < call}
        first = next((i for i, (number, _) in enumerate(self._pieces) if number >= call), len(self._pieces))
        if self._started_over:  # the ids of the earlier pieces are not in memory
            first = 0
        del self._pieces[first:]
        n = self._pieces[-1][1] if self._pieces else 0
        del self._ids[n:], self._logprobs[n:]


def _spans(completion: GrowingCompletion, start: int, end: int) -> tuple[tuple[int, int], ...]:
    """Return (version, tokens) of the tokens [start, end)."""
    spans: list[tuple[int, int]] = []
    for version, length in completion.spans(start):
        if start < end:
            spans.append((version, min(length, end - start)))
        start += length
    return tuple(spans)
