"""Gateway processes: several are one endpoint, each ends in an orderly way, and none outlives its parent."""

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path

import aiohttp
import pytest
import yaml

from slipstream.configs.schema import RunConfig
from slipstream.rollout.gateway.forward import Owners
from slipstream.rollout.gateway.journal_file import JournalFile
from slipstream.rollout.gateway.keys import add_key
from slipstream.rollout.gateway.peers import journal_of, read_address
from slipstream.rollout.gateway.spec import GatewaySpec
from slipstream.rollout.system.network import hold_port, port_of
from slipstream.rollout.tokens.turn_entries import Forgotten
from tests.environment import environment
from tests.unit.gateway_entries import plain

ROOT = Path(__file__).parents[2]


def free_ports() -> tuple[int, int]:
    """Return a free port, and the first of two neighbouring free ports."""
    while True:
        with hold_port("127.0.0.1") as first, hold_port("127.0.0.1") as second:
            ports = port_of(first), port_of(second)
        with socket.socket() as neighbour:
            try:
                neighbour.bind(("127.0.0.1", ports[1] + 1))
            except OSError:
                continue
        if ports[1] + 1 != ports[0]:
            return ports


def recipe(folder: Path, processes: int) -> RunConfig:
    port, admin_port = free_ports()
    return RunConfig.model_validate(
        {
            "run": {"name": "test", "root": str(folder / "runs"), "steps": 1},
            "model": {"path": str(folder / "model")},
            "data": {"path": str(folder / "data.jsonl")},
            "rollout": {
                "max_head_offpolicyness": 2,
                "batch_size": 2,
                "n_samples_per_prompt": 2,
                "reward": {"path": "slipstream.rollout.reward.FinalAnswer"},
            },
            "gateway": {"port": port, "admin_port": admin_port, "processes": processes},
        }
    )


class Gateways:
    """The processes of one run, as their parent sees them."""

    def __init__(self, folder: Path, processes: int = 1) -> None:
        self.config = recipe(folder, processes)
        self.run = self.config.run.folder
        self.key = add_key(folder / "runs" / "test.keys.json", "ann")
        self.linger_s = 60.0
        self._count = processes
        self.processes: dict[int, subprocess.Popen] = {}
        self.run.mkdir(parents=True)
        (self.run / "recipe.yaml").write_text(yaml.safe_dump(self.config.model_dump(mode="json")))

    @property
    def url(self) -> str:
        assert self.config.gateway is not None
        return f"http://127.0.0.1:{self.config.gateway.port}"

    def start(self, number: int = 0, *options: str) -> dict:
        """``options``: "forks" lets the process serve in a child."""
        self.processes[number] = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.gateway_process", self.argument(number), *options],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self.reached(number)

    def reached(self, number: int = 0) -> dict:
        """Wait until users reach a process that starts, and return where."""
        process, log = self.processes[number], ""
        while "users reach" not in log:
            line = process.stderr.readline()
            assert line, f"it has ended with {process.wait()}: {log}"
            log += line
        address = read_address(self.run, number)
        assert address is not None
        return {"url": address.url, "admin": address.admin}

    def argument(self, number: int) -> str:
        values = {"number": number, "processes": self._count, "context": 1000, "linger_s": self.linger_s}
        return json.dumps({"run": str(self.run), **values})

    def end(self, number: int = 0, how: signal.Signals | None = signal.SIGTERM) -> tuple[int, str]:
        """Wait for the end of a process, or end it. Return its exit code and its log."""
        process = self.processes.pop(number)
        if how is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, how)
        _, log = process.communicate(timeout=120)
        return process.returncode, log

    def post(self, path: str = "/v1/x", body: bytes = b"{}", url: str | None = None, **headers: str) -> dict:
        given = {"Authorization": f"Bearer {self.key}"} | {k.replace("_", "-"): v for k, v in headers.items()}
        request = urllib.request.Request((url or self.url) + path, body, given)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)


@contextmanager
def gateways(folder: Path, processes: int = 1):
    running = Gateways(folder, processes)
    try:
        yield running
    finally:
        for number in list(running.processes):
            running.end(number, signal.SIGKILL)


def test_a_specification_comes_back(tmp_path):
    with gateways(tmp_path, processes=4) as running:
        spec = GatewaySpec.read(running.argument(3))
        assert spec == GatewaySpec(3, 4, 1000, 60.0, running.config)
        for argument in ("", "{}", "[]", json.dumps({"run": str(running.run)})):
            with pytest.raises(ValueError, match=r".+"):
                GatewaySpec.read(argument)


