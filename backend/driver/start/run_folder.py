"""The folder of a run: how it is made, who may use it, and whether it belongs to the recipe.

Only the user may enter it unless `run.mode` says otherwise.

recipe.yaml       the recipe with every default filled in
hub.json          the commits of what is on the hub: ``hub_models.py``
inputs.json       the data sets and the model, by their content: ``identity.py``
submitted/        what its jobs were submitted with: ``commands/frozen.py``
job.json          the Slurm job that drives the run, or drove it last, if there is one: ``job.py``
driver.json       the driver that may write here, with driver.term.N: ``rollout/ledger/lease/folder_lease.py``
ledger.sqlite     the state of every group, unless the run is one of ``slipstream sft``
driver.log        the output of the terminal
episodes/         episodes as text: ``rollout/ledger/episode_log/files.py``
transports.json   which transports of weights have worked, and which not: ``weights/transports.py``
engine-model/     the model that engines start from, if it differs from `model.path`: ``engine_model.py``
checkpoints/, checkpoint-hf/, logs/, metrics.jsonl, trace.jsonl, summary.json
"""

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar, cast

import yaml

from slipstream.backend.checkpoint.folder import CHECKPOINTS, CheckpointFolder
from slipstream.backend.driver.start.identity import INPUTS, KnownInputs, current_inputs, inputs_to_go_on_with
from slipstream.backend.driver.start.inputs import InputError
from slipstream.backend.driver.start.job import SUBMITTED, is_restart, job_in, record_job
from slipstream.backend.monitor.metrics import METRICS_FILE
from slipstream.backend.monitor.progress import Progress
from slipstream.configs.rules.models import model_folder
from slipstream.configs.schema import RunConfig, is_on_hub
from slipstream.configs.schema.base import Section
from slipstream.configs.schema.paths import model_settings
from slipstream.rollout.ledger.lease.driver_file import DRIVER, is_lease_file
from slipstream.rollout.ledger.lease.folder_lease import FolderLease, take_lease, wait_until_free
from slipstream.rollout.ledger.recovery import LEDGER
from slipstream.rollout.ledger.storage.database import LedgerBusy
from slipstream.rollout.ledger.storage.locks import lock_problem
from slipstream.rollout.system.disk import describe
from slipstream.rollout.system.durable import write_durably

AnySection = TypeVar("AnySection", bound=Section)

RECIPE = "recipe.yaml"
LOGS = "logs"
CHECKPOINT_HF = "checkpoint-hf"
"""The trained policy as an HF checkpoint."""

EarlierRun = Literal["refuse", "delete", "set aside"]
"""Treatment of an existing run folder when a run starts from the beginning. ``set aside``: the folder is
renamed, and the user is told; for a run that goes on when the folder has nothing to go on with."""

RESTART_LOOK_S, RESTART_LOOKS = 10.0, 18
"""Seconds between two attempts of a restarted job to take its run folder over, and the number of further
attempts. An NFSv4 server keeps the locks of a node that has died for 90 s by default."""

OF_A_RUN = (DRIVER, INPUTS, LEDGER, METRICS_FILE, CHECKPOINTS)
"""Files by which the folder of a run is recognized. A folder without them is never deleted. Any folder of a
user's may hold a recipe.yaml."""

FIXED = ("run.seed", "data.shuffle", "rollout.batch_size", "rollout.n_samples_per_prompt")
"""Settings that give the ledger its meaning: they cannot change when a run is resumed."""

READING = ("data.columns", "data.prompt_template", "data.max_prompt_tokens", "data.sources")
"""Settings that decide which prompt has which position. They cannot change either, except paths in them."""


