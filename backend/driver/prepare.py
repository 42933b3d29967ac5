"""Runs a recipe's ``prepare`` in a process of its own: it may need torch, and it must not outlive the run.

python -m slipstream.backend.driver.prepare '{"path": ..., "args": {...}}'

Prints progress lines on standard output.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slipstream.configs.schema import RunConfig
from slipstream.rollout.plugins import resolve

LONGEST_LINE = 2**24
"""Bytes. A progress bar that redraws itself writes one very long line."""


class PrepareFailed(RuntimeError):
    """The recipe's ``prepare`` has failed, or has not made the files it was called for."""


def input_paths(config: RunConfig) -> dict[str, Path]:
    """Return the files that the run reads, by the argument names of ``prepare``."""
    paths = {"model_path": config.model.path}
    paths |= {"data_path": config.data.path} if config.data else {}
    return paths | ({"eval_path": config.eval.path} if config.eval else {})


async def prepare_inputs(config: RunConfig, say: Callable[[str], None]) -> None:
    """Call the recipe's ``prepare`` when one of the run's inputs is missing. Raises PrepareFailed."""
    paths = input_paths(config)
    if config.prepare is None or all(path.exists() for path in paths.values()):
        return
    arguments = (
        {name: str(path) for name, path in paths.items()} | {"seed": config.run.seed} | config.prepare.args
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "slipstream.backend.driver.prepare",
        json.dumps({"path": config.prepare.path, "args": arguments}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=LONGEST_LINE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.ensure_future(process.stderr.read())
    try:
        async for line in process.stdout:
            say(line.decode(errors="replace").rstrip())
        code = await process.wait()
        if code != 0:
            tail = (await errors).decode(errors="replace").strip().splitlines()[-15:]
            raise PrepareFailed("\n".join([f"{config.prepare.path} {_ending(code)}:", *tail]))
    finally:
        errors.cancel()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if absent := [str(path) for path in paths.values() if not path.exists()]:
        raise PrepareFailed(f"{config.prepare.path} has ended well, but did not make {', '.join(absent)}")


def _ending(code: int) -> str:
    return f"failed with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"


def main() -> None:
    request = json.loads(sys.argv[1])
    arguments = request["args"]
    for name in ("model_path", "data_path", "eval_path"):
        if name in arguments:
            arguments[name] = Path(arguments[name])
    resolve(request["path"])(**arguments, say=lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
