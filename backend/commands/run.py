"""Runs that a user watches: progress in the terminal, and every end with its exit code."""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar

from slipstream.backend.cluster.placement import place_trainer
from slipstream.backend.commands.outcome import Failed, NotYet, WasStopped, WrongInput
from slipstream.backend.commands.preflight import check_start
from slipstream.backend.monitor.progress import Progress, append_to_log, open_progress
from slipstream.backend.monitor.summary import (
    SUMMARY_FILE,
    RunSummary,
    print_summary,
    read_summary,
    summary_text,
)
from slipstream.configs.schema import RunConfig
from slipstream.configs.supervised import Supervised
from slipstream.rollout.system.disk import ADVICE, describe
from slipstream.rollout.system.garbage import keep_few_heaps

T = TypeVar("T")


def train(
    config: RunConfig, *, resume: bool = False, accept_changed_inputs: bool = False, overwrite: bool = False
) -> RunSummary:
    """Run a recipe to its end. Raises as ``check_start`` and ``attended``."""
    check_start(config)
    from slipstream.backend.commands.plan_document import planned_publication_s
    from slipstream.backend.driver.run import run

    options = _options(resume, accept_changed_inputs, overwrite)
    summary = attended(config, partial(run, config, planned_s=planned_publication_s, **options))
    append_to_log(config.run.folder, summary_text(summary, config.run.name))
    return summary


def sft(
    supervised: Supervised,
    *,
    resume: bool = False,
    accept_changed_inputs: bool = False,
    overwrite: bool = False,
) -> Path:
    """Train on examples. Return the folder of the checkpoint. Raises as ``check_start`` and ``attended``."""
    check_start(supervised.run, place=place_trainer)
    from slipstream.backend.driver.modes.sft import run_supervised

    options = _options(resume, accept_changed_inputs, overwrite)
    checkpoint = attended(supervised.run, partial(run_supervised, supervised, **options))
    append_to_log(supervised.run.run.folder, f"done; the checkpoint is {checkpoint}")
    return checkpoint


def _options(resume: bool, accept_changes: bool, overwrite: bool) -> dict[str, bool]:
    return {"resume": resume, "accept_changes": accept_changes, "overwrite": overwrite}


def attended(config: RunConfig, start: Callable[[Progress], Coroutine[None, None, T]]) -> T:
    """Return the result of ``start(progress)`` while progress is shown in the terminal.

    Raises WrongInput when the inputs or the cluster cannot be used, WasStopped or NotYet when the run was
    stopped, and Failed, with every cause, when it has failed.
    """
    if _is_in_a_loop():  # as the cells of a notebook are
        return _beside(config, start)
    keep_few_heaps()
    import uvloop

    from slipstream.backend.cluster.placement import PlacementError
    from slipstream.backend.driver.loops.stop import JobEnds, Stopped
    from slipstream.backend.driver.start.inputs import InputError
    from slipstream.backend.driver.start.job import note_end
    from slipstream.backend.driver.start.run_folder import LOGS

    folder, began = config.run.folder, time.time()
    progress = open_progress(config.run.steps or 0, bound=config.rollout.max_head_offpolicyness)
    try:
        with closing(progress), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(start(progress))
    except Stopped as error:
        stopped = f"stopped; what there is lies in {folder}, and --resume goes on with it"
        append_to_log(folder, stopped, began)
        summary = read_summary(folder)
        if summary is not None and (folder / SUMMARY_FILE).stat().st_mtime >= began:
            append_to_log(folder, summary_text(summary, config.run.name), began)
            print_summary(summary, sys.stdout, folder)
        if isinstance(error, JobEnds):
            note_end(os.environ, "the time limit was near")
            raise NotYet(stopped) from None
        note_end(os.environ, "stopped by a signal")
        raise WasStopped(stopped) from None
    except (InputError, PlacementError) as error:
        raise WrongInput(str(error)) from None
    except Exception as error:
        causes = [f"failed: {type(cause).__name__}: {_described(cause)}" for cause in _leaves(error)]
        causes += memory_lines("\n".join(causes), config)
        append_to_log(folder, "\n".join(causes), began)
        note_end(os.environ, causes[0])
        logs = [f"logs: {folder / LOGS}"] if folder.exists() else []
        raise Failed("\n".join([*causes, *logs])) from error


def _described(cause: BaseException) -> str:
    from slipstream.backend.cluster.trainer_failed import TrainerFailed

    if isinstance(cause, TrainerFailed):
        return cause.described
    return describe(cause) if isinstance(cause, OSError) and cause.errno in ADVICE else str(cause)


def memory_lines(failure: str, config: RunConfig) -> list[str]:
    """Return lines with the settings that free memory, if a run has failed for want of it."""
    from slipstream.backend.cluster.object_store import SHARED_MEMORY_FULL, is_shared_memory_full
    from slipstream.backend.memory.relief import Shortage, relief, shortage_of

    shortage = shortage_of(failure)
    if shortage is Shortage.SHARED or is_shared_memory_full():
        return [f"memory: {SHARED_MEMORY_FULL}"]
    if shortage is None:
        return []
    from slipstream.backend.commands.check import Planned, planned

    def plan(changed: RunConfig) -> Planned | None:
        try:
            return planned(changed)
        except Exception:  # the layout does not fit the model; what has failed must be told in any case
            return None

    return [f"memory: {line}" for line in relief(failure, config, plan)]


def _is_in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _beside(config: RunConfig, start: Callable[[Progress], Coroutine[None, None, T]]) -> T:
    """Do as ``attended`` in another thread, since a thread has one event loop at a time.

    Ctrl-C ends the run, and KeyboardInterrupt is raised after the end of the run.
    """
    cancels: list[Callable[[], object]] = []

    async def started(progress: Progress) -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        cancels.append(lambda: loop.call_soon_threadsafe(task.cancel))
        return await start(progress)

    with ThreadPoolExecutor(1, thread_name_prefix="run") as thread:
        result = thread.submit(attended, config, started)
        try:
            return result.result()
        except KeyboardInterrupt:
            for cancel in cancels:
                cancel()
            raise


def _leaves(error: BaseException) -> list[BaseException]:
    """Return the errors themselves, out of the groups that parallel tasks raise."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
