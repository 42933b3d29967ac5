"""Errors that end a command. Its exit code is 2 for wrong input, 3 or 75 for a stopped run, or else 1."""

from pathlib import Path


class CommandError(Exception):
    """A command has come to an end. The message is for the user; every line of it stands for itself."""

    exit_code = 1


class Failed(CommandError):
    """The work has failed or was stopped."""


class WasStopped(Failed):
    """The user has stopped the run, which ``--resume`` goes on with."""

    exit_code = 3


class NotYet(Failed):
    """The same command goes on with it: a run that its job has ended, an engine that is still leaving."""

    exit_code = 75
    """EX_TEMPFAIL of sysexits.h: the same again is expected to get further."""


class WrongInput(CommandError):
    """The user's input cannot be used. The message lists every reason."""

    exit_code = 2


def not_a_folder(folder: Path) -> str:
    """Return what is at the path of a folder that is none."""
    return "this is a file" if folder.exists() else "no such folder"


def cannot_hold(file: Path, name: str) -> list[str]:
    """Return why a file cannot be written. ``name``: how it is called by default."""
    if file.is_dir():
        return [f"{file}: this is a folder; expected a file to write, such as {file / name}"]
    if not file.parent.is_dir():
        return [f"{file}: there is no folder {file.parent}: make it, or name another file"]
    return []


def no_run(folder: Path, lacks: str) -> str:
    """Return why a folder is not that of a run. It names a run in the folder, if there is one.

    ``lacks``: the files that are not in it, in words.
    """
    why = f"no {lacks} in it" if folder.is_dir() else not_a_folder(folder)
    runs = [
        path.parent for pattern in ("*", "runs/*") for path in sorted(folder.glob(f"{pattern}/metrics.jsonl"))
    ]
    return f"{folder}: {why}; expected the folder of a run, such as {runs[0] if runs else 'runs/quickstart'}"
