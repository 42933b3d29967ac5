"""Runs a recipe's ``prepare`` in a process of its own: it may need torch, and it must not outlive the run.

python -m slipstream.backend.driver.start.prepare '{"path": ..., "args": {...}}'

Prints progress lines on standard output.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.configs.schema import RunConfig, is_on_hub, path_text
from slipstream.rollout.system.plugins import resolve

LONGEST_LINE = 2**24
"""Bytes. A progress bar that redraws itself writes one very long line."""


class PrepareFailed(RuntimeError):
    """The recipe's ``prepare`` has failed, or has not made the files it was called for."""


Inputs = dict[str, Path | dict[str, Path]]


def input_paths(config: RunConfig) -> Inputs:
    """Return the files that the run reads, by the argument names of ``prepare``: ``data_path``, or
    ``data_paths`` by their names where there are several."""
    paths: Inputs = {"model_path": config.model.path}
    for section, files in (("data", config.training_files), ("eval", config.held_out_files)):
        named = {file.name: file.path for file in files if file.name}
        paths |= {f"{section}_paths": named} if named else {f"{section}_path": file.path for file in files}
    return paths


def _missing(paths: Inputs) -> list[str]:
    """Return the files that do not exist."""
    files = [
        file for each in paths.values() for file in (each.values() if isinstance(each, dict) else [each])
    ]
    return [str(file) for file in files if not is_on_hub(file) and not file.exists()]


def _as_text(path: Path | dict[str, Path]) -> object:
    return (
        {name: path_text(each) for name, each in path.items()} if isinstance(path, dict) else path_text(path)
    )


def _as_path(text: Any) -> object:
    return {name: Path(each) for name, each in text.items()} if isinstance(text, dict) else Path(text)


async def prepare_inputs(config: RunConfig, say: Callable[[str], None]) -> None:
    """Call the recipe's ``prepare`` when one of the run's inputs is missing. Raises PrepareFailed."""
    paths = input_paths(config)
    if config.prepare is None or not _missing(paths):
        return
    arguments = (
        {name: _as_text(path) for name, path in paths.items()}
        | {"seed": config.run.seed}
        | config.prepare.args
    )
    await run_module(
        "slipstream.backend.driver.start.prepare",
        {"path": config.prepare.path, "args": arguments},
        say,
        name=config.prepare.path,
    )
    if absent := _missing(paths):
        raise PrepareFailed(f"{config.prepare.path} has ended well, but did not make {', '.join(absent)}")


async def run_module(module: str, request: object, say: Callable[[str], None], *, name: str) -> None:
    """Run a module with ``request`` as JSON in a process of its own, and wait for its end.

    ``say``: hears the lines that it prints. ``name``: what runs, for the message of PrepareFailed, which is
    raised if it fails.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        json.dumps(request),
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
            raise PrepareFailed("\n".join([f"{name} {_ending(code)}:", *tail]))
    finally:
        errors.cancel()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _ending(code: int) -> str:
    return f"failed with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"


def main() -> None:
    request = json.loads(sys.argv[1])
    arguments = request["args"]
    for name in ("model_path", "data_path", "data_paths", "eval_path", "eval_paths"):
        if name in arguments:
            arguments[name] = _as_path(arguments[name])
    resolve(request["path"])(**arguments, say=lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
