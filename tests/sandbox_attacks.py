"""Hostile programs in a sandbox, and what becomes of them.

    python -m tests.sandbox_attacks        ends in one JSON object: contained, of, leftovers

An attack is contained when its sandbox reports it as expected and nothing of it is left. Programs that try to
reach something print ``ESCAPED`` and what they have reached.
"""

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from slipstream.rollout.sandbox.interface import ExecResult, SandboxRefused
from slipstream.rollout.sandbox.local import LocalSandbox
from slipstream.rollout.sandbox.wire import Limits

MB = 1 << 20
LIMITS = Limits(
    wall_s=20.0,
    cpu_s=0.3,
    memory=128 * MB,
    processes=24,
    open_files=64,
    file_size=8 * MB,
    disk=24 * MB,
    output=1 << 16,
)
PROMPT_S = 60.0
"""Seconds beyond its time in which an attack must have been ended, on a busy machine."""


PRELUDE = "import time; END = time.time() + 15\n"
"""Begins each program. A bomb ends by itself at END, should nothing contain it."""


@dataclass(frozen=True)
class Attack:
    """A program, and how the sandbox must report it."""

    name: str
    program: str
    limits: tuple[str, ...] = ()
    """Limits of which one must have ended it; none: no limit must have."""
    shell: bool = False
    fails: bool | None = None
    """True if it must have failed; None: as it ends."""
    needs_namespaces: bool = False
    """True if it is contained with namespaces only."""

    @property
    def wall_s(self) -> float:
        """Seconds that it may take. Only what nothing else ends should use them up, on a busy machine too."""
        return 1.0 if "wall" in self.limits else LIMITS.wall_s


