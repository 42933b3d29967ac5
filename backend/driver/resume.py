"""From a run folder to the state that a run goes on from: checkpoint, ledger, control core, prompts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slipstream.backend.checkpoint.folder import CHECKPOINTS, CheckpointFolder, FoundCheckpoint
from slipstream.backend.driver.folder_lock import LOCK, locked
from slipstream.backend.driver.inputs import InputError, Inputs
from slipstream.configs.schema import RunConfig
from slipstream.rollout.collect.intake import Intake
from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.control.policies import make_control
from slipstream.rollout.control.versions import survives
from slipstream.rollout.ledger.database import LedgerBusy, LedgerError, open_for_reading
from slipstream.rollout.ledger.recovery import LEDGER, Recovered, open_ledger, restarts
from slipstream.rollout.ledger.writer import Ledger
from slipstream.rollout.prompts import PromptStream
from slipstream.rollout.trajectory import Group

FIXED = (
    "run.seed",
    "model.path",
    "data.path",
    "data.shuffle",
    "rollout.batch_size",
    "rollout.n_samples_per_prompt",
)
"""Settings that give the ledger its meaning: they cannot change between two lives of a run."""


@dataclass
class RunState:
    """Where a run stands when its loops begin."""

    ledger: Ledger
    control: RolloutControl
    intake: Intake
    checkpoint: FoundCheckpoint | None
    version: int
    step: int
    notes: list[str]
    """What the user should know about the restart."""


def can_resume(folder: Path) -> bool:
    return (folder / LEDGER).exists()


def refuse_if_running(folder: Path) -> None:
    """Raise LedgerBusy, or InputError, when a process is running the run in ``folder``."""
    if (folder / LOCK).exists():
        with locked(folder):
            """Nobody is."""
    try:
        open_for_reading(folder / LEDGER).close()
    except LedgerBusy:
        raise
    except LedgerError:
        """No ledger, or a damaged one: nobody can be running it."""


def refuse_without_ledger(folder: Path) -> None:
    """Raise InputError when there are checkpoints that nothing tells the history of."""
    if CheckpointFolder(folder / CHECKPOINTS, keep_last=1).all():
        raise InputError(
            f"{folder} has checkpoints but no {LEDGER}, which says what they were trained on: "
            "restore the file, or start anew without --resume (the folder is set aside)"
        )


def check_same_run(config: RunConfig) -> None:
    """Raise InputError if the recipe is not that of the run in its folder, as far as it must be."""
    recipe = config.run.folder / "recipe.yaml"
    try:
        before: dict[str, Any] = yaml.safe_load(recipe.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"cannot resume {config.run.folder}: {recipe}: {error}") from None
    now = config.model_dump(mode="json")
    changed = [
        f"{key}: {_at(now, key)!r}, but the run was started with {_at(before, key)!r}"
        for key in FIXED
        if _at(now, key) != _at(before, key)
    ]
    if changed:
        raise InputError(
            "\n".join(changed) + f"\nto resume {config.run.folder}, set these as they were; "
            "for another run, choose another run.name"
        )


def _at(recipe: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        recipe = recipe[part]
    return recipe


def find_checkpoint(config: RunConfig) -> FoundCheckpoint | None:
    """The newest sound checkpoint that today's line of versions descends from. Raises CheckpointError."""
    folder = config.run.folder
    connection = open_for_reading(folder / LEDGER)
    starts = restarts(connection)
    connection.close()
    checkpoints = CheckpointFolder(folder / CHECKPOINTS, keep_last=config.checkpoint.keep_last)

    def reject(record) -> str | None:
        if survives(record.version, record.epoch, starts):
            return None
        return "the run has gone on from an older one since"

    return checkpoints.latest(reject)


def begin(config: RunConfig, inputs: Inputs, checkpoint: FoundCheckpoint | None) -> RunState:
    """Open the ledger of the run folder, a new one or that of before. Raises LedgerError."""
    rollout = config.rollout
    ledger, found = open_ledger(
        config.run.folder / LEDGER,
        batch_size=rollout.batch_size,
        n_samples=rollout.n_samples_per_prompt,
        bound=rollout.max_head_offpolicyness,
        restored=checkpoint.record.version if checkpoint else 0,
        step=checkpoint.record.step if checkpoint else 0,
    )
    control = make_control(
        rollout,
        steps=config.run.steps,
        version=found.restart.version,
        step=found.step,
        counts=found.counts,
        losses=found.losses,
    )
    stream = PromptStream(
        inputs.prompts, shuffle=config.data.shuffle, seed=config.run.seed, position=found.position
    )
    intake = Intake(stream, found.open)
    notes = list(checkpoint.warnings) if checkpoint else []
    if found.restart.epoch:
        notes.append(_take_up(found, ledger, control, intake, rollout.n_samples_per_prompt))
    return RunState(ledger, control, intake, checkpoint, found.restart.version, found.step, notes)


def _take_up(found: Recovered, ledger: Ledger, control: RolloutControl, intake: Intake, n: int) -> str:
    """Go on with every group that has not ended; what became of them, for the user."""
    begun = [(group, oldest) for group in found.open if (oldest := group.oldest_version) is not None]
    begun.sort(key=lambda pair: (pair[1], pair[0].id))
    ready = continued = 0
    restarted = [group for group in found.open if group.oldest_version is None]
    for group, oldest in begun:
        if group.is_ready:
            trajectories = tuple(group.trajectories[sample] for sample in range(n))
            if control.restore_ready(Group(group.id, intake.prompt(group.id), oldest, trajectories)):
                ready += 1
                continue
        elif (ticket := control.restore_open(group.id, oldest)) is not None:
            intake.resume(ticket, group)
            continued += 1
            continue
        ledger.discarded(group.id, group.tokens)
        restarted.append(group)
    for group in sorted(restarted, key=lambda group: group.id):
        control.restore_unstarted(group.id)
    source = (
        f"version {found.restart.restored}" if found.step else "the initial weights, without a checkpoint"
    )
    return (
        f"resumed from {source} (step {found.step}), served as version {found.restart.version}: "
        f"{ready} groups ready, {continued} continued, {len(restarted)} to be generated again"
    )
