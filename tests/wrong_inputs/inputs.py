"""Hands a wrong input in as a user does, and looks at the message and at what is left behind.

All cases run in one process, which has imported everything.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from slipstream.backend.cli.app import app
from slipstream.rollout.system.linux import children_of
from tests.wrong_inputs.case import WrongInput
from tests.wrong_inputs.world import build


@dataclass(frozen=True)
class Told:
    """What a command has said of a wrong input."""

    message: str
    problems: tuple[str, ...]
    """What is wrong with the message, or with what the command has left behind."""


def hand_in(case: WrongInput, folder: Path, model: Path) -> Told:
    """Run the command of a case in ``folder``, which is made, and judge it."""
    folder.mkdir()
    build(case, folder, model)
    arguments = [case.in_folder(each, folder) for each in (*case.arguments, *case.overrides)]
    (folder / "tmp").mkdir()
    before, children = _files(folder), set(children_of(os.getpid()))
    with _surroundings(case, folder):
        result = CliRunner().invoke(app, arguments)
    message, problems = result.stderr, list[str]()
    if result.exit_code != 2:
        error = "" if result.exception is None else f" ({result.exception!r})"
        problems.append(f"exit code {result.exit_code}{error}")
    if "Traceback" in message:
        problems.append("a traceback")
    problems += [f"lacks {words!r}" for words in case.says if case.in_folder(words, folder) not in message]
    if len(message.splitlines()) < case.count:
        problems.append(f"{len(message.splitlines())} lines, expected {case.count}")
    if new := sorted(map(str, _files(folder) ^ before)):
        problems.append(f"left behind: {', '.join(new[:3])}")
    if set(children_of(os.getpid())) - children:
        problems.append("a process is left")
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        problems.append("Ray was started")
    return Told(message.replace(str(folder), "FOLDER").strip(), tuple(problems))


@contextmanager
def _surroundings(case: WrongInput, folder: Path) -> Iterator[None]:
    """Make the folder importable, and set the environment of a case."""
    environment, path = dict(os.environ), list(sys.path)
    os.environ.update({"NO_COLOR": "1", "COLUMNS": "500", **case.environment})
    sys.path.insert(0, str(folder))
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder / "tmp")}
    sys.dont_write_bytecode, writes = True, sys.dont_write_bytecode
    tempfile.tempdir, temporary = str(folder / "tmp"), tempfile.tempdir
    try:
        yield
    finally:
        sys.dont_write_bytecode, sys.path[:], tempfile.tempdir = writes, path, temporary
        os.environ.clear()
        os.environ.update(environment)


def _files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))
