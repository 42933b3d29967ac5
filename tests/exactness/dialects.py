"""Chat templates as public models have them, each with how its policy writes reasoning and calls.

Every template here is written anew from the documented behaviour of its namesake, with its oddities:

    appending   each prompt begins with all earlier ones
    rewriting   reasoning vanishes from all answers but the last
    qwen3       reasoning vanishes before the last question; results of tools share one message of a user
    llama3      one call in an answer at most, else the template refuses; texts are trimmed; tools stand in
                the first question
    mistral     roles must alternate, else the template refuses; tools and system stand in the last question,
                so that every question rewrites the one before; ids of calls are in the prompt
    r1          the prompt begins the reasoning, which vanishes with the next question

Tokens are bytes, some pairs and words, and the marks of the template: a text has many tokenizations, and a
policy hardly ever samples the one that the tokenizer would choose.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config

from tests.chat_model import APPENDING, END, PAD, REWRITING, START, WORDS

CONTEXT = 16384
MERGES = (
    "h e", "t h", "th e", "l l", "e r", "i n", "o n", "a n", "r e", "Ġ t", "Ġ a", "Ġ {", "\" :", "{ \"",
    "< /", "t o", "to o", "t i", "a t", "Ċ Ċ", "Ã ¼", "ð Ł", "ðŁ ĺ", "E N", "EN D", "U s", "\" }", "} }",
    ", Ġ",
)  # fmt: skip
"""Pairs that are tokens, in the alphabet of byte-level tokenizers."""

Call = tuple[str, Mapping[str, Any]]
"""Name and arguments of a tool call."""


@dataclass(frozen=True)
class Dialect:
    """A chat template, its special tokens, its parsers, and what the policy writes."""

    name: str
    template: str
    end: str
    """Token with which answers end."""
    specials: tuple[str, ...]
    """Tokens that the text of an answer does not show. The first one is for padding."""
    words: tuple[str, ...] = ()
    """Tokens of their own that are text."""
    begin: str | None = None
    """Token that the tokenizer puts before plain texts."""
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    thought: tuple[str, str] | None = None
    """What stands before and behind the reasoning in an answer."""
    calls: Callable[[Sequence[Call], Callable[[Any], str]], str] | None = None
    """Writes calls, given what writes a JSON value."""
    most_calls: int = 3
    alternates: bool = False
    """The template refuses two questions, or two answers, in a row."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that are one token."""
        return (*self.specials, self.end, *self.words)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer with the template."""
        merges = [tuple(merge.split(" ")) for merge in MERGES]
        symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {symbol: number for number, symbol in enumerate(symbols)}
        for first, second in merges:
            vocab.setdefault(first + second, len(vocab))
        backend = Tokenizer(models.BPE(vocab, merges))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([*self.specials, self.end])
        backend.add_tokens(list(self.words))
        if self.begin is not None:
            number = backend.token_to_id(self.begin)
            backend.post_processor = processors.TemplateProcessing(
                single=f"{self.begin} $A", special_tokens=[(self.begin, number)]
            )
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            pad_token=self.specials[0],
            eos_token=self.end,
            bos_token=self.begin,
            additional_special_tokens=list(self.specials[1:]),
            chat_template=self.template,
            clean_up_tokenization_spaces=False,
            model_max_length=CONTEXT,
        )

    def write(self, folder: Path, context: int = CONTEXT) -> PreTrainedTokenizerFast:
        """Write a checkpoint without weights, and return its tokenizer."""
        tokenizer = self.tokenizer()
        tokenizer.save_pretrained(folder)
        Qwen3Config(
            vocab_size=len(tokenizer),
            max_position_embeddings=context,
            bos_token_id=None,
            eos_token_id=tokenizer.convert_tokens_to_ids(self.end),
            pad_token_id=tokenizer.convert_tokens_to_ids(self.specials[0]),
        ).save_pretrained(folder)
        return tokenizer


def _hermes(calls: Sequence[Call], dumps: Callable[[Any], str]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": {dumps(name)}, "arguments": {dumps(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def _llama(calls: Sequence[Call], dumps: Callable[[Any], str]) -> str:
    return ";".join(
        f'{{"name": {dumps(name)}, "parameters": {dumps(arguments)}}}' for name, arguments in calls
    )


def _mistral(calls: Sequence[Call], dumps: Callable[[Any], str]) -> str:
    listed = [f'{{"name": {dumps(name)}, "arguments": {dumps(arguments)}}}' for name, arguments in calls]
    return f"[TOOL_CALLS] [{', '.join(listed)}]"


def as_the_template_does(value: Any) -> str:
    """Write JSON as chat templates do."""
    return json.dumps(value, ensure_ascii=False)


QWEN3 = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nFunctions are listed within <tools></tools>:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nAnswer with <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(question=messages | length - 1, searching=true) %}
{%- for message in messages[::-1] %}
{%- set place = messages | length - 1 - loop.index0 %}
{%- if ns.searching and message.role == 'user' and message.content is string
   and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
{%- set ns.searching = false %}{%- set ns.question = place %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}
{%- set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.question and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}
{{- content }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content | trim %}{%- set rest = messages[1:] %}
{%- else %}
{%- set system = '' %}{%- set rest = messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none and tools is defined %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- system + '<|eot_id|>' }}
{%- if tools is not none and tools is defined %}
{%- if not rest or rest[0].role != 'user' %}
{{- raise_exception('Tools stand in the first question, and there is none') }}
{%- endif %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions, answer with JSON: ' }}
{{- '{"name": function name, "parameters": dictionary of argument name and its value}.\\n\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{{- rest[0].content | trim + '<|eot_id|>' }}
{%- set rest = rest[1:] %}
{%- endif %}
{%- for message in rest %}
{%- if message.role in ('tool', 'ipython') %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{{- message.content | tojson if message.content is mapping else message.content }}
{{- '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{{- '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """\
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}
{%- set system = '' %}{%- set rest = messages %}
{%- endif %}
{%- set questions = rest | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(place=0) %}
{%- for message in rest %}
{%- if message.role in ('user', 'assistant') and not message.tool_calls %}
{%- if (message.role == 'user') != (ns.place % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- set ns.place = ns.place + 1 %}
{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
{%- if message.role == 'user' %}
{%- if tools and message == questions[-1] %}
{{- '[AVAILABLE_TOOLS] [' }}
{%- for tool in tools %}{{- (tool | tojson) + (', ' if not loop.last else '') }}{%- endfor %}
{{- '][/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + (system + '\\n\\n' if loop.last and system else '') + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- ', "id": "' + call.id[-9:] + '"}' + (', ' if not loop.last else ']') }}
{%- endfor %}
{{- eos_token }}
{%- elif message.role == 'assistant' %}
{{- ' ' + message.content | trim + eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) }}
{{- ', "call_id": "' + message.tool_call_id[-9:] + '"}[/TOOL_RESULTS]' }}
{%- else %}
{{- raise_exception('Only user, assistant and tool roles are supported, besides the system message first') }}
{%- endif %}
{%- endfor %}
"""

R1 = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{- message.content }}
{%- elif message.role == 'user' %}{{- '<|User|>' + message.content }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<|Assistant|>' + content + '<|end_of_sentence|>' }}
{%- elif message.role == 'tool' %}{{- '<|tool_output|>' + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}
"""

_THOUGHT = ("<think>\n", "\n</think>\n\n")
_CHATML: dict[str, Any] = {
    "end": END,
    "specials": (PAD, START),
    "words": WORDS,
    "tool_parser": "qwen25",
    "reasoning_parser": "qwen3",
    "thought": _THOUGHT,
    "calls": _hermes,
}

DIALECTS = (
    Dialect("appending", APPENDING, **_CHATML),
    Dialect("rewriting", REWRITING, **_CHATML),
    Dialect("qwen3", QWEN3, **_CHATML),
    Dialect(
        "llama3",
        LLAMA3,
        end="<|eot_id|>",
        specials=(
            "<|end_of_text|>",
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|python_tag|>",
        ),
        begin="<|begin_of_text|>",
        tool_parser="llama3",
        calls=_llama,
        most_calls=1,
    ),
    Dialect(
        "mistral",
        MISTRAL,
        end="</s>",
        specials=(
            "<unk>",
            "<s>",
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        begin="<s>",
        tool_parser="mistral",
        calls=_mistral,
        alternates=True,
    ),
    Dialect(
        "r1",
        R1,
        end="<|end_of_sentence|>",
        specials=("<|pad|>", "<|begin_of_sentence|>", "<|User|>", "<|Assistant|>", "<|tool_output|>"),
        words=("<think>", "</think>"),
        begin="<|begin_of_sentence|>",
        reasoning_parser="deepseek-r1",
        thought=("", "\n</think>\n\n"),
    ),
)
