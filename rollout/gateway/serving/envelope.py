"""Reads the envelope of a request: who sends it, its session, its type. Pure."""

import hashlib
from collections.abc import Mapping
from typing import Any

from slipstream.rollout.gateway import naming
from slipstream.rollout.gateway.conversations import User
from slipstream.rollout.gateway.serving.call import Envelope
from slipstream.rollout.gateway.serving.limits import Refusal


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
    try:
        session = naming.session_name(path_session, headers, body) or response_session or user.session
        turn_type = naming.turn_type(headers, body)
        ends_session = naming.session_done(headers, body)
    except ValueError as error:
        raise Refusal(400, str(error)) from error
    return Envelope(
        user=user,
        session=session,
        turn_type=turn_type,
        ends_session=ends_session,
        digest=hashlib.blake2b(f"{endpoint}\n{session}\n".encode() + raw, digest_size=16).digest(),
        retries=naming.retries(headers),
        arrived_s=now_s,
    )
