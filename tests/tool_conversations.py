"""Conversations with tools in the formats of the mapped families, through SGLang's parsers.

    python -m tests.tool_conversations          prints, as JSON, what became of each

Templates have the rules of the published ones that matter to calls and results, in the fewest words: how a
call, its id and its result are written, what is refused, what of earlier answers is left out.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.tokens.trajectory import Completion, Finish, Prompt, Span
from slipstream.rollout.workflow import ToolUse, WorkflowContext
from tests.chat_model import build_tokenizer

CITIES = ("Köln", "Rom")


async def weather(city: str) -> str:
    """Return the weather."""
    return f"It rains in {city}."


@dataclass(frozen=True)
class Format:
    """The format of a family."""

    parser: str
    marks: Sequence[str]
    """Special tokens."""
    call: str
    """An answer with a call: CITY stands for the city, NUMBER for the place of the call from 0."""
    template: str
    """`call` is the message's first call, `arguments` its arguments as JSON."""
    end: str = "<|e|>"
    call_end: str = ""
    """Token that ends an answer with a call, where it is another one."""
    final: str = "Take a coat."


_LOOP = """\
{%- for message in messages %}{%- set call = (message.tool_calls or [none])[0] %}BODY{%- endfor %}
{%- if add_generation_prompt %}{{- PROMPT }}{%- endif %}"""
_TOOLS = "{{- '<|b|>' }}{%- if tools %}{{- tools | tojson }}{%- endif %}"


def _template(*branches: tuple[str, str], prompt: str = "'<|a|>'") -> str:
    words = ["if", *["elif"] * (len(branches) - 1)]
    body = "".join(
        f"{{%- {word} {condition} %}}{written}"
        for word, (condition, written) in zip(words, branches, strict=True)
    )
    return _TOOLS + _LOOP.replace("BODY", body + "{%- endif %}").replace("PROMPT", prompt)


_USER = ("message.role == 'user'", "{{- '<|u|>' + message.content }}")
_RESULT = ("message.role == 'tool'", "{{- '<|t|>' + message.content }}")
_ANSWER = ("true", "{{- '<|a|>' + message.content + '<|e|>' }}")
_MARKS = ("<|b|>", "<|u|>", "<|a|>", "<|t|>", "<|e|>")
_XML = '<tool_call>\n{"name": "weather", "arguments": {"city": "CITY"}}\n</tool_call>'


def _deepseek(mark: str) -> str:
    return f"<\uff5ctool▁{mark}\uff5c>"


_DEEPSEEK_BEGIN = "".join(
    (_deepseek("calls▁begin"), _deepseek("call▁begin"), "function", _deepseek("sep"), "weather\n```json\n")
)
_DEEPSEEK_END = "\n```" + _deepseek("call▁end") + _deepseek("calls▁end")

