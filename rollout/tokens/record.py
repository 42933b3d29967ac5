"""The record of an episode: chunks of bytes that are appended while it grows and never written again.

    chunk       u32 context | u32 sampled | i4[context + sampled] token ids | f4[sampled] log-probs
    scores      u32 2^32 - 1 | u32 back | u32 tokens | u32 k
                | f4[tokens] log-probs | i4[tokens * k] token ids | f4[tokens * k] log-probs
    routes      u32 2^32 - 2 | u32 back | u32 tokens | u16 width | u16 size | u1 or u2[tokens * width] experts
    trajectory  its chunks, one after the other, and a ``TrajectoryHeader`` kept beside them

Scores of a teacher and routes, which are the experts of tokens (``routes.py``), may follow any chunk. Their
first token is ``back`` tokens before that place, so that they mean the same tokens wherever their chunks are
copied to.

All numbers are little-endian. Context tokens were sampled by no policy and have no log-prob; the sampled
tokens of a chunk follow its context. A chunk is encoded once, where the tokens arrive, and decoded once,
where they are trained. Whatever carries, stores or decides about it in between looks at headers only.
"""

import hashlib
import io
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.rollout.system.frames import UNREADABLE
from slipstream.rollout.tokens.routes import Experts, known_runs, narrowed, placed_routes
from slipstream.rollout.tokens.teacher import TeacherScores, placed
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory, TrajectoryHeader

T = TypeVar("T")


class CorruptRecord(ValueError):
    """Bytes cannot be decoded as the record that they should be."""


