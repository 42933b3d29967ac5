"""Marks in place of images, documents, sounds and other contents that a policy of text cannot read. Pure.

    {"type": "image", ...}              [image]
    a document with a title             [document: report.pdf], and its text if it is one
    what a provider's own tool did      [web_search_call]

A tool may return an image whenever it likes. Without marks, no request could repeat that result, so that the
first image would end its conversation for good.
"""

from collections.abc import Mapping, Sequence
from typing import cast

from slipstream.rollout.gateway.serving.fields import Value
from slipstream.rollout.gateway.serving.limits import Refusal

READ = frozenset(
    {"input_text", "output_text", "reasoning", "search_result", "text", "thinking", "tool_reference"}
    | {"tool_result", "tool_use"}
)
"""Types of contents that reach the policy."""

NAMES = {
    "audio": "audio",
    "audio_url": "audio",
    "computer_screenshot": "image",
    "container_upload": "document",
    "document": "document",
    "file": "document",
    "image": "image",
    "image_url": "image",
    "input_audio": "audio",
    "input_file": "document",
    "input_image": "image",
    "input_video": "video",
    "output_image": "image",
    "redacted_thinking": "redacted thinking",
    "video": "video",
    "video_url": "video",
}
"""What other types of contents are called. A type that is not here is called by its own name."""

ITEMS = frozenset(
    {"custom_tool_call", "custom_tool_call_output", "function_call", "function_call_output"}
    | {"item_reference", "message", "reasoning"}
)
"""Types of items of a response that reach the policy."""

LONGEST_NAME = 200
"""Characters of the longest name of a content."""


def marked(given: Mapping[str, object], *, refuse: bool) -> tuple[Value, list[str]]:
    """Return the fields of a body with marks in place of what cannot be read, and what these are called.

    Raises Refusal with 400 that names every such content, if ``refuse``.
    """
    marking = _Marking()
    fields = {name: marking.field(name, value) for name, value in given.items()}
    if refuse and marking.places:
        where = "; ".join(marking.places)
        raise Refusal(
            400,
            f"this policy reads text alone, and cannot read: {where}; send text in their places",
            param=marking.places[0].partition(":")[0],
        )
    return fields, marking.names


class _Marking:
    """Marks the contents of one body."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.places: list[str] = []

    def field(self, name: str, value: object) -> object:
        if name not in ("messages", "input") or not isinstance(value, list):
            return value
        items = cast("list[object]", value)
        return [self._item(item, f"{name}.{number}") for number, item in enumerate(items)]

    def _item(self, item: object, where: str) -> object:
        """Return a message, or an item of a response."""
        if not isinstance(item, dict):
            return item
        item = cast("Value", item)
        kind = item.get("type")
        if isinstance(kind, str) and "role" not in item and kind not in ITEMS:
            return {"role": "assistant", "content": self._mark(item, where)}
        read = dict(item)
        for name in ("content", "output"):
            if isinstance(item.get(name), list) and kind != "reasoning":
                read[name] = self._parts(
                    item[name], f"{where}.{name}", "text" if "role" in item else "input_text"
                )
        return read

    def _parts(self, parts: Sequence[object], where: str, text: str) -> list[object]:
        return [self._part(part, f"{where}.{number}", text) for number, part in enumerate(parts)]

    def _part(self, part: object, where: str, text: str) -> object:
        if not isinstance(part, dict):
            return part
        part = cast("Value", part)
        kind = part.get("type")
        if not isinstance(kind, str):
            return part
        if kind == "refusal":
            return {"type": text, "text": part.get("refusal") or ""}
        if kind == "tool_result" and isinstance(part.get("content"), list):
            return {**part, "content": self._parts(part["content"], f"{where}.content", text)}
        if kind in READ:
            return part
        return {"type": text, "text": self._mark(part, where)}

    def _mark(self, part: Value, where: str) -> str:
        """Return the mark of a content, followed by its text if it is a document of text."""
        kind = str(part["type"])[:LONGEST_NAME]
        called = NAMES.get(kind, kind)
        name = _name(part)
        mark = f"[{called}: {name}]" if name else f"[{called}]"
        if text := _document_text(part):
            return f"{mark}\n{text}"
        self.names.append(called if kind in NAMES else "other")
        self.places.append(f"{where}: {kind}")
        return mark


def _name(part: Value) -> str:
    inner = part.get("file")
    given = [part, cast("Value", inner)] if isinstance(inner, dict) else [part]
    for one in given:
        for key in ("title", "filename", "name"):
            if isinstance(one.get(key), str) and one[key].strip():
                return " ".join(one[key].split())[:LONGEST_NAME]
    return ""


def _document_text(part: Value) -> str:
    """Return the text of a document that has one; empty for any other content."""
    source = part.get("source")
    if part["type"] != "document" or not isinstance(source, dict):
        return ""
    source = cast("Value", source)
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return source["data"]
    content = source.get("content")
    if isinstance(content, str):
        return content
    blocks = cast("list[object]", content) if isinstance(content, list) else []
    texts = [cast("Value", block).get("text") for block in blocks if isinstance(block, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))
