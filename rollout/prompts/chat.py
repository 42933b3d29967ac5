"""Checks the form of prompts: a text, or a chat that a template can write."""

from collections.abc import Sequence
from typing import cast

from slipstream.configs.violations import nearest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles that templates of published models know."""

_EXPECTED = "expected a text or a list of chat messages with a `role` and a `content`"


def prompt_problem(prompt: object) -> str | None:
    """Return what is wrong with the column ``prompt`` of a row; None: nothing."""
    if isinstance(prompt, str):
        return None if prompt.strip() else "`prompt` is an empty text, " + _EXPECTED
    messages = cast("list[object]", prompt) if isinstance(prompt, list) else []
    if not messages:
        return f"`prompt` is {_kind(cast('object', prompt))}, {_EXPECTED}"
    for place, message in enumerate(messages):
        if (reason := _message_problem(message)) is not None:
            return f"`prompt`, message {place}: {reason}"
    return None


def role_problem(prompt: object, others: Sequence[str] = ()) -> str | None:
    """Return which role of a chat is unknown. ``others``: roles that its template has beside ``ROLES``."""
    if isinstance(prompt, str):
        return None
    for place, message in enumerate(cast("list[dict[str, str]]", prompt)):
        role = message["role"]
        if role not in ROLES and role not in others:
            near = nearest(role, ROLES)
            way_out = f"did you mean {near!r}?" if near else "name it in a chat template of your own"
            known = ", ".join([*ROLES, *others])
            return f"`prompt`, message {place}: the role is {role!r}, expected one of {known}: {way_out}"
    return None


def _message_problem(message: object) -> str | None:
    if not isinstance(message, dict):
        return f"it is {_kind(message)}, expected chat messages with a `role` and a `content`"
    fields = cast("dict[str, object]", message)
    role = fields.get("role")
    if not isinstance(role, str) or not role:
        return f"its `role` is {_kind(role)}, expected chat messages with a `role`, such as user"
    content = fields.get("content")
    has_parts = isinstance(content, list) and bool(cast("list[object]", content))
    if isinstance(content, str) or has_parts:
        return None
    if content is None and role == "assistant" and fields.get("tool_calls"):
        return None
    found = "missing" if "content" not in fields else _kind(cast("object", content))
    return f"its `content` is {found}, expected a text: the template would write an empty message"


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if (empty := _EMPTY.get(repr(value))) is not None:
        return empty
    kind = type(value).__name__
    return _KINDS.get(kind, f"of type {kind}")


_EMPTY = {"[]": "an empty list", "{}": "an empty object", "''": "an empty text"}
_KINDS = {
    "bool": "a boolean",
    "int": "a number",
    "float": "a number",
    "str": "a text",
    "dict": "an object",
    "list": "a list",
}