def recipe_text(config: RunConfig) -> str:
    """Return the recipe as YAML with every default filled in."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def write_recipe(config: RunConfig, inputs: KnownInputs) -> None:
    """Write the recipe and the record of its inputs into the run folder."""
    write_durably(config.run.folder / RECIPE, recipe_text(config))
    inputs.write(config.run.folder)


def goes_on(config: RunConfig, progress: Progress, *, resume: bool) -> bool:
    """True if this process goes on with the run in the folder: with ``resume``, or as a restart of its job.

    Raises OSError.
    """
    folder = config.run.folder
    if not is_restart(folder, os.environ):
        return resume
    progress.note(f"Slurm has started {job_in(folder)} again, which goes on with its run in {folder}")
    return True


def treatment(*, resume: bool, overwrite: bool) -> EarlierRun:
    """Return what becomes of an earlier run when a run starts from the beginning."""
    return "set aside" if resume else "delete" if overwrite else "refuse"


def _is_unused(folder: Path) -> bool:
    """True if nothing but a lease and submissions are in the folder.

    A process that made it was killed at once, or begins, or its job was submitted.
    """
    return all(path.name == SUBMITTED or is_lease_file(path.name) for path in folder.iterdir())


async def start_folder(config: RunConfig, progress: Progress, earlier: EarlierRun = "refuse") -> FolderLease:
    """Make the run folder, with the recipe in it. ``earlier``: what becomes of what is in it.

    Return the lease of the new folder. Raises InputError for an earlier run that is refused, LedgerBusy when
    a process is running it, and OSError.
    """
    folder = config.run.folder
    inputs = current_inputs(config)
    if folder.exists() and not _is_unused(folder):
        await _make_way(config, progress, earlier)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        if not _is_unused(folder):
            raise LedgerBusy(
                f"{folder}: another process has just started this run: choose another run.name"
            ) from None
        # An unused folder stays: another process may have made it, and the lease decides between the two.
        apply_mode(config)
    lease = await hold_folder(config, progress)
    with lease.released_on_error():
        (folder / LOGS).mkdir()
        write_recipe(config, inputs)
    return lease


async def _make_way(config: RunConfig, progress: Progress, earlier: EarlierRun) -> None:
    folder = config.run.folder
    if earlier == "refuse":
        await wait_until_free(folder, say=progress.phase, lease_s=config.run.lease_s)
        owner = job_in(folder)
        whose = f" ({owner})" if owner else ""
        raise InputError(
            f"{folder} holds an earlier run{whose}, which is left as it is. Go on with it: --resume. Delete "
            "it and start anew: --overwrite. Start another run beside it: run.name=NAME"
        )
    if earlier == "delete" and not any((folder / name).exists() for name in OF_A_RUN):
        raise InputError(
            f"{folder} has none of {', '.join(OF_A_RUN)}: it is not the folder of a run and is not deleted. "
            "Move it away, or choose another run.name"
        )
    if needed := list(_needed_in(config, folder)):
        raise InputError(
            f"{folder} is not moved or deleted, because the run needs what is in it: {', '.join(needed)}. "
            "Choose another run.name or run.root"
        )
    lease = await _take_lease(config, progress)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(folder.stat().st_mtime))
    moved = folder.rename(folder.with_name(f"{folder.name}.{stamp}"))
    lease.release(moved)
    if (moved / SUBMITTED).is_dir():  # the job reads its recipe there, also when Slurm starts it again
        folder.mkdir()
        (moved / SUBMITTED).rename(folder / SUBMITTED)
    if earlier == "delete":
        shutil.rmtree(moved)
    else:
        progress.note(f"what was in {folder} lies in {moved} now")


def _needed_in(config: RunConfig, folder: Path) -> Iterator[str]:
    """Yield the models and files in the run folder that the run reads, by their settings."""
    place = folder.resolve()
    if Path.cwd().is_relative_to(place):
        yield "the folder in which it is started"
    models = {name: model_folder(config, name) for name in model_settings()}
    files = {file.setting: file.path for file in (*config.training_files, *config.held_out_files)}
    for name, path in {**models, **files}.items():
        if path is not None and not is_on_hub(path) and path.resolve().is_relative_to(place):
            yield f"{name} ({path})"


async def resume_folder(
    config: RunConfig, progress: Progress, *, accept_changes: bool
) -> tuple[FolderLease, KnownInputs, set[str]]:
    """Check that the run in the folder is the recipe's, and take the folder over.

    Return its lease, the inputs to go on with, and the settings whose inputs have changed, which is refused
    unless ``accept_changes``. Raises InputError when the run is another one, LedgerBusy when a process is
    running it, and OSError.
    """
    check_same_run(config)
    inputs, changed = inputs_to_go_on_with(config, accept_changes=accept_changes, note=progress.note)
    return await hold_folder(config, progress), inputs, changed


async def hold_folder(config: RunConfig, progress: Progress) -> FolderLease:
    """Take the lease of the run folder, and tell the user if it is the only protection."""
    folder = config.run.folder
    lease = await _take_lease(config, progress)
    with lease.released_on_error():
        # First, so that a restart of the job knows the folder as its own, whatever else is missing.
        record_job(folder, os.environ)
        lease.keep()
        if problem := lock_problem(folder):
            progress.note(
                f"{folder}: the file system has no working locks ({problem}). A second driver is kept away "
                f"by the lease in driver.json alone, which lasts {config.run.lease_s:.0f} s (run.lease_s)"
            )
    return lease


async def _take_lease(config: RunConfig, progress: Progress) -> FolderLease:
    """Take the lease of the run folder. Raises LedgerBusy when another process holds it.

    A restart of the folder's job waits for the earlier start to let go: Slurm starts a job again while a lost
    node may still hold locks.
    """
    folder, looks = config.run.folder, RESTART_LOOKS if is_restart(config.run.folder, os.environ) else 0
    while True:
        try:
            return await take_lease(
                folder, lease_s=config.run.lease_s, say=progress.phase, note=progress.note
            )
        except LedgerBusy as busy:
            if not looks:
                raise
            looks -= 1
            progress.phase(f"waiting for the end of the driver of this job's earlier start: {busy}")
            await asyncio.sleep(RESTART_LOOK_S)


@contextmanager
def permissions(config: RunConfig) -> Iterator[None]:
    """Give new files and folders of this process the permissions of `run.mode` inside the block.

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
    return with_paths(section, lambda _, path: path if is_on_hub(path) else path.resolve())


