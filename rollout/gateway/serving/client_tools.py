"""Tools as clients offer them, and as the policy knows them: functions with a schema. Pure.

    a tool that the client runs itself      a function in the prompt (its calls: ``client_calls.py``)
    a tool that the provider would run      left out, and named in a header of the reply and in the metrics

A call that a client repeats in its own form becomes the call that the policy has written.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from slipstream.rollout.gateway.serving.fields import Value
from slipstream.rollout.gateway.serving.limits import Refusal
from slipstream.rollout.gateway.serving.words import Protocols

HEADER = "x-slipstream-dropped-tools"
"""Header of a reply with the types of the tools that were left out."""

CUSTOM, NAMESPACED = "custom", "namespaced"

_TYPE = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_DATE = re.compile(r"_\d{6,8}$")
_MOST_NAMED = 16


@dataclass(frozen=True)
class OtherForm:
    """The form in which a client expects the calls of a tool."""

    kind: str
    """``custom``, ``namespaced``, or the type of the client's tool."""
    name: str
    namespace: str = ""


@dataclass(frozen=True)
class ClientTools:
    """The tools of one request."""

    forms: Mapping[str, OtherForm] = field(default_factory=dict[str, OtherForm])
    """By the name that the policy calls: the tools whose calls the client expects in another form."""
    hosted: Sequence[str] = ()
    """Types of the tools that were left out."""
    ignored: Sequence[str] = ()
    """Choices of tools that cannot be followed."""

    @property
    def headers(self) -> dict[str, str]:
        named = list(dict.fromkeys(kind if _TYPE.fullmatch(kind) else "other" for kind in self.hosted))
        return {HEADER: ", ".join(named[:_MOST_NAMED])} if named else {}


def family(kind: str) -> str:
    """Return the type of a tool without its date, for metrics; ``other`` for one that nobody knows."""
    plain = _DATE.sub("", kind)
    return plain if plain in HOSTED else "other"


HOSTED = frozenset(
    {"advisor", "code_execution", "code_interpreter", "computer", "file_search", "image_generation", "mcp"}
    | {"mcp_servers", "mcp_toolset", "retrieval", "shell", "tool_search", "tool_search_tool_bm25"}
    | {"tool_search_tool_regex", "web_fetch", "web_search", "web_search_options", "web_search_preview"}
)
"""Families of tools that providers run."""


# ---- schemas of the tools that providers know without one


def _schema(required: Sequence[str], **properties: object) -> Value:
    return {"type": "object", "properties": properties, "required": list(required)}


def _one_of(*values: str) -> Value:
    return {"type": "string", "enum": list(values)}


_TEXT: Value = {"type": "string"}
_WHOLE: Value = {"type": "integer"}
_TEXTS: Value = {"type": "array", "items": _TEXT}
_WHOLES: Value = {"type": "array", "items": _WHOLE}

_EDIT = {
    "path": _TEXT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _WHOLE,
    "insert_text": _TEXT,
    "view_range": _WHOLES,
}

_ANTHROPIC: dict[str, tuple[str, str, Value]] = {
    "bash": (
        "bash",
        "Runs a command in a shell that keeps its state. `restart` begins a new shell.",
        _schema([], command=_TEXT, restart={"type": "boolean"}),
    ),
    "text_editor": (
        "str_replace_based_edit_tool",
        "Views, creates and edits text files. `str_replace` replaces the one place where `old_str` stands.",
        _schema(
            ["command", "path"],
            command=_one_of("view", "create", "str_replace", "insert", "undo_edit"),
            **_EDIT,
        ),
    ),
    "memory": (
        "memory",
        "Views and changes files of the memory directory.",
        _schema(
            ["command"],
            command=_one_of("view", "create", "str_replace", "insert", "delete", "rename"),
            **_EDIT,
            old_path=_TEXT,
            new_path=_TEXT,
        ),
    ),
    "computer": (
        "computer",
        "Uses the mouse and the keyboard of a computer, and looks at its screen.",
        _schema(
            ["action"],
            action=_one_of(
                *("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click"),
                *("middle_click", "double_click", "triple_click", "left_mouse_down", "left_mouse_up"),
                *("screenshot", "cursor_position", "scroll", "hold_key", "wait", "zoom"),
            ),
            coordinate=_WHOLES,
            start_coordinate=_WHOLES,
            region=_WHOLES,
            text=_TEXT,
            scroll_direction=_one_of("up", "down", "left", "right"),
            scroll_amount=_WHOLE,
            duration={"type": "number"},
        ),
    ),
}
"""Tools that Anthropic's clients run themselves, by the type without its date: name, description, schema."""

