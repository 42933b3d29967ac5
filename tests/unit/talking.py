"""A tokenizer, chat templates, a client and an engine with which sessions are tested.

The tokenizer has bytes, pairs of letters and special tokens. A text has many tokenizations, and a policy that
samples ids at random hardly ever samples the one that ``encode`` returns.
"""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.rollout.gateway.conversations import Answer, Arrival, User
from slipstream.rollout.gateway.sessions.placing import SessionLimits
from slipstream.rollout.gateway.sessions.running import RunningRequest
from slipstream.rollout.gateway.sessions.sessions import Sessions
from slipstream.rollout.gateway.source import Finished
from slipstream.rollout.tokens.trajectory import Finish
from slipstream.rollout.tokens.turn_entries import Entry, NextState, Turn

SPECIAL = {256: "<|user|>", 257: "<|assistant|>", 258: "<|system|>", 259: "<|tool|>", 260: "<|end|>"}
END = 260
PAIRS = {
    300 + place: pair
    for place, pair in enumerate(("he", "ll", "th", "er", "in", "<t", "k>", '{"', '":', "</", "hi", "nk"))
}
_WORDS = re.compile(
    "|".join(re.escape(word) for word in (*SPECIAL.values(), *PAIRS.values())) + "|.", re.DOTALL
)
_IDS = {word: number for number, word in (SPECIAL | PAIRS).items()}


def encode(text: str) -> list[int]:
    ids: list[int] = []
    for word in _WORDS.findall(text):
        ids += [_IDS[word]] if word in _IDS else word.encode("utf-8", "replace")
    return ids


def decode(ids: Sequence[int]) -> str:
    parts = ((SPECIAL | PAIRS)[number].encode() if number > 255 else bytes([number]) for number in ids)
    return b"".join(parts).decode("utf-8", "replace")


@dataclass
class ChatTemplate:
    """A template; the settings say what it rewrites."""

    thinking: str = "keep"
    """``keep`` writes the reasoning of all answers, ``last`` only behind the last message of a user."""
    spaced_calls: bool = False
    """Calls are written with other blanks than the policy samples."""
    opens_thinking: bool = False
    """The prompt ends with the beginning of a reasoning."""
    tools: str = ""
    rendered: int = 0
    """Characters that have been encoded."""

    def render(self, messages: Sequence[dict[str, Any]], *, answer: bool) -> str:
        last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        parts = [f"<|system|>{self.tools}<|end|>"] if self.tools else []
        for place, message in enumerate(messages):
            role = {"developer": "system"}.get(message["role"], message["role"])
            content = message.get("content") or ""
            if not isinstance(content, str):
                content = "".join(part["text"] for part in content)
            if role == "assistant":
                reasoning = message.get("reasoning_content")
                if reasoning and (self.thinking == "keep" or place > last_user):
                    content = f"<think>{reasoning}</think>{content}"
                elif self.opens_thinking and self.thinking == "keep":
                    content = f"<think></think>{content}"
                for call in message.get("tool_calls") or ():
                    content += written_call(call["function"], spaced=self.spaced_calls)
            parts.append(f"<|{role}|>{content}<|end|>")
        return "".join(parts) + ("<|assistant|>" + "<think>" * self.opens_thinking if answer else "")

    def encode(self, text: str) -> list[int]:
        self.rendered += len(text)
        return encode(text)


def written_call(function: dict[str, Any], *, spaced: bool = False) -> str:
    """Return a tool call as the policy writes it."""
    separators = (", ", ": ") if spaced else (",", ":")
    return f"<call>{json.dumps(function, separators=separators)}</call>"


def parsed(text: str) -> dict[str, Any]:
    """Return the message that a server makes of an answer's text."""
    message: dict[str, Any] = {"role": "assistant"}
    text = text.removesuffix("<|end|>")
    thought = re.match(r"<think>(.*?)</think>", text, re.DOTALL)
    if thought:
        message["reasoning_content"] = thought[1]
        text = text[thought.end() :]
    calls = re.findall(r"<call>(.*?)</call>", text, re.DOTALL)
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{place}", "type": "function", "function": json.loads(call)}
            for place, call in enumerate(calls)
        ]
        text = text[: text.index("<call>")]
    return message | {"content": text}


