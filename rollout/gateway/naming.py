"""Names in requests and answers: keys, sessions, types of turns, ids of answers. Pure.

Everything that reads a name out of a request does it here, so that the process which gets a request and the
one that answers it never disagree. Header names are in lower case. What cannot be a name raises ValueError.
"""

import base64
from collections.abc import Mapping

from slipstream.rollout.tokens.turn_entries import TurnType

SESSION_HEADER = "x-session-id"
"""Header that names the session of an answer."""

CLIENT_HEADERS = (
    "x-claude-code-session-id",
    "session_id",
    "session-id",
    "thread-id",
    "x-session-affinity",
    "x-opencode-session",
    "x-qwen-code-session-id",
    "x-kilocode-taskid",
    "x-client-session-id",
    "x-openwebui-chat-id",
)
"""Headers in which agents name their sessions by themselves; the first one that is given counts."""

LONGEST_NAME = 256
"""Characters of the longest name of a session. Names are returned in a header and kept in memory."""

_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"", "0", "false", "no", "off"})

_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""Beginnings of the ids of answers, by endpoint. The id of the request follows."""


def key_of(headers: Mapping[str, str]) -> str:
    """Return the API key of a request, from the header of OpenAI's or of Anthropic's clients; empty: none.

    The password of basic authentication is a key as well: clients send the one of ``http://user:key@host``.
    """
    kind, _, key = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return key.strip()
    if kind.lower() == "basic":
        return credentials_of(headers).partition(":")[2]
    return headers.get("x-api-key", "")


def credentials_of(headers: Mapping[str, str]) -> str:
    """Return the ``user:password`` of basic authentication (RFC 7617); empty for what is none."""
    kind, _, encoded = headers.get("authorization", "").partition(" ")
    if kind.lower() != "basic":
        return ""
    try:
        return base64.b64decode(encoded, validate=True).decode()
    except ValueError:
        return ""


def session_name(path: str | None, headers: Mapping[str, str], body: Mapping[str, object]) -> str | None:
    """Return the session that a request names by the gateway's own means; None: it names none.

    The order is: the path (``/sessions/{id}/v1/...``), the header, ``session_id`` of the body. Raises
    ValueError if the first name that is given cannot be one.
    """
    return _first_name(
        ("the path", path),
        (f"the header {SESSION_HEADER}", headers.get(SESSION_HEADER)),
        ("session_id", body.get("session_id")),
    )


def client_session(headers: Mapping[str, str]) -> str | None:
    """Return the session that an agent names by a header of its own; None: none.

    Raises ValueError if the first name that is given cannot be one.
    """
    return _first_name(*((f"the header {header}", headers.get(header)) for header in CLIENT_HEADERS))


def _first_name(*places: tuple[str, object]) -> str | None:
    for where, name in places:
        checked = checked_name(where, name)
        if checked is not None:
            return checked
    return None


def checked_name(where: str, name: object) -> str | None:
    """Return the name of a session without the blanks around it; None if nothing is left.

    Raises ValueError for what cannot be such a name. ``where`` says in the message who has given it.
    """
    if name is None:
        return None
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    if not isinstance(name, str):
        raise ValueError(f"{where} names the session {name!r}, expected a string")
    name = name.strip()
    if len(name) > LONGEST_NAME:
        raise ValueError(
            f"{where} names a session with {len(name)} characters, expected at most {LONGEST_NAME}"
        )
    if not all(" " <= character <= "~" for character in name):
        raise ValueError(f"{where} names the session {name!r}, expected printable ASCII characters")
    return name or None


def turn_type(headers: Mapping[str, str], body: Mapping[str, object]) -> TurnType | None:
    """Return the type that ``X-Turn-Type`` or ``turn_type`` of the body gives a turn; None: neither does."""
    for where, value in (
        ("the header X-Turn-Type", headers.get("x-turn-type")),
        ("turn_type", body.get("turn_type")),
    ):
        if value is None or value == "":
            continue
        if isinstance(value, str) and value.strip().upper() in TurnType.__members__:
            return TurnType[value.strip().upper()]
        raise ValueError(f"{where} is {value!r}, expected main or side")
    return None


def session_done(headers: Mapping[str, str], body: Mapping[str, object]) -> bool:
    """True if a request says that it is the last one of its session.

    ``X-Session-Done`` counts before ``session_done`` of the body.
    """
    for where, value in (
        ("the header X-Session-Done", headers.get("x-session-done")),
        ("session_done", body.get("session_done")),
    ):
        if value is None:
            continue
        text = str(value).strip().lower() if isinstance(value, str | int) else None
        if text not in _YES | _NO:
            raise ValueError(f"{where} is {value!r}, expected 1, true, yes, on, or 0, false, no, off")
        return text in _YES
    return False


def retries(headers: Mapping[str, str]) -> int:
    """Return how often the client has sent the request before, by its ``x-stainless-retry-count``."""
    text = headers.get("x-stainless-retry-count", "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0


def addressed_request(path: str, body: Mapping[str, object]) -> str | None:
    """Return the id of the request whose answer is to be shown, aborted or rewarded, or the session that is
    to be rewarded; None: none is.
    """
    rid = body.get("rid") if path == "/abort_request" else None
    if path == "/rewards":
        session, rid = body.get("session"), body.get("response_id")
        if isinstance(session, str) and session.strip():
            return session.strip()
    if path.startswith("/sessions/") and path.count("/") == 2:
        return path.removeprefix("/sessions/") or None
    if path.split("/")[-3:-1] == ["v1", "responses"]:
        rid = path.rpartition("/")[2]
    return request_of(rid) if isinstance(rid, str) else None


def request_of(answer: str) -> str:
    """Return the id of the request with this answer, whichever endpoint has given the answer its id."""
    for prefix in _PREFIXES:
        if answer.startswith(prefix):
            return answer.removeprefix(prefix)
    return answer
