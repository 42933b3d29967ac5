"""The folder of a run: how it is made, who may use it, and whether it belongs to the recipe.

Only the user may enter it unless `run.mode` says otherwise.

recipe.yaml       the recipe with every default filled in
lock              locked by the process that runs a run without a ledger
ledger.sqlite     locked by the process that runs any other
checkpoints/, checkpoint-hf/, logs/, metrics.jsonl, trace.jsonl, summary.json
"""

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import yaml

from slipstream.backend.checkpoint.errors import describe
from slipstream.backend.checkpoint.folder import CHECKPOINTS, CheckpointFolder
from slipstream.backend.driver.inputs import InputError
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.base import Section
from slipstream.rollout.ledger.database import LedgerBusy, LedgerError, open_for_reading
from slipstream.rollout.ledger.recovery import LEDGER

AnySection = TypeVar("AnySection", bound=Section)

RECIPE = "recipe.yaml"
LOCK = "lock"
"""The file stays. What counts is who has it locked, which ends with that process."""
LOGS = "logs"
CHECKPOINT_HF = "checkpoint-hf"
"""The trained policy as an HF checkpoint."""

FIXED = (
    "run.seed",
    "model.path",
    "data.path",
    "data.shuffle",
    "rollout.batch_size",
    "rollout.n_samples_per_prompt",
)
"""Settings that give the ledger its meaning: they cannot change when a run is resumed."""


def recipe_text(config: RunConfig) -> str:
    """Return the recipe as YAML with every default filled in."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def write_recipe(config: RunConfig) -> None:
    """Write the recipe into the run folder."""
    (config.run.folder / RECIPE).write_text(recipe_text(config))


def start_folder(config: RunConfig) -> Path:
    """Make the run folder, with the recipe in it. The folder of an earlier run is renamed first.

    Raises LedgerBusy or InputError when that run is still running.
    """
    folder = config.run.folder
    if folder.exists():
        refuse_if_running(folder)
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(folder.stat().st_mtime))
        folder.rename(folder.with_name(f"{folder.name}.{stamp}"))
    (folder / LOGS).mkdir(parents=True)
    write_recipe(config)
    return folder


@contextmanager
def permissions(config: RunConfig) -> Iterator[None]:
    """Let new files and folders of this process have the permissions of `run.mode` while the context lasts.

    The folder of all runs keeps the user's own: runs of others may be in it. Raises InputError.
    """
    try:
        config.run.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot use {config.run.root}: {describe(error)}") from error
    before = os.umask(config.run.umask)
    try:
        yield
    finally:
        os.umask(before)


def apply_mode(config: RunConfig) -> None:
    """Give the folder of an earlier run the permissions of `run.mode`. Raises OSError if it is another's."""
    folder, mode = config.run.folder, int(config.run.mode, 8)
    if folder.stat().st_mode & 0o777 != mode:
        folder.chmod(mode)


def with_absolute_paths(section: AnySection) -> AnySection:
    """Return the same settings with absolute paths: other nodes need not share the working directory."""
    changed: dict[str, object] = {}
    for name, value in section:
        if isinstance(value, Path):
            changed[name] = value.resolve()
        elif isinstance(value, Section):
            changed[name] = with_absolute_paths(value)
    return section.model_copy(update=changed)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder that has no ledger. Raises InputError while another process holds it."""
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{folder}: another process is running this run: wait for its end, or end it"
            ) from None
        yield


def can_resume(folder: Path) -> bool:
    """Return whether the folder holds a run of ``slipstream train``."""
    return (folder / LEDGER).exists()


def refuse_if_running(folder: Path) -> None:
    """Raise LedgerBusy or InputError when a process is running the run in ``folder``."""
    if (folder / LOCK).exists():
        with locked(folder):
            """No process holds the lock."""
    try:
        open_for_reading(folder / LEDGER).close()
    except LedgerBusy:
        raise
    except LedgerError:
        """There is no ledger, or a damaged one: no process can be running it."""


def refuse_without_ledger(folder: Path) -> None:
    """Raise InputError when there are checkpoints but no ledger with their history."""
    if CheckpointFolder(folder / CHECKPOINTS, keep_last=1).all():
        raise InputError(
            f"{folder} has checkpoints but no {LEDGER}, which says what they were trained on: "
            "restore the file, or start anew without --resume (the folder is set aside)"
        )


def check_same_run(config: RunConfig) -> None:
    """Raise InputError when a setting of ``FIXED`` differs from the recipe in the run folder."""
    recipe = config.run.folder / RECIPE
    try:
        before: Mapping[str, object] = yaml.safe_load(recipe.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"cannot resume {config.run.folder}: {recipe}: {error}") from None
    now = config.model_dump(mode="json")
    changed = [
        f"{key}: {_setting(now, key)!r}, but the run was started with {_setting(before, key)!r}"
        for key in FIXED
        if _setting(now, key) != _setting(before, key)
    ]
    if changed:
        raise InputError(
            "\n".join(changed) + f"\nto resume {config.run.folder}, set these as they were; "
            "for another run, choose another run.name"
        )


def _setting(recipe: object, key: str) -> object:
    for part in key.split("."):
        recipe = recipe[part] if isinstance(recipe, dict) else None
    return recipe
