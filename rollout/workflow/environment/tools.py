"""An environment of tools: functions that the policy calls in the way of its chat template.

An answer with calls is followed by their results, one message each; an answer without a call ends the
episode. Calls are read by SGLang's parser of the model family. What the policy has done wrong (a tool that
does not exist, a call that cannot be read, arguments that do not fit) is said to the policy; what a tool
raises is not its fault, and the attempt at the episode fails, unless it is a ToolError.
"""

import asyncio
import copy
import inspect
import json
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast, get_type_hints

from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo

from slipstream.rollout.engine.server_process import importing_sglang
from slipstream.rollout.system import plugins
from slipstream.rollout.tokens.tokenizer import END_OF_REASONING
from slipstream.rollout.tokens.trajectory import Finish, Messages, Prompt
from slipstream.rollout.workflow.environment.contract import Action, Step

CallParser = Callable[[str], Sequence[tuple[str, str]]]
"""Returns (name, arguments as JSON) of each call in the text of an answer; ("", "") for each call that cannot
be read."""

PartsParser = Callable[[str], tuple[str, str]]
"""Returns the reasoning in the text of an answer, and what is said beside reasoning and calls."""

_IMPORTING = threading.Lock()
"""Environments ask for parsers in threads. Each import puts the process's variables back as it found them."""

HARMONY = "gpt-oss"
"""SGLang's name for the format of gpt-oss, with channels: of its parsers of calls and of reasoning."""


def call_parser(name: str, tools: Sequence[Mapping[str, object]]) -> CallParser:
    """Return SGLang's parser of this name. Raises ValueError for a name that it does not have."""
    with _IMPORTING, importing_sglang():
        from sglang.srt.entrypoints.openai.protocol import Tool  # pyright: ignore[reportMissingTypeStubs]

        from slipstream.rollout.engine.whole_calls import WholeCalls

    known = WholeCalls.ToolCallParserEnum
    if name not in known:
        raise ValueError(f"there is no parser of tool calls {name!r}; SGLang has {', '.join(sorted(known))}")
    described = [Tool.model_validate(tool) for tool in tools]

    def calls_of(text: str) -> Sequence[tuple[str, str]]:
        _, read, unread = WholeCalls(described, name).read(text)
        return [*((call.name or "", call.parameters) for call in read), *[("", "")] * unread]

    return calls_of


def parts_parser(name: str, tools: Sequence[Mapping[str, object]]) -> PartsParser:
    """Return SGLang's parsers of reasoning and of calls, by the name of the one for calls."""
    with _IMPORTING, importing_sglang():
        from sglang.srt.entrypoints.openai.protocol import Tool  # pyright: ignore[reportMissingTypeStubs]
        from sglang.srt.parser.reasoning_parser import (  # pyright: ignore[reportMissingTypeStubs]
            ReasoningParser,
        )

        from slipstream.rollout.engine.whole_calls import WholeCalls

    described = [Tool.model_validate(tool) for tool in tools]

    def parts_of(text: str) -> tuple[str, str]:
        reasoning, said = "", text
        if name == HARMONY or END_OF_REASONING in text:
            # This one also reads a reasoning that the prompt has begun.
            kind = HARMONY if name == HARMONY else "deepseek-r1"
            read = ReasoningParser(model_type=kind).parse_non_stream(text)
            reasoning, said = read[0] or "", read[1] or ""
        return reasoning, WholeCalls(described, name).read(said)[0]

    return parts_of


def answer_message(
    reasoning: str, content: str, calls: Sequence[Mapping[str, object]] = ()
) -> dict[str, object]:
    """Return an answer as the message that chat templates write: its reasoning and its calls apart."""
    message: dict[str, object] = {"role": "assistant", "content": content}
    if reasoning:
        # Templates read one of the two names. That of gpt-oss refuses a content beside it.
        message |= {"reasoning_content": reasoning, "thinking": reasoning}
    if calls:
        message["tool_calls"] = list(calls)
    return message


