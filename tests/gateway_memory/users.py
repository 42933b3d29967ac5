"""Users of every kind: they end sessions or leave them, hang up, reward, rewrite history, are forgotten."""

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import aiohttp

AWAY = 0.3
"""Share of the sessions that nobody ends: they end by their idle time-out, or are evicted."""


@dataclass
class Users:
    """All users, who talk until so many turns are over."""

    url: str
    key: str
    admin: str
    secret: str
    turns: int = 0
    """Turns that are over."""
    sessions: int = 0
    errors: list[str] = field(default_factory=list[str])
    _dice: random.Random = field(default_factory=lambda: random.Random(1))

    async def talk(self, users: int, turns: int) -> None:
        """Be so many users at a time until there were ``turns`` turns in all."""
        headers = {"Authorization": f"Bearer {self.key}"}
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(self.url, headers=headers, connector=connector) as http,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(users):
                tasks.create_task(self._user(http, turns))

    async def _user(self, http: aiohttp.ClientSession, turns: int) -> None:
        kinds = (
            self._chat,
            self._chat,
            self._chat,
            self._respond,
            self._complete,
            self._hang_up,
            self._generate,
        )
        while self.turns < turns:
            self.sessions += 1
            kind = kinds[self.sessions % len(kinds)]
            await kind(http, self.sessions)
            if self.sessions % 97 == 0:
                await self._forget(http, f"chat {self.sessions - 97}")

    async def _post(
        self, http: aiohttp.ClientSession, path: str, body: dict[str, Any], **headers: str
    ) -> str:
        """Return the whole reply."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        async with http.post(path, json=body, headers=given) as reply:
            text = await reply.text()
            if reply.status != 200:
                self.errors.append(f"{path}: HTTP {reply.status}: {text}")
            self.turns += 1
            return text if reply.status == 200 else "{}"

    async def _chat(self, http: aiohttp.ClientSession, number: int) -> None:
        """Have a conversation of a few turns, of which some are greedy, some rewarded, and some rewritten."""
        name, messages = f"chat {number}", list[dict[str, Any]]()
        length, stays = self._dice.randint(1, 5), self._dice.random() > AWAY
        for turn in range(length):
            messages.append({"role": "user", "content": f"What comes after {number} and {turn}? " * 3})
            is_last = stays and turn == length - 1
            body = {
                "messages": messages,
                "max_tokens": 64,
                "stream": number % 2 == 0,
                **({"temperature": 0.0} if number % 10 == turn else {}),
            }
            named = {"X_Session_Id": name} if number % 3 else {}
            ends = {"X_Session_Done": "1"} if is_last else {}
            text = await self._post(http, "/v1/chat/completions", body, **named, **ends)
            messages.append({"role": "assistant", "content": _text_of_chat(text)})
            if number % 5 == 0 and turn == 1:
                messages[0] = {"role": "user", "content": "What I never asked."}
            if number % 4 == 0 and named:
                async with http.post(f"/sessions/{name}/reward", json={"reward": 0.5}) as reply:
                    await reply.read()

    async def _respond(self, http: aiohttp.ClientSession, number: int) -> None:
        """Go on by the ids of responses, which only the idle time-out ends."""
        previous: dict[str, str] = {}
        for turn in range(self._dice.randint(1, 3)):
            body = {"input": f"Question {number}, {turn}", "max_output_tokens": 64, **previous}
            reply = json.loads(await self._post(http, "/v1/responses", body))
            previous = {"previous_response_id": reply["id"]} if "id" in reply else {}

    async def _complete(self, http: aiohttp.ClientSession, number: int) -> None:
        body = {"prompt": f"Once upon {number}", "max_tokens": 32, "n": 2}
        await self._post(http, "/v1/completions", body, X_Session_Done="1")
        self.turns += 1

    async def _generate(self, http: aiohttp.ClientSession, number: int) -> None:
        body = {"text": f"Text {number}", "sampling_params": {"max_new_tokens": 32}, "return_logprob": True}
        await self._post(http, "/generate", body, X_Session_Id=f"generate {number}", X_Session_Done="1")

    async def _hang_up(self, http: aiohttp.ClientSession, number: int) -> None:
        """Leave before the end of the answer."""
        messages = [{"role": "user", "content": f"Never mind {number}"}]
        body = {"messages": messages, "max_tokens": 40, "ignore_eos": True, "stream": True}
        async with http.post("/v1/chat/completions", json=body) as reply:
            await reply.content.readany()
            reply.close()
        self.turns += 1

    async def _forget(self, http: aiohttp.ClientSession, session: str) -> None:
        headers = {"Authorization": f"Bearer {self.secret}"}
        async with http.post(
            f"{self.admin}/forget", json={"session": session, "key": "users"}, headers=headers
        ) as reply:
            await reply.read()


def _text_of_chat(reply: str) -> str:
    """Return the text of an answer, streamed or not."""
    if not reply.startswith("data: "):
        choices = json.loads(reply).get("choices")
        return (choices[0]["message"]["content"] or "") if choices else ""
    events = [json.loads(line[len("data: ") :]) for line in reply.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)
