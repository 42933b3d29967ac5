"""Does jobs in worker processes, and once more each job whose worker is killed.

    jobs ──► next job ──► worker ──► result ──► caller
                 ▲           │ killed
                 └───────────┘

Workers end with the process that uses them, however it ends.
"""

import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Generic, TypeVar

from slipstream.rollout.system.linux import PR_SET_PDEATHSIG, prctl

Job = TypeVar("Job", bound=Hashable)
Result = TypeVar("Result")

ATTEMPTS = 3
"""Number of killed workers after which a job is given up: it may be what gets them killed."""


class WorkerFailed(RuntimeError):
    """A job has raised an error, or too many of its workers were killed."""


@dataclass
class _Worker(Generic[Job]):
    process: SpawnProcess
    connection: Connection
    job: Job


def completed(
    work: Callable[[Job], Result], jobs: Iterable[Job], workers: int
) -> Iterator[tuple[Job, Result]]:
    """Yield each job with its result, as soon as it is there. Jobs are begun in their order.

    ``work``: a function of a module, or a ``partial`` of one, since it is pickled. Raises WorkerFailed.
    """
    waiting, killed = deque(jobs), Counter[Job]()
    busy: list[_Worker[Job]] = []
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                busy.append(_started(work, waiting.popleft()))
            for connection in wait([worker.connection for worker in busy]):
                worker = next(worker for worker in busy if worker.connection is connection)
                job = worker.job
                try:
                    result: Result = worker.connection.recv()
                except (EOFError, ConnectionResetError):
                    busy.remove(worker)
                    killed[job] += 1
                    _check(worker, killed[job])
                    waiting.appendleft(job)
                    continue
                if waiting:
                    worker.job = waiting.popleft()
                    _send(worker)
                else:
                    busy.remove(worker)
                    _end(worker)
                yield job, result
    finally:
        for worker in busy:
            _end(worker)


def _started(work: Callable[[Job], Result], job: Job) -> _Worker[Job]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, work, os.getpid()), daemon=True)
    process.start()
    theirs.close()
    worker = _Worker(process, ours, job)
    _send(worker)
    return worker


def _send(worker: _Worker[Job]) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # it was killed, as the next reading shows
        worker.connection.send(worker.job)


def _check(worker: _Worker[Job], killed: int) -> None:
    """Raise WorkerFailed unless the job of an ended worker may be done again."""
    worker.process.join()
    code = worker.process.exitcode or 0
    worker.connection.close()
    if code >= 0:
        raise WorkerFailed(f"{worker.job}: the worker ended with code {code}; its traceback is above")
    if killed >= ATTEMPTS:
        name = signal.Signals(-code).name
        raise WorkerFailed(
            f"{worker.job}: {killed} workers were killed while they did it, the last one by {name}. "
            "If nobody did that, the memory of this machine is too small: use fewer workers."
        )


def _end(worker: _Worker[Job]) -> None:
    worker.process.kill()
    worker.process.join()
    worker.connection.close()


def _serve(connection: Connection, work: Callable[[Job], Result], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            return
        connection.send(work(job))
