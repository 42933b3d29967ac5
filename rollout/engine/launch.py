"""The SGLang server as a program that cannot outlive the process that started it.

    python -m rollout.engine.launch '{"model_path": ..., ...}'      fields of SGLang's ServerArgs, as JSON

Standard input is a pipe from the owner. It closes when the owner is gone, however that happened (kill -9
included), and the whole process group, with the scheduler and detokenizer in it, is killed at once.
"""

import json
import os
import sys
import threading

from rollout.engine.leftovers import kill_group


def _die_with_owner() -> None:
    while os.read(0, 1):
        """Nothing is ever sent: this returns at end of file."""
    kill_group(os.getpgid(0))


def main() -> None:
    threading.Thread(target=_die_with_owner, name="die-with-owner", daemon=True).start()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(ServerArgs(**json.loads(sys.argv[1])))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
