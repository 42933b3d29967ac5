"""What collectors of ``benchmarks.episodes`` talk with: a tool that takes time, and what engines say.

    policy    xxx ... <tool_call>{"name": "look", "arguments": {}}</tool_call>     turns 1 to n - 1
    tool      nothing new, after TOOL_S
    policy    xxx ...                                                              turn n

Chat template, tokenizer and parser are real ones: ChatML with tools, bytes, and SGLang's parser of Qwen.
"""

import asyncio
from array import array
from collections.abc import Sequence

from slipstream.configs.schema import PluginConfig
from tests.chat_model import END, build_tokenizer

TOOL_S = 0.1

_CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


async def look() -> str:
    """Look whether there is anything new."""
    await asyncio.sleep(TOOL_S)
    return "nothing new"


def workflow(turns: int) -> PluginConfig:
    """Return the workflow of episodes that have at most so many completions."""
    args = {"tools": [f"{__name__}.look"], "parser": "qwen25", "max_turns": turns}
    return PluginConfig(path="slipstream.rollout.workflow.ToolUse", args=args)


class Speaker:
    """Says what an engine samples: calls of the tool, and an answer after the result of the last call."""

    def __init__(self, turns: int, tokens: int) -> None:
        """``turns``: completions of an episode. ``tokens``: length of each."""
        self.tokenizer = build_tokenizer()
        self._calls = turns - 1
        self._result = self.tokenizer.convert_tokens_to_ids("</tool_response>")
        self._call, self._answer = (self._spoken(text, tokens) for text in (_CALL, "done"))

    def _spoken(self, text: str, tokens: int) -> "array[int]":
        ids = self.tokenizer.encode(f"{text}{END}")
        [filler] = self.tokenizer.encode("x")
        return array("i", [filler] * (tokens - len(ids)) + ids)

    def says(self, input_ids: Sequence[int]) -> "array[int]":
        """Return the completion of a prompt."""
        return self._answer if input_ids.count(self._result) >= self._calls else self._call
