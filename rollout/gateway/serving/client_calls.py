"""Calls of the policy in the form in which a client expects those of its tools. Pure."""

from collections.abc import Mapping
from typing import cast

from slipstream.rollout.gateway.serving.client_tools import (
    CUSTOM,
    NAMESPACED,
    OtherForm,
    object_in,
)
from slipstream.rollout.gateway.serving.fields import Value


def chat_call(call: Value, forms: Mapping[str, OtherForm]) -> Value:
    """Return a call of a chat's answer as its client expects it."""
    function = call.get("function") or {}
    form = forms.get(function.get("name") or "")
    if form is None or form.kind != CUSTOM:
        return call
    rest = {name: value for name, value in call.items() if name != "function"}
    return {**rest, "type": CUSTOM, CUSTOM: {"name": form.name, "input": _free_text(function["arguments"])}}


def _free_text(arguments: str) -> str:
    """Return the text in the arguments of a custom tool, or the arguments if they are something else."""
    read = object_in(arguments)
    value = None if read is None else read.get("input")
    return value if isinstance(value, str) else arguments


class StreamedChatCalls:
    """Turns the calls in the chunks of a chat into the client's form: each leaves whole, with its end."""

    def __init__(self, forms: Mapping[str, OtherForm]) -> None:
        self._forms = forms
        self._held: dict[tuple[int, int], Value] = {}
        """Calls that are not complete, by answer and place."""

    def read(self, chunk: Value) -> Value:
        """Return a chunk in the client's form."""
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            calls = [call for call in delta.get("tool_calls") or () if not self._hold(choice["index"], call)]
            if choice.get("finish_reason"):
                calls += self._complete(choice["index"])
            if calls or delta.get("tool_calls"):
                delta["tool_calls"] = calls or None
        return chunk

    def _hold(self, answer: int, call: Value) -> bool:
        """Keep a part of a call that the client expects in another form. Return False for any other."""
        place = answer, call.get("index", 0)
        function = call.get("function") or {}
        name = function.get("name")
        if place not in self._held:
            if name not in self._forms:
                return False
            self._held[place] = {**call, "function": {"name": name, "arguments": ""}}
        self._held[place]["function"]["arguments"] += function.get("arguments") or ""
        return True

    def _complete(self, answer: int) -> list[Value]:
        places = [place for place in self._held if place[0] == answer]
        return [chat_call(self._held.pop(place), self._forms) for place in places]


def response_item(item: Value, forms: Mapping[str, OtherForm]) -> Value:
    """Return an item of a response as its client expects it."""
    form = forms.get(item.get("name") or "")
    if form is None or item.get("type") not in ("function_call", "custom_tool_call"):
        return item
    if form.kind == NAMESPACED:
        return {**item, "name": form.name, "namespace": form.namespace}
    arguments = object_in(item.get("arguments") or "")
    if arguments is None or (form.kind == "local_shell" and not _is_command(arguments)):
        return item  # the policy has written what has no such form: the client gets it as it is
    call = {name: item.get(name) for name in ("id", "call_id", "status")}
    match form.kind:
        case "local_shell":
            action = {"type": "exec", "env": {}, **arguments}
            return {**call, "type": "local_shell_call", "action": action}
        case "shell":
            return {**call, "type": "shell_call", "action": arguments}
        case "apply_patch":
            return {**call, "type": "apply_patch_call", "operation": arguments}
        case "tool_search":
            return {**call, "type": "tool_search_call", "execution": "client", "arguments": arguments}
        case _:
            acted = {"actions": [arguments]} if form.kind == "computer" else {"action": arguments}
            return {**call, "type": "computer_call", "pending_safety_checks": [], **acted}


def _is_command(arguments: Value) -> bool:
    command = arguments.get("command")
    return isinstance(command, list) and all(isinstance(word, str) for word in cast("list[object]", command))


def response_in_form(response: Value, forms: Mapping[str, OtherForm]) -> Value:
    """Return a response as its client expects it."""
    return {**response, "output": [response_item(item, forms) for item in response["output"]]}


class StreamedItems:
    """Turns the events of a streamed response into the client's form. Calls in another form leave whole."""

    def __init__(self, forms: Mapping[str, OtherForm]) -> None:
        self._forms = forms
        self._whole: set[object] = set()
        """Ids of items of which nothing leaves before their ends."""
        self._sent = 0

    def read(self, event: Value) -> list[Value]:
        """Return the events that leave in place of one."""
        events = self._read(event)
        for one in events:
            one["sequence_number"] = self._sent
            self._sent += 1
        return events

    def _read(self, event: Value) -> list[Value]:
        item, kind = event.get("item"), event.get("type")
        if event.get("item_id") in self._whole:
            return []
        if "response" in event:
            return [event | {"response": response_in_form(event["response"], self._forms)}]
        if not isinstance(item, dict):
            return [event]
        form = self._forms.get(item.get("name") or "")
        if form is not None and form.kind != NAMESPACED and kind == "response.output_item.added":
            self._whole.add(item.get("id"))
            return []
        changed = event | {"item": response_item(cast("Value", item), self._forms)}
        if item.get("id") in self._whole:
            return [{**changed, "type": "response.output_item.added"}, changed]
        return [changed]
