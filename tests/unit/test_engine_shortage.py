"""A process without free descriptors or ports: it waits and says so, and holds it against no engine."""

import asyncio
import errno
import logging
import os
import resource
import socket
import subprocess
import sys

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from slipstream.rollout.engine.client import Aborted
from slipstream.rollout.engine.connection import (
    LONGEST_PAUSE_S,
    PERIOD_S,
    NotSent,
    ShortageLog,
    events,
    is_local,
    pauses,
)
from slipstream.rollout.engine.growing import GrowingCompletion
from tests.unit import test_engine_client, test_engine_sickness
from tests.unit.driven_pool import SAMPLING, Driver, FakeEngine, settle, start
from tests.unit.test_engine_client import WHOLE, streaming
from tests.unit.test_engine_completion import COMPLETION, REPLY
from tests.unit.test_engine_sickness import ask

KEY = ConnectionKey("engine-0", 1, False, True, None, None, None)
NO_FILES = OSError(errno.EMFILE, "Too many open files")
TRY_AGAIN = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.fixture
def few_descriptors():
    """Lower the limit of this process, so that it is soon reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def use_up_descriptors() -> list[socket.socket]:
    """Take all descriptors of this process; closing the sockets gives them back."""
    sockets: list[socket.socket] = []
    while True:
        try:
            sockets.append(socket.socket())
        except OSError as error:
            assert error.errno == errno.EMFILE
            return sockets


def test_a_process_without_descriptors_waits_and_gives_up_no_engine(few_descriptors, caplog):
    async def main():
        async with test_engine_sickness.serving(REPLY) as (server, pool):
            sockets = use_up_descriptors()
            asking = [asyncio.create_task(ask(pool)) for _ in range(4)]
            await asyncio.wait(asking, timeout=0.5)
            status = pool.status()
            for each in sockets:
                each.close()
            assert status.lost == ()
            assert not any(task.done() for task in asking), "the requests wait"
            assert await asyncio.gather(*asking) == [COMPLETION] * 4
            assert pool.status().lost == ()
            assert len(server.requests) == 4, "each request was sent once"

    with caplog.at_level(logging.WARNING, "slipstream"):
        asyncio.run(main())
    [message] = [message for message in caplog.messages if "cannot open connections" in message]
    assert "Too many open files" in message
    assert "no engine is to blame" in message


def test_a_server_that_cannot_be_asked_counts_as_well(few_descriptors):
    async def main():
        async with test_engine_client.serving(REPLY, answer_timeout_s=0.2) as (_, client):
            sockets = use_up_descriptors()
            is_well = await client.healthy()
            for each in sockets:
                each.close()
            assert is_well

    asyncio.run(main())


def test_a_request_that_can_never_be_sent_fails_and_says_why(few_descriptors):
    async def main():
        async with test_engine_client.serving(REPLY, timeout_s=0.2, answer_timeout_s=0.2) as (server, client):
            sockets = use_up_descriptors()
            (generated, resumed) = await asyncio.gather(
                client.generate([1], SAMPLING, GrowingCompletion(), version=0),
                client.resume(),
                return_exceptions=True,
            )
            for each in sockets:
                each.close()
            for error in (generated, resumed):
                assert isinstance(error, NotSent)
                assert "Too many open files" in str(error)
            assert server.requests == []

    asyncio.run(main())


def test_a_shortage_in_the_middle_of_a_completion_keeps_what_there_is(monkeypatch):
    async def first_event_only(data):
        async for event in events(data):
            yield event
            raise OSError(errno.ENOBUFS, "No buffer space available")

    monkeypatch.setattr("slipstream.rollout.engine.connection.events", first_event_only)
    monkeypatch.setattr("slipstream.rollout.engine.client.LONGEST_PAUSE_S", 0)

    async def main():
        completion = GrowingCompletion()
        async with test_engine_client.serving(streaming(*WHOLE)) as (_, client):
            with pytest.raises(Aborted, match="No buffer space"):
                await client.generate([1], SAMPLING, completion, version=3)
            assert len(completion.tokens) == 1

    asyncio.run(main())


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_of_this_process"),
    [
        *((OSError(number, "short"), True) for number in (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)),
        *((OSError(number, "short"), True) for number in (errno.ENOBUFS, errno.ENOMEM)),
        (aiohttp.ClientConnectorError(KEY, NO_FILES), True),
        (aiohttp.ClientOSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (caused(aiohttp.ClientPayloadError("cut"), NO_FILES), True),
        (caused(aiohttp.ClientConnectorDNSError(KEY, TRY_AGAIN), TRY_AGAIN), True),
        (caused(aiohttp.ClientConnectorDNSError(KEY, UNKNOWN), UNKNOWN), False),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), False),
        (aiohttp.ClientConnectorError(KEY, OSError(errno.EHOSTUNREACH, "no route")), False),
        (aiohttp.ServerDisconnectedError(), False),
        (caused(aiohttp.ClientPayloadError("cut"), ConnectionResetError(errno.ECONNRESET, "reset")), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_of_this_process_are_told_apart(error, is_of_this_process):
    assert is_local(error) is is_of_this_process


def test_the_pauses_between_attempts_grow_up_to_a_limit():
    growing = [pause_s for pause_s, _ in zip(pauses(), range(20), strict=False)]
    assert growing == sorted(growing)
    assert 0 < growing[0] < 1
    assert growing[-1] == LONGEST_PAUSE_S


def test_shortages_are_named_once_in_a_period(caplog):
    now_s = 0.0
    shortages = ShortageLog(lambda: now_s)
    for now_s in (0.0, 1.0, PERIOD_S - 1, PERIOD_S, PERIOD_S + 1):  # noqa: B007
        shortages.note(NO_FILES)
    first, second = caplog.messages
    assert "(1 attempts failed" in first
    assert "(3 attempts failed" in second


# ---- the limit on open files


def test_no_more_requests_run_than_the_process_has_descriptors_for():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine, max_concurrent=5, most_requests=2)
        start(driver, 4)
        await settle()
        assert engine.running == 2
        driver.send(limit=1)
        engine.end(n=2)
        await settle()
        assert engine.running == 1

    asyncio.run(main())


ROOM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from slipstream.rollout.engine.descriptors import make_room
print(make_room({requests}), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "requests", "room"), [(300, 900, 256, 256), (300, 600, 500, 344), (256, 256, 4, 1)]
)
def test_a_collector_raises_its_limit_on_open_files_and_says_if_that_is_too_low(soft, hard, requests, room):
    code = ROOM.format(soft=soft, hard=hard, requests=requests)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert ended.stdout.split() == [str(room), str(hard)], ended.stderr
    warning = f"may open {hard} files, but {requests} requests and 256 descriptors for the rest"
    assert (warning in ended.stderr) == (room < requests)