ATTACKS = (
    # A bomb that gives up when it is refused a process may be over before anybody looks.
    Attack(
        "fork bomb",
        """
import os
while time.time() < END:
    try: os.fork()
    except OSError: pass
""",
        ("processes",),
    ),
    Attack(
        "fork bomb in a shell",
        "b(){ b|b& };b; sleep 9",
        ("processes", "wall", "cpu"),  # whichever the machine reaches first
        shell=True,
        needs_namespaces=True,
    ),
    Attack(
        "fork bomb of detached processes",
        """
import os
while time.time() < END:
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork(): os._exit(0)
            time.sleep(1000)
    except OSError: pass
""",
        ("processes",),
    ),
    Attack(
        "thread bomb",
        "import threading as t\nwhile time.time() < END: t.Thread(target=time.sleep, args=(9,)).start()",
        ("processes",),
    ),
    Attack("memory", "x = []\nwhile True: x.append(b'x' * 2**20)", ("memory",)),
    Attack("memory at once", "x = b'x' * 10**11", ("memory",)),
    Attack("memory that grows in place", "x = bytearray(b'x')\nwhile True: x *= 2", ("memory",)),
    Attack(
        "memory of many processes",
        """
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = [b'x' * 2**20 for _ in range(40)]
        time.sleep(9)
time.sleep(9)
""",
        ("memory",),
    ),
    Attack(
        "shared memory",
        """
import mmap, time
x = [mmap.mmap(-1, 2**24) for _ in range(20)]
for m in x: m.write(b'x' * 2**24)
time.sleep(9)
""",
        ("memory",),
    ),
    Attack(
        "memory without a process",
        """
import os
while True:
    f = os.memfd_create('x')
    os.write(f, b'x' * 2**22)
""",
        fails=True,
    ),
    Attack("disk", "i = 0\nwhile True:\n    open(f'{i}', 'wb').write(b'x' * 2**20); i += 1", ("disk",)),
    Attack(
        "disk in other folders",
        """
i = 0
while True:
    for folder in '/tmp', '/dev/shm', '/var/tmp':
        open(f'{folder}/{i}', 'wb').write(b'x' * 2**20); i += 1
""",
        ("disk",),
        needs_namespaces=True,
    ),
    Attack(
        "disk in a file without a name",
        """
import os, tempfile
files = []
while True:
    files.append(tempfile.TemporaryFile())
    try: files[-1].write(b'x' * 2**22); files[-1].flush()
    except OSError: pass
    if len(files) > 20: files = files[:20]
""",
        ("disk",),
        needs_namespaces=True,
    ),
    Attack(
        "names of files",
        "i = 0\nwhile True: open(f'{i}', 'w').close(); i += 1",
        ("disk",),
        needs_namespaces=True,
    ),
    Attack("a large file", "open('x', 'wb').write(b'x' * 2**24)", ("file_size",)),
    Attack("a large file in a shell", "head -c 16000000 /dev/zero > x", ("file_size",), shell=True),
    Attack("output", "while True: print('x' * 1000)", ("output",)),
    Attack("output of errors", "import sys\nwhile True: sys.stderr.write('x' * 1000)", ("output",)),
    Attack("output of many processes", "for i in 1 2 3 4; do yes & done; wait", ("output",), shell=True),
    Attack("endless loop", "while True: pass", ("cpu",)),
    Attack(
        "endless loops of several processes",
        "import os\nos.fork(); os.fork()\nwhile True: pass",
        ("cpu",),
    ),
    Attack(
        "endless sleep that ignores signals",
        """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
time.sleep(1000)
""",
        ("wall",),
    ),
    Attack("a stopped process", "import os\nos.kill(os.getpid(), 19)", ("wall",)),
    Attack("waiting for input", "import sys, time\nsys.stdin.read()\ntime.sleep(1000)", ("wall",)),
    Attack(
        "a daemon",
        """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork(): os._exit(0)
    os.execvp('sleep', ['TOKEN', '1000'])
""",
    ),
    Attack("a child that keeps the output open", "sleep 1000 & echo done", shell=True),
    Attack(
        "network",
        """
import socket, os
def attempt(family, address, kind=socket.SOCK_STREAM):
    try:
        with socket.socket(family, kind) as s:
            s.settimeout(0.3)
            s.connect(address)
            if kind == socket.SOCK_DGRAM: s.send(b'x')
            print('ESCAPED', address)
    except OSError: pass
for host in '127.0.0.1', 'ADDRESS', '10.0.0.1', '8.8.8.8', '169.254.169.254':
    attempt(socket.AF_INET, (host, PORT))
    attempt(socket.AF_INET, (host, 53), socket.SOCK_DGRAM)
attempt(socket.AF_INET6, ('::1', PORT))
attempt(socket.AF_UNIX, b'\\0ABSTRACT')
attempt(socket.AF_UNIX, 'SOCKET')
try: attempt(socket.AF_VSOCK, (2, PORT))
except AttributeError: pass
for kind in socket.SOCK_RAW, socket.SOCK_PACKET if hasattr(socket, 'SOCK_PACKET') else socket.SOCK_RAW:
    try: socket.socket(socket.AF_PACKET, kind, 3); print('ESCAPED', kind)
    except OSError: pass
""",
        fails=False,
    ),
    Attack(
        "files of the machine",
        """
import glob, os
for path in ['SECRET', '/etc/shadow', '/proc/OWNER/environ', '/proc/1/environ', '/proc/1/root/etc/shadow',
             '/proc/1/root/SECRET', '/proc/1/cwd/SECRET', '/proc/kcore', '/proc/self/root/SECRET', '/dev/vda',
             '/dev/mem', '/sandbox/../SECRET', '/root/.ssh', '/proc/1/mem', '/sys/kernel', '/home']:
    try:
        if os.path.isdir(path) and os.listdir(path): print('ESCAPED', path)
        elif os.path.isfile(path) and open(path, 'rb').read(1): print('ESCAPED', path)
        elif os.path.exists(path) and not os.path.isdir(path):
            open(path, 'rb').read(1); print('ESCAPED', path)
    except OSError: pass
for path in glob.glob('/proc/[0-9]*/root/SECRET') + glob.glob('/proc/[0-9]*/fd/*/SECRET'):
    print('ESCAPED', path)
if b'SECRETVALUE' in b''.join(open(p, 'rb').read() for p in glob.glob('/proc/self/environ')): print('ESCAPED')
print(sorted(os.environ))
""",
        fails=False,
        needs_namespaces=True,
    ),
    Attack(
        "writing to the machine",
        """
import os
for path in '/usr/bin/x', '/usr/lib/x', '/etc/passwd', '/x', '/etc/x', '/proc/sys/kernel/core_pattern', \\
        '/proc/sysrq-trigger', '/proc/1/oom_score_adj', '/dev/x', __import__('sys').prefix + '/x':
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT)); print('ESCAPED', path)
    except OSError: pass
for name in os.listdir('/usr/bin')[:3]:
    try: os.unlink('/usr/bin/' + name); print('ESCAPED', name)
    except OSError: pass
""",
        fails=False,
        needs_namespaces=True,
    ),
    Attack(
        "links to the machine",
        """
import os
for target in '/usr/bin/env', 'SECRET', '/proc/1/root':
    try: os.link(target, 'hard'); print('ESCAPED', target)
    except OSError: pass
os.symlink('/usr/bin/env', 'absolute'); os.symlink('../usr/bin/env', 'relative')
os.symlink('/proc/1/root', 'root')
os.symlink('.', 'here'); os.symlink('loop', 'loop'); os.mkfifo('pipe'); os.symlink('/tmp', 'folder')
os.mkdir('inner'); os.symlink('../inner/../..', 'inner/up')
open('inner/fine', 'w').write('fine'); os.symlink('inner/fine', 'inside')
""",
        fails=False,
        needs_namespaces=True,
    ),
    Attack(
        "other processes",
        """
import ctypes, os
libc = ctypes.CDLL(None)
for pid in {1, 2, os.getppid(), OWNER} - {os.getpid()}:
    if libc.ptrace(16, pid, 0, 0) == 0: print('ESCAPED ptrace', pid)
    try: os.kill(pid, 9); print('killed', pid) if pid != 1 else None
    except OSError: pass
    try: os.close(os.open(f'/proc/{pid}/mem', os.O_RDWR)); print('ESCAPED memory', pid)
    except OSError: pass
if [p for p in os.listdir('/proc') if p.isdigit() and int(p) > 50]: print('ESCAPED processes')
""",
        fails=False,
        needs_namespaces=True,
    ),
    Attack(
        "namespaces, mounts and privileges",
        """
import ctypes, os, resource
libc = ctypes.CDLL(None)
for flag in 0x10000000, 0x20000, 0x40000000, 0x20000000:
    if libc.unshare(flag) == 0: print('ESCAPED unshare', flag)
    if libc.syscall(56, flag | 17, 0, 0, 0, 0) >= 0: print('ESCAPED clone', flag)
if libc.mount(b'none', b'/tmp', b'tmpfs', 0, b'') == 0: print('ESCAPED mount')
if libc.umount2(b'/proc', 2) == 0: print('ESCAPED umount')
for call in (lambda: os.chroot('/tmp'), lambda: os.mknod('d', 0o20666, os.makedev(1, 1)),
             lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.nice(-5), lambda: os.chown('.', 0, 0),
             lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1)),
             lambda: resource.setrlimit(resource.RLIMIT_NPROC, (10000, 10000)),
             lambda: os.setpriority(os.PRIO_PROCESS, 0, -20),
             lambda: open('/proc/self/oom_score_adj', 'wb', 0).write(b'-1000')):
    try: call(); print('ESCAPED', call)
    except Exception: pass
status = open('/proc/self/status').read()
if 'CapEff:\\t0000000000000000' not in status or 'NoNewPrivs:\\t1' not in status: print('ESCAPED', status)
""",
        fails=False,
        needs_namespaces=True,
    ),
    Attack(
        "calls that the kernel should refuse",
        """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
calls = {'x86_64': {'shmget': (29, 0, 4096, 0o1600), 'msgget': (68, 0, 0o1600),
         'io_uring_setup': (425, 8, bytes(120)), 'clone3': (435, bytes(88), 88),
         'bpf': (321, 0, bytes(64), 64), 'keyctl': (250, 0, -3, 1),
         'userfaultfd': (323, 1)}}
for name, arguments in calls.get(__import__('platform').machine(), {}).items():
    if libc.syscall(*arguments) >= 0: print('ESCAPED', name)
""",
        fails=False,
    ),
    Attack(
        "descriptors of the sandbox",
        """
import os
for fd in range(3, 60):
    try: print('ESCAPED', fd, os.readlink(f'/proc/self/fd/{fd}'))
    except OSError: pass
""",
        fails=False,
    ),
)

