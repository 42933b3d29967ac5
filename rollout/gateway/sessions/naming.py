"""Names of sessions and types of turns, as clients give them. Header names are in lower case."""

from collections.abc import Callable, Mapping

from slipstream.rollout.turns import TurnType

SESSION_HEADERS = ("x-session-id", "session_id", "x-session-affinity")
"""Headers that name a session; the first one that is present counts."""

LONGEST_NAME = 256
"""Characters of the longest name of a session. Names are returned in a header and kept in memory."""

_YES = frozenset({"1", "true", "yes", "on"})


def session_name(
    path: str | None,
    headers: Mapping[str, str],
    body: Mapping[str, object],
    previous: Callable[[str], str | None],
) -> str | None:
    """Return the session that a request names, or None.

    The order is: the path (``/sessions/{id}/v1/...``), the headers, ``session_id`` of the body, and the
    session of the response that ``previous_response_id`` names, which ``previous`` looks up. Raises
    ValueError if the first name that is given cannot be one.
    """
    for where, name in (
        ("the path", path),
        *((f"the header {header}", headers.get(header)) for header in SESSION_HEADERS),
        ("session_id", body.get("session_id")),
    ):
        checked = _checked(where, name)
        if checked is not None:
            return checked
    response = body.get("previous_response_id")
    return previous(response) if isinstance(response, str) and response else None


def _checked(where: str, name: object) -> str | None:
    """Return a name without the blanks around it; None if nothing is left."""
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
    """Return the type that ``X-Turn-Type`` or ``turn_type`` of the body gives a turn; None: neither does.

    Raises ValueError for a type that does not exist.
    """
    for where, value in (
        ("the header X-Turn-Type", headers.get("x-turn-type")),
        ("turn_type", body.get("turn_type")),
    ):
        text = "" if value is None else str(value).strip()
        if not text:
            continue
        try:
            return TurnType[text.upper()]
        except KeyError:
            raise ValueError(f"{where} is {text!r}, expected main or side") from None
    return None


def session_done(headers: Mapping[str, str], body: Mapping[str, object]) -> bool:
    """Return whether a request says that it is the last one of its session.

    ``X-Session-Done`` and ``session_done`` of the body are true if they are 1, true, yes or on.
    """
    values = (headers.get("x-session-done"), body.get("session_done"))
    return any(value is not None and str(value).strip().lower() in _YES for value in values)


def retries(headers: Mapping[str, str]) -> int:
    """Return how often the client has sent the request before, by its ``x-stainless-retry-count``."""
    text = headers.get("x-stainless-retry-count", "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
