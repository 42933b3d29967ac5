"""The entry of a turn, with the chunk of its tokens."""

from math import isfinite

import msgspec

from slipstream.rollout.gateway.conversations import Answer
from slipstream.rollout.gateway.sessions.continuing import PromptPlan
from slipstream.rollout.gateway.sessions.running import RunningRequest
from slipstream.rollout.tokens.conversation.chains import ids_of
from slipstream.rollout.tokens.record import encode_chunk
from slipstream.rollout.tokens.trajectory import Finish
from slipstream.rollout.tokens.turn_entries import Turn, TurnType, as_json

_HIGHEST_LOGPROB = 1e-3
"""Log-probs may exceed 0 by rounding."""


def entry_of(running: RunningRequest, prompt: PromptPlan, answer: Answer) -> Turn:
    """Return the entry of an answer to a prompt, with the reason for which it is a side turn.

    A turn without tokens, without a finite log-prob of each, or without the versions of all is not trained.
    Tokens without log-probs are recorded as context: nothing is made up for them.
    """
    turn_type, reason = running.turn_type, running.reason
    spans = tuple((int(version), int(tokens)) for version, tokens in answer.spans)
    flaw = _flaw(answer, spans)
    if flaw and turn_type is TurnType.MAIN and not answer.cancelled:
        turn_type, reason = TurnType.SIDE, flaw
    context = ids_of(prompt.tail)[prompt.shared :]
    if flaw in (_LOGPROBS, _SPANS):
        spans, chunk = (), encode_chunk([*context, *answer.tokens], (), ())
    else:
        chunk = encode_chunk(context, answer.tokens, answer.logprobs)
    return Turn(
        session=running.session,
        key=running.key,
        parent=None if prompt.parent is None else prompt.parent.number,
        shared=prompt.shared,
        turn_type=turn_type,
        reason=reason,
        spans=spans,
        finish=Finish.PARTIAL if answer.finish is None or answer.cancelled else answer.finish.finish,
        cancelled=answer.cancelled,
        started_s=running.arrived_s,
        ended_s=answer.ended_s,
        kept=prompt.kept,
        messages=as_json(prompt.messages[prompt.kept :]),
        answer=as_json(answer.message),
        response=running.request,
        previous=running.previous if answer.exchange else "",
        exchange=msgspec.Raw(answer.exchange),
        choice=answer.choice,
        is_rewarded=running.home.tags is not None,
        chunk=chunk,
    )


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
