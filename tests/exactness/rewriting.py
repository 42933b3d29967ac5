"""Agents that rewrite their histories, and what their turns must get as next states.

Each question has a text of its own, ``[conversation.number]``. So a judge's question says by itself whether
a turn was paired with what came after it, in its own conversation.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from slipstream.rollout.tokens.trajectory import Messages
from tests.exactness.client import Branch
from tests.exactness.conversations import Conversation
from tests.exactness.oracle import Oracle, text_of
from tests.exactness.protocols import CHAT, Message, Request

QUESTION = re.compile(r"\[(\d+)\.([1-9]\d*)")
"""Numbers from 1 on: the policy's calls have lists such as [2.0]."""
REMINDER = "<system-reminder>The todo list is empty.</system-reminder>"
HEADERS = ("x-claude-code-session-id", "session-id", "thread-id")


class RewritingAgent(Conversation):
    """One conversation in one line, each request of which rewrites what came before."""

    async def _talk(self, steps: int) -> None:
        draw = self.draw
        self.protocol = CHAT
        self.naming = "history"  # the gateway's own means are those of other conversations
        named = {draw.choice(HEADERS): f"agent {self.number}"} if draw.random() < 0.5 else {}
        kinds = sorted(draw.sample(list(REWRITINGS), draw.randint(1, 2)), key=list(REWRITINGS).index)
        history: list[Message] = []
        for step in range(max(2, steps)):
            new = self._next(Branch(history)) if history else self._question()
            said = self._rewritten([*history, *new], kinds, step)
            request = Request(said, tools=self.tools, stream=draw.random() < 0.5)
            self._limit(request, 1.0, [20, 60])
            answered = await self.send(CHAT, request, Branch([], odd=True), said, headers=named)
            if answered is not None:
                [answer] = answered.messages
                history += [*new, answer]
                self.world.oracle.answered_questions |= questions_of(new)

    def _rewritten(self, history: Sequence[Message], kinds: Sequence[str], step: int) -> list[Message]:
        messages = deepcopy(list(history))
        for kind in kinds:
            messages = REWRITINGS[kind](messages, step)
        text = f"at {step} o'clock" if "clock" in kinds else "be brief"
        return [{"role": "system", "content": text}, *messages]


def _window(messages: list[Message], step: int) -> list[Message]:
    """Keep the last exchange, from a message of the user on."""
    places = [place for place, message in enumerate(messages) if message["role"] == "user"]
    return messages[places[-2] :] if len(places) > 1 and messages[-1]["role"] == "user" else messages


def _summary(messages: list[Message], step: int) -> list[Message]:
    kept = _window(messages, step)
    summary: Message = {"role": "user", "content": f"Summary {step}: much was said."}
    return messages if len(kept) == len(messages) else [summary, *kept]


def _reminder_first(messages: list[Message], step: int) -> list[Message]:
    return [_with(messages[0], f"{REMINDER * (step > 0)}{text_of(messages[0])}"), *messages[1:]]


def _reminder_last(messages: list[Message], step: int) -> list[Message]:
    if messages[-1]["role"] != "user":
        return messages
    return [*messages[:-1], _with(messages[-1], f"{text_of(messages[-1])}\n{REMINDER}")]


def _trimmed(messages: list[Message], step: int) -> list[Message]:
    kept = [_with(m, text_of(m).strip()) if m["role"] == "user" else m for m in messages[:-1]]
    last = messages[-1]
    return [*kept, _with(last, f"  {text_of(last)}\n") if last["role"] == "user" else last]


def _answered_by_itself(messages: list[Message], step: int) -> list[Message]:
    """Say something before the last question, and answer that, once to three times, as aider does."""
    if messages[-1]["role"] != "user":
        return messages
    own: list[Message] = [
        {"role": "user", "content": "No files are shared."},
        {"role": "assistant", "content": "Ok."},
    ]
    return [*messages[:-1], *own * (1 + step % 3), messages[-1]]


