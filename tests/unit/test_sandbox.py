"""Sandboxes of this machine: what they do for programs, keep them from, and leave of them."""

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from pydantic import ValidationError

from slipstream.configs.schema.sandbox import LocalSandboxConfig
from slipstream.rollout.sandbox import keeper_process
from slipstream.rollout.sandbox.interface import ExecResult, Isolation, SandboxFailed, SandboxRefused
from slipstream.rollout.sandbox.local import LocalSandbox
from slipstream.rollout.sandbox.open import limits_of, make_sandbox, sandbox_settings
from slipstream.rollout.sandbox.wire import Limits
from tests.environment import ROOT
from tests.sandbox_attacks import (
    ATTACKS,
    LIMITS,
    MOMENTS,
    Attack,
    Machine,
    left_by_killed_owner,
    nothing_left,
    problems_of,
    processes_with,
)

ROOMY = limits_of(LocalSandboxConfig(wall_s=60))
TIMEOUT_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep sandboxes of other processes from coming and going where these tests look for leftovers."""
    tmp_path_factory.getbasetemp()  # before the folder below is that of temporary files
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@asynccontextmanager
async def opened(limits: Limits = ROOMY, readable: tuple[str, ...] = ()) -> AsyncIterator[LocalSandbox]:
    sandbox = LocalSandbox(limits, readable)
    await sandbox.create()
    try:
        yield sandbox
    finally:
        await sandbox.close()


def in_sandbox(
    use: Callable[[LocalSandbox], Awaitable[object]], limits: Limits = ROOMY, readable: tuple[str, ...] = ()
) -> None:
    async def run() -> None:
        async with opened(limits, readable) as sandbox:
            await asyncio.wait_for(use(sandbox), TIMEOUT_S)

    asyncio.run(run())


def outcome(result: ExecResult) -> tuple[int, str, str]:
    return result.exit_code, result.stdout, result.stderr


async def gone(text: str) -> list[str]:
    """Wait for processes to end whose command line contains a text. Return those that do not."""
    deadline = time.monotonic() + TIMEOUT_S
    while (left := processes_with(text)) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return left


# -- What it does


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["true"], (0, "", "")),
        (["sh", "-c", "echo out; echo err >&2; exit 7"], (7, "out\n", "err\n")),
        (["sh", "-c", "kill -TERM $$"], (-signal.SIGTERM, "", "")),
        (["cat"], (0, "given", "")),
        (["printf", r"\377x"], (0, "\ufffdx", "")),
        (["no-such-program"], (127, "", "no-such-program: No such file or directory\n")),
        (["/etc/passwd"], (127, "", "/etc/passwd: Permission denied\n")),
        (["sh", "-c", "echo $NAME $HOME $USER; pwd"], (0, "value /sandbox sandbox\n/sandbox\n", "")),
    ],
)
def test_a_command_ends_as_it_would_elsewhere(command: list[str], expected: tuple[int, str, str]):
    async def use(sandbox: LocalSandbox) -> None:
        result = await sandbox.exec(command, stdin=b"given", env={"NAME": "value"})
        assert outcome(result) == expected
        assert result.limit is None
        assert result.failed == (expected[0] != 0)
        assert 0 < result.seconds < ROOMY.wall_s

    in_sandbox(use)


def test_the_python_of_slipstream_runs_with_its_packages():
    async def use(sandbox: LocalSandbox) -> None:
        result = await sandbox.exec(["python", "-c", "import sys, msgspec; print(sys.prefix)"])
        assert outcome(result) == (0, f"{sys.prefix}\n", "")

    in_sandbox(use)


def test_files_last_until_the_sandbox_is_closed_and_processes_until_their_command_ends():
    token = f"left-{secrets.token_hex(8)}"

    async def use(sandbox: LocalSandbox) -> None:
        await sandbox.exec(["sh", "-c", "echo kept > file; mkdir /tmp/folder; touch /dev/shm/shared"])
        # Detached, in a session of its own, and holding the output open.
        python = f"import os\nif not os.fork(): os.setsid(); os.execvp('sleep', ['{token}', '1000'])"
        result = await sandbox.exec(["python", "-c", f"{python}\nprint('ended')"])
        assert outcome(result) == (0, "ended\n", "")
        assert not processes_with(token)
        after = await sandbox.exec(
            ["sh", "-c", "cat file; ls -d /tmp/folder /dev/shm/*; ps ax | grep -c slee[p]"]
        )
        assert after.stdout == "kept\n/dev/shm/shared\n/tmp/folder\n0\n"

    in_sandbox(use)


def test_sandboxes_share_nothing():
    async def run() -> None:
        async with opened() as first, opened() as second:
            await first.exec(["sh", "-c", "echo x > /tmp/x; echo x > x; echo x > /dev/shm/x"])
            waiting = asyncio.create_task(first.exec(["sleep", "1"]))
            seen = await second.exec(["sh", "-c", "ls . /tmp /dev/shm; ps ax -o comm="])
            assert "x" not in seen.stdout.split()
            assert "sleep" not in seen.stdout
            assert not (await waiting).failed

    asyncio.run(run())


def test_readable_folders_below_the_temporary_one_are_not_the_sandboxs_files():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        for number in range(3):
            Path(folder, f"{number}.bin").write_bytes(b"x" * 2**20)

        async def use(sandbox: LocalSandbox) -> None:
            result = await sandbox.exec(["sh", "-c", f"ls {folder}; exit 3"])
            assert outcome(result) == (3, "0.bin\n1.bin\n2.bin\n", "")
            assert result.limit is None

        in_sandbox(use, limits_of(LocalSandboxConfig(disk_mb=2)), (folder,))


def test_folders_that_the_recipe_names_can_be_read_and_not_written(tmp_path: Path):
    (tmp_path / "data.txt").write_text("data")
    tmp_path.chmod(0o755)  # root's sandboxes have users of their own

    async def use(sandbox: LocalSandbox) -> None:
        assert (await sandbox.exec(["cat", f"{tmp_path}/data.txt"])).stdout == "data"
        assert "Read-only" in (await sandbox.exec(["touch", f"{tmp_path}/x"])).stderr

    in_sandbox(use, readable=(str(tmp_path),))
    assert [path.name for path in tmp_path.iterdir()] == ["data.txt"]


@pytest.mark.parametrize(("own_s", "asked_s"), [(99.0, 0.2), (0.2, 99.0)])
def test_a_shorter_time_can_be_asked_for_and_a_longer_one_cannot(own_s: float, asked_s: float):
    async def use(sandbox: LocalSandbox) -> None:
        result = await sandbox.exec(["sleep", "1000"], wall_s=asked_s)
        assert (result.limit, result.exit_code) == ("wall", -signal.SIGKILL)
        assert 0.2 <= result.seconds < 99.0

    in_sandbox(use, Limits(own_s, 5.0, 1 << 28, 64, 64, 1 << 20, 1 << 20, 1 << 10))


def test_output_beyond_the_limit_is_cut_and_says_so():
    async def use(sandbox: LocalSandbox) -> None:
        result = await sandbox.exec(["sh", "-c", "head -c 1024 /dev/zero | tr '\\0' x"])
        assert outcome(result) == (0, "x" * 1024, "")
        result = await sandbox.exec(["sh", "-c", "head -c 1025 /dev/zero | tr '\\0' x"])
        assert (result.limit, result.stdout) == ("output", "x" * 1024 + "\n[cut after 1024 bytes]")

    in_sandbox(use, Limits(5.0, 5.0, 1 << 28, 64, 64, 1 << 20, 1 << 20, 1 << 10))


def test_files_come_back_as_they_were_given():
    data = bytes(range(256)) * 4096

    async def use(sandbox: LocalSandbox) -> None:
        await sandbox.upload("a/b/c.bin", data)
        assert await sandbox.download("a//./b/c.bin") == data
        await sandbox.upload("a/b/c.bin", b"other")
        assert (
            await sandbox.exec(["sh", "-c", "cat a/b/c.bin; ls -A a/b; touch a/b/mine"])
        ).stdout == "otherc.bin\n"
        with pytest.raises(SandboxRefused, match="'no/such' cannot be read"):
            await sandbox.download("no/such")
        with pytest.raises(SandboxRefused, match="at most 67108864 can be uploaded"):
            await sandbox.upload("large", b"x" * (ROOMY.file_size + 1))

    in_sandbox(use)


def test_a_full_sandbox_refuses_an_upload_and_goes_on():
    async def use(sandbox: LocalSandbox) -> None:
        with pytest.raises(SandboxRefused, match="No space left"):
            await sandbox.upload("x", b"x" * (3 << 20))
        await sandbox.upload("x", b"x" * (1 << 20))
        assert (await sandbox.exec(["ls", "-A"])).stdout == "x\n"

    in_sandbox(use, Limits(5.0, 5.0, 1 << 28, 64, 64, 8 << 20, 2 << 20, 1 << 10))


def test_memory_that_is_filled_between_two_looks_is_named():
    """The kernel fails an allocation before the sandbox looks, and the program says so in its own way."""
    fills = "x = []\nwhile True: x.append(b'x' * 2**20)"

    async def use(sandbox):
        for _ in range(15):
            ended = await sandbox.exec(["python", "-c", fills])
            assert (ended.limit, ended.failed) == ("memory", True), ended
        ended = await sandbox.exec(["sh", "-c", "exit 7"])
        assert (ended.limit, ended.exit_code) == (None, 7)

    in_sandbox(use, Limits(5.0, 5.0, 24 << 20, 64, 64, 8 << 20, 2 << 20, 1 << 10))


@pytest.mark.parametrize("command", ["ls", [], [""], ["echo", "a\0b"]])
def test_what_is_no_command_is_refused(command: list[str]):
    async def use(sandbox: LocalSandbox) -> None:
        with pytest.raises(SandboxRefused, match="command"):
            await sandbox.exec(command)
        assert not (await sandbox.exec(["true"])).failed

    in_sandbox(use)


HALF = "\ud800"


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("exec", (["echo", HALF], {}), "half a surrogate pair"),
        ("exec", (["echo", 3], {}), "contains a int"),
        ("exec", ([None], {}), "no command"),
        ("exec", (["env"], {"env": {"A": HALF}}), "half a surrogate pair"),
        ("exec", (["env"], {"env": {HALF: "a"}}), "half a surrogate pair"),
        ("exec", (["env"], {"env": {"A": "x\0"}}), "NUL"),
        ("exec", (["env"], {"env": {"A=B": "x"}}), "no name of a variable"),
        ("exec", (["env"], {"env": {"": "x"}}), "no name of a variable"),
        ("exec", (["env"], {"env": {"A": 1}}), "contains a int"),
        ("exec", (["cat"], {"stdin": "text"}), "type str, expected bytes"),
        ("exec", (["true"], {"wall_s": float("nan")}), "wall_s is nan"),
        ("exec", (["true"], {"wall_s": -1}), "wall_s is -1"),
        ("exec", (["true"], {"wall_s": 0}), "wall_s is 0"),
        ("exec", (["true"], {"wall_s": "9"}), "wall_s is '9'"),
        ("upload", (HALF, {"data": b"x"}), "half a surrogate pair"),
        ("upload", ("a", {"data": "x"}), "type str, expected bytes"),
        ("upload", (7, {"data": b"x"}), "contains a int"),
        ("download", (HALF, {}), "half a surrogate pair"),
        ("download", ("a\0", {}), "NUL"),
    ],
)
def test_a_call_that_cannot_be_sent_is_refused_and_the_sandbox_goes_on(name, arguments, reason):
    async def use(sandbox: LocalSandbox) -> None:
        first, named = arguments
        with pytest.raises(SandboxRefused, match=reason):
            await getattr(sandbox, name)(first, **named)
        assert not (await sandbox.exec(["true"])).failed

    in_sandbox(use)


def test_commands_of_one_sandbox_take_turns():
    async def use(sandbox: LocalSandbox) -> None:
        program = "test ! -e busy && touch busy && sleep 0.05 && rm busy"
        results = await asyncio.gather(*[sandbox.exec(["sh", "-c", program]) for _ in range(4)])
        assert [result.exit_code for result in results] == [0] * 4

    in_sandbox(use)


def test_a_cancelled_command_is_killed_and_closes_its_sandbox():
    token = f"cancelled-{secrets.token_hex(8)}"

    async def use(sandbox: LocalSandbox) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sandbox.exec(["sh", "-c", f": {token}; sleep 1000"]), 0.5)
        with pytest.raises(SandboxFailed, match="closed"):
            await sandbox.exec(["true"])
        assert not await gone(token)

    in_sandbox(use)


def test_a_sandbox_is_used_between_create_and_close():
    async def run() -> None:
        sandbox = LocalSandbox(ROOMY)
        with pytest.raises(SandboxFailed, match="not created"):
            await sandbox.exec(["true"])
        await sandbox.create()
        with pytest.raises(SandboxFailed, match="created before"):
            await sandbox.create()
        await sandbox.close()
        await sandbox.close()
        with pytest.raises(SandboxFailed, match="closed"):
            await sandbox.download("x")

    asyncio.run(run())


def test_sandboxes_of_several_event_loops_and_threads_have_one_keeper():
    keepers: set[int] = set()

    def use() -> None:
        in_sandbox(lambda sandbox: sandbox.exec(["true"]))
        keepers.add(id(keeper_process.keeper()))

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    use()
    assert len(keepers) == 1


def test_nothing_but_the_keeper_is_left_of_closed_sandboxes():
    async def run() -> None:
        async with opened() as first, opened() as second:
            await asyncio.gather(first.exec(["true"]), second.exec(["true"]))
            assert len(pid_of("sandbox-box")) == 2
        assert not pid_of("sandbox-box") + pid_of("sandbox-init")
        assert len(pid_of("sandbox-keeper")) == 1

    asyncio.run(run())


# -- What it keeps programs from


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    os.environ["SLIPSTREAM_ATTACK_SECRET"] = secrets.token_hex(16)
    machine = Machine(tmp_path_factory.mktemp("machine"))
    yield machine
    machine.close()
    del os.environ["SLIPSTREAM_ATTACK_SECRET"]


def test_this_machine_has_namespaces():
    """The tests below show what is contained with them."""
    in_sandbox(lambda sandbox: check_isolation(sandbox))


async def check_isolation(sandbox: LocalSandbox) -> None:
    assert sandbox.isolation == Isolation("namespaces")


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_is_contained_and_leaves_nothing(attack: Attack, machine: Machine):
    left: list[str] = []
    with nothing_left(left.extend):
        assert not asyncio.run(problems_of(attack, machine))
    assert not left


# -- What is left of it


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_owner_leaves_nothing(moment: float):
    left: list[str] = []
    with nothing_left(left.extend):
        assert not left_by_killed_owner(moment)
    assert not left


def pid_of(name: str) -> list[int]:
    """The processes of this process's keeper that have a name."""
    keeper = f", {os.getpid()})"
    lines = [line for line in processes_with("sandbox.keeper import keep") if keeper in line]
    pids = [int(line.split()[1].rstrip(":")) for line in lines]
    return [pid for pid in pids if name_of(pid) == name]