REFUSED_PATHS = (
    *("/etc/passwd", "../x", "a/../../x", "", ".", "folder/", "absolute", "relative", "root/etc/passwd"),
    *("loop", "pipe", "inner/up/etc/passwd", "inner", "missing", "x\0y", "folder/../x"),
)
"""Paths that can neither be downloaded nor lead to anything, after the attack "links to the machine"."""

REFUSED_UPLOADS = ("/tmp/x", "../x", "folder/x", "root/tmp/x", "inner/up/x", "pipe/x", "loop/x", "inner", "")


class Machine:
    """What a machine has that no sandbox may reach: a file, a listener, a socket, an environment."""

    def __init__(self, folder: Path) -> None:
        self.token = f"attack-{secrets.token_hex(8)}"
        self._secret = folder / "secret"
        self._secret.write_text("secret")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._abstract = socket.socket(socket.AF_UNIX)
        self._abstract.bind(f"\0{self.token}")
        self._abstract.listen()
        self._named = socket.socket(socket.AF_UNIX)
        self._named.bind(str(folder / "socket"))
        self._named.listen()
        os.chmod(folder / "socket", 0o777)

    def aim(self, program: str) -> str:
        """Return a program of an attack with the names of this machine's things in it."""
        for name, value in {
            "TOKEN": self.token,
            "ABSTRACT": self.token,
            "SOCKET": self._named.getsockname(),
            "SECRETVALUE": os.environ["SLIPSTREAM_ATTACK_SECRET"],
            "SECRET": str(self._secret),
            "PORT": str(self._listener.getsockname()[1]),
            "ADDRESS": own_address(),
            "OWNER": str(os.getpid()),
        }.items():
            program = program.replace(name, value)
        return program

    def close(self) -> None:
        for listener in (self._listener, self._abstract, self._named):
            listener.close()


