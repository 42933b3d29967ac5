"""Random conversations: what clients of every kind do to a gateway.

A client keeps its histories as it has sent and got them, and sends them again as clients do: without
reasoning, with another order of keys, rewritten, cut, forked, twice at once, before the answer has ended.
Each conversation is a function of its seed, but for the order in which requests overlap.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from tests.exactness.client import Branch, Client, World
from tests.exactness.policy import FUNCTIONS, KEYS, STOPS, words
from tests.exactness.protocols import (
    ANTHROPIC,
    CHAT,
    COMPLETION,
    GENERATE,
    RESPONSES,
    Message,
    Protocol,
    Request,
)

CHATS = (CHAT, ANTHROPIC, RESPONSES)
SIDE_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.1},
    {"top_p": 0.5},
    {"top_k": 3},
    {"temperature": 0},
)
"""Sampling that every protocol may ask for, and that the trainer cannot reproduce."""
CHAT_SIDE_SAMPLING: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 0.5},
    {"logit_bias": {"5": 1.0}},
    {"min_p": 0.2},
    {"response_format": {"type": "json_object"}},
)
"""More of it, which only /v1/chat/completions understands."""
MOVES = {
    "on": 24,
    "fork": 2,
    "edit": 2,
    "cut": 1,
    "agent": 1,
    "race": 2,
    "early": 2,
    "retry": 1,
    "leave": 2,
    "side": 1,
    "reward": 2,
}
LONGEST_PROMPT = 3000
"""Characters or ids after which a text is not continued."""


class Conversation(Client):
    """A client that does what its seed says."""

    def __init__(self, world: World, number: int, seed: int) -> None:
        super().__init__(world, number, draw := random.Random(f"conversation {seed} {number}"))
        self.protocol = draw.choices(CHATS, [4, 2, 2])[0]
        self.tools = _tools(draw) if draw.random() < 0.7 else None
        self.system = words(draw, 2) if draw.random() < 0.5 else None
        self.questions = 0
        self.tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> None:
        """Talk."""
        draw = self.draw
        speak = self._talk if draw.random() < 0.85 else self._continue_texts
        async with self.world.overlapping:
            await speak(draw.choices([1, 3, 6, 12], [2, 3, 3, 2])[0])
            await asyncio.gather(*self.tasks)
            self.world.talking -= self.sessions

    async def _talk(self, steps: int) -> None:
        draw = self.draw
        for step in range(steps):
            [move] = draw.choices([*MOVES], [*MOVES.values()])
            await self._move(move, self._branch(move), is_last=step == steps - 1 and draw.random() < 0.5)
            if draw.random() < 0.1 and self.protocol is ANTHROPIC and self.branches:
                request = Request(self._repeated_all(self.branches[-1]) + self._question(), tools=self.tools)
                if self.says_all(ANTHROPIC, request):
                    await self.count(ANTHROPIC, request)
            if draw.random() < 0.1:
                self.protocol = draw.choice(CHATS)

    def _branch(self, move: str) -> Branch:
        """Return the history that is continued: most often the newest."""
        if self.branches and move != "agent":
            return self.draw.choice([*self.branches[-3:], *self.branches[-1:] * 6])
        system = words(self.draw, 1) if move == "agent" else self.system
        return Branch([] if system is None else [{"role": "system", "content": system}])

    async def _move(self, move: str, branch: Branch, *, is_last: bool) -> None:
        draw, length = self.draw, len(branch.messages)
        match move:
            case "edit":
                await self._ask(self._edited(branch))
            case "fork" if length > 2:
                await self._ask(branch, self._question())
                await self._ask(branch, self._question())
            case "cut" if length > 4:
                await self._ask(_cut(branch), self._next(branch))
            case "race":
                new = [self._next(branch), self._next(branch)]
                await asyncio.gather(*(self._ask(branch, messages) for messages in new))
            case "early":
                await self._ask_early(branch)
            case "retry":
                await self._ask_twice(branch)
            case "leave":
                await self._ask(branch, self._next(branch), leave_after=draw.randint(0, 6))
                await self._ask(branch, self._next(branch))
            case "side":
                await self._ask(branch, self._question("Name this conversation. "), turn_type="side")
            case "reward":
                await self._ask(branch, self._next(branch))
                await self.reward()
            case _:
                done = {"session_done": draw.choice([True, "1", "yes"])} if is_last else {}
                await self._ask(branch, self._next(branch), **done)

    # ---- messages

    def _question(self, prefix: str = "") -> list[Message]:
        """Return a question that nobody has asked before."""
        self.questions += 1
        text = f"{prefix}[{self.number}.{self.questions}] {words(self.draw, 3)}"
        return [{"role": "user", "content": text}]

    def _next(self, branch: Branch) -> list[Message]:
        """Return what comes next: results of all calls, or a question."""
        draw = self.draw
        calls = branch.messages[-1].get("tool_calls") if branch.messages else None
        if not calls or draw.random() < 0.1:
            return self._question()
        self.questions += 1
        results = [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": f"[{self.number}.{self.questions}.{place}] {words(draw, 2)}",
            }
            for place, call in enumerate(calls)
        ]
        return results + (self._question() if draw.random() < 0.1 else [])

    def _edited(self, branch: Branch) -> Branch:
        """Return a history in which something was rewritten, with what comes next."""
        draw = self.draw
        messages = deepcopy(branch.messages)
        role = draw.choice(["user", "user", "assistant", "tool"])
        places = [place for place, message in enumerate(messages) if message["role"] == role]
        if not places:
            return Branch([*messages, *self._next(branch)], odd=branch.odd)
        place = draw.choice(places)
        if role == "user":
            question = self._question()
            if draw.random() < 0.6:  # a question is edited, and what came behind it is gone
                return Branch([*messages[:place], *question], odd=branch.odd)
            messages[place]["content"] = question[0]["content"]
        elif role == "assistant":
            messages[place] = {"role": "assistant", "content": words(draw, 2)}
            messages = messages[: place + 1]
        else:
            messages[place]["content"] += " (shortened)"
        return Branch([*messages, *self._next(Branch(messages))], odd=branch.odd)

    def _repeated_all(self, branch: Branch) -> list[Message]:
        return [self._repeated(message) for message in branch.messages]

    def _repeated(self, message: Message) -> Message:
        """Return a message as a client may send it again."""
        draw = self.draw
        copy = deepcopy(message)
        if draw.random() < 0.5:
            copy.pop("reasoning_content", None)
        if copy["role"] == "assistant" and draw.random() < 0.1:
            copy["content"] = copy["content"].strip()
        for call in copy.get("tool_calls") or ():
            if draw.random() < 0.3:
                call["function"]["arguments"] = _reordered(call["function"]["arguments"], draw)
        if copy["content"] and draw.random() < 0.2:
            copy["content"] = [{"type": "text", "text": copy["content"]}]
        return copy

    # ---- requests

    async def _ask(
        self, branch: Branch, new: Sequence[Message] = (), *, leave_after: int | None = None, **more: Any
    ) -> None:
        """Ask ``new`` behind a history. ``more``: further fields of the body."""
        request = self._request(branch, new)
        request.more |= more
        protocol = self._protocol_for(request)
        await self.send(protocol, request, branch, [*branch.messages, *new], leave_after=leave_after)

    def _request(self, branch: Branch, new: Sequence[Message]) -> Request:
        draw = self.draw
        request = Request([*self._repeated_all(branch), *new], tools=self.tools, stream=draw.random() < 0.5)
        self._limit(request, 0.15, [1, 5, 20, 60])
        if draw.random() < 0.15:
            stops = draw.sample(STOPS, draw.randint(1, 3))
            request.sampling["stop"] = stops if draw.random() < 0.7 else stops[0]
        if draw.random() < 0.08:
            request.sampling |= draw.choice(SIDE_SAMPLING)
        elif draw.random() < 0.1:
            request.sampling |= {"temperature": self.world.temperature, "top_p": 1}
        if branch.response is not None and draw.random() < 0.8:
            request.previous = branch.response
        return request

    def _limit(self, request: Request, probability: float, lengths: Sequence[int]) -> None:
        """Ask for an answer of some length, always where answers do not end by themselves."""
        most = self.world.most_tokens
        if most is not None or self.draw.random() < probability:
            request.sampling["max_tokens"] = min(self.draw.choice(lengths), most or max(lengths))

    def _protocol_for(self, request: Request) -> Protocol:
        """Return an endpoint that can say this, and add what only /v1/chat/completions understands."""
        draw = self.draw
        if self.protocol is not CHAT and self.says_all(self.protocol, request):
            return self.protocol
        if draw.random() < 0.15:
            request.sampling["n"] = draw.randint(2, 3)
        if draw.random() < 0.2:
            request.sampling |= {"logprobs": True, "top_logprobs": draw.randint(0, 2)}
        if draw.random() < 0.05:
            request.sampling |= draw.choice(CHAT_SIDE_SAMPLING)
        if self.world.dialect.name == "qwen3" and draw.random() < 0.2:
            request.more["chat_template_kwargs"] = {"enable_thinking": False}
        if draw.random() < 0.2:
            for message in request.messages:
                if message["role"] == "system":
                    message["role"] = "developer"
        return CHAT

    async def _ask_early(self, branch: Branch) -> None:
        """Answer an answer that has not ended: only its beginning is repeated."""
        new = self._next(branch)
        request = self._request(branch, new)
        request.stream = True
        protocol = self._protocol_for(request)
        early: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        history = [*branch.messages, *new]
        first = asyncio.create_task(self.send(protocol, request, branch, history, early=early))
        self.tasks.add(first)
        await asyncio.wait({first, early}, return_when=asyncio.FIRST_COMPLETED)
        if early.done():
            beginning = {"role": "assistant", "content": early.result()}
            await self._ask(Branch([*history, beginning], odd=True), self._question())
        else:
            early.cancel()
        if self.draw.random() < 0.5:
            await first

    async def _ask_twice(self, branch: Branch) -> None:
        """Send the same request again while it runs, or behind its end."""
        draw, new = self.draw, self._next(branch)
        request = self._request(branch, new)
        protocol = self._protocol_for(request)
        history = [*branch.messages, *new]
        first = asyncio.create_task(self.send(protocol, request, branch, history))
        for _ in range(draw.choice([1, 5, 30])):
            await asyncio.sleep(0)
        retry = {"x-stainless-retry-count": "1"}
        await self.send(protocol, request, branch, history, headers=retry)
        await first

    # ---- prompts without messages

    async def _continue_texts(self, steps: int) -> None:
        """Send texts, or ids, each of which goes on behind the answer before."""
        draw, tokenizer = self.draw, self.world.tokenizer
        protocol = draw.choice([COMPLETION, GENERATE])
        prompt: Any = self._text()
        if draw.random() < 0.5:
            prompt = tokenizer.encode(prompt)
        for _ in range(steps):
            request = self._request_of_text(prompt)
            asked = self.asked(request, [])
            answered = await self.send(protocol, request, Branch([]), [], asked=asked)
            if answered is None or draw.random() < 0.1:
                continue
            added = self._text() if draw.random() < 0.9 else ""
            if isinstance(prompt, str):
                prompt += answered.messages[0]["content"] + added
            else:
                [record, *_] = self.world.oracle.records.asked_by(asked.number)
                added = tokenizer.encode(added, add_special_tokens=False)
                prompt = [*record.prompt, *record.tokens, *added]
            if len(prompt) > LONGEST_PROMPT:
                return

    def _request_of_text(self, prompt: Any) -> Request:
        draw = self.draw
        request = Request(prompt=prompt, stream=draw.random() < 0.5)
        self._limit(request, 1.0, [3, 10, 40, 100])
        if draw.random() < 0.3:
            request.sampling["stop"] = draw.choice(STOPS)
        if draw.random() < 0.1:
            request.sampling["temperature"] = 0.1
        if draw.random() < 0.1:
            request.prompt = [prompt, prompt]
        elif draw.random() < 0.1:
            request.sampling["n"] = 2
        return request

    def _text(self) -> str:
        self.questions += 1
        return f"[{self.number}.{self.questions}] {words(self.draw, 4)}"


def _tools(draw: random.Random) -> list[dict[str, Any]]:
    properties = {key: {"type": ["string", "number"]} for key in KEYS}
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": words(draw, 1),
                "parameters": {"type": "object", "properties": properties},
            },
        }
        for name in FUNCTIONS
    ]


def _cut(branch: Branch) -> Branch:
    """Return a history from the last question on, behind its system message."""
    kept = [message for message in branch.messages[:1] if message["role"] == "system"]
    place = max(place for place, message in enumerate(branch.messages) if message["role"] == "user")
    return Branch([*kept, *branch.messages[place:]], odd=branch.odd)


def _reordered(arguments: str, draw: random.Random) -> str:
    """Return arguments with other blanks, another order of keys, and 2 in place of 2.0."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            items = list(value.items())
            draw.shuffle(items)
            return {key: changed(item) for key, item in items}
        if isinstance(value, list):
            return [changed(item) for item in value]
        return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e9 else value

    try:
        return json.dumps(changed(json.loads(arguments)), ensure_ascii=draw.random() < 0.5)
    except ValueError:
        return arguments