@dataclass
class Gateway:
    """Sessions with a journal that keeps everything, and an engine that remembers what it was asked."""

    limits: SessionLimits = field(default_factory=lambda: SessionLimits(1000, 1 << 30, 1800.0))
    override: bool = False
    journal: list[Entry] = field(default_factory=list)
    sampled: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    """By the number of a turn: the ids that went to the engine, and those that it sampled."""
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.sessions = self.made()

    def made(self) -> Sessions:
        names = itertools.count()
        return Sessions(
            self.limits,
            temperature=1.0,
            override=self.override,
            decode=decode,
            mint=lambda: f"minted-{next(names)}-{len(self.journal)}",
        )

    def restart(self) -> None:
        """Kill the process and start it again."""
        self.sessions = self.made()
        self.append(self.sessions.restore(list(enumerate(self.journal, 1))))
        self.sessions.rest_from(self.now)

    def append(self, entries: Sequence[Entry]) -> list[int]:
        self.journal += entries
        return [*range(len(self.journal) - len(entries) + 1, len(self.journal) + 1)]

    def arrival(self, messages: Sequence[dict[str, Any]] = (), **changes: Any) -> Arrival:
        self.now += 1
        template = changes.pop("template", ChatTemplate())
        text = template.render(messages, answer=True) if messages else changes.get("text")
        values: dict[str, Any] = {
            "user": User("key"),
            "session": None,
            "turn_type": None,
            "ends_session": False,
            "digest": b"",
            "retries": 0,
            "messages": messages,
            "prompt_ids": None if messages else encode(text or ""),
            "text": text,
            "template": template,
            "sampling": {"temperature": 1.0},
            "choices": 1,
            "most_tokens": 100_000,
            "arrived_s": self.now,
        }
        return Arrival(**(values | changes))

    def begin(self, messages: Sequence[dict[str, Any]] = (), **changes: Any) -> RunningRequest:
        begun = self.sessions.begin(self.arrival(messages, **changes))
        self.append(begun.entries)
        return begun

    def end(self, begun: RunningRequest, answer: str | Sequence[int], **changes: Any) -> int:
        """End an answer, and return the number of its turn."""
        self.now += 1
        ids = encode(answer) if isinstance(answer, str) else list(answer)
        stopped = bool(ids) and ids[-1] == END
        values: dict[str, Any] = {
            "choice": 0,
            "tokens": ids,
            "logprobs": [-0.5 - place for place in range(len(ids))],
            "spans": [(3, len(ids))] if ids else [],
            "finish": Finished(Finish.STOP if stopped else Finish.LENGTH, END if stopped else None),
            "text": decode(ids),
            "message": parsed(decode(ids)),
            "cancelled": False,
            "ended_s": self.now,
        }
        values |= changes
        entries = self.sessions.end(begun, Answer(**values))
        numbers = self.append(entries)
        self.append(self.sessions.recorded(begun, values["choice"], numbers))
        turns = [number for number, item in zip(numbers, entries, strict=True) if isinstance(item, Turn)]
        assert len(turns) == 1
        self.sampled[turns[0]] = (list(begun.input_ids), ids)
        return turns[0]

    def talk(self, messages: Sequence[dict[str, Any]], answer: str | Sequence[int], **changes: Any) -> int:
        """Ask and answer; return the number of the turn."""
        return self.end(self.begin(messages, **changes), answer)

    def turn(self, number: int) -> Turn:
        entry = self.journal[number - 1]
        assert isinstance(entry, Turn)
        return entry

    def next_states(self) -> dict[int, list[str]]:
        """By the number of a turn: the text of its next state."""
        states = [item for item in self.journal if isinstance(item, NextState)]
        assert len({state.turn for state in states}) == len(states), "a turn has two next states"
        return {state.turn: [m["content"] for m in json.loads(bytes(state.messages))] for state in states}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": "call_0"}
