"""Sandboxes behind HTTP: they do what local ones do, and nothing is left of them when either side ends."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from unittest.mock import AsyncMock

import aiohttp
import pytest
from pydantic import ValidationError

from slipstream.backend.simulate import clock
from slipstream.configs.schema.sandbox import RemoteSandboxConfig, SandboxLimits
from slipstream.rollout.sandbox.interface import ExecResult, SandboxFailed, SandboxRefused
from slipstream.rollout.sandbox.open import make_sandbox, sandbox_settings
from slipstream.rollout.sandbox.remote import RemoteSandbox
from slipstream.rollout.sandbox.serve import LONGEST_IDLE_S, SandboxServer, _InUse, _Served
from tests.environment import ROOT
from tests.sandbox_attacks import keepers_of, processes_with

KEY = "SLIPSTREAM_SANDBOX_KEY"
TIMEOUT_S = 60.0
NAME = "0123456789abcdef" * 2


@contextmanager
def served(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a server. Yield its address and process."""
    others = os.environ.get(KEY)
    os.environ[KEY] = secrets.token_hex(16)
    command = [sys.executable, "-m", "slipstream.rollout.sandbox.serve", "--port", "0", *arguments]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield server.stdout.readline().split()[-1], server
    finally:
        server.kill()
        server.wait(TIMEOUT_S)
        server.stdout.close()
        del os.environ[KEY]
        if others is not None:
            os.environ[KEY] = others


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served("--most", "3", "--largest", "memory_mb=1024") as (address, _):
        yield address


def settings(url: str, **others: object) -> RemoteSandboxConfig:
    made = sandbox_settings({"type": "remote", "url": url, **others})
    assert isinstance(made, RemoteSandboxConfig)
    return made


def in_sandbox(use: Callable[[RemoteSandbox], Awaitable[object]], url: str, **others: object) -> None:
    async def run() -> None:
        sandbox = make_sandbox(settings(url, **others))
        assert isinstance(sandbox, RemoteSandbox)
        await sandbox.create()
        try:
            await asyncio.wait_for(use(sandbox), TIMEOUT_S)
        finally:
            await sandbox.close()

    asyncio.run(run())


def gone(find: Callable[[], list[str]]) -> list[str]:
    deadline = time.monotonic() + TIMEOUT_S
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def test_a_remote_sandbox_does_what_a_local_one_does(url: str):
    async def use(sandbox: RemoteSandbox) -> None:
        assert sandbox.isolation is not None
        assert sandbox.isolation.level == "namespaces"
        result = await sandbox.exec(
            ["sh", "-c", "cat; echo $NAME >&2; echo kept > file; exit 3"],
            stdin=b"\xffin",
            env={"NAME": "value"},
        )
        assert (result.exit_code, result.stdout, result.stderr) == (3, "\ufffdin", "value\n")
        data = bytes(range(256)) * 1000
        await sandbox.upload("folder/a ?&#+%2e ü.bin", data)
        assert await sandbox.download("folder/a ?&#+%2e ü.bin") == data
        assert await sandbox.download("file") == b"kept\n"
        result = await sandbox.exec(["python", "-c", "while True: print('x' * 1000)"])
        assert (result.limit, result.failed) == ("output", True)
        assert result.stdout.endswith("[cut after 65536 bytes]")

    in_sandbox(use, url)


