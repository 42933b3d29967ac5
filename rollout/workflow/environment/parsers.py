"""SGLang's parsers of tool calls. Importing SGLang takes seconds, and happens with the first parser."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.rollout.engine.process import importing_sglang

CallParser = Callable[[str], Sequence[tuple[str, str]]]
"""Returns (name, arguments as JSON) of each call in the text of an answer."""

_IMPORTING = threading.Lock()
"""Environments ask for parsers in threads. Each import puts the process's variables back as it found them."""


def call_parser(name: str, tools: Sequence[Mapping[str, Any]]) -> CallParser:
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
