"""The fields of a request that a client may set. Pure.

SGLang's endpoints take much that is not for users: token ids in place of messages, adapters, the place in the
engine's queue and cache, code, addresses of other servers. Each endpoint here has a list of the fields that
pass; every other field that SGLang knows is refused. Fields that SGLang does not know, which newer clients
send, have no effect: they are left out and counted.
"""

from collections.abc import Collection, Mapping
from typing import Any, cast

from slipstream.rollout.gateway.serving.limits import Refusal

Value = dict[str, Any]
"""A JSON object."""

SESSION = frozenset({"session_id", "turn_type", "session_done"})
"""Fields of the gateway itself, on every endpoint."""

_SAMPLING = frozenset(
    {
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "max_tokens",
        "min_p",
        "min_tokens",
        "n",
        "presence_penalty",
        "repetition_penalty",
        "response_format",
        "seed",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
        "regex",
        "ebnf",
    }
)

_COMMON = frozenset({"model", "stream", "stream_options", "user", "skip_special_tokens", "no_stop_trim"})

CHAT = (
    _SAMPLING
    | _COMMON
    | {
        "chat_template_kwargs",
        "continue_final_message",
        "logprobs",
        "max_completion_tokens",
        "messages",
        "parallel_tool_calls",
        "reasoning",
        "reasoning_effort",
        "return_prompt_token_ids",
        "return_token_ids",
        "separate_reasoning",
        "stream_reasoning",
        "tool_choice",
        "tools",
        "top_logprobs",
    }
)

COMPLETION = _SAMPLING | _COMMON | {"echo", "json_schema", "logprobs", "prompt", "return_token_ids", "suffix"}

RESPONSES = frozenset(
    {
        "chat_template_kwargs",
        "frequency_penalty",
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "min_p",
        "model",
        "parallel_tool_calls",
        "presence_penalty",
        "previous_response_id",
        "reasoning",
        "repetition_penalty",
        "service_tier",
        "stop",
        "store",
        "stream",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
        "truncation",
        "user",
    }
)

COUNT_TOKENS = frozenset(
    {"betas", "messages", "model", "output_config", "system", "thinking", "tool_choice", "tools"}
)

MESSAGES = COUNT_TOKENS | {
    "max_tokens",
    "metadata",
    "stop_sequences",
    "stream",
    "temperature",
    "top_k",
    "top_p",
}

GENERATE = frozenset(
    {
        "input_ids",
        "logprob_start_len",
        "return_logprob",
        "return_text_in_logprobs",
        "sampling_params",
        "stream",
        "text",
        "top_logprobs_num",
    }
)

NEVER = frozenset({"chat_template"})
"""Fields that are refused although SGLang would not read them: a client that sends them counts on them."""

TEMPLATE_SETTINGS = frozenset(
    {
        "enable_thinking",
        "thinking",
        "thinking_mode",
        "thinking_budget",
        "reasoning_effort",
        "preserve_thinking",
    }
    | {"clear_thinking", "add_thinking", "date_string", "model_identity", "builtin_tools", "xml_tools"}
)
"""Keys of ``chat_template_kwargs``. Others could replace the template or what it renders."""


def check_fields(
    body: Mapping[str, object], allowed: Collection[str], known: Mapping[str, object]
) -> tuple[dict[str, object], list[str]]:
    """Return the fields of a body that the endpoint reads, and the names of those that it does not know.

    ``known``: the default of every field that SGLang's endpoint reads. A field that is null, or has its
    default, is not set.

    Raises Refusal with 400 that names every field that may not be set.
    """
    given = {name: value for name, value in body.items() if value is not None and name not in SESSION}
    refused = sorted(
        name
        for name, value in given.items()
        if name not in allowed and (name in NEVER or (name in known and value != known[name]))
    )
    if refused:
        raise Refusal(400, f"clients may not set {', '.join(refused)}", param=refused[0])
    check_template_settings(given.get("chat_template_kwargs"))
    if "metadata" in given:
        given["metadata"] = _labels(given["metadata"])
    unknown = [name for name in given if name not in allowed]
    return {name: value for name, value in given.items() if name in allowed}, unknown


def check_template_settings(settings: object) -> None:
    """Raises Refusal with 400 unless these are settings that a chat template may be given."""
    if settings is None:
        return
    if not isinstance(settings, dict):
        raise Refusal(400, "chat_template_kwargs: expected an object", param="chat_template_kwargs")
    refused = sorted(
        str(name) for name in cast("dict[object, object]", settings) if name not in TEMPLATE_SETTINGS
    )
    if refused:
        raise Refusal(
            400, f"clients may not set chat_template_kwargs.{refused[0]}", param="chat_template_kwargs"
        )


def _labels(metadata: object) -> dict[str, str]:
    """Return the labels of a request, as OpenAI and Anthropic have them. Raises Refusal with 400."""
    labels = cast("dict[str, object]", metadata) if isinstance(metadata, dict) else {"": metadata}
    given = {name: value for name, value in labels.items() if value is not None}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in given.values()):
        raise Refusal(400, "metadata: expected an object whose values are texts", param="metadata")
    return cast("dict[str, str]", given)