_SCREEN = (
    "computer",
    "Uses the mouse and the keyboard of a computer, and looks at its screen.",
    _schema(
        ["type"],
        type=_one_of(
            *("click", "double_click", "drag", "keypress", "move", "screenshot", "scroll", "type", "wait")
        ),
        x=_WHOLE,
        y=_WHOLE,
        button=_one_of("left", "right", "wheel", "back", "forward"),
        keys=_TEXTS,
        path={"type": "array", "items": _schema(["x", "y"], x=_WHOLE, y=_WHOLE)},
        scroll_x=_WHOLE,
        scroll_y=_WHOLE,
        text=_TEXT,
    ),
)

_RESPONSES: dict[str, tuple[str, str, Value]] = {
    "local_shell": (
        "local_shell",
        "Runs a program on the user's machine. `command` has the program and its arguments.",
        _schema(
            ["command"], command=_TEXTS, working_directory=_TEXT, timeout_ms=_WHOLE, env={"type": "object"}
        ),
    ),
    "shell": (
        "shell",
        "Runs commands in shells on the user's machine.",
        _schema(["commands"], commands=_TEXTS, timeout_ms=_WHOLE, max_output_length=_WHOLE),
    ),
    "apply_patch": (
        "apply_patch",
        "Creates, updates or deletes a file. `diff` is in the V4A format.",
        _schema(
            ["type", "path"],
            type=_one_of("create_file", "update_file", "delete_file"),
            path=_TEXT,
            diff=_TEXT,
        ),
    ),
    "computer": _SCREEN,
    "computer_use": _SCREEN,
    "computer_use_preview": _SCREEN,
    "tool_search": (
        "tool_search",
        "Looks for further tools by what they do.",
        _schema(["query"], query=_TEXT, limit=_WHOLE),
    ),
}
"""Tools that clients of OpenAI's Responses run themselves, by type."""

_CUSTOM_SCHEMA = _schema(["input"], input={"type": "string", "description": "The whole input, as free text."})


# ---- what a request offers


def read_tools(
    given: Mapping[str, object], protocol: Protocols, *, refuse: bool
) -> tuple[Value, ClientTools]:
    """Return the fields of a body with functions in place of all tools, and what became of them.

    Raises Refusal with 400 that names every tool which a provider would run, if ``refuse``.
    """
    reading = _Reading(protocol)
    fields = reading.read(dict(given))
    if refuse and reading.hosted:
        raise Refusal(
            400,
            f"tools of these types would have to be run by the server, which runs none: "
            f"{', '.join(reading.hosted)}; offer functions that the client runs, or leave these tools out",
            param="tools",
        )
    return fields, ClientTools(reading.forms, reading.hosted, reading.ignored)


