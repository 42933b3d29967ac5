"""What users see of a gateway process as a run has it when engines are full, gone, or lost in an answer."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from slipstream.rollout.engine.client import EngineAddress, EngineClient
from slipstream.rollout.gateway.engines import RETRY_ENGINES_S, RETRY_FULL_S
from slipstream.rollout.gateway.keys import add_key
from slipstream.rollout.system.network import hold_port, port_of
from tests.chat_model import build_tokenizer
from tests.gateway_memory.driver import CONTEXT, Driver
from tests.gateway_memory.engine import PIECE, ScriptedEngine
from tests.gateway_memory.programs import gateway_of, recipe, started

PLACES = 2
LENGTH = 40
"""Tokens of an answer."""
HELD_S = 60.0
TIMEOUT_S = 90.0

MESSAGES = [{"role": "user", "content": "hello"}]
REQUESTS = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": LENGTH},
    "/v1/completions": {"prompt": "hello", "max_tokens": LENGTH},
    "/v1/messages": {"model": "m", "messages": MESSAGES, "max_tokens": LENGTH},
    "/v1/responses": {"input": "hello", "max_output_tokens": LENGTH},
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": LENGTH, "ignore_eos": True}},
}


@dataclass
class Setting:
    """A gateway, its driver, and a user."""

    driver: Driver
    http: httpx.AsyncClient
    admin: str
    stack: AsyncExitStack
    vocab: int
    engines: int = 0

    async def engine(self) -> tuple[ScriptedEngine, EngineClient, AsyncExitStack]:
        """Let another engine serve. Closing the stack ends it in the middle of its answers."""
        engine, life = ScriptedEngine(slow_s=HELD_S), AsyncExitStack()
        url = await life.enter_async_context(engine.serving())
        self.stack.push_async_callback(life.aclose)
        address = EngineAddress(f"engine-{self.engines}", url, 1, self.vocab, CONTEXT, timeout_s=60)
        self.engines += 1
        client = EngineClient(address)
        self.stack.push_async_callback(client.close)
        self.driver.roster.add(client)
        await self.serves(True)
        return engine, client, life

    async def serves(self, expected: bool) -> None:
        """Wait until the gateway has an engine, or has none."""
        while True:
            state = (await self.http.get(f"{self.admin}/state")).json()
            if (state["retry_after_s"] != RETRY_ENGINES_S) == expected:
                return
            await asyncio.sleep(0.02)

    @asynccontextmanager
    async def stream(self) -> AsyncIterator["Stream"]:
        """Read an answer of LENGTH tokens, of which the first ones have come."""
        body = REQUESTS["/generate"] | {"stream": True}
        async with self.http.stream("POST", "/generate", json=body) as reply:
            assert reply.status_code == 200
            stream = Stream(reply.aiter_lines())
            await stream.grown(PIECE)
            yield stream

    async def refusals(self) -> list[tuple[str, int, str]]:
        """Return path, status and Retry-After of one request to each endpoint, streamed and not."""
        replies: list[tuple[str, int, str]] = []
        for path, body in REQUESTS.items():
            for stream in (False, True):
                reply = await self.http.post(path, json=body | {"stream": stream})
                assert reply.headers["content-type"] == "application/json"
                assert reply.json()["error"]["message"]
                replies.append((path, reply.status_code, reply.headers.get("retry-after", "")))
        return replies


class Stream:
    """A reply of /generate."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.ids: list[int] = []
        self.finish: dict | None = None

    async def grown(self, tokens: int) -> None:
        """Read until so many tokens have come."""
        while len(self.ids) < tokens:
            line = await anext(self._lines)
            if line.startswith("data: "):
                part = json.loads(line.removeprefix("data: "))
                assert part["output_ids"][: len(self.ids)] == self.ids
                self.ids, self.finish = part["output_ids"], part["meta_info"]["finish_reason"]


def overloaded(path: str) -> int:
    """Return the status with which the provider of a path says that it has no room."""
    return 529 if path == "/v1/messages" else 503


@asynccontextmanager
async def setting(folder: Path, policy: Path) -> AsyncIterator[Setting]:
    async def publish(version: int) -> None: ...

    vocab = len(build_tokenizer())
    key = add_key(folder / "memory.keys.json", "users")
    async with AsyncExitStack() as stack:
        ports = [port_of(stack.enter_context(hold_port("127.0.0.1"))) for _ in range(2)]
        config = recipe(folder, policy, *ports, limits={"concurrent": PLACES})
        driver = Driver(config.run.folder, vocab, publish)
        stack.callback(driver.close)
        gateway = stack.enter_context(gateway_of(config, folder / "gateway.log"))
        await stack.enter_async_context(driver.running())
        address = await started(gateway, config.run.folder, has_engine=False)
        http = httpx.AsyncClient(
            base_url=address.url, headers={"Authorization": f"Bearer {key}"}, timeout=HELD_S
        )
        await stack.enter_async_context(http)
        yield Setting(driver, http, address.admin, stack, vocab)


@pytest.fixture(scope="module")
def policy(chat_model: Path) -> Path:
    return chat_model


def test_a_user_waits_for_an_engine_in_an_answer_and_is_refused_at_once_before_one(
    tmp_path: Path, policy: Path
):
    async def main() -> None:
        async with asyncio.timeout(TIMEOUT_S), setting(tmp_path, policy) as given:
            no_engine = [
                (path, overloaded(path), f"{RETRY_ENGINES_S:.0f}") for path in REQUESTS for _ in range(2)
            ]
            assert await given.refusals() == no_engine

            first, client, life = await given.engine()
            async with given.stream() as long, given.stream() as longer:
                full = [
                    (path, overloaded(path), f"{RETRY_FULL_S:.0f}") for path in REQUESTS for _ in range(2)
                ]
                assert await given.refusals() == full
                assert len(first.prompts) == PLACES, "no refused request has reached the engine"
                assert longer.finish is None

                # The engine dies, and there is no other: both answers wait, and nothing begins.
                await life.aclose()
                await given.serves(False)
                assert await given.refusals() == no_engine
                given.driver.roster.remove(client)

                second, client, life = await given.engine()
                second.released.set()
                for stream in (long, longer):
                    head = stream.ids[:PIECE]
                    await stream.grown(LENGTH)
                    assert stream.ids[:PIECE] == head
                    assert stream.finish == {"type": "length", "length": LENGTH}
                    [prompt] = [ids for ids in second.prompts if ids[-PIECE:] == head]
                    assert prompt == first.prompts[0] + head, "it goes on from its prefix"

            reply = await given.http.post("/v1/chat/completions", json=REQUESTS["/v1/chat/completions"])
            assert reply.status_code == 200

    asyncio.run(main())
