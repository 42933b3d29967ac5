"""The SGLang server as a program that cannot outlive the process that started it.

    python -m slipstream.rollout.engine.launch \\
        '{"server": {...}, "prepare": null, "replica": null, "temporary": "/tmp/x"}'

``server`` has fields of SGLang's ServerArgs. ``prepare`` is null, or the import path of a function that
changes SGLang before the server starts. ``replica`` is null, or has the import path of a function that adds
routes for a copy of the weights to the server (``mount``), and the folder of that copy (``folder``).
``temporary`` is an empty folder for temporary files, which is removed at the end.

Standard input is a pipe from the owner. Its first line is the key that every request must carry. It closes
when the owner ends, by kill -9 too, and then the whole process group, with the scheduler and detokenizer in
it, is killed at once.
"""

import getpass
import json
import os
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.rollout import plugins
from slipstream.rollout.engine.key import Key, KeyRequired
from slipstream.rollout.engine.leftovers import announced, kill_group
from slipstream.rollout.garbage import kept_for_good

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

STORE_TIMEOUT = timedelta(minutes=30)
"""Torch's own patience with the other ranks of a process group."""


def _read_key() -> Key:
    """Read the first line of standard input, and not a byte more."""
    line = bytearray()
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return Key(line.decode())


def _die_with_owner(temporary: Path, leftovers: list[Path]) -> None:
    while os.read(0, 1):
        """Nothing is ever sent: read returns at the end of the file."""
    kill_group(os.getpgid(0), [*announced(temporary), temporary, *leftovers])


def _require_key(key: Key) -> None:
    """Enclose the whole server, with everything that SGLang adds to it later."""
    from sglang.srt.entrypoints.http_server import app

    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: KeyRequired(build(), key)


def _open_store() -> "TCPStore":
    """Open the store in which the server's processes find each other, on loopback: they share a node.

    Left to itself, SGLang opens one on every interface of the machine. The store lives as long as the object
    that is returned.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    listener = socket.create_server(("127.0.0.1", 0))
    address, port = listener.getsockname()
    os.environ |= {
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "env://",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _add_routes(mount: str, folder: str) -> None:
    from sglang.srt.entrypoints.http_server import app

    plugins.resolve(mount)(app, folder)


def _use_for_temporary_files(folder: str) -> None:
    """Set the temporary folder before it is first used.

    The cache of torch's compiler stays where torch has it, unless another user has made a folder of that
    name: what is in the cache is executed.
    """
    compiled = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    with suppress(FileExistsError):
        compiled.mkdir(mode=0o700)
    if compiled.lstat().st_uid == os.geteuid():
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def _announce_shared_memory(folder: Path) -> None:
    """Leave a link in ``folder`` to the file in which SGLang's schedulers publish their load.

    Its name is drawn here, before there is a scheduler. A scheduler that is killed while it starts may be
    the only process that has the file mapped, and SGLang removes it in no case.
    """
    from sglang.srt.managers.load_snapshot import shm_path_for
    from sglang.srt.server_args import PortArgs, ServerArgs

    make = PortArgs.init_new

    def announced_ports(
        server_args: ServerArgs, dp_rank: int | None = None, worker_ports: list[int] | None = None
    ) -> PortArgs:
        ports = make(server_args, dp_rank, worker_ports)
        file = Path(shm_path_for(ports.instance_id))
        folder.joinpath(file.name).symlink_to(file)
        return ports

    PortArgs.init_new = staticmethod(announced_ports)


def main() -> None:
    settings = json.loads(sys.argv[1])
    replica, temporary = settings["replica"], Path(settings["temporary"])
    leftovers = [Path(replica["folder"])] if replica else []
    _use_for_temporary_files(str(temporary))
    key = _read_key()
    threading.Thread(
        target=_die_with_owner, args=(temporary, leftovers), name="die-with-owner", daemon=True
    ).start()
    with kept_for_good():
        from sglang.launch_server import run_server
        from sglang.srt.server_args import ServerArgs
        from sglang.srt.utils import kill_process_tree

        if settings["prepare"]:
            plugins.resolve(settings["prepare"])()
        if replica:
            _add_routes(**replica)
        _require_key(key)
        _announce_shared_memory(temporary)
    store = _open_store()
    try:
        # SGLang needs the key as well, because it calls some of its own routes.
        run_server(ServerArgs(**settings["server"], **{"api_key": key}))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
        del store


if __name__ == "__main__":
    main()
