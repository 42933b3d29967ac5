"""An environment of tools: functions that the policy calls in the way of its chat template.

An answer with calls is followed by their results, one message each; an answer without a call ends the
episode. Calls are read by SGLang's parser of the model family. What the policy has done wrong (a tool that
does not exist, arguments that are no JSON or do not fit) is said to the policy; what a tool raises is not its
fault, and the attempt at the episode fails, unless it is a ToolError.
"""

import asyncio
import copy
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, get_type_hints

from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo

from slipstream.rollout.engine.server_process import importing_sglang
from slipstream.rollout.system import plugins
from slipstream.rollout.tokens.trajectory import Messages, Prompt
from slipstream.rollout.workflow.environment.contract import Action, Step

CallParser = Callable[[str], Sequence[tuple[str, str]]]
"""Returns (name, arguments as JSON) of each call in the text of an answer."""

_IMPORTING = threading.Lock()
"""Environments ask for parsers in threads. Each import puts the process's variables back as it found them."""


def call_parser(name: str, tools: Sequence[Mapping[str, object]]) -> CallParser:
    """Return SGLang's parser of this name. Raises ValueError for a name that it does not have."""
    with _IMPORTING, importing_sglang():
        from sglang.srt.entrypoints.openai.protocol import Tool  # pyright: ignore[reportMissingTypeStubs]
        from sglang.srt.function_call.function_call_parser import (  # pyright: ignore[reportMissingTypeStubs]
            FunctionCallParser,
        )

    known = FunctionCallParser.ToolCallParserEnum
    if name not in known:
        raise ValueError(f"there is no parser of tool calls {name!r}; SGLang has {', '.join(sorted(known))}")
    described = [Tool.model_validate(tool) for tool in tools]

    def calls_of(text: str) -> Sequence[tuple[str, str]]:
        _, calls = FunctionCallParser(described, name).parse_non_stream(text)
        return [(call.name or "", call.parameters) for call in calls]

    return calls_of


Function = Callable[..., Awaitable[object]]


class ToolError(Exception):
    """Raised by a tool: its message is the result of the call, for the policy to read."""


class ToolFailed(RuntimeError):
    """A tool has raised something else than a ToolError; the message names the tool."""


class Tool:
    """A function with a description, and a schema of its parameters made from its annotations."""

    def __init__(self, path: str, timeout_s: float) -> None:
        """Raises PluginError for a path that leads nowhere, ValueError for what cannot be a tool."""
        function = plugins.resolve(path)
        if not inspect.iscoroutinefunction(function):
            raise ValueError(
                f"{path} is not `async def`, and would block all episodes of its collector: make it so, and "
                "let what computes run in a sandbox"
            )
        self.name: str = function.__name__
        self._path = path
        self._function: Function = function
        self._timeout_s = timeout_s
        self._arguments = create_model(self.name, __config__={"extra": "forbid"}, **_fields(path, function))
        self.description = inspect.getdoc(function) or ""
        parameters = self._arguments.model_json_schema()
        parameters.pop("title", None)
        described = {"name": self.name, "description": self.description, "parameters": parameters}
        self.schema: dict[str, object] = {"type": "function", "function": described}
        """The tool as OpenAI's protocol describes it, which chat templates read."""

    async def result(self, arguments: str) -> str:
        """Return the result of a call as text. Raises ToolFailed for what the tool raises, except
        ToolError."""
        try:
            given = self._arguments.model_validate_json(arguments or "{}")
        except ValidationError as error:
            return f"error: {_shown(error)}"
        values = {name: getattr(given, name) for name in type(given).model_fields}
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await self._function(**values)
        except ToolError as error:
            return f"error: {error}"
        except TimeoutError:
            return f"error: {self.name} took longer than {self._timeout_s:g} s"
        except Exception as error:
            raise ToolFailed(f"the tool {self._path} raised {type(error).__name__}: {error}") from error
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _shown(error: ValidationError) -> str:
    problems = [(".".join(map(str, each["loc"])) or "arguments", each["msg"]) for each in error.errors()]
    return "; ".join(f"{where}: {problem}" for where, problem in problems)