def test_an_owner_is_the_same_everywhere_and_new_names_belong_to_who_makes_them():
    for processes in (1, 2, 5):
        owners = [Owners(number, processes) for number in range(processes)]
        for name in ("a", "key ann", "\ud800"):
            assert len({owner.of(name) for owner in owners}) == 1
        for owner in owners:
            names = [owner.mint() for _ in range(20)]
            assert {owner.of(name) for name in names} == {owner.number}
            assert len(set(names)) == 20
    assert len({Owners(0, 5).of(str(n)) for n in range(100)}) == 5


def test_an_end_is_orderly_and_what_ran_is_recorded(tmp_path):
    with gateways(tmp_path) as running:
        told = running.start()
        assert told["url"] == running.url
        address = read_address(running.run, 0)
        assert (running.run / "gateway" / "gateway-0.json").stat().st_mode & 0o777 == 0o600
        assert address.pid == running.processes[0].pid
        assert running.post()["entry"] == 1
        request = urllib.request.Request(running.url + "/slow", b"{}")
        with urllib.request.urlopen(request, timeout=60) as slow:
            assert slow.read(3) == b"..."
            code, log = running.end()
        assert code == 0, log
        assert "Traceback" not in log
        assert read_address(running.run, 0) is None
        file = JournalFile.open(journal_of(running.run, 0), "gateway-0")
        assert [row.entry().cancelled for row in file.rows(0)] == [False, True]
        file.close()


def test_an_idle_connection_stays_open_for_longer_than_openais_client_keeps_it(tmp_path):
    """Else a request may be sent on a connection that is just being closed, and fail."""
    with gateways(tmp_path) as running:
        running.start()
        assert running.config.gateway is not None
        connection = HTTPConnection("127.0.0.1", running.config.gateway.port, timeout=60)
        with closing(connection):
            connection.connect()
            opened = connection.sock
            for pause_s in (0, 6):
                time.sleep(pause_s)
                connection.request("POST", "/v1/x", b"{}", {"Authorization": f"Bearer {running.key}"})
                assert connection.getresponse().read()
                assert connection.sock is opened, "it was closed, and opened anew"


def test_sessions_are_there_again_after_a_kill(tmp_path):
    with gateways(tmp_path) as running:
        running.start()
        numbers = [running.post()["entry"] for _ in range(3)]
        running.end(how=signal.SIGKILL)
        told = running.start()
        figures = running.post("/figures", url=told["admin"])
        assert figures["restored"] == [[number, "Turn"] for number in numbers]


def test_a_process_that_was_killed_is_forked_again_with_its_sessions_and_ends_with_its_parent(tmp_path):
    with gateways(tmp_path) as running:
        running.start(0, "forks")
        parent, served = running.processes[0].pid, []
        numbers = []
        for _ in range(3):
            numbers.append(running.post()["entry"])
            address = read_address(running.run, 0)
            assert address is not None and address.pid not in (parent, *served)
            served.append(address.pid)
            os.kill(address.pid, signal.SIGKILL)
            told = running.reached()
        assert running.post("/figures", url=told["admin"])["restored"] == [[n, "Turn"] for n in numbers]
        code, log = running.end()
        assert code == 0 and "Traceback" not in log
        assert read_address(running.run, 0) is None, "its end was orderly"
        running.start(0, "forks")
        address = read_address(running.run, 0)
        assert address is not None
        descriptor = os.pidfd_open(address.pid)
        running.end(how=signal.SIGKILL)
        assert select.select([descriptor], [], [], 30)[0], "it dies with its parent"
        os.close(descriptor)


def test_a_port_that_is_taken_and_a_journal_that_is_damaged_are_named(tmp_path):
    with gateways(tmp_path) as running:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", running.config.gateway.port))
            taken.listen()
            with pytest.raises(AssertionError, match=r"(?s)ended with 1: .*set gateway.port to another one"):
                running.start()
        journal_of(running.run, 0).write_bytes(b"")
        with pytest.raises(AssertionError, match=r"(?s)ended with 2: .*is empty: restore the file"):
            running.start()


def test_a_process_without_a_driver_ends_after_a_while(tmp_path):
    with gateways(tmp_path) as running:
        running.linger_s = 0.5
        running.start()
        code, log = running.end(how=None)
        assert code == 1
        assert "no driver has come for 0 s: go on with the run by `--resume`" in log


