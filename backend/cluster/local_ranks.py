"""Runs a function in several processes of this machine, one for each rank of a process group.

No process outlives the call, nor ends before all have answered: all are killed when the last one has, when
one fails or when the call is interrupted. A thread in each ends it when its parent is gone.
"""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple, cast

from slipstream.rollout.system.network import hold_port, port_of, process_group_variables

if TYPE_CHECKING:
    from slipstream.backend.megatron.parallel import RankSpec

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

HOST = "127.0.0.1"

GRACE_S = 1.0
"""Seconds to listen to the other ranks after a failure, which may be the cause of the first one."""


class RankFailed(RuntimeError):
    """A rank raised, died or gave no result in time. Its traceback, if any, is a note of this error."""


def run_ranks(
    world_size: int,
    function: "Callable[[RankSpec, *Arguments], T]",
    *args: *Arguments,
    timeout_s: float,
    fresh: bool = False,
) -> list[T]:
    """Call ``function(RankSpec, *args)`` on every rank. Return the results in rank order.

    ``function`` must be defined in a module. Processes are forked from one that has imported Megatron; with
    ``fresh`` each starts from nothing. Raises RankFailed.
    """
    context = multiprocessing.get_context("spawn") if fresh else multiprocessing.get_context("forkserver")
    if not fresh:
        context.set_forkserver_preload(["slipstream.backend.trainer.preload"])
    holder = hold_port(HOST)
    pipes: dict[Connection, int] = {}
    processes: list[BaseProcess] = []
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            pipes[receiver] = rank
            process = context.Process(
                target=_main, args=(function, rank, world_size, port_of(holder), args, sender), daemon=True
            )
            processes.append(process)
            with _without_interrupts():
                process.start()
            sender.close()  # so that the end of the process is the end of the pipe
        return cast(list[T], _results(pipes, processes, timeout_s))
    finally:
        started = [process for process in processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()
        holder.close()


@dataclass(frozen=True)
class _Returned:
    """Outcome of a rank whose function has returned."""

    value: object


@dataclass(frozen=True)
class _Raised:
    """Outcome of a rank whose function has raised."""

    error: str
    trace: str


_Outcome = _Returned | _Raised | None
"""None: the rank has died."""


def _results(
    pipes: Mapping[Connection, int], processes: Sequence[BaseProcess], timeout_s: float
) -> list[object]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, object] = {}
    while len(results) < len(pipes):
        silent = {pipe: rank for pipe, rank in pipes.items() if rank not in results}
        outcomes = _outcomes(silent, max(deadline - time.monotonic(), 0))
        if not outcomes:
            raise RankFailed(f"no answer of ranks {sorted(silent.values())} within {timeout_s:.0f} s")
        returned = {rank: end.value for rank, end in outcomes.items() if isinstance(end, _Returned)}
        if len(returned) < len(outcomes):
            rest = {pipe: rank for pipe, rank in silent.items() if rank not in outcomes}
            raise _failure(outcomes | _outcomes(rest, GRACE_S), processes)
        results |= returned
    return [results[rank] for rank in range(len(pipes))]


def _outcomes(silent: Mapping[Connection, int], timeout_s: float) -> dict[int, _Outcome]:
    """Return the outcomes, by rank, that come within ``timeout_s``; at least one unless there is none."""
    outcomes: dict[int, _Outcome] = {}
    for pipe in wait(list(silent), timeout_s) if silent else ():
        assert isinstance(pipe, Connection)
        try:
            outcomes[silent[pipe]] = pipe.recv()
        except EOFError:
            outcomes[silent[pipe]] = None
    return outcomes


def _failure(outcomes: Mapping[int, _Outcome], processes: Sequence[BaseProcess]) -> RankFailed:
    """Return the error of a rank that has died, or else of the first one that has raised."""
    for rank, outcome in outcomes.items():
        if outcome is None:
            processes[rank].join(GRACE_S)
            return RankFailed(f"rank {rank} {_end(processes[rank].exitcode)}")
    rank, raised = next((rank, end) for rank, end in outcomes.items() if isinstance(end, _Raised))
    failure = RankFailed(f"rank {rank}: {raised.error}")
    failure.add_note(raised.trace)
    return failure


def _end(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"ended without an answer, with exit code {exit_code}"
    hint = ": perhaps the memory was used up" if exit_code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-exit_code).name}{hint}"


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM inside the block, and keep processes that start in it from ever seeing them.

    A terminal and a scheduler send these signals to the whole process group, but the process that has started
    the ranks ends them. It would not know a process whose start was cut short.
    """
    resource_tracker.ensure_running()  # the first process would start it, and it lets both through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _main(
    function: Callable[..., object],
    rank: int,
    world_size: int,
    port: int,
    args: tuple[object, ...],
    out: Connection,
) -> None:
    parent = threading.Thread(target=_end_with_parent, name="parent", daemon=True)
    parent.start()
    import torch

    from slipstream.backend.megatron.parallel import RankSpec

    torch.set_num_threads(1)
    os.environ.update(process_group_variables(HOST))
    try:
        out.send(_Returned(function(RankSpec(rank, world_size, HOST, port), *args)))
    except Exception as error:
        out.send(_Raised(f"{type(error).__name__}: {error}", traceback.format_exc()))
    parent.join()  # a rank that ended now would close its connections to ranks still at work, and its store


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