def _fields(path: str, function: Function) -> dict[str, Any]:
    hints = get_type_hints(function)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if not is_named or name not in hints:
            raise ValueError(f"{path}: parameter {name} has no annotation, or no name of its own")
        has_default = parameter.default is not parameter.empty
        fields[name] = (hints[name], FieldInfo(default=parameter.default) if has_default else ...)
    return fields


class _Reader:
    """Reads calls. The parser is made for the first episode, so that the driver imports no SGLang."""

    def __init__(self, parser: str, schemas: Sequence[Mapping[str, object]]) -> None:
        self._name = parser
        self._schemas = schemas
        self._parser: CallParser | None = None

    async def prepare(self) -> None:
        """Make the parser. Raises ValueError for one that there is not."""
        if self._parser is None:
            self._parser = await asyncio.to_thread(call_parser, self._name, self._schemas)

    def calls_in(self, text: str) -> Sequence[tuple[str, str]]:
        """Return (name, arguments as JSON) of each call."""
        assert self._parser is not None, "no episode has begun"
        return self._parser(text)


class ToolEnvironment:
    """Tools, and what is said of an episode with them: ``Environment``."""

    def __init__(
        self,
        tools: Sequence[str],
        *,
        parser: str,
        system: str | None = None,
        timeout_s: float = 60.0,
        most_calls: int = 16,
    ) -> None:
        """``tools``: import paths of functions. ``parser``: name of SGLang's parser of the model family, such
        as ``qwen25``, ``llama3`` or ``mistral``. ``system``: a system message before the prompt.
        ``timeout_s``: seconds for each call. ``most_calls``: largest number of calls in one answer; further
        ones are refused.
        """
        self._tools = {tool.name: tool for tool in (Tool(path, timeout_s) for path in tools)}
        if len(self._tools) < len(tools):
            raise ValueError(f"several of the tools {list(tools)} have the same name")
        self._reader = _Reader(parser, self.schemas)
        self._system = system
        self._most_calls = most_calls
        self._calls = 0
        """Number of calls in the episode."""

    def another(self) -> "ToolEnvironment":
        """Return an environment for another episode, which shares everything but the episode."""
        return copy.copy(self)

    @property
    def schemas(self) -> list[dict[str, object]]:
        """The tools as chat templates read them."""
        return [tool.schema for tool in self._tools.values()]

    @property
    def template(self) -> Mapping[str, object]:
        """Settings of the chat template."""
        return {"tools": self.schemas}

    async def reset(self, prompt: Prompt) -> Messages:
        """Return the system message and the prompt. Raises ValueError for an unknown parser."""
        await self._reader.prepare()
        self._calls = 0
        given = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*given, *prompt.messages()]

    async def step(self, action: Action) -> Step:
        """Call the tools of an answer side by side."""
        calls = self._reader.calls_in(action.text)
        if not calls:
            return Step(is_done=True)
        results = await asyncio.gather(*(self._result(place, *call) for place, call in enumerate(calls)))
        first, self._calls = self._calls + 1, self._calls + len(calls)
        return Step(
            [
                {"role": "tool", "tool_call_id": f"call_{number}", "name": name, "content": result}
                for number, ((name, _), result) in enumerate(zip(calls, results, strict=True), first)
            ]
        )

    async def _result(self, place: int, name: str, arguments: str) -> str:
        if place >= self._most_calls:
            return f"error: an answer may have {self._most_calls} calls"
        tool = self._tools.get(name)
        if tool is None:
            return f"error: there is no tool {name}; there are {', '.join(self._tools)}"
        return await tool.result(arguments)

    async def close(self) -> None:
        """Do nothing: functions hold nothing."""
