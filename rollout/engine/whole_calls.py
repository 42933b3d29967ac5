"""SGLang's parsers of calls, made to leave out nothing of what the policy says. Imports SGLang.

    a call of a tool that does not exist    is a call: whoever runs the tools says so to the policy
    a call that cannot be read              the whole answer stays a text; that of gpt-oss, whose template
                                            writes no calls in a text, is a call with its arguments as written
    text after the calls                    follows the text before them

In a stream, everything from the first call on waits for the end: a later call may be one that cannot be read.
"""

import json
import re
from functools import partial
from typing import Any

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.environ import envs
from sglang.srt.function_call.core_types import ToolCallItem
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.gpt_oss_detector import GptOssDetector
from sglang.srt.function_call.mistral_detector import MistralDetector

from slipstream.rollout.tokens.tokenizer import END_OF_REASONING

_PROMPT_END = "<|start|>assistant"
"""End of a prompt of gpt-oss. Its parser finds no call that begins an answer without it."""

_HARMONY_HEAD = re.compile(
    r"<\|start\|>assistant(?:<\|channel\|>\w+)? ?(to=[\w.-]+) ?(?:<\|channel\|>\w+)? ?"
    r"(?:<\|constrain\|>)? ?\w*<\|message\|>"
)
_READ_HEAD = r"<|start|>assistant<|channel|>commentary \1 <|constrain|>json<|message|>"
"""Head of a call of gpt-oss as its policy or its chat template writes it, and as SGLang's parser reads it."""

_MISTRAL_ID = re.compile(r"\[CALL_ID\][A-Za-z0-9]*(?=\[ARGS\])")
"""The id of a call, of which SGLang's parser of Mistral knows nothing."""

_HARMONY_CALL = re.compile(
    r"to=(?:functions\.)?([\w.-]+)(?:(?!<\|message\|>).)*<\|message\|>(.*?)(?=<\|call\|>|<\|start\|>|$)",
    re.DOTALL,
)
"""A call of gpt-oss: the name of the tool, and its arguments whatever they are."""


class _AnyTool(dict[str, int]):
    """Places of tools by name, among which every name is."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(name)

    def __missing__(self, name: str) -> int:
        return -1


class WholeCalls(FunctionCallParser):
    """Takes the place of SGLang's ``FunctionCallParser``."""

    is_cut_off = False
    """The answer has ended by its length: the end of its last call may be missing."""

    def __init__(self, tools: list[Tool], tool_call_parser: str, *args: Any, **settings: Any) -> None:
        """Raises ValueError for a parser that SGLang does not have."""
        super().__init__(tools, tool_call_parser, *args, **settings)
        self._again = partial(type(self), tools, tool_call_parser, *args, **settings)
        self._is_harmony = isinstance(self.detector, GptOssDetector)
        indices = self.detector._get_tool_indices
        self.detector._get_tool_indices = lambda tools: _AnyTool(indices(tools))
        self._text = ""
        """All of a stream so far."""
        self._sent = 0
        """Number of its characters that have left."""
        self._waiting = ""
        self._calls: list[ToolCallItem] = []

    def has_tool_call(self, text: str) -> bool:
        return super().has_tool_call(self._written(text))

    def read(self, text: str) -> tuple[str, list[ToolCallItem], int]:
        """Return the text beside the calls of an answer, the calls, and the number of those that cannot be
        read."""
        written = self._written(text)
        try:
            with envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
                said, calls = super().parse_non_stream(written)
        except Exception:  # SGLang's parsers take it for granted that a call is a JSON object
            said, calls = text, []
        calls = [call for call in calls if call.name]
        unread = max(0, self._begun(written) - len(calls)) if self.tools else 0
        return (self._with_rest(said, text), calls, unread) if calls else (text, [], unread)

    def parse_non_stream(self, full_text: str) -> tuple[str, list[ToolCallItem]]:
        said, calls, unread = self.read(full_text)
        if unread and self._is_harmony:
            return "", [
                ToolCallItem(tool_index=at, name=name.rpartition(".")[2], parameters=arguments.strip())
                for at, (name, arguments) in enumerate(_HARMONY_CALL.findall(full_text))
            ]
        return (full_text, []) if unread else (said, calls)

    def parse_stream_chunk(self, chunk_text: str) -> tuple[str, list[ToolCallItem]]:
        try:
            with envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
                said, calls = super().parse_stream_chunk(chunk_text)
        except Exception:  # as in ``read``
            said, calls = "", []
        self._text += chunk_text
        self._calls += calls
        pending = self._text[self._sent :]
        if said and not (self._is_harmony or self.detector._buffer or pending.startswith(said)):
            said = pending  # the parser has taken marks of calls out of a text without a call
        if self._calls or self._waiting or (said and self._has_mark(len(chunk_text))):
            self._waiting += said
            return "", []
        self._sent += len(said)
        return said, []

    def parse_stream_end(self) -> tuple[str, list[ToolCallItem]]:
        with envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
            said, calls = super().parse_stream_end()
        said, calls = self._waiting + said, [*self._calls, *calls]
        if self.is_cut_off and calls:
            return said, calls
        whole, read = self._again().parse_non_stream(self._text)
        self.detector.prev_tool_call_arr = []  # else SGLang sends the rest of calls that have not left
        if not read:
            return (said if self._is_harmony else self._text[self._sent :]), []
        rest = whole[self._sent :].lstrip() if whole.startswith(self._text[: self._sent].rstrip()) else said
        return rest, [call.model_copy(update={"tool_index": at}) for at, call in enumerate(read)]

    def _written(self, text: str) -> str:
        """Return an answer in the one of several forms of its format that SGLang's parser reads."""
        if self._is_harmony:
            return _HARMONY_HEAD.sub(_READ_HEAD, text if text.startswith(_PROMPT_END) else _PROMPT_END + text)
        if isinstance(self.detector, MistralDetector):  # the space is there or not, as the tokenizer has it
            return _MISTRAL_ID.sub("", text).replace("[TOOL_CALLS][", "[TOOL_CALLS] [")
        return text

    def _begun(self, text: str) -> int:
        """Return the least number of calls that an answer has begun. Several may follow one mark."""
        if self._mark:
            return text.rpartition(END_OF_REASONING)[2].count(self._mark)
        if self._is_harmony:
            return len(_HARMONY_CALL.findall(text))
        # A parser without a mark may take any JSON for a call.
        return int(self.detector.has_tool_call(text) and not _is_json(text))

    def _has_mark(self, new: int) -> bool:
        """True if a call has begun by the last ``new`` characters of the stream."""
        mark = self._mark
        return bool(mark) and mark in self._text[-new - len(mark) :]

    @property
    def _mark(self) -> str:
        """The mark that begins calls, without the blanks and brackets of a right call; empty: there is none.

        That of gpt-oss is the head of each message beside the first.
        """
        mark = self.detector.bot_token
        return mark.split()[0] if isinstance(mark, str) and mark and not self._is_harmony else ""

    def _with_rest(self, said: str, text: str) -> str:
        """Return the text beside the calls with the text after them, which some of SGLang's parsers leave
        out."""
        end = self.detector.eot_token
        end = end.strip() if isinstance(end, str) else ""
        rest = text.rpartition(end)[2].strip() if end.startswith("<") and end in text else ""
        return f"{said}\n{rest}".lstrip("\n") if rest and not said.endswith(rest) else said


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
