"""What agents leave out of the conversation that they send again, and what they do to calls and results.

A rewriting gets a conversation, with the number of the request, and returns what an agent sends instead. It
keeps all that a message does not show: ``of``, the ids of the messages that it holds; ``new``, that nothing
has answered it yet; ``touched``, that other text stands beside its own; ``spoilt``, that nobody can recognise
it any more. Messages without ``of`` are an agent's own, and never new where ``of`` holds ``own``.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any

from tests.unit.talking import assistant, user

Message = dict[str, Any]
Messages = list[Message]
Rewriting = Callable[[Messages, int], Messages]
REMINDER = "<system-reminder>The file has changed.</system-reminder>"
CONTINUED = "This session is being continued from a previous conversation that ran out of context."


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def own(text: str) -> Message:
    """Return what an agent says before what is new, such as a summary."""
    return user(text) | {"of": ["own"]}


def with_text(message: Message, change: Callable[[str], str]) -> Message:
    return {**message, "content": change(message["content"] or "")}


def spoilt(message: Message, change: Callable[[str], str]) -> Message:
    return with_text(message, change) | {"spoilt": True}


def told(message: Message, role: str, text: str) -> Message:
    """Return a message of another role that tells of one in words."""
    hidden = {key: value for key, value in message.items() if key in ("of", "new")}
    return {"role": role, "content": text, **hidden, "spoilt": True}


def news(history: Messages) -> int:
    """Place of the first message that nothing has answered yet."""
    return next((place for place, message in enumerate(history) if message.get("new")), len(history) - 1)


def cut_at(history: Messages, exchanges: int) -> int:
    """Place of the user message that begins the last ``exchanges`` questions. What is new is never cut off,
    and neither are calls whose results are new."""
    places = [place for place, message in enumerate(history) if message["role"] == "user"]
    new = news(history) - (history[news(history)]["role"] == "tool")
    return min(places[max(0, len(places) - exchanges)] if places else 0, max(0, new))


def first_words(history: Messages) -> int:
    """Place of the first message that is not the system's."""
    return next((place for place, message in enumerate(history) if message["role"] != "system"), 0)


# ---- what is left out, and what stands for it


def sliding(history: Messages, step: int) -> Messages:
    return history[min(max(0, len(history) - 3), news(history)) :]


def compacted(history: Messages, step: int) -> Messages:
    summary = [own(f"Summary {step} of what came before")] if len(history) > 3 else []
    return [*summary, *sliding(history, step)]


def summary_by_the_assistant(history: Messages, step: int) -> Messages:
    """As agents do that let the policy sum up, and go on from what it has said."""
    start = cut_at(history, 2)
    said = [own("Sum up."), assistant(f"So far ({step}): much.")] if start else []
    return [*said, *history[start:]]


def summary_alone(history: Messages, step: int) -> Messages:
    """As Claude Code does: the summary and the new prompt are one message."""
    new = history[news(history) :]
    if len(new) > 1 or new[0]["role"] != "user" or all(m["role"] != "assistant" for m in history):
        return history
    instructions = [message for message in history if message["role"] == "system"]
    return [*instructions, with_text(new[0], lambda text: f"{REMINDER}\n{CONTINUED} Much was said.\n{text}")]


def users_and_a_summary(history: Messages, step: int) -> Messages:
    """As Codex does: what the user has said stays."""
    start = news(history)
    if start < 3 or history[start]["role"] != "user":
        return history
    kept = [message for message in history[:start] if message["role"] == "user"]
    return [*kept, own(f"Another model has summed up ({step}): much was said."), *history[start:]]


def summary_of_older_steps(history: Messages, step: int) -> Messages:
    """As condensers of OpenHands do: the first message stays, and the last ones."""
    start = min(max(1, len(history) - 4), news(history))
    if start < 2:
        return history
    return [history[0], own(f"<CONDENSED> {step}: the agent has looked around"), *history[start:]]


def compressed(history: Messages, step: int) -> Messages:
    """As gemini-cli does: the summary is answered by the agent itself, and the newest part stays."""
    start = cut_at(history, 2)
    if not start:
        return history
    got = assistant("Got it. Thanks for the additional context!")
    return [own(f"<state_snapshot>{step}</state_snapshot>"), got, *history[start:]]


