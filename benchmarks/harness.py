"""Scaffolding that benchmarks share: options, memory, and sides that take turns in separate processes."""

import argparse
import multiprocessing
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser described by the first line of a module's docstring."""
    return argparse.ArgumentParser(description=(doc or "").partition("\n")[0])


# ---- memory of a process, by default of this one


def peak_mb(process: int | str = "self") -> float:
    """Return the largest resident size since `reset_peak`."""
    [line] = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) / 1024


def reset_peak(process: int | str = "self") -> float:
    """Forget the peak so far, and return the present resident size."""
    Path(f"/proc/{process}/clear_refs").write_text("5")
    return peak_mb(process)


# ---- ranks


def seconds_of_all_ranks(work: Callable[[], None]) -> float:
    """Return the seconds until the last rank of the default process group is done."""
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


# ---- sides that take turns

RANK_THREADS = 1
"""Threads of a trainer rank on CPUs (``backend/trainer/preload.py``). With more, threads that wait for each
other on a machine with other work use CPU time, of which the side with less work has the larger share."""


@dataclass(frozen=True)
class Turn(Generic[T]):
    """Time and result of one turn of a side."""

    seconds: float
    cpu_seconds: float
    result: T


Setup = Callable[[], tuple[str, Callable[[int], T]]]
"""Prepares a side: returns how the side works, in words, and the function that takes turn number n."""


def take_turns(
    setups: Mapping[str, Setup[T]], turns: int, threads: int
) -> tuple[dict[str, str], dict[str, list[Turn[T]]]]:
    """Run each side in its own process, one turn at a time. Return how each side works, and its turns."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name, setup in setups.items():
        pipes[name], child = context.Pipe()
        context.Process(target=_serve, args=(child, setup, threads), daemon=True).start()
        child.close()
    ways = {name: pipe.recv() for name, pipe in pipes.items()}
    taken: dict[str, list[Turn[T]]] = {name: [] for name in setups}
    for number in range(turns):
        for name, pipe in pipes.items():
            pipe.send(number)
            taken[name].append(pipe.recv())
    for pipe in pipes.values():
        pipe.send(None)
    return ways, taken


def _serve(pipe: Connection, setup: Setup[T], threads: int) -> None:
    torch.set_num_threads(threads)
    way, turn = setup()
    pipe.send(way)
    while (number := pipe.recv()) is not None:
        pipe.send(timed(partial(turn, number)))


def timed(work: Callable[[], T]) -> Turn[T]:
    """Do the work, and return its time by the clock and of the CPU."""
    began, cpu_began = time.perf_counter(), time.process_time()
    result = work()
    return Turn(time.perf_counter() - began, time.process_time() - cpu_began, result)
