"""The SGLang server as a program that cannot outlive the process that started it.

    python -m slipstream.rollout.engine.launch \\
        '{"server": {...}, "prepare": [], "replica": null, "meeting": null, "temporary": "/tmp/x",
          "facts": {}}'

``server`` has fields of SGLang's ServerArgs. ``prepare`` has the import paths of functions that change SGLang
before the server starts. ``replica`` is null, or has the import path of a function that adds
routes for a copy of the weights to the server (``mount``), the folder of that copy (``folder``) and the
checkpoint from which the server starts (``model``).
``meeting`` is null, or has the address and port at which all ranks of an engine meet (``address``, ``port``).
``temporary`` is an empty folder for temporary files, which is removed at the end. ``facts`` is what the
server says of itself at ``FACTS``: a driver compares it before it takes a server that it has not started.

``patches.py`` lists what is changed inside SGLang, and for which of its releases.

An engine over several nodes has one such program on each of them. That of node rank 0 answers requests. The
others listen on no port for them; each leaves the file ``READY`` in its temporary folder once its ranks are
ready.

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
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.rollout.engine import dead_ends, patches
from slipstream.rollout.engine.leftovers import announced, kill_group
from slipstream.rollout.system import plugins
from slipstream.rollout.system.garbage import kept_for_good
from slipstream.rollout.system.key import Key, KeyRequired
from slipstream.rollout.system.stacks import shows_stacks

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

STORE_TIMEOUT = timedelta(minutes=30)
"""Torch's own patience with the other ranks of a process group."""

FACTS = "/slipstream/engine"
"""Route at which a server says what it serves, and by which code."""

READY = "ready"
"""File by which a server that answers no requests says that its ranks are ready."""


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


def _open_store(meeting: Mapping[str, Any] | None, *, is_first: bool) -> "TCPStore | None":
    """Let the engine's processes find each other in one store, which is opened here on the first node.

    Without a meeting point they share a node, and the store is on loopback. Left to itself, SGLang opens one
    on every interface of the machine. The store lives as long as the object that is returned.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    listener = None
    if is_first:
        listener = socket.create_server(
            (meeting["address"], meeting["port"]) if meeting else ("127.0.0.1", 0)
        )
        address, port = listener.getsockname()
    else:
        assert meeting is not None
        address, port = meeting["address"], meeting["port"]
    os.environ |= {
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "env://",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if listener is None:
        return None
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _be_another_node(folder: Path) -> None:
    """Change what SGLang does on a node that is not the first.

    It leaves ``READY`` in ``folder`` in place of its server of health checks, which asks for no key. It does
    not wait until the ports of the first node are free on this one too.
    """
    from sglang.srt import server_args
    from sglang.srt.entrypoints import engine

    def announce(host: str, port: int, enable_metrics: bool) -> None:
        (folder / READY).touch()

    engine.launch_dummy_health_check_server = announce
    server_args.wait_port_available = lambda port, port_name: True


def _tell(facts: Mapping[str, str]) -> None:
    from sglang.srt.entrypoints.http_server import app

    async def told() -> dict[str, str]:
        return dict(facts)

    app.add_api_route(FACTS, told)


def _add_routes(mount: str, folder: str, model: str) -> None:
    from sglang.srt.entrypoints.http_server import app

    plugins.resolve(mount)(app, folder, model)


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


def read_tokenizer(folder: Path, settings: Mapping[str, Any]) -> Any:
    """Return the tokenizer of a model folder as SGLang reads it. ``settings``: arguments of the server."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    return get_tokenizer(str(folder), **settings)


def check_arguments(arguments: Mapping[str, object]) -> None:
    """Raise what SGLang raises at its start for arguments that it does not take. Starts nothing."""
    from sglang.srt.server_args import ServerArgs

    made = ServerArgs(**arguments)  # pyright: ignore[reportArgumentType]
    made.resolve_once()
    made.check_server_args()


def main() -> None:
    shows_stacks()
    settings = json.loads(sys.argv[1])
    replica, temporary = settings["replica"], Path(settings["temporary"])
    leftovers = [Path(replica["folder"])] if replica else []
    _use_for_temporary_files(str(temporary))
    key = _read_key()
    threading.Thread(
        target=_die_with_owner, args=(temporary, leftovers), name="die-with-owner", daemon=True
    ).start()
    patches.check(
        patches.LAUNCH, patches.DEAD_ENDS, *(path.rpartition(".")[0] for path in settings["prepare"])
    )
    with kept_for_good():
        from sglang.launch_server import run_server
        from sglang.srt.server_args import ServerArgs
        from sglang.srt.utils import kill_process_tree

        for prepare in settings["prepare"]:
            plugins.resolve(prepare)()
        if replica:
            _add_routes(**replica)
        _tell(settings["facts"])
        _require_key(key)
        dead_ends.use()
        _announce_shared_memory(temporary)
        is_first = settings["server"].get("node_rank", 0) == 0
        if not is_first:
            _be_another_node(temporary)
    store = _open_store(settings["meeting"], is_first=is_first)
    try:
        # SGLang needs the key as well, because it calls some of its own routes.
        run_server(ServerArgs(**settings["server"], **{"api_key": key}))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
        del store


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # in a process that SGLang spawns; one that it forks has the handler already
    shows_stacks()
