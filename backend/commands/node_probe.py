"""What one node of a job answers to ``slipstream doctor --nodes``: JSON, a line for each line that it reads.

    doctor ── stdin: {"do": "meet", ...} ──► probe of every node ── stdout: {"answer": ...} ──► doctor
                                              ▲      │
                                              └─ TCP ┘   every pair

Neither the network between the nodes nor their file system carries the questions: both are examined.
"""

import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slipstream.backend.commands.gpu_doctor import ThisMachine
from slipstream.backend.commands.node_surroundings import surroundings
from slipstream.rollout.ledger.storage.locks import lock_problem
from slipstream.rollout.system.network import process_group_variables
from slipstream.slurm.own_address import route_source

CONNECT_S = 5.0
"""Longest wait for a connection between two nodes."""

STREAM_S = 20.0
"""Longest time for one transfer between two nodes."""

REDUCE_S = 25.0
"""Longest time for all nodes to meet in a process group and to add up tensors."""

CHUNK = bytes(2**20)
PACKAGES = ("slipstream", "torch", "megatron-core", "sglang", "ray", "transformers", "numpy")
MARK, LOCKED = ".slipstream-doctor", ".slipstream-doctor-lock"
"""Files that the first node writes, and holds a lock of, in the folder of runs."""


def installed() -> dict[str, str]:
    """Return the versions that must be the same on all nodes."""
    found = {"Python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


class Probe:
    """Answers questions about its node. Every failure of a question is an answer, too."""

    calls = (fcntl.flock, fcntl.lockf)
    """Locks of runs: of their folders, and of SQLite."""

    def __init__(
        self,
        node: str,
        address: str,
        folder: Path,
        local_disk: Path,
        *,
        clock: Callable[[], float] = time.time,
        versions: Callable[[], dict[str, str]] = installed,
        locks: Callable[[Path], str | None] = lock_problem,
        machine: ThisMachine | None = None,
    ) -> None:
        """``address``: of the node, for the other nodes. ``folder``: of runs, for all nodes. ``machine``:
        what surrounds the process; None: this machine.
        """
        self._node, self._address, self._folder, self._local_disk = node, address, folder, local_disk
        self._clock, self._versions, self._locks = clock, versions, locks
        self._machine = machine or ThisMachine()
        self._server = socket.create_server((address, 0))
        self._held: Any = None
        threading.Thread(target=self._serve, daemon=True).start()

    def answer(self, question: Mapping[str, Any]) -> object:
        """Return the answer to a question: ``do`` names a method, the rest are its arguments."""
        given = dict(question)
        return getattr(self, f"do_{given.pop('do')}")(**given)

    def close(self) -> None:
        """Stop to listen."""
        self._server.close()

    # ---- what others ask over the network

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()

    def _serve_one(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rwb") as stream:
                connection.settimeout(STREAM_S)
                left = int(stream.readline())
                while left > 0 and (data := stream.read(min(left, len(CHUNK)))):
                    left -= len(data)
                stream.write(f"{self._clock()}\n".encode())
        except (OSError, ValueError):
            """The other side has gone, or is no probe."""

    def _ask(self, peer: tuple[str, int], size: int) -> tuple[float, float]:
        """Send ``size`` bytes to a probe. Return the seconds until its answer, and its clock then."""
        with socket.create_connection(peer, timeout=CONNECT_S) as connection:
            connection.settimeout(STREAM_S)
            began = time.monotonic()
            connection.sendall(f"{size}\n".encode())
            for _ in range(size // len(CHUNK)):
                connection.sendall(CHUNK)
            with connection.makefile("rb") as stream:
                theirs = float(stream.readline() or "nan")
            return time.monotonic() - began, theirs

    # ---- the questions

    def do_hello(self) -> object:
        return {
            "address": [self._address, self._server.getsockname()[1]],
            "free": _free_port(self._address),
            "versions": self._versions(),
        }

    def do_look(self) -> object:
        """Return what surrounds this process."""
        return surroundings(self._machine)

    def do_meet(self, peers: Mapping[str, tuple[str, int]]) -> object:
        """Connect to every other node. The answer has, by node, the offset of its clock, or why it failed."""
        met: dict[str, object] = {}
        threads = [
            threading.Thread(target=self._meet, args=(peer, address, met))
            for peer, address in peers.items()
            if peer != self._node
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return met

    def _meet(self, peer: str, address: tuple[str, int], met: dict[str, object]) -> None:
        try:
            seconds, theirs = self._ask((address[0], address[1]), 0)
            met[peer] = {"seconds": seconds, "offset": theirs - (self._clock() - seconds / 2)}
        except (OSError, ValueError) as error:
            met[peer] = f"{error}" or type(error).__name__

    def do_stream(self, pairs: Mapping[str, tuple[str, int]], size: int) -> object:
        """Send bytes to the node that ``pairs`` names for this one. Return bytes per second."""
        if self._node not in pairs:
            return None
        host, port = pairs[self._node]
        seconds, _ = self._ask((host, port), size)
        return size / seconds

    def do_mark(self, first: str, text: str) -> object:
        """Write the file that all nodes must see, and lock another one, on the node ``first``."""
        if self._node != first:
            return None
        (self._folder / MARK).write_text(text)
        self._held = (self._folder / LOCKED).open("w")
        fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None

    def do_see(self, first: str, text: str) -> object:
        """Return what keeps nodes from sharing the folder and from locking files in it."""
        seen = self._folder / MARK
        if not seen.exists() or seen.read_text() != text:
            return {"unshared": True}
        if self._node == first:
            return {"locks": self._locks(self._folder)}
        with (self._folder / LOCKED).open("r+") as file:
            for call in self.calls:
                try:
                    call(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                except OSError as error:
                    return {"locks": f"{call.__name__}: {error.strerror or error}"}
                return {"locks": f"{call.__name__}: granted although {first} holds it"}
        return {"locks": None}

    def do_unmark(self, first: str) -> object:
        if self._node == first and self._held is not None:
            self._held.close()
            for name in (MARK, LOCKED):
                (self._folder / name).unlink(missing_ok=True)
        return None

    def do_write(self, size: int) -> object:
        """Write a file, as all nodes do at once. Return bytes per second, by disk."""
        return {"folder": _write_rate(self._folder, size), "local": _write_rate(self._local_disk, size)}

    def do_bind(self, first: str, port: int) -> object:
        """Try the port of Ray's head on the node ``first``."""
        if self._node == first:
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind((self._address, port))
        return None

    def do_load(self) -> object:
        """Import what ``do_reduce`` needs, which takes long on a shared file system."""
        os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", **process_group_variables(self._address)}
        import torch.distributed

        return torch.__version__

    def do_reduce(self, ranks: Mapping[str, int], host: str, port: int, size: int) -> object:
        """Add up a tensor over all nodes, by NCCL where there are GPUs. Return bytes per second of a node."""
        import torch
        from torch import distributed

        on_gpu = torch.cuda.is_available()
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"tcp://{host}:{port}",
            rank=ranks[self._node],
            world_size=len(ranks),
            timeout=timedelta(seconds=REDUCE_S),
        )
        tensor = torch.ones(size // 4, device="cuda" if on_gpu else "cpu")
        best = float("inf")
        for _ in range(3):
            began = time.monotonic()
            distributed.all_reduce(tensor)
            if on_gpu:
                torch.cuda.synchronize()
            best = min(best, time.monotonic() - began)
        distributed.destroy_process_group()
        return size * 2 * (len(ranks) - 1) / len(ranks) / best


def _free_port(address: str) -> int:
    with socket.socket() as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])


def _write_rate(folder: Path, size: int) -> float:
    path = folder / f"{MARK}-{socket.gethostname()}-{os.getpid()}"
    try:
        began = time.monotonic()
        with path.open("wb") as file:
            for _ in range(size // len(CHUNK)):
                file.write(CHUNK)
            file.flush()
            os.fsync(file.fileno())
        return size / (time.monotonic() - began)
    finally:
        path.unlink(missing_ok=True)


def main() -> None:
    """Answer until stdin ends. ``node_probe.py FOLDER LOCAL_DISK NODE=ADDRESS ...``"""
    folder, local_disk, *named = sys.argv[1:]
    node = os.environ.get("SLURMD_NODENAME", "")
    addresses = dict(each.split("=", 1) for each in named)
    peer = next((address for name, address in addresses.items() if name != node), "127.0.0.1")
    probe = Probe(node, route_source(peer), Path(folder), Path(local_disk))
    for line in sys.stdin:
        question = json.loads(line)
        number = question.pop("number")
        try:
            answer: dict[str, object] = {"answer": probe.answer(question)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"node": node, "number": number, **answer}), flush=True)


if __name__ == "__main__":
    main()
