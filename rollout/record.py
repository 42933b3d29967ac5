"""The record of an episode: chunks of bytes that are appended while it grows and never written again.

    chunk       u32 context | u32 sampled | i4[context + sampled] token ids | f4[sampled] log-probs
    trajectory  its chunks, one behind the other, and a ``TrajectoryHeader`` kept beside them

All numbers are little-endian. Context tokens were sampled by no policy and have no log-prob; the sampled
tokens of a chunk follow its context. A chunk is encoded once, where the tokens arrive, and decoded once,
where they are trained. Whatever carries, stores or decides about it in between looks at headers only.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.rollout.trajectory import UNSAMPLED, Finish, Trajectory, TrajectoryHeader


class CorruptRecord(ValueError):
    """Bytes cannot be decoded as the record that they should be."""


class PieceHeader(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a chunk of an unfinished episode is: a part of the completion of one of its requests."""

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


class Ref(NamedTuple):
    """Where the payload of one chunk stands in the segments of a ledger."""

    segment: int
    offset: int
    size: int
    """Bytes."""
    crc: int
    """CRC-32 of the bytes, from whoever encoded them."""


UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of a msgspec decoder that is given bytes which nobody has encoded."""

HEADER = msgspec.msgpack.Decoder(TrajectoryHeader)
PIECE = msgspec.msgpack.Decoder(PieceHeader)
encode = msgspec.msgpack.Encoder().encode
"""Encodes a header as msgpack."""

REF = struct.Struct("<IQII")
_LENGTHS = struct.Struct("<II")


Ids = Sequence[int] | npt.NDArray[np.integer]
LogProbs = Sequence[float] | npt.NDArray[np.floating]


def encode_chunk(context: Ids, tokens: Ids, logprobs: LogProbs) -> bytes:
    """Return a chunk of ``context`` and of the sampled ``tokens`` behind it, with a log-prob for each."""
    return b"".join(
        (
            _LENGTHS.pack(len(context), len(tokens)),
            np.asarray(context, "<i4").tobytes(),
            np.asarray(tokens, "<i4").tobytes(),
            np.asarray(logprobs, "<f4").tobytes(),
        )
    )


def decode_chunks(data: bytes | memoryview) -> Iterator[DecodedChunk]:
    """Yield the chunks of ``data``, which stand one behind the other. Raises CorruptRecord."""
    start = 0
    while start < len(data):
        try:
            n_context, n_sampled = _LENGTHS.unpack_from(data, start)
            ids = np.frombuffer(data, "<i4", n_context + n_sampled, start + _LENGTHS.size)
            logprobs_start = start + _LENGTHS.size + ids.nbytes
            logprobs = np.frombuffer(data, "<f4", n_sampled, logprobs_start)
        except (struct.error, ValueError) as error:
            raise CorruptRecord(f"not a chunk at byte {start} of {len(data)}: {error}") from error
        yield DecodedChunk(ids[:n_context], ids[n_context:], logprobs)
        start = logprobs_start + logprobs.nbytes


def cut_chunks(data: bytes | memoryview, kept: Sequence[int]) -> bytes:
    """Return the first ``kept`` tokens of each chunk of ``data``. Raises CorruptRecord."""
    parts: list[bytes] = []
    for chunk, tokens in zip(decode_chunks(data), kept, strict=True):
        n = max(0, tokens - len(chunk.context))
        parts.append(encode_chunk(chunk.context[:tokens], chunk.tokens[:n], chunk.logprobs[:n]))
    return b"".join(parts)


def encode_trajectory(trajectory: Trajectory, start: int = 0) -> bytes:
    """Return the chunks of all tokens from token ``start`` on."""
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
    for chunk in decode_chunks(data):
        tokens += (chunk.context, chunk.tokens)
        logprobs += (np.zeros(len(chunk.context), np.float32), chunk.logprobs)
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
        )
    except (ValueError, OverflowError) as error:
        raise CorruptRecord(str(error)) from error


def decode_header(data: bytes | memoryview) -> TrajectoryHeader:
    """Return a trajectory's header. Raises CorruptRecord."""
    try:
        return HEADER.decode(data)
    except UNREADABLE as error:
        raise CorruptRecord(f"not the header of a trajectory: {error}") from error


def decode_piece(data: bytes | memoryview) -> PieceHeader:
    """Return the header of a piece. Raises CorruptRecord."""
    try:
        return PIECE.decode(data)
    except UNREADABLE as error:
        raise CorruptRecord(f"not the header of a piece: {error}") from error


def checksum(data: bytes | memoryview) -> int:
    """Return the CRC-32 of encoded chunks."""
    return zlib.crc32(data)


def digest(input_ids: Sequence[int], sampling: bytes = b"") -> bytes:
    """Return a digest that tells whether two requests have the same token ids, and the same ``sampling``
    where they say how they are sampled."""
    hashed = hashlib.blake2b(np.asarray(input_ids, "<i4").tobytes(), digest_size=16)
    if sampling:
        hashed.update(b"\0" + sampling)
    return hashed.digest()
