"""What a prompt must be: a text, or a chat that a template can write."""

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
    if not isinstance(prompt, list) or not prompt:
        return f"`prompt` is {_kind(prompt)}, {_EXPECTED}"
    for place, message in enumerate(cast("list[object]", prompt)):
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
    if isinstance(content, str) or (isinstance(content, list) and content):
        return None
    if content is None and role == "assistant" and fields.get("tool_calls"):
        return None
    found = "missing" if "content" not in fields else _kind(content)
    return f"its `content` is {found}, expected a text: the template would write an empty message"


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, list | dict | str) and not value:
        return {list: "an empty list", dict: "an empty object", str: "an empty text"}[type(value)]
    kinds = {bool: "a boolean", int: "a number", float: "a number", dict: "an object", list: "a list"}
    return kinds.get(type(value), "a text" if isinstance(value, str) else f"of type {type(value).__name__}")
