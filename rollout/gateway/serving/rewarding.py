"""Bodies of the gateway's own endpoints for rewards. What is not known is an error. No SGLang in here.

The endpoints of other protocols leave out what they do not know, so that newer clients work. A reward has no
newer clients: a field that is left out would send it to another turn, silently.
"""

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

from slipstream.rollout.gateway.conversations import ClientReward, TakenReward
from slipstream.rollout.gateway.naming import LONGEST_NAME, checked_name, request_of
from slipstream.rollout.gateway.serving.limits import Refusal
from slipstream.rollout.tokens.trajectory import LARGEST_REWARD

LONGEST_REWARD_NAME = 64
NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
MOST_PROBLEMS = 16
"""Problems of a body that are told. A body of millions of unknown fields has as many."""

LONGEST_FIELD = 80
"""Characters of a client's field or value in an error."""

MOST_TURNS = 1 << 40
"""Turns and choices have smaller places."""

COUNTED = "counted"
"""Outcome of a reward that is the turn's score from now on. Others say why it is not."""

LATE = {
    "trained": "it was trained already",
    "training": "the training step that reads it has begun",
    "side": "it is a side turn, which is not trained",
    "filtered": "there is nothing to train in it",
    "expired": "it has expired: its tokens are too old",
    "failed": "it cannot be trained: its tokens are damaged, or it has waited too long",
    "cancelled": "it was cancelled",
    "forgotten": "it was forgotten",
    "unpaired": "its next state was lost, and it has ended",
    "unused": "the run trains on a teacher's scores alone",
    "too large": "the rewards of the turn add up to more than float32 holds",
}
"""Why a reward does not count, by its outcome."""


class OwnField(NamedTuple):
    """A field of a body."""

    schema: Mapping[str, object]
    """Its JSON schema, for the description of the endpoints."""
    expected: str
    fits: Callable[[object], bool]