def name_of(pid: int) -> str | None:
    with suppress(OSError):  # it has just ended
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return None


@pytest.mark.parametrize("name", ["sandbox-keeper", "sandbox-box", "sandbox-init"])
def test_a_killed_process_of_a_sandbox_takes_its_commands_with_it_and_is_replaced(name: str):
    token = f"orphan-{secrets.token_hex(8)}"

    async def use(sandbox: LocalSandbox) -> None:
        program = f"import os\nos.fork() or os.setsid()\nos.execvp('sleep', ['{token}', '1000'])"
        command = asyncio.create_task(sandbox.exec(["python", "-c", program]))
        while len(processes_with(f"{token} 1000")) < 2:
            await asyncio.sleep(0.01)
        for pid in pid_of(name):
            os.kill(pid, signal.SIGKILL)
        if name == "sandbox-init":
            assert (await command).exit_code == -signal.SIGKILL
        else:
            with pytest.raises(SandboxFailed, match="its process has ended"):
                await command
        assert not await gone(token)
        async with opened() as other:
            assert not (await other.exec(["true"])).failed

    in_sandbox(use)


def test_a_fork_of_an_owner_has_sandboxes_of_its_own():
    script = """
import asyncio, os
from tests.unit.test_sandbox import in_sandbox
in_sandbox(lambda sandbox: sandbox.exec(["true"]))
pid = os.fork()
in_sandbox(lambda sandbox: sandbox.exec(["true"]))
if pid: raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0


# -- Where the kernel allows less

REPORT = """
import asyncio, json, sys
from slipstream.rollout.sandbox.local import LocalSandbox
from slipstream.rollout.sandbox.interface import SandboxFailed
from tests.unit.test_sandbox import ROOMY
async def main():
    sandbox = LocalSandbox(ROOMY, require_isolation=sys.argv[1:] == ["required"])
    try:
        isolation = await sandbox.create()
        await LocalSandbox(ROOMY).create()
        program = "id -u; sleep 1000 & (setsid sleep 1000 &) ; python3 -c 'import socket; socket.socket()'"
        result = await sandbox.exec(["sh", "-c", program])
        await sandbox.upload("a/b", b"c")
        assert await sandbox.download("a/b") == b"c"
        await sandbox.close()
        print(json.dumps([isolation.level, isolation.reason, result.stdout, result.stderr]))
    except SandboxFailed as error:
        print(json.dumps([str(error)]))
