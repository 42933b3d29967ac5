"""A pause of a real SGLang server, whatever state its requests are in: nothing of it ends the server."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.rollout.engine import client as clients
from slipstream.rollout.engine.client import EngineClient
from slipstream.rollout.engine.connection import RequestRefused
from slipstream.rollout.engine.engine_pool import EnginePool
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.sampling import LiveSampling
from slipstream.rollout.tokens.trajectory import Finish
from tests.runs.engines.conftest import Server
from tests.runs.engines.test_engine_weights import Serving, running_requests, slowed

SLOW_REGEX = "".join(f"(0{place}|1[0-9]+2)" for place in range(2_000))
"""Takes xgrammar seconds, and is longer than a request may have it."""


def live(pool: EnginePool, **parameters: object) -> tuple[asyncio.Task[None], GrowingCompletion]:
    """Ask for 20 tokens; under a grammar they are digits."""
    completion = GrowingCompletion()
    sampling = LiveSampling(20, {"ignore_eos": True, **parameters}, 0)
    return asyncio.create_task(pool.generate([5, 6, 7], sampling, completion)), completion


async def compiled(serving: Serving, client: EngineClient) -> list[asyncio.Task[None]]:
    task, completion = live(serving.pool, regex=SLOW_REGEX)
    async with asyncio.timeout(60):
        while await client._emptied():  # the server is idle: the request has not arrived
            await asyncio.sleep(0.02)
    assert not completion.tokens
    return [task]


async def running(serving: Serving, client: EngineClient) -> list[asyncio.Task[None]]:
    tasks = [live(serving.pool)[0], live(serving.pool, regex="[0-9]{25}")[0]]
    await running_requests(client, 2)
    return tasks


async def retracted(serving: Serving, client: EngineClient) -> list[asyncio.Task[None]]:
    tasks = await running(serving, client)
    await client.pause("retract")
    return tasks


@pytest.mark.parametrize("mode", ["retract", "abort"])
@pytest.mark.parametrize("state", [compiled, running, retracted])
def test_a_pause_lets_weights_and_memory_go_whatever_requests_wait_for(
    server: Server,
    checkpoint: Path,
    mode: str,
    state: Callable[[Serving, EngineClient], Awaitable[list[asyncio.Task[None]]]],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(clients, "violations", lambda *_: [])

    async def main() -> None:
        async with slowed(replace(server.address, timeout_s=60), 0.02) as client:
            serving = Serving(client)
            tasks = await state(serving, client)
            async with asyncio.timeout(60):
                await client.pause(mode)
                await client.load_files(checkpoint, version=0)
                await client.release_memory(["kv_cache"])
                await client.regain_memory(["kv_cache"])
                await client.resume()
            if state is compiled:  # it would be compiled again
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            else:
                async with asyncio.timeout(60):
                    await asyncio.gather(*tasks)
            assert serving.roster.lost.empty() and await client.healthy()
            after, completion = live(serving.pool, regex="[0-9]{25}")
            async with asyncio.timeout(60):
                await after
            assert (completion.finish, len(completion.tokens)) == (Finish.LENGTH, 20)

    asyncio.run(main())


@pytest.mark.parametrize(
    "grammar",
    [
        {"ebnf": "root ::= root"},
        {"ebnf": 'root ::= "1" a\na ::= a "2"'},
        {"json_schema": '{"$ref": "#"}'},
        {"json_schema": '{"const": "\u6d77"}'},
        {"regex": "[0-9]{2}\u6d77"},
    ],
    ids=str,
)
def test_a_grammar_without_a_next_token_ends_its_own_request_alone(
    server: Server, grammar: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(clients, "violations", lambda *_: [])

    async def main() -> None:
        async with slowed(replace(server.address, timeout_s=60), 0.02) as client:
            serving = Serving(client)
            other, whole = live(serving.pool)
            await running_requests(client, 1)
            refused, _ = live(serving.pool, **grammar)
            async with asyncio.timeout(60):
                with pytest.raises(RequestRefused, match="allows no further token"):
                    await refused
                await other
            assert (whole.finish, len(whole.tokens)) == (Finish.LENGTH, 20)
            assert serving.roster.lost.empty() and await client.healthy()

    asyncio.run(main())
