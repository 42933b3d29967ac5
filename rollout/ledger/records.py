"""Encodes trajectories and completions as bytes: msgpack with raw little-endian arrays, no pickle."""

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from slipstream.rollout.trajectory import UNSAMPLED, Completion, Finish, Span, Trajectory


class CorruptRecord(ValueError):
    """Bytes cannot be decoded as the record that they should be."""


class _Trajectory(msgspec.Struct, array_like=True):
    tokens: bytes
    logprobs: bytes
    runs: list[tuple[int, bool, int]]
    """``Trajectory.runs``"""
    finish: str
    retractions: int
    reward: float | None
    turn_rewards: tuple[tuple[int, float], ...] = ()


class _Completion(msgspec.Struct, array_like=True):
    tokens: bytes
    logprobs: bytes
    spans: list[tuple[int, int]]
    """(version, end) of each version span."""
    finish: str
    retractions: int


_encoder = msgspec.msgpack.Encoder()
_trajectories = msgspec.msgpack.Decoder(_Trajectory)
_completions = msgspec.msgpack.Decoder(_Completion)


def encode_trajectory(trajectory: Trajectory) -> bytes:
    return _encoder.encode(
        _Trajectory(
            trajectory.tokens_T.astype("<i4").tobytes(),
            trajectory.logprobs_T.astype("<f4", copy=False).tobytes(),
            trajectory.runs,
            trajectory.finish.value,
            trajectory.retractions,
            trajectory.reward,
            trajectory.turn_rewards,
        )
    )


def decode_trajectory(data: bytes) -> Trajectory:
    """Return the trajectory that was encoded. Raises CorruptRecord."""
    try:
        record = _trajectories.decode(data)
        tokens_T = np.frombuffer(record.tokens, "<i4").astype(np.int64)
        logprobs_T = np.frombuffer(record.logprobs, "<f4").astype(np.float32)
        versions, trained, ends = zip(*record.runs, strict=True) if record.runs else ((), (), ())
        lengths = np.diff(ends, prepend=0).astype(np.int64)
        if (lengths <= 0).any() or not len(tokens_T) == len(logprobs_T) == lengths.sum():
            raise CorruptRecord(
                f"{len(tokens_T)} tokens, {len(logprobs_T)} log-probs, and runs that end at {list(ends)}"
            )
        if any(version == UNSAMPLED and carries for version, carries, _ in record.runs):
            raise CorruptRecord("a token that carries loss has no version")
        return Trajectory(
            tokens_T,
            np.repeat(np.array(trained, bool), lengths),
            logprobs_T,
            np.repeat(np.array(versions, np.int32), lengths),
            Finish(record.finish),
            record.retractions,
            record.reward,
            record.turn_rewards,
        )
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise CorruptRecord(f"not a trajectory: {error}") from error


def encode_completion(completion: Completion) -> bytes:
    return _encoder.encode(
        _Completion(
            np.array(completion.tokens, "<i4").tobytes(),
            np.array(completion.logprobs, "<f4").tobytes(),
            [(span.version, span.end) for span in completion.spans],
            completion.finish.value,
            completion.retractions,
        )
    )


def decode_completion(data: bytes) -> Completion:
    """Return the completion that was encoded. Raises CorruptRecord."""
    try:
        record = _completions.decode(data)
        start = 0
        spans: list[Span] = []
        for version, end in record.spans:
            spans.append(Span(version, start, end))
            start = end
        return Completion(
            tuple(np.frombuffer(record.tokens, "<i4").tolist()),
            tuple(np.frombuffer(record.logprobs, "<f4").tolist()),
            tuple(spans),
            Finish(record.finish),
            record.retractions,
        )
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise CorruptRecord(f"not a completion: {error}") from error


def digest(input_ids: Sequence[int]) -> bytes:
    """Return a digest that tells whether two requests have the same token ids."""
    return hashlib.blake2b(np.array(input_ids, "<i4").tobytes(), digest_size=16).digest()