def _is_finite(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(cast(float, value)) <= LARGEST_REWARD  # NaN is not


def _is_place(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_TURNS


def _is_session(value: object) -> bool:
    try:
        return isinstance(value, str) and checked_name("session", value) is not None
    except ValueError:
        return False


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and value.isprintable()


def _is_reward_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= LONGEST_REWARD_NAME and {*value} <= NAME_CHARACTERS


_TEXT = {"type": "string", "minLength": 1, "maxLength": LONGEST_NAME}
_PLACE = {"type": "integer", "minimum": 0}
_NUMBER = {"type": "number", "minimum": -LARGEST_REWARD, "maximum": LARGEST_REWARD}
_VALUE = OwnField(_NUMBER, "a finite number of float32", _is_finite)
_TURN = OwnField(_PLACE, "the place of a turn in its session, from 0", _is_place)
_NAME = OwnField(
    {"type": "string", "pattern": f"^[A-Za-z0-9._-]{{1,{LONGEST_REWARD_NAME}}}$"},
    f"1 to {LONGEST_REWARD_NAME} letters, digits and characters of `._-`",
    _is_reward_name,
)
_ONCE = OwnField(_TEXT, f"a text of 1 to {LONGEST_NAME} printable characters", _is_text)


def _is_tags(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    tags = cast("dict[str, object]", value)
    return len(tags) <= MOST_TAGS and all(map(_is_tag, (*tags, *tags.values())))


def _is_tag(tag: object) -> bool:
    if isinstance(tag, str):  # half of a surrogate pair is in no list of sessions, which is UTF-8
        return len(tag) <= LONGEST_NAME and not any("\ud800" <= character <= "\udfff" for character in tag)
    return isinstance(tag, bool) or _is_finite(tag)


MOST_SESSIONS = 1024
"""Sessions that one request may open."""

MOST_TAGS = 16

OPENING = {
    "count": OwnField(
        {"type": "integer", "minimum": 1, "maximum": MOST_SESSIONS},
        f"a whole number from 1 to {MOST_SESSIONS}",
        lambda value: _is_place(value) and 1 <= cast(int, value) <= MOST_SESSIONS,
    ),
    "group": OwnField({"type": "boolean"}, "true or false", lambda value: isinstance(value, bool)),
    "tags": OwnField(
        {"type": "object", "maxProperties": MOST_TAGS},
        f"an object of at most {MOST_TAGS} texts, numbers, true or false, of {LONGEST_NAME} characters each",
        _is_tags,
    ),
    "key": _ONCE,
}
"""Fields of ``POST /sessions``."""

SESSION_REWARD = {"reward": _VALUE, "turn": _TURN, "name": _NAME, "key": _ONCE}
"""Fields of ``POST /sessions/ID/reward``."""

REWARD = {
    "value": _VALUE,
    "response_id": OwnField(
        _TEXT, "the id of an answer", lambda value: _is_text(value) and bool(request_of(cast(str, value)))
    ),
    "choice": OwnField(_PLACE, "the place of an answer among several, from 0", _is_place),
    "call_id": OwnField(_TEXT, "the id of a tool call in an answer", _is_text),
    "session": OwnField(_TEXT, f"the name of a session, of at most {LONGEST_NAME} characters", _is_session),
    "turn": _TURN,
    "discount": OwnField(
        {"type": "number", "minimum": 0, "maximum": 1},
        "a number from 0 to 1",
        lambda value: _is_finite(value) and 0 <= cast(float, value) <= 1,
    ),
    "name": _NAME,
    "key": _ONCE,
}
"""Fields of ``POST /rewards``."""

PLACES = ("response_id", "call_id", "session")
"""Fields of which exactly one says what is rewarded."""


def read_reward(raw: bytes, header: str | None) -> ClientReward:
    """Return the reward in the body of ``POST /rewards``. ``header``: ``Idempotency-Key``.

    Raises Refusal with 400 that names everything that is wrong.
    """
    body = _with_key(_object(raw), header)
    problems = _problems(body, REWARD, ("value",))
    named = [name for name in PLACES if name in body]
    if len(named) != 1:
        found = " and ".join(named) or "none of them"
        problems.append(("session", f"expected exactly one of {', '.join(PLACES)}, found {found}"))
    for name, needed in (("choice", "response_id"), ("turn", "session"), ("discount", "session")):
        if name in body and needed not in body:
            problems.append((name, f"`{name}` is of no use without `{needed}`"))
    if "discount" in body and "turn" in body:
        problems.append(("discount", "`discount` shares the reward of a whole session: leave `turn` out"))
    _raise(problems)
    given = cast("dict[str, str]", body)
    return ClientReward(
        value=float(given["value"]),
        session=given.get("session", "").strip(),
        turn=cast("int | None", body.get("turn")),
        is_whole="session" in body and "turn" not in body,
        discount=cast("float | None", body.get("discount")),
        request=request_of(given.get("response_id", "")),
        choice=cast("int | None", body.get("choice")),
        call=given.get("call_id", ""),
        name=given.get("name", ""),
        once=given.get("key", ""),
    )


def read_session_reward(raw: bytes, session: str, header: str | None) -> ClientReward:
    """Return the reward in the body of ``POST /sessions/ID/reward``, as ``read_reward`` does."""
    body = _with_key(_object(raw), header)
    _raise(_problems(body, SESSION_REWARD, ("reward",)))
    given = cast("dict[str, str]", body)
    return ClientReward(
        value=float(given["reward"]),
        session=session,
        turn=cast("int | None", body.get("turn")),
        name=given.get("name", ""),
        once=given.get("key", ""),
    )


class WantedSessions(NamedTuple):
    """What ``POST /sessions`` asks for."""

    count: int
    is_group: bool
    tags: Mapping[str, object]
    once: str
    """Name of the request, which counts once however often the client sends it; empty: none."""


def read_opening(raw: bytes, header: str | None) -> WantedSessions:
    """Return what a client wants to open, as ``read_reward`` does."""
    body = _with_key(_object(raw) if raw.strip() else {}, header)
    problems = _problems(body, OPENING, ())
    if body.get("group") is True and not problems and body.get("count", 1) == 1:
        problems.append(("count", "count: expected 2 or more for a group, whose rewards are compared"))
    _raise(problems)
    tags = cast("dict[str, object]", body.get("tags", {}))
    return WantedSessions(
        cast(int, body.get("count", 1)), bool(body.get("group", False)), tags, cast(str, body.get("key", ""))
    )


def schema_of(fields: Mapping[str, OwnField], required: Sequence[str]) -> dict[str, object]:
    """Return the JSON schema of a body."""
    properties = {name: dict(field.schema) for name, field in fields.items()}
    return {
        "type": "object",
        "required": list(required),
        "properties": properties,
        "additionalProperties": False,
    }


def reply_of(given: TakenReward) -> tuple[int, dict[str, object]]:
    """Return status and content of the reply to a reward.

    200: it counts for all turns, or for those of a session that still wait. 202: it is recorded, and held for
    the others of its group, or the driver has not taken it yet. 409: it counts for none.
    """
    outcomes = {turn.outcome for turn in given.turns}
    turns = [
        {
            "session": turn.session,
            "turn": turn.turn,
            "response_id": turn.request,
            "value": turn.value,
            "outcome": turn.outcome or None,
        }
        for turn in given.turns
    ]
    content: dict[str, object] = {"session_id": given.session, "turns": turns, "again": not given.entries}
    if not given.turns:
        return 202, {**content, "status": "held", "waits_for": given.waits_for}
    if COUNTED in outcomes:
        return 200, {**content, "status": COUNTED}
    if "" in outcomes:
        return 202, {**content, "status": "recorded"}
    why = "; ".join(f"turn {turn.turn}: {LATE.get(turn.outcome, 'it has ended')}" for turn in given.turns)
    error = {"message": f"the reward does not count: {why}", "type": "invalid_request_error", "code": "late"}
    return 409, {**content, "status": "late", "error": error | {"param": None}}


def _with_key(body: dict[str, object], header: str | None) -> dict[str, object]:
    """Return a body with the key from the header, unless the body has one."""
    return body if header is None or "key" in body else {**body, "key": header.strip()}


def _object(raw: bytes) -> dict[str, object]:
    """Return a body in which no field is given twice. NaN and Infinity are read, to be refused by name."""
    try:
        body = json.loads(raw.decode(), object_pairs_hook=_once)  # bytes could be UTF-16, too
    except _Twice as error:
        raise Refusal(400, f"{_shown(str(error))} is given twice", param=_param(str(error))) from None
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refusal(400, "expected a JSON object as the body")
    return cast("dict[str, object]", body)


class _Twice(ValueError):
    """A field is given twice."""


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    given: dict[str, object] = {}
    for name, value in pairs:
        if name in given:
            raise _Twice(name)
        given[name] = value
    return given


def _problems(
    body: Mapping[str, object], fields: Mapping[str, OwnField], required: Sequence[str]
) -> list[tuple[str, str]]:
    problems = [(name, f"`{name}` is missing") for name in required if name not in body]
    for name, value in body.items():
        if name not in fields:
            is_told = len(problems) < MOST_PROBLEMS
            problems.append((name, _unknown(name, fields) if is_told else ""))
        elif not fields[name].fits(value):
            problems.append((name, f"{name}: expected {fields[name].expected}, found {_shown(value)}"))
    return problems


def _unknown(name: str, fields: Mapping[str, OwnField]) -> str:
    word = name.lower().replace("-", "_")
    near = difflib.get_close_matches(word, fields, n=1, cutoff=0.5) if len(word) <= LONGEST_FIELD else []
    meant = f", did you mean `{near[0]}`?" if near else ""
    return f"there is no field {_shown(name)}{meant or ';'} the fields are {', '.join(fields)}"


def _shown(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    try:
        text = json.dumps(value, ensure_ascii=True)
    except RecursionError:
        return "a value that is nested too deeply"
    return text if len(text) <= LONGEST_FIELD else f"{text[: LONGEST_FIELD - 3]}..."


def _param(name: str) -> str:
    """Return the name of a field as an error names it: what is no ASCII is escaped."""
    return name[:LONGEST_FIELD].encode("ascii", "backslashreplace").decode()


def _raise(problems: Sequence[tuple[str, str]]) -> None:
    if problems:
        told = [text for _, text in problems[:MOST_PROBLEMS]]
        if len(problems) > MOST_PROBLEMS:
            told.append(f"and {len(problems) - MOST_PROBLEMS} more")
        raise Refusal(400, "; ".join(told), param=_param(problems[0][0]))
