"""Runs a function in several processes of this machine, one for each rank of a process group.

No process outlives the call: all are killed when the first one fails or the call is interrupted, and a thread
in each ends it when the process that started it is gone.
"""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from slipstream.rollout.network import free_port

HOST = "127.0.0.1"

GRACE_S = 1.0
"""Seconds to listen to the other ranks after a failure, which may be the cause of the first one."""


class RankFailed(RuntimeError):
    """A rank raised, died or gave no result in time. Its traceback, if any, is a note of this error."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float, fresh: bool = False
) -> list[Any]:
    """Call ``function(RankSpec, *args)`` on every rank. Return the results in rank order.

    ``function`` must be defined in a module. Processes are forked from one that has imported Megatron; with
    ``fresh`` each starts from nothing. Raises RankFailed.
    """
    context = multiprocessing.get_context("spawn") if fresh else multiprocessing.get_context("forkserver")
    if not fresh:
        context.set_forkserver_preload(["slipstream.backend.trainer.preload"])
    port = free_port(HOST)
    pipes: dict[Connection, int] = {}
    processes: list[BaseProcess] = []
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            pipes[receiver] = rank
            process = context.Process(
                target=_main, args=(function, rank, world_size, port, args, sender), daemon=True
            )
            processes.append(process)
            with _without_interrupts():
                process.start()
            sender.close()  # so that the end of the process is the end of the pipe
        return _results(pipes, processes, timeout_s)
    finally:
        started = [process for process in processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()


def _results(pipes: Mapping[Connection, int], processes: list[BaseProcess], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        silent = {pipe: rank for pipe, rank in pipes.items() if rank not in results}
        ready = wait(list(silent), max(deadline - time.monotonic(), 0))
        if not ready:
            raise RankFailed(f"no answer of ranks {sorted(silent.values())} within {timeout_s:.0f} s")
        answers = _answers(ready, silent)
        if any(not succeeded for succeeded, _ in answers.values()):
            rest = {pipe: rank for pipe, rank in silent.items() if rank not in answers}
            answers |= _answers(wait(list(rest), GRACE_S), rest) if rest else {}
            raise _failure(answers, processes)
        results |= {rank: value for rank, (_, value) in answers.items()}
    return [results[rank] for rank in range(len(pipes))]


def _answers(ready: list[Any], ranks: Mapping[Connection, int]) -> dict[int, tuple[bool, Any]]:
    """Return by rank whether it succeeded, and its result, or its error and traceback, or None if it died."""
    outcomes: dict[int, tuple[bool, Any]] = {}
    for pipe in ready:
        try:
            outcomes[ranks[pipe]] = pipe.recv()
        except EOFError:
            outcomes[ranks[pipe]] = (False, None)
    return outcomes


def _failure(answers: Mapping[int, tuple[bool, Any]], processes: list[BaseProcess]) -> RankFailed:
    failed = {rank: value for rank, (succeeded, value) in answers.items() if not succeeded}
    for rank, value in failed.items():
        if value is None:
            processes[rank].join(GRACE_S)
            return RankFailed(f"rank {rank} {_end(processes[rank].exitcode)}")
    rank, (error, trace) = next(iter(failed.items()))
    failure = RankFailed(f"rank {rank}: {error}")
    failure.add_note(trace)
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
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    args: tuple[Any, ...],
    out: Connection,
) -> None:
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    import torch

    from slipstream.backend.megatron.parallel import RankSpec

    torch.set_num_threads(1)
    try:
        out.send((True, function(RankSpec(rank, world_size, HOST, port), *args)))
    except Exception as error:
        out.send((False, (f"{type(error).__name__}: {error}", traceback.format_exc())))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