def test_limits_hold_on_the_servers_side(url: str):
    async def use(sandbox: RemoteSandbox) -> None:
        assert (await sandbox.exec(["sleep", "1000"], wall_s=0.1)).limit == "wall"
        assert (await sandbox.exec(["python", "-c", "b'x' * 10**9"])).limit == "memory"

    in_sandbox(use, url, wall_s=TIMEOUT_S, memory_mb=64)

    async def outlast(sandbox: RemoteSandbox) -> None:
        assert (await sandbox.exec(["sleep", "1000"])).limit == "wall"

    in_sandbox(outlast, url, wall_s=0.2)


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "", "a/../../x", "link/passwd", "missing"])
def test_paths_that_lead_out_are_refused_and_the_sandbox_goes_on(url: str, path: str):
    async def use(sandbox: RemoteSandbox) -> None:
        await sandbox.exec(["ln", "-s", "/etc", "link"])
        with pytest.raises(SandboxRefused):
            await sandbox.download(path)
        if path != "missing":
            with pytest.raises(SandboxRefused):
                await sandbox.upload(path, b"x")
        with pytest.raises(SandboxRefused, match="NUL"):
            await sandbox.exec(["a\0b"])
        with pytest.raises(SandboxRefused, match="half a surrogate pair"):
            await sandbox.download("\ud800")
        with pytest.raises(SandboxRefused, match="wall_s is nan"):
            await sandbox.exec(["true"], wall_s=float("nan"))
        assert not (await sandbox.exec(["true"])).failed

    in_sandbox(use, url)


def test_limits_that_the_server_does_not_allow_are_all_named(url: str):
    with pytest.raises(SandboxFailed, match=r"wall_s is 9000, at most 600; memory_mb is 2048, at most 1024"):
        in_sandbox(lambda sandbox: sandbox.exec(["true"]), url, memory_mb=2048, wall_s=9000)


def test_a_full_server_is_waited_for_as_long_as_the_recipe_says(url: str):
    async def run() -> None:
        first = [RemoteSandbox(settings(url)) for _ in range(3)]
        for sandbox in first:
            await sandbox.create()
        with pytest.raises(SandboxFailed, match=r"PUT .* was not answered in 0.5 s"):
            await RemoteSandbox(settings(url, create_timeout_s=0.5)).create()
        waiting = RemoteSandbox(settings(url))
        creation = asyncio.create_task(waiting.create())
        await asyncio.sleep(0.1)
        assert not creation.done()
        await first.pop().close()
        await creation
        for sandbox in [waiting, *first]:
            await sandbox.close()

    asyncio.run(run())


def test_a_client_that_hangs_up_ends_its_command(url: str):
    token = f"hung-up-{secrets.token_hex(8)}"

    async def use(sandbox: RemoteSandbox) -> None:
        program = f"import os; os.execvp('sleep', ['{token}', '1000'])"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sandbox.exec(["python", "-c", program]), 1)
        assert not await asyncio.to_thread(gone, lambda: processes_with(token))
        with pytest.raises(SandboxFailed, match="closed"):
            await sandbox.exec(["true"])

    in_sandbox(use, url, wall_s=300)


def test_a_sandbox_that_nobody_asks_is_closed(url: str):
    async def use(sandbox: RemoteSandbox) -> None:
        await asyncio.sleep(2)
        with pytest.raises(SandboxFailed, match="no such sandbox"):
            await sandbox.exec(["true"])

    in_sandbox(use, url, idle_s=1)


def test_no_idle_s_is_longer_than_a_server_keeps_a_sandbox():
    assert settings("http://host", idle_s=LONGEST_IDLE_S).idle_s == LONGEST_IDLE_S
    with pytest.raises(ValidationError, match="idle_s"):
        settings("http://host", idle_s=LONGEST_IDLE_S + 1)