asyncio.run(main())
"""


def restricted(account: str, *arguments: str) -> tuple[list[str], str]:
    """What a sandbox says under an account of tests/restricted.py, and what its process warns of."""
    command = [sys.executable, "-m", "tests.restricted", account, sys.executable, "-c", REPORT, *arguments]
    left: list[str] = []
    with nothing_left(left.extend):
        ended = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    assert not left
    return json.loads(ended.stdout), ended.stderr


def test_a_user_without_privileges_has_namespaces():
    (level, reason, stdout, _), warnings = restricted("user")
    assert (level, reason, stdout, warnings) == ("namespaces", "", "1000\n", "")


def test_root_without_namespaces_has_a_user_for_each_sandbox_and_a_warning():
    if os.geteuid() != 0:  # nobody else can become another user: there is no such level
        return
    (level, reason, stdout, stderr), warnings = restricted("root")
    assert level == "user"
    assert reason.startswith("namespaces: ")
    assert int(stdout) >= 2_000_000_000
    assert "Permission denied" in stderr  # no network
    assert warnings.count("sandboxes have no namespaces here") == 1


def test_without_any_means_a_sandbox_says_so_or_is_refused():
    report, warnings = restricted("nobody")
    if os.geteuid() == 0:  # nothing would limit the number of processes
        assert "the kernel does not limit the processes of root" in report[0]
    else:
        assert report[0] == "none"
        assert warnings.count("sandboxes have no namespaces here") == 1


@pytest.mark.parametrize("account", ["root", "nobody"])
def test_isolation_that_is_required_is_not_done_without(account: str):
    if account == "root" and os.geteuid() != 0:
        return
    [error], _ = restricted(account, "required")
    assert "Allow user namespaces" in error


# -- Settings


def test_settings_make_the_sandbox_that_they_name():
    assert isinstance(make_sandbox(sandbox_settings(None)), LocalSandbox)
    custom = {"type": "path", "path": f"{__name__}.opened", "args": {"limits": LIMITS}}
    assert make_sandbox(sandbox_settings(custom)) is not None
    local = sandbox_settings({"type": "local", "memory_mb": 64, "readable": ["/data"]})
    assert isinstance(local, LocalSandboxConfig)
    assert (limits_of(local).memory, local.readable) == (64 << 20, ("/data",))


def test_a_setting_that_does_not_exist_or_has_no_effect_is_an_error():
    with pytest.raises(ValidationError) as caught:
        sandbox_settings({"type": "local", "url": "http://x", "memory_mb": 0, "procesess": 3})
    assert {error["loc"][-1] for error in caught.value.errors()} == {"url", "memory_mb", "procesess"}