class _Reading:
    """Reads the tools of one body."""

    def __init__(self, protocol: Protocols) -> None:
        self._protocol = protocol
        self.forms: dict[str, OtherForm] = {}
        self.hosted: list[str] = []
        self.ignored: list[str] = []

    def read(self, given: Value) -> Value:
        tools = given.get("tools")
        if isinstance(tools, list):
            given["tools"] = self._functions(cast("list[object]", tools))
            if not given["tools"]:
                del given["tools"]
        for name in ("web_search_options", "mcp_servers"):
            if given.pop(name, None):
                self.hosted.append(name)
        if self._protocol is Protocols.RESPONSES and isinstance(given.get("input"), list):
            given["input"] = [self._item(item) for item in given["input"]]
        if self._protocol is Protocols.OPENAI and isinstance(given.get("messages"), list):
            given["messages"] = [_with_functions(message) for message in given["messages"]]
        if "tool_choice" in given:
            self._choose(given)
        return given

    def _functions(self, tools: Sequence[object]) -> list[object]:
        read: list[object] = []
        for tool in tools:
            read += self._tool(_without_nulls(tool)) if isinstance(tool, dict) else [tool]
        if any("tool_search" in kind for kind in self.hosted):
            # Nothing would ever load a tool that waits for the provider's search.
            read = [_without(tool, "defer_loading") for tool in read]
        return read

    def _tool(self, tool: Value) -> list[object]:
        kind = tool.get("type")
        if kind is not None and not isinstance(kind, str):
            return [tool]
        if self._protocol is Protocols.ANTHROPIC:
            return self._of_anthropic(tool, kind)
        if self._protocol is Protocols.RESPONSES:
            return self._of_responses(tool, kind)
        return self._of_chat(tool, kind)

    def _of_chat(self, tool: Value, kind: str | None) -> list[object]:
        custom = tool.get("custom")
        if kind == "custom" and isinstance(custom, dict) and isinstance(custom.get("name"), str):
            self.forms[custom["name"]] = OtherForm(CUSTOM, custom["name"])
            return [{"type": "function", "function": _custom(custom)}]
        if kind in (None, "function") or isinstance(tool.get("function"), dict):
            if isinstance(tool.get("function"), dict):
                tool = {**tool, "type": "function", "function": _without_nulls(tool["function"])}
            return [tool]
        self.hosted.append(kind)
        return []

    def _of_anthropic(self, tool: Value, kind: str | None) -> list[object]:
        if kind in (None, "custom") or "input_schema" in tool:
            return [_without(tool, "type")]
        known = _ANTHROPIC.get(_DATE.sub("", kind))
        if known is None:
            self.hosted.append(kind)
            return []
        name, description, schema = known
        given = tool.get("name", name)
        size = [tool.get(side) for side in ("display_width_px", "display_height_px")]
        if all(isinstance(side, int) for side in size):
            description += f" The screen has {size[0]} x {size[1]} pixels."
        return [
            {"name": given, "description": tool.get("description") or description, "input_schema": schema}
        ]

    def _of_responses(self, tool: Value, kind: str | None) -> list[object]:
        if kind is None or kind in ("function", "custom"):
            return [tool]
        if kind == "namespace":
            return self._of_namespace(tool)
        known = _RESPONSES.get(kind)
        if known is None or _is_run_by_provider(tool):
            self.hosted.append(kind)
            return []
        name, description, schema = known
        self.forms[name] = OtherForm(kind, name)
        return [
            {
                "type": "function",
                "name": name,
                "description": tool.get("description") or description,
                "parameters": tool["parameters"] if isinstance(tool.get("parameters"), dict) else schema,
            }
        ]

    def _of_namespace(self, tool: Value) -> list[object]:
        """Return the tools of a namespace, each under a name with that of the namespace before it."""
        space, inner = tool.get("name"), tool.get("tools")
        if not isinstance(space, str) or not isinstance(inner, list):
            return [tool]
        flat: list[object] = []
        for one in cast("list[object]", inner):
            if not isinstance(one, dict) or not isinstance(one.get("name"), str):
                continue
            name = _joined(space, one["name"])
            self.forms[name] = OtherForm(NAMESPACED, one["name"], space)
            flat.append({**_without_nulls(one), "type": one.get("type") or "function", "name": name})
        return flat

    # ---- what a client repeats

    def _item(self, item: object) -> object:
        """Return an item of a conversation as the policy has written or read it."""
        if not isinstance(item, dict):
            return item
        item = cast("Value", item)
        kind = item.get("type")
        if kind != "tool_search_output":
            return repeated_item(item)
        # What the client has found is a text from which the policy can call it.
        tools = item.get("tools")
        found = self._functions(cast("list[object]", tools)) if isinstance(tools, list) else []
        return _output(item, json.dumps(found, ensure_ascii=False))

    # ---- choices

    def _choose(self, given: Value) -> None:
        """Take out a choice that the offered tools cannot follow, and name the others as the policy does."""
        choice, tools = given["tool_choice"], given.get("tools")
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            allowed = choice.get("allowed_tools", choice)
            choice = given["tool_choice"] = (allowed if isinstance(allowed, dict) else {}).get("mode", "auto")
            self.ignored.append("tool_choice")
        if isinstance(choice, str):
            if choice == "required" and not tools and self.hosted:
                self._drop_choice(given)
            return
        if not isinstance(choice, dict):
            return
        choice = cast("Value", choice)
        kind = choice.get("type")
        if self._protocol is Protocols.ANTHROPIC:
            named = kind == "tool" and choice.get("name") not in {
                tool.get("name") for tool in cast("list[object]", tools or ()) if isinstance(tool, dict)
            }
            if self.hosted and ((kind == "any" and not tools) or named):
                self._drop_choice(given)
        elif self._protocol is Protocols.OPENAI:
            if kind == "custom" and isinstance(choice.get("custom"), dict):
                given["tool_choice"] = {
                    "type": "function",
                    "function": {"name": choice["custom"].get("name")},
                }
            elif kind != "function":
                self._drop_choice(given)
        elif kind not in ("function", "custom"):
            known = _RESPONSES.get(kind) if isinstance(kind, str) else None
            if known is not None and known[0] in self.forms:
                given["tool_choice"] = {"type": "function", "name": known[0]}
            else:
                self._drop_choice(given)

    def _drop_choice(self, given: Value) -> None:
        del given["tool_choice"]
        self.ignored.append("tool_choice")


def _is_run_by_provider(tool: Value) -> bool:
    """True for a tool that runs on either side, and here on the provider's."""
    if tool["type"] == "tool_search":
        return tool.get("execution") != "client"
    environment = tool.get("environment")
    return isinstance(environment, dict) and environment.get("type") not in (None, "local")


def _joined(space: str, name: str) -> str:
    return space + name if space.endswith("_") else f"{space}__{name}"