def own_address() -> str:
    """Return an address of this machine that is not its loopback's, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        return probe.getsockname()[0]
    return "127.0.0.1"


async def problems_of(attack: Attack, machine: Machine) -> list[str]:
    """Run an attack. Return what is wrong with how it was contained; nothing: it was."""
    sandbox = LocalSandbox(LIMITS)
    await sandbox.create()
    try:
        program = machine.aim(attack.program)
        if not attack.shell:
            await sandbox.upload("attack.py", f"{PRELUDE}{program}".encode())
        command = ["sh", "-c", program] if attack.shell else ["python3", "-I", "-S", "attack.py"]
        start = time.monotonic()
        result = await sandbox.exec(command, wall_s=attack.wall_s)
        seconds = time.monotonic() - start
        problems = list(problems_in(attack, result, seconds))
        if attack.name == "links to the machine":
            problems += await paths_that_lead_out(sandbox)
        # The sandbox can be used after each attack, but for one that has filled it.
        after = await sandbox.exec(["echo", "fine"])
        if after.stdout != "fine\n":
            problems.append(f"the next command: {after}")
    finally:
        await sandbox.close()
    return problems + [f"left: {name}" for name in processes_with(machine.token)]


def problems_in(attack: Attack, result: ExecResult, seconds: float) -> Iterator[str]:
    """Yield what is wrong with the result of an attack."""
    printed = f"{result.stdout[-300:]!r}, {result.stderr[-600:]!r}"
    shown = f"exit code {result.exit_code}, limit {result.limit}, {printed}"
    if result.limit not in (attack.limits or (None,)):
        yield f"expected the limit {attack.limits}: {shown}"
    if attack.limits and not result.failed:
        yield f"it has not failed: {shown}"
    if attack.fails is not None and result.failed != attack.fails:
        yield f"expected failed to be {attack.fails}: {shown}"
    if "ESCAPED" in result.stdout or os.environ["SLIPSTREAM_ATTACK_SECRET"] in result.stdout:
        yield f"it has escaped: {shown}"
    if seconds > attack.wall_s + PROMPT_S:
        yield f"it has taken {seconds:.1f} s"
    if len(result.stdout) > LIMITS.output + 100:
        yield f"{len(result.stdout)} characters of output"
    if attack.limits == ("output",) and "[cut after 65536 bytes]" not in result.stdout + result.stderr:
        yield "the output does not say that it is cut"


async def paths_that_lead_out(sandbox: LocalSandbox) -> list[str]:
    """Return the paths that a sandbox should refuse, and does not."""
    wrong: list[str] = []
    for path in REFUSED_PATHS:
        with suppress(SandboxRefused):
            wrong.append(f"downloaded {path!r}: {(await sandbox.download(path))[:50]!r}")
    for path in REFUSED_UPLOADS:
        with suppress(SandboxRefused):
            await sandbox.upload(path, b"x")
            wrong.append(f"uploaded {path!r}")
    await sandbox.upload("absolute", b"replaced")  # the link itself, not what it leads to
    for path, data in {"absolute": b"replaced", "inside": b"fine", "here/inner/../inner/fine": b""}.items():
        with suppress(SandboxRefused):
            if await sandbox.download(path) != data:
                wrong.append(f"downloaded {path!r}")
    return wrong


# -- What is left


def processes_with(text: str) -> list[str]:
    """Return the command lines of this machine's processes that contain a text."""
    lines: list[str] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in line and int(pid) != os.getpid():
                lines.append(f"process {pid}: {line}")
    return lines


