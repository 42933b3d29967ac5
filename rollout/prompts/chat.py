"""Checks the form of prompts: a text, or a chat that a template can write."""

import json
from collections.abc import Mapping, Sequence
from typing import cast

from slipstream.configs.violations import nearest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles that templates of published models know."""

_EXPECTED = "expected a text or a list of chat messages with a `role` and a `content`"


def prompt_problem(prompt: object) -> str | None:
    """Return what is wrong with the column ``prompt`` of a row; None: nothing."""
    if isinstance(prompt, str):
        if _is_json_of_chat(prompt):
            return (
                "`prompt` is the JSON text of a chat, which would be the text of one message; write the list "
                "of messages itself (json.loads)"
            )
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


def with_joined_parts(messages: Sequence[object]) -> list[object]:
    """Return chat messages with texts in place of contents that are lists of parts of text.

    Templates that read parts join them alike; others write an empty message, or Python's text of the list.
    """
    return [
        {**fields, "content": "".join(texts)}
        if isinstance(message, dict)
        and (texts := _part_texts((fields := cast("dict[str, object]", message)).get("content"))) is not None
        else message
        for message in messages
    ]


def content_problem(messages: Sequence[Mapping[str, object]], *, is_answered: bool = False) -> str | None:
    """Return why a chat cannot be sent to a policy that reads text: parts of other types, or an open answer.

    ``is_answered``: the last message is an answer to learn.
    """
    for place, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            kinds = ", ".join(sorted({_part_kind(part) for part in cast("list[object]", content)}))
            return (
                f"`prompt`, message {place}: its `content` has parts of the types {kinds}, expected "
                "text alone: the policy reads no others"
            )
    if not is_answered and messages[-1]["role"] == "assistant":
        return (
            f"`prompt`, message {len(messages) - 1}: the last message is of the assistant, and the chat "
            "template would open another answer after it; expected a message to answer: leave it out"
        )
    return None


def _part_texts(content: object) -> list[str] | None:
    """Return the texts of a content that is a list of nothing else."""
    if not isinstance(content, list) or not content:
        return None
    parts = cast("list[object]", content)
    if any(_part_kind(part) != "text" for part in parts):
        return None
    return [part if isinstance(part, str) else str(cast("dict[str, object]", part)["text"]) for part in parts]


def _part_kind(part: object) -> str:
    if isinstance(part, str):
        return "text"
    if not isinstance(part, dict):
        return _kind(part)
    fields = cast("dict[str, object]", part)
    if isinstance(fields.get("text"), str) and fields.get("type") in (
        None,
        "text",
        "input_text",
        "output_text",
    ):
        return "text"
    return str(fields.get("type"))


def _is_json_of_chat(text: str) -> bool:
    if not text.lstrip().startswith(("[", "{")):
        return False
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return False
    messages = cast("list[object]", value if isinstance(value, list) else [value])
    return bool(messages) and all(
        isinstance(message, dict) and {"role", "content"} <= cast("dict[str, object]", message).keys()
        for message in messages
    )


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