def test_a_command_is_no_idleness():
    async def run() -> None:
        server = SandboxServer("key", 1, SandboxLimits(), (), False)
        sandbox = AsyncMock()
        served = server._served[NAME] = _Served(sandbox, 10.0)
        for _ in range(2):
            with _InUse(server, NAME, served):
                await asyncio.sleep(100)
            await asyncio.sleep(9)
            assert server.serves(NAME)
        await asyncio.sleep(2)
        assert not server.serves(NAME)
        sandbox.close.assert_awaited_once()

    clock.run(run())


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("PUT", f"/sandboxes/{NAME}", b"{}", 400),
        ("PUT", f"/sandboxes/{NAME}", b'{"limits": {"memroy_mb": 3}, "idle_s": 9}', 422),
        ("POST", f"/sandboxes/{NAME}/exec", b'{"command": "ls"}', 400),
        ("POST", f"/sandboxes/{NAME}/exec", b'{"command": ["ls"]}', 404),
        ("GET", f"/sandboxes/{NAME}/files?path=x", b"", 404),
        ("DELETE", f"/sandboxes/{NAME}", b"", 204),
        ("GET", "/sandboxes", b"", 404),
        ("PUT", "/sandboxes/../x", b"", 404),
        ("PATCH", f"/sandboxes/{NAME}", b"", 405),
    ],
)
def test_other_clients_get_a_status_and_an_error(url: str, method: str, path: str, body: bytes, status: int):
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            headers = {"Authorization": f"Bearer {os.environ[KEY]}"}
            async with session.request(method, url + path, data=body, headers=headers) as response:
                assert response.status == status
                assert status == 204 or set(await response.json()) == {"error"}
            for wrong in ("", "Bearer x", f"Bearer {os.environ[KEY]}x", f"Basic {os.environ[KEY]}"):
                headers = {"Authorization": wrong}
                async with session.request(method, url + path, data=body, headers=headers) as response:
                    assert response.status == 401

    asyncio.run(run())


def test_creating_a_sandbox_twice_makes_one(url: str):
    async def run() -> None:
        headers = {"Authorization": f"Bearer {os.environ[KEY]}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            address = f"{url}/sandboxes/{NAME}"
            for _ in range(5):  # of three that the server has
                async with session.put(address, data=b'{"limits": {}, "idle_s": 9}') as response:
                    assert await response.json() == {"level": "namespaces", "reason": ""}
            async with session.delete(address) as response:
                assert response.status == 204

    asyncio.run(run())


def test_a_client_without_a_key_says_which_variable_is_missing(url: str):
    with pytest.raises(SandboxFailed, match="NO_SUCH_VARIABLE is not set"):
        RemoteSandbox(settings(url, key_variable="NO_SUCH_VARIABLE"))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_ends_leaves_nothing_and_its_client_is_told(end: signal.Signals):
    token = f"served-{secrets.token_hex(8)}"
    with served() as (address, server):

        async def use(sandbox: RemoteSandbox) -> None:
            program = f"import os; os.execvp('sleep', ['{token}', '1000'])"
            command = asyncio.create_task(sandbox.exec(["python", "-c", program]))
            while not processes_with(f"{token} 1000"):
                await asyncio.sleep(0.02)
            server.send_signal(end)
            with pytest.raises(SandboxFailed):
                await command

        in_sandbox(use, address, wall_s=300)
        server.wait(TIMEOUT_S)
        assert not gone(lambda: processes_with(token) + keepers_of(server.pid))


@pytest.mark.parametrize(
    ("arguments", "key", "errors"),
    [
        ([], "", ["has 0 characters"]),
        (
            ["--largest", "memory=3", "--most", "0"],
            "short",
            ["no limit 'memory'", "5 characters", "--most 0"],
        ),
        (["--largest", "memory_mb=x"], "k" * 32, ["memory_mb=x"]),
    ],
)
def test_a_server_refuses_bad_input_with_all_errors_and_code_2(
    arguments: list[str], key: str, errors: list[str]
):
    command = [sys.executable, "-m", "slipstream.rollout.sandbox.serve", "--port", "0", *arguments]
    environment = os.environ | {KEY: key}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode == 2
    assert all(error in ended.stderr for error in errors), ended.stderr


def test_an_answer_that_is_none_is_an_error_of_the_server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KEY, "k" * 32)

    async def run() -> None:
        server = await asyncio.start_server(answer_nonsense, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(SandboxFailed, match="answers with no CreatedBody"):
            await RemoteSandbox(settings(f"http://127.0.0.1:{port}")).create()
        server.close()

    asyncio.run(run())


async def answer_nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nnonsense")
    await writer.drain()
    writer.close()


def test_results_of_commands_travel_as_they_are(url: str):
    async def use(sandbox: RemoteSandbox) -> None:
        result = await sandbox.exec(["printf", "a\\000\\033b ü \\n"])
        assert result == ExecResult(0, "a\0\x1bb ü \n", "", None, result.seconds)

    in_sandbox(use, url)