def things_of_the_machine() -> set[str]:
    """Return what sandboxes could leave: mounts, their folders, files in shared folders, shared memory.

    Other processes of the machine leave things there, too: files of attacks have numbers as names.
    """
    own = tempfile.gettempdir()
    things = {line for line in Path("/proc/self/mounts").read_text().splitlines() if "sandbox." in line}
    things |= {f"{own}/{name}" for name in os.listdir(own) if "sandbox." in name}
    for folder in ("/dev/shm", "/tmp", "/var/tmp"):
        with suppress(OSError):
            things |= {f"{folder}/{name}" for name in os.listdir(folder) if name.isdigit()}
    with suppress(OSError):
        things |= {
            f"shm {line.split()[1]}" for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
        }
    return things


@contextmanager
def nothing_left(report: Callable[[list[str]], None]) -> Iterator[None]:
    """Report what is there behind the block and was not before."""
    before = things_of_the_machine()
    yield
    deadline = time.monotonic() + 60
    while (left := things_of_the_machine() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    report(sorted(left))


# -- Owners that are killed

OWNER = """
import asyncio, sys
from slipstream.rollout.sandbox.local import LocalSandbox
from tests.sandbox_attacks import LIMITS
token = sys.argv[1]
program = f"import os\\nif not os.fork(): os.setsid(); os.fork()\\nos.execvp('sleep', ['{token}', '1000'])"
async def live():
    while True:
        sandbox = LocalSandbox(LIMITS)
        await sandbox.create()
        print("created", flush=True)
        await sandbox.upload("x", b"x" * 1000000)
        await sandbox.exec(["python3", "-I", "-S", "-c", program], wall_s=float(sys.argv[2]))
        await sandbox.close()
async def main():
    await asyncio.gather(live(), live())
asyncio.run(main())
"""

MOMENTS = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Seconds between the first sandbox of an owner and its end by kill -9."""


def left_by_killed_owner(moment: float, wall_s: float = 0.05) -> list[str]:
    """Kill a process that makes and uses sandboxes without a break. Return the processes that it leaves."""
    token = f"attack-{secrets.token_hex(8)}"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, token, str(wall_s)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert owner.stdout is not None
    try:
        if not owner.stdout.readline():
            return ["the owner has made no sandbox"]
        time.sleep(moment)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
    deadline = time.monotonic() + 60
    while True:
        left = processes_with(token) + keepers_of(owner.pid)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def keepers_of(owner: int) -> list[str]:
    """Return the keeper of a process, and its boxes and inits, which have its command line."""
    return [line for line in processes_with("sandbox.keeper import keep") if f", {owner})" in line]


async def level_here() -> str:
    """Return how far sandboxes are kept from this machine."""
    sandbox = LocalSandbox(LIMITS)
    isolation = await sandbox.create()
    await sandbox.close()
    return isolation.level


def main() -> int:
    """Run all attacks, and kill owners at bad moments. Print what was contained."""
    os.environ.setdefault("SLIPSTREAM_ATTACK_SECRET", secrets.token_hex(16))
    level = asyncio.run(level_here())
    attacks = [attack for attack in ATTACKS if level == "namespaces" or not attack.needs_namespaces]
    print(f"isolation {level}: {len(attacks)} of {len(ATTACKS)} attacks can be contained")
    leftovers: list[str] = []
    contained = 0
    with tempfile.TemporaryDirectory() as folder, nothing_left(leftovers.extend):
        machine = Machine(Path(folder))
        for attack in attacks:
            problems = asyncio.run(problems_of(attack, machine))
            contained += not problems
            print(
                f"{'contained' if not problems else 'NOT CONTAINED':13}  {attack.name}", *problems, flush=True
            )
        for moment in MOMENTS:
            left = left_by_killed_owner(moment)
            contained += not left
            leftovers += left
            print(
                f"{'contained' if not left else 'NOT CONTAINED':13}  owner killed after {moment:g} s", *left
            )
        machine.close()
    total = len(attacks) + len(MOMENTS)
    print(json.dumps({"contained": contained, "of": total, "leftovers": len(leftovers)}))
    return 0 if contained == total and not leftovers else 1


if __name__ == "__main__":
    sys.exit(main())