def ways_to_write(answer: Mapping[str, object], text: str) -> list[dict[str, Any]]:
    """Return an answer in the ways in which one chat template or another repeats what was sampled: calls
    apart, with their arguments as objects or as JSON, and all of it as a text."""
    apart = dict(answer)
    calls = cast("Sequence[Mapping[str, Any]]", apart.get("tool_calls", ()))
    functions = [dict(call["function"]) for call in calls]
    for function in functions:
        if isinstance(function["arguments"], dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    spelled = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
    as_json = [{**apart, "tool_calls": spelled}] if spelled else []
    return [apart, *as_json, {"role": "assistant", "content": text}]


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


_WRITTEN_IDS = {
    "mistral": re.compile(r'(?:"id": ?"|\[CALL_ID\])([A-Za-z0-9]{9})(?="|\[ARGS\])'),
    "kimi_k2": re.compile(r"<\|tool_call_begin\|>\s*(\S+?)\s*<\|tool_call_argument_begin\|>"),
}
"""The ids in the calls of an answer, by the parser: their policies write them, and their templates too."""


class _Reader:
    """Reads calls. The parser is made for the first episode, so that the driver imports no SGLang."""

    def __init__(self, parser: str, schemas: Sequence[Mapping[str, object]]) -> None:
        self._name = parser
        self._schemas = schemas
        self._parser: CallParser | None = None
        self._parts: PartsParser | None = None

    async def prepare(self) -> None:
        """Make the parsers. Raises ValueError for one that there is not."""
        if self._parser is None:
            self._parser = await asyncio.to_thread(call_parser, self._name, self._schemas)
            self._parts = parts_parser(self._name, self._schemas)

    def calls_in(self, text: str) -> Sequence[tuple[str, str]]:
        """Return (name, arguments as JSON) of each call; ("", "") for each that cannot be read."""
        assert self._parser is not None, "no episode has begun"
        return self._parser(text)

    def numbers(self, text: str, first: int, count: int) -> list[str]:
        """Return the ids of the calls of an answer, the ``first`` and those after it of the episode."""
        written = _WRITTEN_IDS[self._name].findall(text) if self._name in _WRITTEN_IDS else []
        # Templates of Mistral refuse ids that have not nine letters or digits.
        made = [f"call{number:05d}" for number in range(first, first + count)]
        return written if len(written) == count else made

    def message(self, text: str, calls: Sequence[tuple[str, str, str]]) -> dict[str, object]:
        """Return an answer as a message. ``calls``: (id, name, arguments as JSON) of each. Arguments that
        are no object stay as they were written."""
        assert self._parts is not None, "no episode has begun"
        written: list[dict[str, object]] = []
        for number, name, arguments in calls:
            given: object = arguments
            with suppress(ValueError):
                given = json.loads(arguments or "{}")
            is_object = isinstance(given, dict)
            function: dict[str, object] = {"name": name, "arguments": given if is_object else arguments}
            written.append({"id": number, "type": "function", "function": function})
        return answer_message(*self._parts(text), written)


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
        read = self._reader.calls_in(action.text)
        calls = [call for call in read if call[0]]
        # The end of an answer that was cut off is missing, which is no mistake of the policy.
        has_unread = len(calls) < len(read) and action.finish is Finish.STOP
        if not calls and not has_unread:
            return Step(is_done=True)
        if not calls:
            return Step([{"role": "user", "content": self._unread}])
        results = await asyncio.gather(*(self._result(place, *call) for place, call in enumerate(calls)))
        first, self._calls = self._calls + 1, self._calls + len(calls)
        if has_unread:
            results[-1] += f"\n{self._unread}"
        numbers = self._reader.numbers(action.text, first, len(calls))
        return Step(
            [
                {"role": "tool", "tool_call_id": number, "name": name, "content": result}
                for number, (name, _), result in zip(numbers, calls, results, strict=True)
            ],
            answer=self._reader.message(
                action.text, [(number, *call) for number, call in zip(numbers, calls, strict=True)]
            ),
        )

    @property
    def _unread(self) -> str:
        """What is said of a call that cannot be read."""
        return (
            "error: a call cannot be read: expected the name of a tool and its arguments as the tools are "
            f"described; there are {', '.join(self._tools)}"
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
