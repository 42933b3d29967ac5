"""A port of a gateway: who sends nothing, or half of a request, is closed in time and drives nobody out."""

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest

from slipstream.rollout.gateway import port
from slipstream.rollout.gateway.port import PortServer
from tests.unit.doubles import PutForward

REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nab"
HALVES = [b"", REQUEST[:9], REQUEST[:-12], REQUEST[:-1], REQUEST + REQUEST[:9], REQUEST + REQUEST[:-1]]


async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def serving(most: int | None = None):
    listener = socket.create_server(("127.0.0.1", 0))
    server = PortServer(app, listener, most_connections=most)
    task = asyncio.create_task(server.serve())
    await server.is_listening.wait()
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = server.force_exit = True
        await task
        server.close()


async def answered(reader: asyncio.StreamReader) -> bool:
    """Read one answer. Return False if the connection is closed instead."""
    try:
        async with asyncio.timeout(60):
            return (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
    except (asyncio.IncompleteReadError, ConnectionError):
        return False


async def closed(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(60):
        try:
            while await reader.read(100):
                pass
        except ConnectionError:
            pass


@pytest.mark.parametrize("sent", HALVES)
def test_a_connection_that_sends_no_whole_request_is_closed(sent, monkeypatch):
    monkeypatch.setattr(port, "HEAD_S", 0.2)
    monkeypatch.setattr(port, "BODY_S", 0.2)

    async def main():
        async with serving() as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(sent)
            await closed(reader)
            writer.close()

    asyncio.run(main())


def test_a_connection_that_rests_between_requests_stays():
    async def main():
        loop = asyncio.get_running_loop()
        assert isinstance(loop, PutForward)
        async with serving() as address:
            reader, writer = await asyncio.open_connection(*address)
            for _ in range(3):
                writer.write(REQUEST)
                assert await answered(reader)
                idle, _ = await asyncio.open_connection(*address)
                await asyncio.sleep(0.05)  # it is accepted
                loop.forward_s += 1.5 * port.HEAD_S
                await closed(idle)  # the time of one that has sent nothing is up
            writer.close()

    with asyncio.Runner(loop_factory=PutForward) as runner:
        runner.run(main())


@pytest.mark.parametrize("sent", HALVES)
def test_who_sends_requests_is_answered_beside_any_number_of_silent_connections(sent):
    async def main():
        async with serving(most=8) as address:
            silent = [await asyncio.open_connection(*address) for _ in range(40)]
            for _, writer in silent:
                writer.write(sent)
            for _ in range(5):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(REQUEST)
                assert await answered(reader)
            for reader, _ in silent[:30]:
                await closed(reader)

    asyncio.run(main())