class PieceHeader(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Describes a chunk of an unfinished episode: a part of the completion of one of its requests."""

    call: int
    """Number of the request within the episode, from 0."""
    input_digest: bytes
    """Digest of the request's token ids (``digest``)."""
    spans: tuple[tuple[int, int], ...]
    """(version, tokens) of the chunk's sampled tokens, in order."""
    finish: Finish = Finish.PARTIAL
    """PARTIAL while more tokens of the completion follow."""
    retractions: int = 0
    """Retractions of the completion up to here."""
    starts_over: bool = False
    """The request's token ids do not continue the record: it begins again with this chunk."""
    matched: int | str | None = None
    """The token id or the stop string that ended the completion; None: neither, or more tokens follow."""


class DecodedChunk(NamedTuple):
    """One decoded chunk. The arrays share the memory of the bytes that they were decoded from."""

    context: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    """Sampled token ids, int32 [S]."""
    logprobs: npt.NDArray[np.float32]
    """Behaviour log-probs, float32 [S]."""


class ScoresPart(NamedTuple):
    """A teacher's scores of some of the tokens that stand before them."""

    back: int
    """Number of tokens from the first of them up to this place."""
    scores: TeacherScores
    encoded: bytes | memoryview


class RoutesPart(NamedTuple):
    """Experts of some of the tokens that stand before them."""

    back: int
    """Number of tokens from the first of them up to this place."""
    ids_RW: Experts
    size: int
    """Number of bytes."""


HEADER = msgspec.msgpack.Decoder(TrajectoryHeader)
PIECE = msgspec.msgpack.Decoder(PieceHeader)
encode = msgspec.msgpack.Encoder().encode
"""Encodes a header as msgpack."""

REF = struct.Struct("<IQII")
"""Where the payload of one chunk stands in the segments of a ledger: segment, offset, size in bytes, and
CRC-32 of the bytes, from the process that has encoded them."""
_LENGTHS = struct.Struct("<II")
_SCORES = struct.Struct("<IIII")
_IS_SCORES = 2**32 - 1
"""Stands where a chunk has its number of context tokens."""
_ROUTES = struct.Struct("<IIIHH")
_IS_ROUTES = 2**32 - 2
"""Stands there as well."""


Ids = Sequence[int] | npt.NDArray[np.integer]


def encode_chunk(context: Ids, tokens: Ids, logprobs: Sequence[float] | npt.NDArray[np.floating]) -> bytes:
    """Return a chunk of ``context`` and then of sampled ``tokens``, with a log-prob for each of these."""
    return b"".join(
        (
            _LENGTHS.pack(len(context), len(tokens)),
            np.asarray(context, "<i4").tobytes(),
            np.asarray(tokens, "<i4").tobytes(),
            np.asarray(logprobs, "<f4").tobytes(),
        )
    )


def encode_scores(scores: TeacherScores, *, replaces: bool = False) -> bytes:
    """Return a teacher's scores of the last tokens before the place where they will stand.

    Tokens without a value at both ends are left out; nothing is returned if no token has one. ``replaces``:
    there are earlier scores of the same tokens, of which nothing is to be left.
    """
    has_value_T = scores.has_T | scores.has_top_T | replaces
    if not has_value_T.any():
        return b""
    first, end = int(has_value_T.argmax()), len(scores) - int(has_value_T[::-1].argmax())
    kept = scores.part(first, end)
    return b"".join(
        (
            _SCORES.pack(_IS_SCORES, len(scores) - first, len(kept), kept.k),
            kept.logp_T.astype("<f4", copy=False).tobytes(),
            kept.top_ids_TK.astype("<i4", copy=False).tobytes(),
            kept.top_logp_TK.astype("<f4", copy=False).tobytes(),
        )
    )


def encode_routes(back: int, ids_RW: Experts) -> bytes:
    """Return experts of tokens. The first is ``back`` tokens before the place where they will stand."""
    rows, width = ids_RW.shape
    head = _ROUTES.pack(_IS_ROUTES, back, rows, width, ids_RW.itemsize)
    return head + ids_RW.astype(ids_RW.dtype.newbyteorder("<"), copy=False).tobytes()


def decode_scores(data: bytes | memoryview, tokens: int) -> TeacherScores:
    """Return the scores of the last ``tokens`` tokens before ``data``, which nothing else is in.

    Raises CorruptRecord.
    """
    parts = list(decode_parts(data))
    if len(parts) != 1 or not isinstance(parts[0], ScoresPart):
        raise CorruptRecord(f"{len(data)} bytes that are no scores of a teacher")
    return _placed(tokens, [(tokens - parts[0].back, parts[0].scores)])


def decode_chunks(data: bytes | memoryview) -> Iterator[DecodedChunk]:
    """Yield the chunks of ``data``, which follow each other, without scores of a teacher and routes.

    Raises CorruptRecord.
    """
    return (part for part in decode_parts(data) if isinstance(part, DecodedChunk))


def decode_parts(data: bytes | memoryview) -> Iterator[DecodedChunk | ScoresPart | RoutesPart]:
    """Yield the chunks of ``data``, and what follows them. Raises CorruptRecord."""
    start = 0
    while start < len(data):
        try:
            n_context, n_sampled = _LENGTHS.unpack_from(data, start)
            if n_context == _IS_SCORES:
                part = _scores_at(data, start)
                yield part
                start += len(part.encoded)
                continue
            if n_context == _IS_ROUTES:
                routes = _routes_at(data, start)
                yield routes
                start += routes.size
                continue
            ids = np.frombuffer(data, "<i4", n_context + n_sampled, start + _LENGTHS.size)
            logprobs_start = start + _LENGTHS.size + ids.nbytes
            logprobs = np.frombuffer(data, "<f4", n_sampled, logprobs_start)
        except (struct.error, ValueError) as error:
            raise CorruptRecord(f"not a chunk at byte {start} of {len(data)}: {error}") from error
        yield DecodedChunk(ids[:n_context], ids[n_context:], logprobs)
        start = logprobs_start + logprobs.nbytes


def _scores_at(data: bytes | memoryview, start: int) -> ScoresPart:
    _, back, tokens, k = _SCORES.unpack_from(data, start)
    ids_start = start + _SCORES.size + 4 * tokens
    scores = TeacherScores(
        np.frombuffer(data, "<f4", tokens, start + _SCORES.size),
        np.frombuffer(data, "<i4", tokens * k, ids_start).reshape(tokens, k),
        np.frombuffer(data, "<f4", tokens * k, ids_start + 4 * tokens * k).reshape(tokens, k),
    )
    end = ids_start + 8 * tokens * k
    return ScoresPart(back, scores, data[start:end])


def _routes_at(data: bytes | memoryview, start: int) -> RoutesPart:
    _, back, rows, width, itemsize = _ROUTES.unpack_from(data, start)
    if itemsize not in (1, 2) or not 0 < rows <= back or not width:
        raise ValueError(f"routes of {rows} tokens, {back} tokens back, {width} choices of {itemsize} bytes")
    ids = np.frombuffer(data, f"<u{itemsize}", rows * width, start + _ROUTES.size)
    return RoutesPart(back, ids.reshape(rows, width), _ROUTES.size + ids.nbytes)


def _placed(tokens: int, parts: Sequence[tuple[int, TeacherScores]]) -> TeacherScores:
    try:
        return placed(tokens, parts)
    except ValueError as error:
        raise CorruptRecord(str(error)) from error


def count_chunk_tokens(data: bytes | memoryview) -> tuple[int, int]:
    """Return the numbers of context tokens and of sampled tokens of chunks, whose tokens are not looked at.

    Raises CorruptRecord.
    """
    context = sampled = start = 0
    try:
        while start < len(data):
            more_context, more_sampled = _LENGTHS.unpack_from(data, start)
            if more_context == _IS_SCORES:
                _, _, tokens, k = _SCORES.unpack_from(data, start)
                start += _SCORES.size + 4 * tokens * (1 + 2 * k)
                continue
            if more_context == _IS_ROUTES:
                _, _, rows, width, itemsize = _ROUTES.unpack_from(data, start)
                start += _ROUTES.size + rows * width * itemsize
                continue
            context, sampled = context + more_context, sampled + more_sampled
            start += _LENGTHS.size + 4 * more_context + 8 * more_sampled
    except struct.error as error:
        raise CorruptRecord(f"not a chunk at byte {start} of {len(data)}") from error
    if start != len(data):
        raise CorruptRecord(f"chunks of {start} bytes in {len(data)}")
    return context, sampled


def check_routes(data: bytes | memoryview) -> None:
    """Raise CorruptRecord unless the routes of a trajectory's chunks are of its tokens, each at most once."""
    length, ends, widths = 0, list[tuple[int, int]](), set[int]()
    for part in decode_parts(data):
        if isinstance(part, DecodedChunk):
            length += len(part.context) + len(part.tokens)
        elif isinstance(part, RoutesPart):
            rows, width = part.ids_RW.shape
            ends.append((length - part.back, length - part.back + rows))
            widths.add(width)
    ends.sort()
    if (ends and ends[0][0] < 0) or any(first < end for (_, end), (first, _) in pairwise(ends)):
        raise CorruptRecord(f"routes of the tokens {ends[:5]} of {length}, expected each token once")
    if len(widths) > 1:
        raise CorruptRecord(f"routes of {sorted(widths)} choices, expected one number for all tokens")


def cut_chunks(data: bytes | memoryview, kept: Sequence[int]) -> bytes:
    """Return the first ``kept`` tokens of each chunk of ``data``, with the scores that follow the chunks.

    Scores stay as they are: a chunk that has any must be kept whole. Routes are left out. Raises
    CorruptRecord.
    """
    cut, lengths = io.BytesIO(), iter(kept)
    for part in decode_parts(data):
        if isinstance(part, ScoresPart):
            cut.write(part.encoded)
            continue
        if isinstance(part, RoutesPart):
            continue
        tokens = next(lengths, 0)
        n = max(0, tokens - len(part.context))
        cut.write(encode_chunk(part.context[:tokens], part.tokens[:n], part.logprobs[:n]))
    return cut.getvalue()


def encode_trajectory(trajectory: Trajectory, start: int = 0, routed: int = 0) -> bytes:
    """Return the chunks of all tokens from token ``start`` on, followed by a teacher's scores, if any, and by
    the routes of the tokens from token ``routed`` on."""
    chunks: list[bytes] = []
    context_start = begin = start
    for version, _, end in _joined(trajectory.header.runs):
        if end <= start:
            continue
        if version == UNSAMPLED:
            context_start, begin = begin, end
            continue
        context = trajectory.tokens_T[context_start:begin]
        chunks.append(encode_chunk(context, trajectory.tokens_T[begin:end], trajectory.logprobs_T[begin:end]))
        context_start = begin = end
    if begin > context_start:
        chunks.append(encode_chunk(trajectory.tokens_T[context_start:begin], (), ()))
    if trajectory.teacher is not None:
        chunks.append(encode_scores(trajectory.teacher))
    if trajectory.routes_TW is not None:
        ids_TW = trajectory.routes_TW
        for first, end in known_runs(ids_TW, routed):
            chunks.append(encode_routes(len(ids_TW) - first, narrowed(ids_TW[first:end])))
    return b"".join(chunks)


def _joined(runs: Iterable[tuple[int, bool, int]]) -> list[tuple[int, bool, int]]:
    """Join neighbouring runs of sampled tokens, and neighbouring runs of context."""
    joined: list[tuple[int, bool, int]] = []
    for version, trained, end in runs:
        kind = UNSAMPLED if version == UNSAMPLED else 0
        if joined and joined[-1][0] == kind:
            joined[-1] = (kind, trained, end)
        else:
            joined.append((kind, trained, end))
    return joined


def decode_trajectory(data: bytes | memoryview, header: TrajectoryHeader) -> Trajectory:
    """Return the trajectory whose chunks are ``data``. Raises CorruptRecord when the two do not fit."""
    tokens: list[npt.NDArray[np.int32]] = []
    logprobs: list[npt.NDArray[np.float32]] = []
    scores: list[tuple[int, TeacherScores]] = []
    routes: list[tuple[int, Experts]] = []
    length = 0
    for part in decode_parts(data):
        if isinstance(part, ScoresPart):
            scores.append((length - part.back, part.scores))
            continue
        if isinstance(part, RoutesPart):
            routes.append((length - part.back, part.ids_RW))
            continue
        tokens += (part.context, part.tokens)
        logprobs += (np.zeros(len(part.context), np.float32), part.logprobs)
        length += len(part.context) + len(part.tokens)
    tokens_T = np.concatenate(tokens).astype(np.int64) if tokens else np.zeros(0, np.int64)
    logprobs_T = np.concatenate(logprobs).astype(np.float32) if logprobs else np.zeros(0, np.float32)
    ends = [end for _, _, end in header.runs]
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    if any(length <= 0 for length in lengths) or len(tokens_T) != sum(lengths):
        raise CorruptRecord(f"{len(tokens_T)} tokens, and runs {header.runs}")
    if any(trained and version == UNSAMPLED for version, trained, _ in header.runs):
        raise CorruptRecord("a token that carries loss has no version")
    try:
        return Trajectory(
            tokens_T,
            np.repeat(np.array([trained for _, trained, _ in header.runs], np.bool_), lengths),
            logprobs_T,
            np.repeat(np.array([version for version, _, _ in header.runs], np.int32), lengths),
            header.finish,
            header.retractions,
            header.reward,
            header.turn_rewards,
            header.reward_parts,
            header.siblings,
            header.is_dropped,
            _placed(length, scores) if scores else None,
            header.metrics,
            placed_routes(length, routes) if routes else None,
        )
    except (ValueError, OverflowError) as error:
        raise CorruptRecord(str(error)) from error


def decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview, what: str) -> T:
    """Return a stored struct. Raises CorruptRecord, which says that the data is not ``what``."""
    try:
        return decoder.decode(data)
    except UNREADABLE as error:
        raise CorruptRecord(f"not {what}: {error}") from error


