"""Trajectories and partial answers as bytes. A msgpack of raw little-endian arrays: no pickle."""

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from rollout.trajectory import UNSAMPLED, Completion, Finish, Span, Trajectory


class CorruptRecord(ValueError):
    """Bytes that are no record."""


class _Spans(msgspec.Struct, array_like=True):
    """Runs of equal versions: [version, end] pairs, int32."""

    runs: bytes

    @classmethod
    def of(cls, versions_T: np.ndarray) -> "_Spans":
        n = len(versions_T)
        ends = [*(np.flatnonzero(versions_T[1:] != versions_T[:-1]) + 1).tolist(), n] if n else []
        pairs = [(int(versions_T[end - 1]), end) for end in ends]
        return cls(np.array(pairs, "<i4").tobytes())

    def pairs(self) -> np.ndarray:
        """int32 [R, 2]"""
        return np.frombuffer(self.runs, "<i4").reshape(-1, 2)

    def versions(self, n: int) -> np.ndarray:
        """int32 [n]"""
        pairs_R2 = self.pairs()
        if (np.diff(pairs_R2[:, 1], prepend=0) <= 0).any() or pairs_R2[-1:, 1].sum() != n:
            raise CorruptRecord(f"version runs that do not tile {n} tokens")
        return np.repeat(pairs_R2[:, 0], np.diff(pairs_R2[:, 1], prepend=0)).astype(np.int32)


class _Trajectory(msgspec.Struct, array_like=True):
    tokens: bytes
    loss_mask: bytes
    logprobs: bytes
    versions: _Spans
    finish: str
    retractions: int
    reward: float | None


class _Completion(msgspec.Struct, array_like=True):
    tokens: bytes
    logprobs: bytes
    versions: _Spans
    finish: str
    retractions: int


_encoder = msgspec.msgpack.Encoder()
_trajectories = msgspec.msgpack.Decoder(_Trajectory)
_completions = msgspec.msgpack.Decoder(_Completion)


def encode_trajectory(trajectory: Trajectory) -> bytes:
    return _encoder.encode(
        _Trajectory(
            trajectory.tokens_T.astype("<i4").tobytes(),
            np.packbits(trajectory.loss_mask_T).tobytes(),
            trajectory.logprobs_T.astype("<f4", copy=False).tobytes(),
            _Spans.of(trajectory.versions_T),
            trajectory.finish.value,
            trajectory.retractions,
            trajectory.reward,
        )
    )


def decode_trajectory(data: bytes) -> Trajectory:
    """Raises CorruptRecord."""
    try:
        record = _trajectories.decode(data)
        tokens_T = np.frombuffer(record.tokens, "<i4").astype(np.int64)
        n = len(tokens_T)
        mask_T = np.unpackbits(np.frombuffer(record.loss_mask, np.uint8), count=n).astype(bool)
        logprobs_T = np.frombuffer(record.logprobs, "<f4").astype(np.float32)
        versions_T = record.versions.versions(n)
        if len(logprobs_T) != n or len(mask_T) != n:
            raise CorruptRecord(f"{n} tokens, {len(logprobs_T)} log-probs, {len(mask_T)} mask bits")
        if (versions_T[mask_T] == UNSAMPLED).any():
            raise CorruptRecord("a token that carries loss has no version")
        return Trajectory(
            tokens_T,
            mask_T,
            logprobs_T,
            versions_T,
            Finish(record.finish),
            record.retractions,
            record.reward,
        )
    except (msgspec.DecodeError, ValueError) as error:
        raise CorruptRecord(f"not a trajectory: {error}") from error


def encode_completion(completion: Completion) -> bytes:
    runs = [(span.version, span.end) for span in completion.spans]
    return _encoder.encode(
        _Completion(
            np.array(completion.tokens, "<i4").tobytes(),
            np.array(completion.logprobs, "<f4").tobytes(),
            _Spans(np.array(runs, "<i4").tobytes()),
            completion.finish.value,
            completion.retractions,
        )
    )


def decode_completion(data: bytes) -> Completion:
    """Raises CorruptRecord."""
    try:
        record = _completions.decode(data)
        start, spans = 0, []
        for version, end in record.versions.pairs().tolist():
            spans.append(Span(version, start, end))
            start = end
        return Completion(
            tuple(np.frombuffer(record.tokens, "<i4").tolist()),
            tuple(np.frombuffer(record.logprobs, "<f4").tolist()),
            tuple(spans),
            Finish(record.finish),
            record.retractions,
        )
    except (msgspec.DecodeError, ValueError) as error:
        raise CorruptRecord(f"not a partial answer: {error}") from error


def digest(input_ids: Sequence[int]) -> bytes:
    """Tells whether two requests ask for the same continuation."""
    return hashlib.blake2b(np.array(input_ids, "<i4").tobytes(), digest_size=16).digest()