def with_paths(section: AnySection, change: Callable[[str, Path], Path], around: str = "") -> AnySection:
    """Return the same settings with the paths that ``change`` returns for a dotted setting and its path."""
    changed: dict[str, object] = {}
    for name, value in section:
        setting = f"{around}{name}"
        if isinstance(value, Path):
            changed[name] = change(setting, value)
        elif isinstance(value, Section):
            changed[name] = with_paths(value, change, f"{setting}.")
        elif isinstance(value, list):
            items = cast("list[object]", value)
            changed[name] = [
                with_paths(each, change, f"{setting}.{place}.") if isinstance(each, Section) else each
                for place, each in enumerate(items)
            ]
    return section.model_copy(update=changed)


def can_resume(folder: Path) -> bool:
    """True if the folder holds a run of ``slipstream train``."""
    return (folder / LEDGER).exists()


def refuse_without_ledger(folder: Path) -> None:
    """Raise InputError when there are checkpoints but no ledger with their history."""
    if CheckpointFolder(folder / CHECKPOINTS, keep_last=1).all():
        raise InputError(
            f"{folder} has checkpoints but no {LEDGER}, which says what they were trained on: "
            "restore the file, or start anew with --overwrite, which deletes it"
        )


def check_same_run(config: RunConfig) -> None:
    """Raise InputError when a setting of ``FIXED`` differs from the recipe in the run folder."""
    before, now = read_recipe(config.run.folder), config.model_dump(mode="json")
    changed = [
        f"{key}: {_setting(now, key)!r}, but the run was started with {_setting(before, key)!r}"
        for key in (*FIXED, *READING)
        if _setting(now, key) != _setting(before, key)
    ]
    if changed:
        raise InputError(
            "\n".join(changed) + f"\nto resume {config.run.folder}, set these as they were; "
            "for another run, choose another run.name"
        )


def read_recipe(folder: Path) -> Mapping[str, object]:
    """Return the recipe in a run folder. Raises InputError unless it has every setting of ``FIXED``."""
    path = folder / RECIPE
    try:
        recipe: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _damaged(path, "it is missing") from None
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise _damaged(path, " ".join(str(error).split())) from None
    if recipe is None:
        raise _damaged(path, "it is empty")
    if not isinstance(recipe, dict):
        raise _damaged(path, f"it holds a {type(recipe).__name__}")
    settings = cast("dict[str, object]", recipe)
    needed = [key for key in FIXED if settings.get("data") is not None or not key.startswith("data.")]
    if absent := [key for key in needed if _setting(settings, key) is None]:
        raise _damaged(path, f"it lacks {', '.join(absent)}")
    return settings


def _damaged(path: Path, reason: str) -> InputError:
    return InputError(
        f"cannot resume {path.parent}: {path} is damaged: {reason}; expected the recipe of the run with "
        f"every default filled in. Restore it from a copy ({METRICS_FILE} has one under run/recipe), or "
        "start anew with --overwrite, which deletes the folder"
    )


def _setting(recipe: object, key: str) -> object:
    for part in key.split("."):
        recipe = recipe.get(part) if isinstance(recipe, dict) else None
    if key == "data.sources" and isinstance(recipe, list):  # files may have moved
        return [{name: value for name, value in source.items() if name != "path"} for source in recipe]
    return recipe