FORMATS = {
    "qwen": Format(
        "qwen25",
        _MARKS,
        "I look.\n" + _XML,
        _template(
            _USER,
            _RESULT,
            (
                "call",
                '{{- \'<|a|>\' + message.content + \'\n<tool_call>\n{"name": "weather", "arguments": \' + '
                "(call.function.arguments | tojson) + '}\n</tool_call><|e|>' }}",
            ),
            _ANSWER,
        ),
    ),
    "llama": Format(
        "llama3",
        _MARKS,
        '{"name": "weather", "parameters": {"city": "CITY"}}',
        _template(
            _USER,
            _RESULT,
            (
                "call",
                '{{- \'<|a|>{"name": "weather", "parameters": \' + (call.function.arguments | tojson) '
                "+ '}<|e|>' }}",
            ),
            _ANSWER,
        ),
    ),
    "mistral": Format(
        "mistral",
        (*_MARKS, "[TOOL_CALLS]"),
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "CITY"}, "id": "abcdefghNUMBER"}]',
        _template(
            _USER,
            (
                "(message.tool_call_id or call.id) and (message.tool_call_id or call.id) | length != 9",
                "{{- raise_exception('ids have nine letters') }}",
            ),
            _RESULT,
            (
                "call",
                '{{- \'<|a|>[TOOL_CALLS][{"name": "weather", "arguments": \' + (call.function.arguments | '
                "tojson) + ', \"id\": \"' + call.id + '\"}]<|e|>' }}",
            ),
            _ANSWER,
        ),
    ),
    "mistral, compact": Format(
        "mistral",
        (*_MARKS, "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        '[TOOL_CALLS]weather[CALL_ID]abcdefghNUMBER[ARGS]{"city": "CITY"}',
        _template(
            _USER,
            _RESULT,
            (
                "call",
                "{{- '<|a|>[TOOL_CALLS]weather[CALL_ID]' + call.id + '[ARGS]' + (call.function.arguments | "
                "tojson) + '<|e|>' }}",
            ),
            _ANSWER,
        ),
    ),
    "kimi_k2": Format(
        "kimi_k2",
        (
            *_MARKS,
            *(f"<|tool_call{mark}|>" for mark in ("_begin", "_argument_begin", "_end")),
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
        ),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:NUMBER<|tool_call_argument_begin|>"
        '{"city": "CITY"}<|tool_call_end|><|tool_calls_section_end|>',
        _template(
            _USER,
            _RESULT,
            (
                "call",
                "{{- '<|a|><|tool_calls_section_begin|><|tool_call_begin|>' + call.id + "
                "'<|tool_call_argument_begin|>' + (call.function.arguments | tojson) + "
                "'<|tool_call_end|><|tool_calls_section_end|><|e|>' }}",
            ),
            _ANSWER,
        ),
    ),
    "deepseek_v3": Format(
        "deepseekv3",
        (
            *_MARKS,
            *map(_deepseek, ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")),
        ),
        _DEEPSEEK_BEGIN + '{"city": "CITY"}' + _DEEPSEEK_END,
        _template(
            _USER,
            _RESULT,
            (
                "call",
                f"{{{{- '<|a|>{_DEEPSEEK_BEGIN}' + call.function.arguments + '{_DEEPSEEK_END}<|e|>' }}}}",
            ),
            _ANSWER,
        ),
    ),
    "glm4_moe": Format(
        "glm45",
        _MARKS,
        "\n<think>wet?</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>CITY</arg_value>\n"
        "</tool_call>",
        _template(
            _USER,
            _RESULT,
            (
                "call",
                "{{- '<|a|>\n<think>' + message.reasoning_content.strip() + '</think>\n<tool_call>weather\n"
                "<arg_key>city</arg_key>\n<arg_value>' + call.function.arguments.city + '</arg_value>\n"
                "</tool_call>' }}",
            ),
            _ANSWER,
        ),
        call_end="<|t|>",
    ),
}

_CHANNELS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
_HARMONY = (
    "{{- '<|start|>developer<|message|>' }}{%- if tools %}{{- tools | tojson }}{%- endif %}{{- '<|end|>' }}"
    + _LOOP.replace(
        "BODY",
        "{%- if '<|channel|>' in message.content %}{{- raise_exception('channels in the content') }}"
        "{%- elif call and message.content and message.thinking %}{{- raise_exception('both') }}"
        "{%- elif message.role == 'tool' and not (messages[loop.index0 - 1].tool_calls) %}"
        "{{- raise_exception('no previous call') }}"
        "{%- elif message.role == 'tool' %}{{- '<|start|>functions.weather to=assistant<|channel|>commentary"
        "<|message|>' + (message.content | tojson) + '<|end|>' }}"
        "{%- elif call %}{%- if message.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + "
        "message.thinking + '<|end|>' }}{%- endif %}{{- '<|start|>assistant to=functions.' + "
        "call.function.name + '<|channel|>commentary json<|message|>' + (call.function.arguments | tojson) + "
        "'<|call|>' }}"
        "{%- elif message.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + "
        "message.content + '<|end|>' }}"
        "{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}"
        "{%- endif %}",
    ).replace("PROMPT", "'<|start|>assistant'")
)
_THOUGHT = "<|channel|>analysis<|message|>wet?<|end|><|start|>assistant"
for _name, _head in {
    "gpt_oss": "<|channel|>commentary to=functions.weather <|constrain|>json",
    "gpt_oss, as its template": " to=functions.weather<|channel|>commentary json",
}.items():
    FORMATS[_name] = Format(
        "gpt-oss",
        _CHANNELS,
        _THOUGHT + _head + '<|message|>{"city": "CITY"}',
        _HARMONY,
        end="<|return|>",
        call_end="<|call|>",
        final=_THOUGHT + "<|channel|>final<|message|>Take a coat.",
    )


class Scripted:
    """A policy that asks for the weather of each city, one after another, and answers."""

    def __init__(self, tokenizer: Any, form: Format) -> None:
        calls = [
            form.call.replace("CITY", city).replace("NUMBER", str(number)) + (form.call_end or form.end)
            for number, city in enumerate(CITIES)
        ]
        self._answers = [*calls, form.final + form.end]
        self._tokenizer = tokenizer
        self.asked: list[list[int]] = []
        self.whole: list[list[int]] = []
        """Prompts with their completions."""

    async def generate(self, input_ids: Sequence[int], sampling: SamplingConfig) -> Completion:
        ids = self._tokenizer.encode(self._answers[len(self.asked)])
        self.asked.append(list(input_ids))
        self.whole.append([*input_ids, *ids])
        logprobs, spans = (-0.5,) * len(ids), (Span(1, 0, len(ids)),)
        return Completion(tuple(ids), logprobs, spans, Finish.STOP, matched=ids[-1])


class NoReward:
    async def score(self, *_: object) -> float:
        raise AssertionError("nobody asks")


def tokenizer_of(form: Format) -> Any:
    tokenizer = build_tokenizer(form.template)
    marks = {"additional_special_tokens": list(form.marks)}
    tokenizer.add_special_tokens(marks, replace_extra_special_tokens=False)
    tokenizer.eos_token = form.end
    return tokenizer


def hold(form: Format) -> dict[str, object]:
    """Hold a conversation, and return what is true of it."""
    tokenizer = tokenizer_of(form)
    policy = Scripted(tokenizer, form)
    context = WorkflowContext(policy, tokenizer, NoReward(), SamplingConfig())
    workflow = ToolUse(["tests.tool_conversations.weather"], parser=form.parser)
    episode = asyncio.run(workflow.run(Prompt(0, "A coat?"), context))
    last = tokenizer.decode(policy.asked[-1])
    return {
        "requests": len(policy.asked),
        "results": [f"It rains in {city}." in last.replace("\\u00f6", "ö") for city in CITIES],
        "repeats": all(
            then[: len(before)] == before
            for before, then in zip(policy.whole, policy.asked[1:], strict=False)
        ),
        "trained": sum(map(len, policy.whole)) - sum(map(len, policy.asked)) == episode.response_length,
    }


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    print(json.dumps({name: hold(form) for name, form in FORMATS.items()}))