def first_pair_and_half(history: Messages, step: int) -> Messages:
    """As cline does: the first question and its answer stay, and half of the rest."""
    start = 2 + 2 * (len(history) // 4)
    if len(history) < 7 or start > cut_at(history, 2):
        return history
    note = spoilt(history[1], lambda _: "[NOTE] Some previous conversation was removed.")
    note.pop("tool_calls", None)
    return [history[0], note, *history[start:]]


def first_question_pinned(history: Messages, step: int) -> Messages:
    start = cut_at(history, 1)
    return [history[0], *history[start:]] if start else history


def window_from_a_question(history: Messages, step: int) -> Messages:
    """As LangGraph's trimming does, which begins with what a human has said."""
    return history[cut_at(history, 2) :]


def old_calls_dropped(history: Messages, step: int) -> Messages:
    last = cut_at(history, 1)
    kept = [m for m in history[:last] if m["role"] != "tool" and not m.get("tool_calls")]
    return [*kept, *history[last:]]


# ---- calls, results and reasoning


def calls_as_texts(history: Messages, step: int) -> Messages:
    """As agents do that have no field for calls: those of earlier questions are told in words."""
    last = cut_at(history, 1)
    return [*(in_words(message) for message in history[:last]), *history[last:]]


def in_words(message: Message) -> Message:
    if message.get("tool_calls"):
        calls = json.dumps([call["function"] for call in message["tool_calls"]])
        return told(message, "assistant", f"{message['content'] or ''}I call {calls}")
    if message["role"] == "tool":
        return told(message, "user", f"Result: {message['content']}")
    return message


def all_calls_as_texts(history: Messages, step: int) -> Messages:
    """As smolagents does, to the newest calls and results, too."""
    return [in_words(message) for message in history]


def results_in_another_order(history: Messages, step: int) -> Messages:
    runs: Messages = []
    for role, run in itertools.groupby(history, lambda message: message["role"]):
        messages = list(run)
        if role == "tool" and len(messages) > 1 and not messages[0].get("new"):
            messages = [message | {"touched": True} for message in messages[::-1]]
        runs += messages
    return runs


def old_results_cleared(history: Messages, step: int) -> Messages:
    last = cut_at(history, 1)
    return [
        with_text(m, lambda _: "[Old tool result content cleared]") | {"spoilt": True}
        if m["role"] == "tool" and place < last
        else m
        for place, m in enumerate(history)
    ]


def results_truncated(history: Messages, step: int) -> Messages:
    """A result is whole at first, and cut when anything has followed it."""
    last = max((place for place, message in enumerate(history) if message["role"] != "tool"), default=0)
    return [
        spoilt(m, lambda text: text[:6] + "... [truncated]")
        if m["role"] == "tool" and place < min(last, news(history))
        else m
        for place, m in enumerate(history)
    ]


def observations_elided(history: Messages, step: int) -> Messages:
    """As SWE-agent does, but for the last two."""
    places = [place for place, message in enumerate(history) if message["role"] == "tool"]
    elided = {place for place in places[:-2] if place < news(history)}
    return [
        spoilt(m, lambda text: f"Old environment output: ({len(text)} letters omitted)") if i in elided else m
        for i, m in enumerate(history)
    ]


def with_calls(history: Messages, change: Callable[[Message], Message]) -> Messages:
    return [
        m | {"tool_calls": [change(call) for call in m["tool_calls"]]} if m.get("tool_calls") else m
        for m in history
    ]


def arguments_in_another_order(history: Messages, step: int) -> Messages:
    def change(call: Message) -> Message:
        arguments = dict(reversed(call["function"]["arguments"].items()))
        return call | {"function": call["function"] | {"arguments": arguments}}

    return with_calls(history, change)


def arguments_as_text(history: Messages, step: int) -> Messages:
    def change(call: Message) -> Message:
        arguments = json.dumps(call["function"]["arguments"], indent=step % 3)
        return call | {"function": call["function"] | {"arguments": arguments}}

    return with_calls(history, change)


def other_ids(history: Messages, step: int) -> Messages:
    """Ids are made anew for each request, in calls and results alike."""

    def changed(id_: str) -> str:
        return f"toolu_{step}_{id_}"

    called = with_calls(history, lambda call: call | {"id": changed(call.get("id", ""))})
    return [
        m | {"tool_call_id": changed(m.get("tool_call_id", ""))} if m["role"] == "tool" else m for m in called
    ]


def without_ids(history: Messages, step: int) -> Messages:
    called = with_calls(history, lambda call: {k: v for k, v in call.items() if k != "id"})
    return [{k: v for k, v in message.items() if k != "tool_call_id"} for message in called]


def text_beside_calls_dropped(history: Messages, step: int) -> Messages:
    return [m | {"content": None} if m.get("tool_calls") else m for m in history]


def without_reasoning(history: Messages, step: int) -> Messages:
    return [{k: v for k, v in message.items() if k != "reasoning_content"} for message in history]


def reasoning_in_the_text(history: Messages, step: int) -> Messages:
    """As clients of other providers do, which know no field for it."""
    return [
        with_text(
            without_reasoning([m], step)[0],
            lambda text, thought=m["reasoning_content"]: f"<think>{thought}</think>{text}",
        )
        if m.get("reasoning_content")
        else m
        for m in history
    ]