def decode_header(data: bytes | memoryview) -> TrajectoryHeader:
    """Return a trajectory's header. Raises CorruptRecord."""
    return decoded(HEADER, data, "the header of a trajectory")


def decode_piece(data: bytes | memoryview) -> PieceHeader:
    """Return the header of a piece. Raises CorruptRecord."""
    return decoded(PIECE, data, "the header of a piece")


def checksum(data: bytes | memoryview) -> int:
    """Return the CRC-32 of encoded chunks."""
    return zlib.crc32(data)


def begins_with(input_ids: "array[int]", first: bytearray, known: int = 0) -> bool:
    """True if a request begins with the token ids ``first`` (int32), as it does for certain with ``known`` of
    them."""
    start, end = 4 * known, len(first)
    if not start < end <= 4 * len(input_ids):
        return end <= start
    # Bytes are compared at the speed of memory, elements of arrays several times slower.
    rest = first[start:] if start else first
    return rest.startswith(memoryview(input_ids).cast("B")[start:end])


def hashed_ids(ids: bytes | bytearray = b"") -> "hashlib.blake2b":
    """Return the hash of the first token ids of a request (int32), which ``digest`` goes on with."""
    return hashlib.blake2b(ids, digest_size=16)


def digest(input_ids: Sequence[int], sampling: bytes = b"", after: "hashlib.blake2b | None" = None) -> bytes:
    """Return a digest that tells whether two requests have the same token ids, and the same ``sampling``
    where they say how they are sampled. ``after``: hash of the token ids before ``input_ids``."""
    hashed = hashed_ids() if after is None else after.copy()
    hashed.update(np.asarray(input_ids, "<i4").tobytes())
    if sampling:
        hashed.update(b"\0" + sampling)
    return hashed.digest()
