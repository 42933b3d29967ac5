"""What a request says about itself beside its prompt: who sends it, its session, its type. Pure."""

import hashlib
from collections.abc import Mapping
from typing import Any

from slipstream.rollout.gateway.conversations import User
from slipstream.rollout.gateway.serving.call import Envelope
from slipstream.rollout.gateway.serving.limits import Refusal
from slipstream.rollout.turns import TurnType

SESSION_HEADERS = ("x-session-id", "session_id", "x-session-affinity")
"""Headers that name a session; the first one that is given counts."""

LONGEST_NAME = 256
"""Largest number of characters of a session's name."""

_YES = {"1", "true", "yes", "on"}
_NO = {"", "0", "false", "no", "off"}
_TYPES = {"main": TurnType.MAIN, "side": TurnType.SIDE}


def key_of(headers: Mapping[str, str]) -> str:
    """Return the API key of a request, from the header of OpenAI's or of Anthropic's clients; empty: none."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def envelope_of(
    user: User,
    *,
    endpoint: str,
    path_session: str | None,
    response_session: str | None,
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    raw: bytes,
    now_s: float,
) -> Envelope:
    """Return what a request says about itself. Raises Refusal with 400.

    ``path_session``: the session in the URL. ``response_session``: the session of the response that the
    request names as the previous one.
    """
    session = _session(user, path_session, response_session, headers, body)
    return Envelope(
        user=user,
        session=session,
        turn_type=_turn_type(headers.get("x-turn-type", body.get("turn_type"))),
        ends_session=_flag("session_done", headers.get("x-session-done", body.get("session_done"))),
        digest=hashlib.blake2b(f"{endpoint}\n{session}\n".encode() + raw, digest_size=16).digest(),
        retries=_retries(headers.get("x-stainless-retry-count")),
        arrived_s=now_s,
    )


def _session(
    user: User,
    path_session: str | None,
    response_session: str | None,
    headers: Mapping[str, str],
    body: Mapping[str, Any],
) -> str | None:
    named = [path_session, *(headers.get(name) for name in SESSION_HEADERS), body.get("session_id")]
    for name in [*named, response_session, user.session]:
        if name is None or name == "":
            continue
        if not isinstance(name, str) or len(name) > LONGEST_NAME or not name.isprintable():
            raise Refusal(
                400,
                f"session_id: expected a printable text of at most {LONGEST_NAME} characters",
                param="session_id",
            )
        return name
    return None


def _turn_type(name: object) -> TurnType | None:
    if name is None:
        return None
    turn_type = _TYPES.get(name.lower()) if isinstance(name, str) else None
    if turn_type is None:
        raise Refusal(400, f"turn_type: expected main or side, found {name!r}", param="turn_type")
    return turn_type


def _flag(what: str, value: object) -> bool:
    text = "" if value is None else str(value).strip().lower()
    if text in _YES or text in _NO:
        return text in _YES
    raise Refusal(400, f"{what}: expected 1, true, yes, on, or none of them; found {value!r}", param=what)


def _retries(count: str | None) -> int:
    return int(count) if count is not None and count.isdecimal() and len(count) < 10 else 0