def _without_nulls(tool: object) -> Value:
    return {name: value for name, value in cast("Value", tool).items() if value is not None}


def _without(tool: object, name: str) -> object:
    if not isinstance(tool, dict):
        return tool
    read = {key: value for key, value in cast("Value", tool).items() if key != name}
    if isinstance(read.get("function"), dict):
        read["function"] = _without(read["function"], name)
    return read


def _custom(tool: Value) -> Value:
    """Return a function that takes a free text. A grammar is described: no answer is held to it."""
    described = [tool["description"]] if tool.get("description") else []
    form = tool.get("format")
    grammar = form.get("grammar", form) if isinstance(form, dict) and form.get("type") == "grammar" else None
    if isinstance(grammar, dict):
        syntax, definition = grammar.get("syntax") or "lark", grammar.get("definition") or ""
        described.append(f"The input must follow this {syntax} grammar:\n{definition}")
    return {"name": tool["name"], "description": "\n\n".join(described), "parameters": _CUSTOM_SCHEMA}


# ---- calls of chats


def _with_functions(message: object) -> object:
    """Return a message of a chat with calls of functions alone."""
    if not isinstance(message, dict) or not isinstance(message.get("tool_calls"), list):
        return message
    return {**message, "tool_calls": [_as_function(call) for call in message["tool_calls"]]}


def _as_function(call: object) -> object:
    custom = call.get("custom") if isinstance(call, dict) else None
    if not isinstance(custom, dict):
        return call
    arguments = json.dumps({"input": custom.get("input") or ""}, ensure_ascii=False)
    function = {"name": custom.get("name"), "arguments": arguments}
    return {"id": cast("Value", call).get("id"), "type": "function", "function": function}


# ---- items of responses


def repeated_item(item: Value) -> Value:
    """Return an item of a conversation with functions' calls in place of all others."""
    kind = item.get("type")
    if kind == "function_call" and isinstance(item.get("namespace"), str):
        name = _joined(item["namespace"], str(item.get("name")))
        return {key: value for key, value in item.items() if key != "namespace"} | {"name": name}
    if isinstance(kind, str) and kind in _REPEATED:
        name, field_ = _REPEATED[kind]
        arguments = item.get(field_)
        if kind == "computer_call" and isinstance(item.get("actions"), list) and item["actions"]:
            arguments = item["actions"][0]
        return {
            "type": "function_call",
            "call_id": item.get("call_id") or item.get("id"),
            "name": name,
            "arguments": json.dumps(_arguments(kind, arguments), ensure_ascii=False),
        }
    if isinstance(kind, str) and kind in _OUTPUTS:
        return _output(item, _OUTPUTS[kind](item))
    return item


_REPEATED = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "computer_call": ("computer", "action"),
    "tool_search_call": ("tool_search", "arguments"),
}
"""Types of calls that clients repeat: the function, and the field with its arguments."""


def _arguments(kind: str, given: object) -> Value:
    """Return the arguments as the policy has written them: clients add what it has left out."""
    if isinstance(given, str):
        given = object_in(given)
    left_out = {"type"} if kind == "local_shell_call" else set[str]()
    named = cast("Value", given) if isinstance(given, dict) else {}
    return {
        name: value
        for name, value in named.items()
        if name not in left_out and value is not None and value != {}
    }


def _output(item: Value, output: object) -> Value:
    call = item.get("call_id") or item.get("id")
    return {"type": "function_call_output", "call_id": call, "output": output}


def _said(item: Value) -> object:
    output = item.get("output")
    return output if isinstance(output, str | list) else f"[{item.get('status') or 'no output'}]"


def _shells_said(item: Value) -> str:
    output = item.get("output")
    if not isinstance(output, list):
        return str(_said(item))
    parts: list[str] = []
    for one in cast("list[object]", output):
        said = cast("Value", one) if isinstance(one, dict) else {}
        outcome = said.get("outcome")
        ended = cast("Value", outcome) if isinstance(outcome, dict) else {}
        how = (
            f"[exit code {ended['exit_code']}]" if "exit_code" in ended else f"[{ended.get('type', 'ended')}]"
        )
        parts += [str(said[name]) for name in ("stdout", "stderr") if said.get(name)] + [how]
    return "\n".join(parts)


def _screen(item: Value) -> object:
    output = item.get("output")
    return [output] if isinstance(output, dict) else _said(item)


_OUTPUTS: dict[str, Callable[[Value], object]] = {
    "local_shell_call_output": _said,
    "shell_call_output": _shells_said,
    "apply_patch_call_output": _said,
    "computer_call_output": _screen,
}


def object_in(text: str) -> Value | None:
    """Return the JSON object in a text; None: there is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return cast("Value", value) if isinstance(value, dict) else None
