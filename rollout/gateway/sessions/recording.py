"""The entry of a turn, and the chunk with its tokens."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import msgspec

from slipstream.rollout.gateway.conversations import Answer
from slipstream.rollout.tokens.record import encode_chunk
from slipstream.rollout.tokens.trajectory import Finish
from slipstream.rollout.tokens.turn_entries import TurnType

_HIGHEST_LOGPROB = 1e-3
"""Log-probs may exceed 0 by rounding."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The part of a turn's entry that the answer decides."""

    chunk: bytes
    spans: tuple[tuple[int, int], ...]
    finish: Finish
    turn_type: TurnType
    reason: str
    """Reason for which it is a side turn."""


def sample_of(answer: Answer, context: Sequence[int], turn_type: TurnType, reason: str) -> Sample:
    """Return the tokens of an answer behind its context.

    A turn without tokens, without a finite log-prob of each, or without the versions of all is not trained.
    Tokens without log-probs are recorded as context: nothing is made up for them.
    """
    finish = Finish.PARTIAL if answer.finish is None or answer.cancelled else answer.finish.finish
    spans = tuple((int(version), int(tokens)) for version, tokens in answer.spans)
    flaw = _flaw(answer, spans)
    if flaw and turn_type is TurnType.MAIN and not answer.cancelled:
        turn_type, reason = TurnType.SIDE, flaw
    if flaw in (_LOGPROBS, _SPANS):
        return Sample(encode_chunk([*context, *answer.tokens], (), ()), (), finish, turn_type, reason)
    chunk = encode_chunk(context, answer.tokens, answer.logprobs)
    return Sample(chunk, spans, finish, turn_type, reason)


_LOGPROBS = "log-probs missing"
_SPANS = "versions missing"
_EMPTY = "no tokens"
_CUT_OFF = "cut off"


def _flaw(answer: Answer, spans: tuple[tuple[int, int], ...]) -> str:
    """Return why an answer cannot be trained; empty: it can."""
    if len(answer.logprobs) != len(answer.tokens) or not all(
        isfinite(logprob) and logprob <= _HIGHEST_LOGPROB for logprob in answer.logprobs
    ):
        return _LOGPROBS
    if sum(tokens for _, tokens in spans) != len(answer.tokens) or any(tokens <= 0 for _, tokens in spans):
        return _SPANS
    if not answer.tokens:
        return _EMPTY
    return _CUT_OFF if answer.finish is None else ""


def as_json(value: object) -> msgspec.Raw:
    """Return JSON. Halves of surrogate pairs, which JSON may have and UTF-8 cannot, become question marks."""
    try:
        return msgspec.Raw(msgspec.json.encode(value))
    except (UnicodeEncodeError, OverflowError):  # the latter: integers of more than 64 bits
        return msgspec.Raw(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
