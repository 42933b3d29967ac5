"""From a run folder to the state that a run starts from: checkpoint, ledger, control core, prompts."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from slipstream.backend.checkpoint.errors import CheckpointError, describe
from slipstream.backend.checkpoint.folder import CHECKPOINTS, CheckpointFolder, FoundCheckpoint
from slipstream.backend.checkpoint.manifest import CheckpointRecord
from slipstream.backend.driver.inputs import InputError, Inputs
from slipstream.backend.driver.run_folder import (
    can_resume,
    refuse_without_ledger,
    resume_folder,
    start_folder,
    write_recipe,
)
from slipstream.backend.monitor.progress import Progress
from slipstream.configs.schema import RunConfig
from slipstream.rollout.collect.intake import Intake
from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.control.policies import make_control
from slipstream.rollout.control.versions import survives
from slipstream.rollout.ledger.database import LedgerError, open_for_reading
from slipstream.rollout.ledger.lease import Lease
from slipstream.rollout.ledger.recovery import LEDGER, Recovered, open_ledger, restarts
from slipstream.rollout.ledger.writer import Ledger
from slipstream.rollout.prompts import PromptStream
from slipstream.rollout.trajectory import Group


@dataclass(frozen=True)
class RunState:
    """State of a run when its loops start."""

    lease: Lease
    ledger: Ledger
    control: RolloutControl
    intake: Intake
    checkpoint: FoundCheckpoint | None
    notes: list[str]
    """Messages about the restart, for the user."""


async def open_run(
    config: RunConfig, inputs: Inputs, progress: Progress, resume: bool, accept_changes: bool = False
) -> tuple[Path, RunState]:
    """Return the run folder and where the run stands: at its beginning, or where its last process ended.

    ``accept_changes``: go on also with inputs whose content has changed. Raises InputError when the folder
    cannot be used.
    """
    folder = config.run.folder
    with ExitStack() as taken:
        try:
            if resume and can_resume(folder):
                lease, known, changed = await resume_folder(config, progress, accept_changes=accept_changes)
                taken.callback(lease.release)
                progress.phase("checking the last checkpoint")
                checkpoint = find_checkpoint(config)
                state = begin(config, inputs, checkpoint, lease, other_prompts="data.path" in changed)
                taken.callback(state.ledger.close)
                write_recipe(config, known)
            else:
                if resume:
                    refuse_without_ledger(folder)
                    progress.note(f"nothing to resume in {folder}: the run starts from the beginning")
                lease = await start_folder(config, progress)
                taken.callback(lease.release)
                state = begin(config, inputs, None, lease)
        except (LedgerError, CheckpointError) as error:
            raise InputError(str(error)) from error
        except OSError as error:
            raise InputError(f"cannot use {folder}: {describe(error)}") from error
        taken.pop_all()
    for note in state.notes:
        progress.note(note)
    return folder, state


def find_checkpoint(config: RunConfig) -> FoundCheckpoint | None:
    """Return the newest sound checkpoint on the run's present line of versions. Raises CheckpointError."""
    folder = config.run.folder
    connection = open_for_reading(folder / LEDGER)
    starts = restarts(connection)
    connection.close()
    checkpoints = CheckpointFolder(folder / CHECKPOINTS, keep_last=config.checkpoint.keep_last)

    def reject(record: CheckpointRecord) -> str | None:
        if survives(record.version, record.epoch, starts):
            return None
        return "the run has gone on from an older one since"

    return checkpoints.latest(reject)


def begin(
    config: RunConfig,
    inputs: Inputs,
    checkpoint: FoundCheckpoint | None,
    lease: Lease,
    *,
    other_prompts: bool = False,
) -> RunState:
    """Open the ledger of the run folder, a new one or the one of a resumed run.

    ``other_prompts``: the prompt set has changed, so groups that have begun begin again. Raises LedgerError.
    """
    rollout = config.rollout
    ledger, recovered = open_ledger(
        config.run.folder / LEDGER,
        batch_size=rollout.batch_size,
        n_samples=rollout.n_samples_per_prompt,
        bound=rollout.max_head_offpolicyness,
        restored=checkpoint.record.version if checkpoint else 0,
        step=checkpoint.record.step if checkpoint else 0,
        fence=lease.check,
    )
    control = make_control(
        rollout,
        steps=config.run.steps,
        version=recovered.restart.version,
        step=recovered.step,
        counts=recovered.counts,
        losses=recovered.losses,
    )
    stream = PromptStream(
        inputs.prompts, shuffle=config.data.shuffle, seed=config.run.seed, position=recovered.position
    )
    intake = Intake(stream, recovered.open)
    notes = list(checkpoint.warnings) if checkpoint else []
    if recovered.restart.epoch:
        notes.append(
            _take_up(recovered, ledger, control, intake, rollout.n_samples_per_prompt, other_prompts)
        )
    return RunState(lease, ledger, control, intake, checkpoint, notes)


def _take_up(
    recovered: Recovered, ledger: Ledger, control: RolloutControl, intake: Intake, n: int, other_prompts: bool
) -> str:
    """Continue every group that has not ended. Return what became of them, for the user."""
    begun = [(group, oldest) for group in recovered.open if (oldest := group.oldest_version) is not None]
    begun.sort(key=lambda pair: (pair[1], pair[0].id))
    ready = continued = 0
    restarted = [group for group in recovered.open if group.oldest_version is None]
    for group, oldest in begun:
        if group.is_ready:
            trajectories = tuple(group.trajectories[sample] for sample in range(n))
            if control.restore_ready(Group(group.id, intake.prompt(group.id), oldest, trajectories)):
                ready += 1
                continue
        elif not other_prompts and (ticket := control.restore_open(group.id, oldest)) is not None:
            intake.resume(ticket, group)
            continued += 1
            continue
        ledger.discarded(group.id, group.tokens)
        restarted.append(group)
    for group in sorted(restarted, key=lambda group: group.id):
        control.restore_unstarted(group.id)
    source = (
        f"version {recovered.restart.restored}"
        if recovered.step
        else "the initial weights, without a checkpoint"
    )
    return (
        f"resumed from {source} (step {recovered.step}), served as version {recovered.restart.version}: "
        f"{ready} groups ready, {continued} continued, {len(restarted)} to be generated again"
    )
