"""The SGLang server as a program that cannot outlive the process that started it.

    python -m slipstream.rollout.engine.launch '{"server": {...}, "replica": null, "temporary": "/tmp/x"}'

``server`` has fields of SGLang's ServerArgs. ``replica`` is null, or has the import path of a function that
adds routes for a copy of the weights to the server (``mount``), and the folder of that copy (``folder``).
``temporary`` is an empty folder for temporary files, which is removed at the end.

Standard input is a pipe from the owner. It closes when the owner ends, by kill -9 too, and then the whole
process group, with the scheduler and detokenizer in it, is killed at once.
"""

import getpass
import importlib
import json
import os
import sys
import tempfile
import threading
from pathlib import Path

from slipstream.rollout.engine.leftovers import kill_group


def _die_with_owner(leftovers: list[Path]) -> None:
    while os.read(0, 1):
        """Nothing is ever sent: read returns at the end of the file."""
    kill_group(os.getpgid(0), leftovers)


def _add_routes(mount: str, folder: str) -> None:
    from sglang.srt.entrypoints.http_server import app

    module, _, name = mount.rpartition(".")
    getattr(importlib.import_module(module), name)(app, folder)


def _use_for_temporary_files(folder: str) -> None:
    """Set the temporary folder before it is first used. The cache of torch's compiler stays where it is."""
    compiled = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def main() -> None:
    settings = json.loads(sys.argv[1])
    replica = settings["replica"]
    leftovers = [Path(settings["temporary"]), *([Path(replica["folder"])] if replica else [])]
    _use_for_temporary_files(settings["temporary"])
    threading.Thread(target=_die_with_owner, args=(leftovers,), name="die-with-owner", daemon=True).start()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    if replica:
        _add_routes(**replica)
    try:
        run_server(ServerArgs(**settings["server"]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
