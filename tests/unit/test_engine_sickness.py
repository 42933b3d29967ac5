"""Engines that serve nothing but malformed replies: they are given up, and their requests go on elsewhere."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from slipstream.rollout.engine.client import EngineError
from slipstream.rollout.engine.engine_pool import EnginePool
from slipstream.rollout.engine.routing import Routing, ServingEngine
from tests.unit.driven_pool import SAMPLING, GrowingCompletion
from tests.unit.test_engine_client import Server, address
from tests.unit.test_engine_completion import REPLY, reply

NAN = reply(output_token_logprobs=[(-0.5, 11, None), (math.nan, 12, None), (-2.5, 13, None)])
REFUSED = {"error": {"message": "too long"}}


@asynccontextmanager
async def serving(answer) -> AsyncIterator[tuple[Server, EnginePool]]:
    """A pool with one engine, which is a server on this machine."""
    server = Server(answer)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    pool = EnginePool(wait_timeout_s=60, isolate_versions=False)
    engine = ServingEngine(address(f"http://127.0.0.1:{runner.addresses[0][1]}"), life=1)
    pool.follow(Routing(number=1, version=0, held=False, limit=8, engines=(engine,)))
    try:
        yield server, pool
    finally:
        await pool.close()
        await runner.cleanup()


async def ask(pool: EnginePool) -> object:
    """Return the completion of one request, or its error."""
    completion = GrowingCompletion()
    try:
        async with asyncio.timeout(60):
            await pool.generate([7], SAMPLING, completion)
    except (EngineError, TimeoutError) as error:
        return error
    return completion.completion()


async def until_lost(pool: EnginePool) -> None:
    async with asyncio.timeout(60):
        while not pool.status().lost:
            await asyncio.sleep(0.005)


def test_an_engine_whose_answers_are_malformed_is_given_up_and_named_with_the_answer(caplog):
    async def main():
        async with serving(NAN) as (server, pool):
            for _ in range(2):
                assert isinstance(await ask(pool), EngineError)
                assert pool.status().lost == ()
            third = asyncio.create_task(ask(pool))
            await until_lost(pool)
            assert not third.done(), "the request waits for another engine"
            third.cancel()
            [lost] = pool.status().lost
            assert (lost.name, lost.life) == ("engine-0", 1)
            assert "its last 3 replies in a row were malformed" in lost.reason
            assert "log-prob nan" in lost.reason
            assert len(server.requests) == 3

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert len(caplog.messages) == 3
    assert all("engine-0" in message and "log-prob nan" in message for message in caplog.messages)


def test_a_good_answer_in_between_clears_an_engine():
    async def main():
        async with serving(NAN) as (server, pool):
            for answer in [NAN, NAN, REPLY] * 4:
                server.reply = answer
                await ask(pool)
            assert pool.status().lost == ()

    asyncio.run(main())


def test_a_refusal_is_the_fault_of_the_request_and_neither_counts_nor_clears_an_engine():
    async def main():
        async with serving(REFUSED) as (server, pool):
            for _ in range(5):
                assert isinstance(await ask(pool), EngineError)
            for answer in [NAN, REFUSED, NAN, REFUSED]:
                server.reply = answer
                await ask(pool)
            assert pool.status().lost == ()
            server.reply = NAN
            asking = asyncio.create_task(ask(pool))
            await until_lost(pool)
            assert [lost.name for lost in pool.status().lost] == ["engine-0"]
            asking.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("status", [400, 500, 503])
def test_a_server_that_fails_inside_is_sick_and_one_that_refuses_is_not(status):
    async def answer(request):
        return web.Response(status=status, text="Internal Server Error")

    async def main():
        async with serving(answer) as (_, pool):
            asking = [asyncio.create_task(ask(pool)) for _ in range(3)]
            if status == 500:
                await until_lost(pool)
            else:
                await asyncio.gather(*asking)
            lost = [each.name for each in pool.status().lost]
            assert lost == (["engine-0"] if status == 500 else [])
            for task in asking:
                task.cancel()

    asyncio.run(main())
