"""Wishes of clients that a policy may be unable to grant: how much it thinks, what is cached. Pure.

Agents send such wishes with every request, whatever they talk to. A wish that cannot be granted changes
nothing and is counted; it is never a reason to refuse an answer.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import cast

from slipstream.rollout.gateway.serving.fields import Value
from slipstream.rollout.gateway.serving.words import Protocols

TIERS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})
"""Efforts that SGLang's endpoints read."""

WISHES = frozenset(
    {"audio", "cache_control", "client_metadata", "container", "context_management", "enable_thinking"}
    | {"inference_geo", "modalities", "output_config", "output_config.effort", "output_config.format"}
    | {"output_config.task_budget", "output_format", "prediction", "prompt_cache_key", "include"}
    | {"prompt_cache_retention", "reasoning", "reasoning.effort", "reasoning.summary", "reasoning_effort"}
    | {"safety_identifier", "service_tier", "speed", "store", "text.verbosity", "thinking", "verbosity"}
    | {"thinking.budget_tokens", "thinking.display", "thinking_budget", "tool_choice", "truncation"}
)
"""Wishes that are counted by name. Fields that nobody knows are counted as ``other``."""

INCLUDED = frozenset(
    {"code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results"}
    | {"message.input_image.image_url", "message.output_text.logprobs", "reasoning.encrypted_content"}
)
"""Values of ``include`` that SGLang's endpoint reads."""


@dataclass(frozen=True)
class Abilities:
    """What a policy can do of what clients wish."""

    reasons: bool
    """Its answers begin with reasoning, or its template reads how much it should think."""
    efforts: Collection[str] = TIERS
    """Efforts that it knows."""


def served(given: Mapping[str, object], protocol: Protocols, policy: Abilities) -> tuple[Value, list[str]]:
    """Return the fields of a body without the wishes that cannot be granted, and the names of these.

    Fields of wrong types are left for those who check the body.
    """
    fields, ignored = dict(given), list[str]()
    _drop_service(fields, ignored)
    if protocol is Protocols.ANTHROPIC:
        _of_anthropic(fields, ignored, policy)
    elif protocol is Protocols.RESPONSES:
        _of_responses(fields, ignored, policy)
    else:
        _of_chat(fields, ignored, policy)
    if _has_cache_control(fields):
        ignored.append("cache_control")
    return fields, ignored


def _drop_service(fields: Value, ignored: list[str]) -> None:
    """Take out what a provider's service would do: tiers, speed, places."""
    tier = fields.pop("service_tier", None)
    if tier not in (None, "auto", "default", "standard_only"):
        ignored.append("service_tier")


def _of_chat(fields: Value, ignored: list[str], policy: Abilities) -> None:
    for name in ("thinking", "enable_thinking", "thinking_budget", "verbosity", "prediction"):
        if fields.pop(name, None) is not None:
            ignored.append(name)
    effort = fields.get("reasoning_effort")
    if isinstance(effort, str | float | int) and not _knows(effort, policy):
        del fields["reasoning_effort"]
        ignored.append("reasoning_effort")
    _keep_reasoning(fields, ignored, policy)


def _of_responses(fields: Value, ignored: list[str], policy: Abilities) -> None:
    _keep_reasoning(fields, ignored, policy)
    text = fields.get("text")
    if isinstance(text, dict) and "verbosity" in text:
        fields["text"] = {name: value for name, value in text.items() if name != "verbosity"}
        ignored.append("text.verbosity")
    if fields.get("truncation") not in (None, "disabled") and isinstance(fields["truncation"], str):
        del fields["truncation"]
        ignored.append("truncation")
    include = fields.get("include")
    if isinstance(include, list) and not INCLUDED.issuperset(map(str, include)):
        fields["include"] = [name for name in include if str(name) in INCLUDED]
        ignored.append("include")


def _of_anthropic(fields: Value, ignored: list[str], policy: Abilities) -> None:
    _keep_thinking(fields, ignored, policy)
    output = fields.get("output_config")
    if not isinstance(output, dict):
        return
    kept: Value = {}
    for name, value in cast("Value", output).items():
        if value is None:
            continue
        if name == "effort" and isinstance(value, str) and _knows(value, policy):
            kept[name] = value
        else:
            ignored.append(f"output_config.{name}")
    fields["output_config"] = kept


def _keep_thinking(fields: Value, ignored: list[str], policy: Abilities) -> None:
    """Leave of Anthropic's ``thinking`` whether the policy should think at all."""
    thinking = fields.get("thinking")
    if not isinstance(thinking, dict):
        return
    kind = thinking.get("type")
    if not isinstance(kind, str):
        return
    del fields["thinking"]
    if kind == "disabled" and not policy.reasons:
        return
    if kind not in ("enabled", "adaptive", "disabled") or not policy.reasons:
        ignored.append("thinking")
        return
    ignored += [f"thinking.{name}" for name in ("budget_tokens", "display") if thinking.get(name) is not None]
    # SGLang reads both kinds alike, and takes no "enabled" without a budget that it does not keep.
    fields["thinking"] = {"type": "disabled" if kind == "disabled" else "adaptive"}


def _keep_reasoning(fields: Value, ignored: list[str], policy: Abilities) -> None:
    reasoning = fields.get("reasoning")
    if not isinstance(reasoning, dict):
        return
    if not policy.reasons:
        del fields["reasoning"]
        ignored.append("reasoning")
        return
    kept = dict(cast("Value", reasoning))
    for name in ("effort", "reasoning_effort"):
        if isinstance(kept.get(name), str | float | int) and not _knows(kept[name], policy):
            del kept[name]
            ignored.append("reasoning.effort")
    summary = kept.get("summary")
    if isinstance(summary, str) and summary not in ("auto", "concise", "detailed"):
        del kept["summary"]
        ignored.append("reasoning.summary")
    fields["reasoning"] = kept


def _knows(effort: object, policy: Abilities) -> bool:
    if not policy.reasons or isinstance(effort, bool):
        return False
    if isinstance(effort, str) and effort in TIERS:
        return effort in policy.efforts
    try:
        return 0 <= float(cast("str", effort)) < 1
    except (ValueError, OverflowError):
        return False


def _has_cache_control(fields: Value) -> bool:
    """True if a client says what is to be cached: engines cache every prompt."""
    if fields.pop("cache_control", None) is not None:
        return True
    for name in ("system", "tools", "messages"):
        blocks = fields.get(name)
        for block in cast("list[object]", blocks) if isinstance(blocks, list) else ():
            if not isinstance(block, dict):
                continue
            parts = block.get("content")
            inner = cast("list[object]", parts) if isinstance(parts, list) else []
            if any(isinstance(part, dict) and part.get("cache_control") for part in (block, *inner)):
                return True
    return False
