"""From a run folder to the state that a run starts from: checkpoint, ledger, control core, prompts."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError
from slipstream.backend.checkpoint.folder import CHECKPOINTS, CheckpointFolder, FoundCheckpoint
from slipstream.backend.checkpoint.manifest import CheckpointRecord
from slipstream.backend.checkpoint.watermarks import check_watermarks
from slipstream.backend.driver.start.feedback import Feedback
from slipstream.backend.driver.start.inputs import InputError, Inputs
from slipstream.backend.driver.start.run_folder import (
    apply_mode,
    can_resume,
    goes_on,
    refuse_without_ledger,
    resume_folder,
    start_folder,
    treatment,
    write_recipe,
)
from slipstream.backend.monitor.progress import Progress
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.live import live_places
from slipstream.rollout.collection.driver.intake import Intake
from slipstream.rollout.collection.driver.restored import RestoredGroups, take_up
from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.control.policies import admission_policy, make_control
from slipstream.rollout.control.versions import VersionTree
from slipstream.rollout.ledger.lease.folder_lease import FolderLease
from slipstream.rollout.ledger.reading.history import history_of
from slipstream.rollout.ledger.recovery import Recovered, open_ledger
from slipstream.rollout.ledger.rows.stored_turns import RecoveredTurns
from slipstream.rollout.ledger.storage.database import LedgerError
from slipstream.rollout.ledger.writing.writer import Ledger
from slipstream.rollout.prompts import PromptStream
from slipstream.rollout.prompts.sources.drawn_prompts import DrawnPrompts, drawn_prompts
from slipstream.rollout.system.disk import describe


@dataclass(frozen=True)
class RunState:
    """State of a run when its loops start."""

    lease: FolderLease
    ledger: Ledger
    control: RolloutControl
    intake: Intake
    checkpoint: FoundCheckpoint | None
    groups: RestoredGroups
    failures: list[tuple[int, ...]]
    """Groups of each training step that has ended the trainer, in order."""
    notes: list[str]
    """Messages about the restart, for the user."""
    turns: RecoveredTurns
    """Turns of live users."""
    feedback: Feedback
    """Measurements of earlier steps for later ones."""
    drawn: DrawnPrompts | None = None
    """Prompts of a data source; None: the recipe names none."""


async def open_run(
    config: RunConfig,
    inputs: Inputs,
    progress: Progress,
    resume: bool,
    accept_changes: bool = False,
    *,
    overwrite: bool = False,
    whole: bool = True,
) -> tuple[Path, RunState]:
    """Return the run folder and where the run stands: at its beginning, or where its last process ended.

    ``accept_changes``: go on also with inputs whose content has changed. ``overwrite``: delete an earlier run
    in the folder, which is refused otherwise. A restart of the Slurm job that the folder belongs to goes on
    without being told. Without ``whole``, for a half of a run, it begins anew. Raises InputError when the
    folder cannot be used.
    """
    folder = config.run.folder
    with ExitStack() as taken:
        try:
            resume = goes_on(config, progress, resume=resume)
            if resume and whole and can_resume(folder):
                lease, known, changed = await resume_folder(config, progress, accept_changes=accept_changes)
                taken.callback(lease.release)
                apply_mode(config)
                progress.phase("checking the last checkpoint")
                checkpoint = find_checkpoint(config)
                state = begin(
                    config,
                    inputs,
                    checkpoint,
                    lease,
                    other_prompts=any(setting.startswith("data.") for setting in changed),
                )
                taken.callback(state.ledger.close)
                write_recipe(config, known)
            else:
                if resume and whole:
                    refuse_without_ledger(folder)
                    progress.note(f"nothing to resume in {folder}: the run starts from the beginning")
                earlier = treatment(resume=resume, overwrite=overwrite)
                lease = await start_folder(config, progress, earlier)
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
    history = history_of(folder)
    checkpoints = CheckpointFolder(folder / CHECKPOINTS, keep_last=config.checkpoint.keep_last)
    check_watermarks(history, checkpoints)

    def reject(record: CheckpointRecord) -> str | None:
        if history.is_on_line(record.version):
            return None
        return "the run has gone on from an older one since"

    return checkpoints.latest(reject)


def begin(
    config: RunConfig,
    inputs: Inputs,
    checkpoint: FoundCheckpoint | None,
    lease: FolderLease,
    *,
    other_prompts: bool = False,
) -> RunState:
    """Open the ledger of the run folder, a new one or the one of a resumed run.

    ``other_prompts``: the prompt set has changed, so groups that have begun begin again. Raises LedgerError.
    """
    rollout = config.rollout
    ledger, recovered = open_ledger(
        config.run.folder,
        batch_size=rollout.batch_size - live_places(config.live, rollout.batch_size),
        n_samples=rollout.n_samples_per_prompt,
        bound=rollout.max_head_offpolicyness,
        restored=checkpoint.record.version if checkpoint else 0,
        guard=lease.check,
    )
    drawn = drawn_prompts(config.rollout, config.run.folder)
    feedback = Feedback.of(config, checkpoint.record.feedback if checkpoint else None)
    collected = restore_collection(
        config, inputs, ledger, recovered, feedback, drawn=drawn, other_prompts=other_prompts
    )
    notes = [*(checkpoint.warnings if checkpoint else []), *recovered.notes]
    if recovered.epoch:
        notes.append(f"resumed from {collected.described()}")
    return RunState(
        lease,
        ledger,
        collected.control,
        collected.intake,
        checkpoint,
        collected.groups,
        recovered.failures,
        notes,
        recovered.live,
        feedback,
        drawn,
    )


@dataclass(frozen=True)
class RestoredCollection:
    """The control core of a restored run, with the prompts and the groups that belong to it."""

    control: RolloutControl
    intake: Intake
    groups: RestoredGroups

    def described(self) -> str:
        """Return a message for the user about the state from which the run goes on."""
        control, groups = self.control, self.groups
        source = f"version {control.version}" if control.step else "the initial weights, without a checkpoint"
        return (
            f"{source} (step {control.step}): {len(groups.ready)} groups ready, "
            f"{len(groups.continued)} continued, {groups.restarted} to be generated again"
        )


def restore_collection(
    config: RunConfig,
    inputs: Inputs,
    ledger: Ledger,
    recovered: Recovered,
    feedback: Feedback,
    *,
    served: int | None = None,
    drawn: DrawnPrompts | None = None,
    other_prompts: bool = False,
) -> RestoredCollection:
    """Return the collection with which a run goes on from ``recovered``.

    ``drawn``: the prompts of a data source; None: those of the prompt set. ``served``: version of engines
    that have outlived the trainer. Raises CorruptRecord.
    """
    rollout = config.rollout
    control = make_control(
        rollout,
        steps=config.run.total_steps,
        live=config.live,
        versions=VersionTree(recovered.versions, recovered.copies),
        version=recovered.restored,
        served=served,
        counts=recovered.counts,
        losses=recovered.losses,
        admission=feedback.admission(admission_policy(rollout)),
    )
    if drawn is not None:
        drawn.go_to(recovered.position)
    stream = drawn or PromptStream(
        inputs.prompts,
        shuffle=config.data is not None and config.data.shuffle,
        seed=config.run.seed,
        position=recovered.position,
    )
    groups = take_up(
        recovered.open,
        control,
        ledger.discarded,
        stream,
        rollout.n_samples_per_prompt,
        other_prompts=other_prompts,
    )
    for group in recovered.requeued:
        control.restore_requeued(group.id, group.requeues)
    positions = [(group.id, group.position) for group in (*recovered.open, *recovered.requeued)]
    return RestoredCollection(control, Intake(stream, positions), groups)
