"""Scripted users of the quickstart's policy, whose next words alone say whether an answer was right.

    user ──problem──► answer ──"thanks" or "wrong"──► a token that nobody reads, and the user leaves

The second request is what makes the answer's next state. Its temperature is 0, so that its turn is no part of
the task. Every other user reads answers as a stream.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from openai import APIConnectionError, APIStatusError, AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from slipstream.backend.quickstart.task import Problem, is_correct

THANKS, WRONG = "thanks", "wrong"

LONGEST_ANSWER = 72
"""Tokens: as in the rollouts of the quickstart. An answer without an end is wrong."""

POLL_S = 0.2
"""Time between two looks at something of which no event tells."""


@dataclass(frozen=True)
class Answer:
    """What a user has got."""

    text: str
    session: str


class Conversations:
    """Requests to a gateway, as a user's client sends them."""

    def __init__(self, url: str, key: str) -> None:
        """``url``: of the gateway, without a path."""
        self._client = AsyncOpenAI(api_key=key, base_url=f"{url}/v1", timeout=60.0)

    async def close(self) -> None:
        await self._client.close()

    async def ready(self, timeout_s: float) -> None:
        """Wait until questions are answered. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    await self._client.with_options(max_retries=0).chat.completions.create(
                        model="policy", messages=[_user("a1b1")], temperature=0
                    )
                    return
                except (APIConnectionError, APIStatusError):
                    await asyncio.sleep(POLL_S)

    async def ask(self, problem: Problem, *, stream: bool) -> Answer:
        """Send a problem, and return the answer."""
        messages = [_user(problem.prompt)]
        if not stream:
            reply = await self._client.chat.completions.create(
                model="policy", messages=messages, max_tokens=LONGEST_ANSWER
            )
            return Answer(reply.choices[0].message.content or "", _session(reply.model_extra))
        text, session = "", ""
        async for chunk in await self._client.chat.completions.create(
            model="policy", messages=messages, max_tokens=LONGEST_ANSWER, stream=True
        ):
            session = _session(chunk.model_extra)
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        return Answer(text, session)

    async def react(self, problem: Problem, answer: Answer, word: str) -> None:
        """Say a word about an answer, and leave."""
        await self._client.chat.completions.create(
            model="policy",
            messages=[
                _user(problem.prompt),
                {"role": "assistant", "content": answer.text},
                _user(word),
            ],
            max_tokens=1,
            temperature=0,
            extra_headers={"X-Session-Id": answer.session, "X-Session-Done": "1"},
        )

    async def accuracy(self, problems: Sequence[Problem], at_a_time: int) -> float:
        """Return the share of problems that are answered right at temperature 0. None of this is trained."""
        places = asyncio.Semaphore(at_a_time)

        async def is_right(problem: Problem) -> bool:
            async with places:
                reply = await self._client.chat.completions.create(
                    model="policy",
                    messages=[_user(problem.prompt)],
                    max_tokens=LONGEST_ANSWER,
                    temperature=0,
                    extra_headers={"X-Session-Done": "1"},
                )
            return is_correct(reply.choices[0].message.content or "", problem.label)

        return sum(await asyncio.gather(*map(is_right, problems))) / len(problems)


class Shuffle:
    """Exchanges the words of users at random: as many are thanked for, and it means nothing."""

    def __init__(self, rng: random.Random, users: int) -> None:
        """``users``: number of those whose words are exchanged with each other; more of them must talk."""
        self._rng = rng
        self._users = users
        self._waiting: list[tuple[str, asyncio.Future[str]]] = []

    async def exchange(self, word: str) -> str:
        """Wait until so many users have a word, and return that of one of them."""
        word_of_another: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((word, word_of_another))
        if len(self._waiting) == self._users:
            waiting, self._waiting = self._waiting, []
            words = self._rng.sample([each for each, _ in waiting], self._users)
            for (_, future), each in zip(waiting, words, strict=True):
                if not future.done():
                    future.set_result(each)
        return await word_of_another


async def honestly(word: str) -> str:
    return word


class Users:
    """Users that talk at the same time, each in one session after the other."""

    def __init__(
        self,
        conversations: Conversations,
        problems: Iterator[Problem],
        count: int,
        said: Callable[[str], Awaitable[str]] = honestly,
    ) -> None:
        """``said``: returns what a user says in place of the word that is true."""
        self._conversations = conversations
        self._problems = problems
        self._count = count
        self._said = said
        self.answers: dict[str, tuple[Problem, Answer]] = {}
        """All answers, by session."""

    @asynccontextmanager
    async def talking(self) -> AsyncIterator[dict[str, tuple[Problem, Answer]]]:
        """Have users talk inside of the block, which gets ``answers``, and leave at its end. Raises, in an
        ExceptionGroup, whatever a user's client raises.
        """
        async with asyncio.TaskGroup() as tasks:
            users = [tasks.create_task(self._user(stream=bool(n % 2))) for n in range(self._count)]
            yield self.answers
            for user in users:
                user.cancel()

    async def _user(self, *, stream: bool) -> None:
        for problem in self._problems:
            answer = await self._conversations.ask(problem, stream=stream)
            self.answers[answer.session] = (problem, answer)
            word = THANKS if is_correct(answer.text, problem.label) else WRONG
            await self._conversations.react(problem, answer, await self._said(word))


def _user(text: str) -> ChatCompletionMessageParam:
    return {"role": "user", "content": text}


def _session(extra: dict[str, object] | None) -> str:
    return str((extra or {})["session_id"])
