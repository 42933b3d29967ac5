"""A process that opens a run as ``slipstream train`` does, and goes no further, for tests of two of them.

    python -m tests.unit.open_run_process RECIPE HOST [resume] [nolocks]

``HOST`` is the machine that the process pretends to be on; with ``nolocks`` the file system has no working
locks. Prints ``opened EPOCH`` and ends when standard input does, or prints why the run cannot be opened. The
exit code is that of the command line.
"""

import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import yaml

from slipstream.backend.commands.outcome import CommandError
from slipstream.backend.commands.run import attended
from slipstream.backend.driver.start import run_folder
from slipstream.backend.driver.start.resume import open_run
from slipstream.backend.monitor.progress import Progress
from slipstream.configs.schema import RunConfig
from slipstream.rollout.ledger.lease import folder_lease as leases
from slipstream.rollout.ledger.lease.driver_file import Machine
from slipstream.rollout.ledger.storage import database
from slipstream.rollout.prompts import PromptSet
from slipstream.rollout.tokens.trajectory import Prompt


def main() -> int:
    recipe, host, *options = sys.argv[1:]
    config = RunConfig.model_validate(yaml.safe_load(Path(recipe).read_text()))
    Machine.this = lambda: Machine(host, "boot", "pids")  # type: ignore[method-assign]
    if "nolocks" in options:
        database.fcntl_error = lambda folder: "none here"
        leases.take_lease.__kwdefaults__["lock"] = lambda descriptor: None
        run_folder.lock_problem = lambda folder: "none here"
    inputs = SimpleNamespace(prompts=PromptSet.of([Prompt(0, "a prompt")]))

    async def open_and_wait(progress: Progress) -> None:
        with ExitStack() as stack:
            _, state = await open_run(config, inputs, progress, "resume" in options)  # type: ignore[arg-type]
            stack.enter_context(state.lease.held(lambda loss: None))
            stack.callback(state.ledger.close)
            print(f"opened {state.ledger.epoch}", flush=True)
            sys.stdin.read()

    try:
        attended(config, open_and_wait)
    except CommandError as error:
        print(error, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
