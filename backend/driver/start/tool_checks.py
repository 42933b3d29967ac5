"""Checks of a chat template against the conversations of the workflow with tools.

A template may leave out what it does not know: then the policy reads no tools, or no results, and nothing is
said. One conversation with every kind of message is written, in each way in which ``ToolUse`` writes one.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from slipstream.configs.rules.parsers import TOOL_USE
from slipstream.configs.schema import RunConfig
from slipstream.rollout.tokens.tokenizer import HfTokenizer
from slipstream.rollout.tokens.trajectory import Messages
from slipstream.rollout.workflow.environment.tools import answer_message, ways_to_write

_TOOL, _RESULTS = "look_up_wind", ("Calm-37", "Gale-52")
_PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
_SCHEMA = {
    "type": "function",
    "function": {"name": _TOOL, "description": "Return the wind.", "parameters": _PARAMETERS},
}
_RAISES = "raises"
_IDS = ("call00001", "call00002")
_CALL = {"type": "function", "function": {"name": _TOOL, "arguments": {"place": "Oslo"}}}
_ANSWERS = [answer_message("", "", [{"id": number, **_CALL}]) for number in _IDS]


def tool_problems(config: RunConfig, tokenizer: HfTokenizer) -> list[str]:
    """Return why the model's chat template cannot write conversations with tools, if the recipe has them."""
    workflow = config.rollout.workflow
    if config.rollout.hooks is not None or workflow.path not in TOOL_USE or not tokenizer.chat_template:
        return []
    answers = zip(*(ways_to_write(answer, "A call.") for answer in _ANSWERS), strict=True)
    problems = [_problem(tokenizer, workflow.args, way) for way in answers]
    if None in problems:
        return []
    # What is left out says more than what is raised for another way of writing the calls.
    problem = next((each for each in problems if each and not each.startswith(_RAISES)), problems[0])
    return [
        f"rollout.workflow: ToolUse cannot be used with the chat template of {config.model.path}, which "
        f"{problem}; expected one that writes `tools`, calls and messages of the role `tool`: take a model "
        "that was trained with tools, or put such a chat_template.jinja beside its tokenizer"
    ]


def _problem(
    tokenizer: HfTokenizer, args: Mapping[str, object], answers: Sequence[dict[str, Any]]
) -> str | None:
    """Return what a template does wrong with a conversation with these answers."""
    own, system = args.get("template"), args.get("system")
    settings = cast("Mapping[str, object]", own) if isinstance(own, dict) else {}

    def written(messages: Messages) -> str:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **{"tools": [_SCHEMA], **settings}
        )

    begun: Messages = [] if system is None else [{"role": "system", "content": system}]
    begun.append({"role": "user", "content": "Is there wind?"})
    try:
        first, last = written(begun), written([*begun, *_rounds(answers)])
    except Exception as error:  # the template is code of the model's
        return f"{_RAISES} {type(error).__name__}: {error}"
    if not all(result in last for result in _RESULTS):
        return "leaves out the results of tools"
    if _TOOL not in first and system is None and not settings:
        return "leaves out the tools, which no `system` message of the workflow describes"
    return None


def _rounds(answers: Sequence[dict[str, Any]]) -> Messages:
    """Return answers with the results of their calls."""
    rounds: Messages = []
    for number, answer, result in zip(_IDS, answers, _RESULTS, strict=True):
        rounds += [answer, {"role": "tool", "tool_call_id": number, "name": _TOOL, "content": result}]
    return rounds