def _with(message: Message, text: str) -> Message:
    return {**message, "content": text}


def _last_question(messages: list[Message]) -> int:
    """Return the place of the last question before which no call has its result only now, or has none yet."""
    places = [place for place, message in enumerate(messages) if message["role"] == "user"]
    before = messages[places[-1] - 1] if places[-1] else {"role": "user"}
    is_open = before["role"] == "tool" or bool(before.get("tool_calls"))
    return places[-1] if not is_open else places[-2] if len(places) > 1 else 0


def _calls_left_out(messages: list[Message], step: int) -> list[Message]:
    """Leave out the calls and results of earlier questions."""
    last = _last_question(messages)
    kept = [m for m in messages[:last] if m["role"] != "tool" and not m.get("tool_calls")]
    return [*kept, *messages[last:]]


def _results_cut(messages: list[Message], step: int) -> list[Message]:
    last = _last_question(messages)
    cut = [_with(m, f"{text_of(m)[:10]}...") if m["role"] == "tool" else m for m in messages[:last]]
    return [*cut, *messages[last:]]


def _ids_anew(messages: list[Message], step: int) -> list[Message]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            call["id"] = f"toolu_{step}_{call['id']}"
        if "tool_call_id" in message:
            message["tool_call_id"] = f"toolu_{step}_{message['tool_call_id']}"
    return messages


def _reasoning_in_text(messages: list[Message], step: int) -> list[Message]:
    thoughts = [message.pop("reasoning_content", None) for message in messages]
    both = zip(messages, thoughts, strict=True)
    return [_with(m, f"<think>{t}</think>{text_of(m)}") if t else m for m, t in both]


def _reminder_alone(messages: list[Message], step: int) -> list[Message]:
    return [*messages, {"role": "user", "content": REMINDER}]


REWRITINGS: Mapping[str, Callable[[list[Message], int], list[Message]]] = {
    "clock": lambda messages, step: messages,
    "window": _window,
    "summary": _summary,
    "reminder first": _reminder_first,
    "reminder last": _reminder_last,
    "trimmed": _trimmed,
    "answered by itself": _answered_by_itself,
    "results cut": _results_cut,
    "calls left out": _calls_left_out,
    "ids anew": _ids_anew,
    "reasoning in text": _reasoning_in_text,
    "reminder alone": _reminder_alone,
}


def questions_of(messages: Sequence[Mapping[str, Any]]) -> set[tuple[int, int]]:
    """Return conversation and number of all questions and results in messages."""
    texts = (text_of(message) for message in messages if message["role"] in ("user", "tool"))
    return {(int(n), int(k)) for text in texts for n, k in QUESTION.findall(text)}


def check_pairs(oracle: Oracle) -> dict[str, int]:
    """Compare the next state of each turn that was judged with what was said after it."""
    found = Counter(paired=0, wrong_pairs=0, mixed_users=0, wrong_ends=0)
    pairs: dict[tuple[tuple[int, int], str], list[Messages]] = {}
    for turn, next_state in oracle.questions:
        asked = max(questions_of(turn.conversation), default=None)
        states = [] if asked is None else pairs.setdefault((asked, turn.text), [])
        if next_state not in states:  # several judges are asked about one
            states.append(next_state)
    answered = sorted(oracle.answered_questions)
    for ((conversation, number), _), states in pairs.items():
        following = [k for n, k in answered if n == conversation and k > number]
        told = [(questions_of(state), state) for state in states if questions_of(state)]
        # Of equal answers to a request that was sent again, the client goes on from one.
        found["wrong_ends"] += bool(following and not told)
        for said, state in told:
            if {n for n, _ in said} - {conversation}:
                found["mixed_users"] += 1
            elif min(said)[1] <= number or any(number < k < min(said)[1] for k in following):
                found["wrong_pairs"] += 1
                oracle.findings.examples.append(
                    f"wrong_pairs: {number} of {conversation} got {state}, {following}"
                )
            else:
                found["paired"] += 1
    return dict(found)