def test_only_who_has_the_secret_makes_a_gateway_forget(tmp_path):
    with gateways(tmp_path) as running:
        told = running.start()
        running.post(X_Session_Id="s")
        body = json.dumps({"session": "s", "key": None}).encode()
        with pytest.raises(urllib.error.HTTPError) as caught:
            running.post("/forget", body, url=told["admin"])
        assert caught.value.code == 401
        secret = f"Bearer {read_address(running.run, 0).secret}"
        for wrong in (b"{}", b"[]", b"{", b'{"session": 1}', b'{"session": ""}'):
            with pytest.raises(urllib.error.HTTPError) as caught:
                running.post("/forget", wrong, url=told["admin"], Authorization=secret)
            assert caught.value.code == 400
        running.post("/forget", body, url=told["admin"], Authorization=secret)
        running.end()
        file = JournalFile.open(journal_of(running.run, 0), "gateway-0")
        assert [row.entry() for row in file.rows(0)] == [Forgotten("s", None)] * 2
        file.close()


def forget(run: Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "slipstream.backend.cli", "forget", str(run), *options],
        cwd=ROOT,
        env=environment(NO_COLOR="1"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_command_forgets_in_gateways_that_run_and_in_journals_of_those_that_do_not(tmp_path):
    with gateways(tmp_path) as running:
        running.start()
        running.post(X_Session_Id="s")
        running.post(X_Session_Id="t")
        ended = forget(running.run, "--session", "s", "--key", "ann")
        assert (ended.returncode, ended.stdout) == (0, "gateway-0: removed\n"), ended.stderr
        running.end(how=signal.SIGKILL)
        ended = forget(running.run, "--key", "ann")
        assert ended.returncode == 0, ended.stderr
        assert "removed from its journal" in ended.stdout
        file = JournalFile.open(journal_of(running.run, 0), "gateway-0")
        kinds = [plain(row.entry()) for row in file.rows(0)]
        file.close()
        assert kinds == [("Forgotten", "s", "ann"), ("Forgotten", None, "ann")] * 2
    for options in ((), ("--session", "")):
        assert forget(running.run, *options).returncode == 2
    assert forget(tmp_path, "--key", "ann").returncode == 2


def test_a_conversation_is_served_by_one_process_wherever_its_requests_arrive(tmp_path):
    with gateways(tmp_path, processes=2) as running:
        told = [running.start(number) for number in range(2)]
        assert told[0]["url"] == told[1]["url"]
        owners = Owners(0, 2)
        for n in range(8):
            name = f"session {n}"
            body = json.dumps({"session_id": name, "text": "ü" * n}).encode()
            for _ in range(4):  # the kernel chooses where a connection arrives
                reply = running.post("/v1/x%20y?a=%2F&b", body, x_other="kept")
                assert reply["number"] == owners.of(name)
                assert (reply["path"], reply["query"]) == ("/v1/x%20y", "a=%2F&b")
                assert (reply["body"], reply["header"]) == (body.decode(), "kept")
        by_key = {running.post(body=b"{}")["number"] for _ in range(8)}
        assert by_key == {owners.of("key ann")}
        with pytest.raises(urllib.error.HTTPError) as caught:
            running.post(url=read_address(running.run, 1).peer)
        assert caught.value.code == 401, "the port of the processes is no way around the keys"


def test_requests_wait_for_a_process_that_starts_again(tmp_path):
    with gateways(tmp_path, processes=2) as running:
        for number in range(2):
            running.start(number)
        name = next(str(n) for n in range(9) if Owners(0, 2).of(str(n)) == 1)
        running.end(1, signal.SIGKILL)

        async def ask() -> dict:
            headers = {"Authorization": f"Bearer {running.key}", "X-Session-Id": name}
            async with aiohttp.ClientSession(headers=headers) as session:
                asking = asyncio.create_task(session.post(f"{running.url}/v1/x", data=b"{}"))
                await asyncio.sleep(0.3)
                assert not asking.done()
                await asyncio.to_thread(running.start, 1)
                async with await asking as reply:
                    return await reply.json()

        assert asyncio.run(asyncio.wait_for(ask(), 120))["number"] == 1


def test_a_user_who_leaves_ends_the_request_at_the_process_that_serves_it(tmp_path):
    with gateways(tmp_path, processes=2) as running:
        for number in range(2):
            running.start(number)
        names = [next(str(n) for n in range(99) if Owners(0, 2).of(str(n)) == owner) for owner in range(2)]
        for name in names * 3:
            request = urllib.request.Request(
                running.url + "/slow",
                b"{}",
                {"Authorization": f"Bearer {running.key}", "X-Session-Id": name},
            )
            with urllib.request.urlopen(request, timeout=60) as slow:
                assert slow.read(3) == b"..."
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            lasts = [running.post("/f", url=read_address(running.run, n).admin)["last"] for n in range(2)]
            if sum(lasts) == 6:
                break
            time.sleep(0.05)
        assert lasts == [3, 3]
