"""Runs a function on several gloo ranks, each a process of its own, and brings the results back."""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from backend.megatron.parallel import RankSpec
from rollout.engine.actor import free_port


def _main(function: Callable[..., Any], spec: RankSpec, args: tuple[Any, ...], out: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        out.send((True, function(spec, *args)))
    except Exception:
        out.send((False, traceback.format_exc()))


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 180) -> list[Any]:
    """``function(RankSpec, *args)`` on every rank; results in rank order. Fails with the first traceback."""
    context = multiprocessing.get_context("spawn")
    port = free_port("127.0.0.1")
    pipes, processes = [], []
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            spec = RankSpec(rank, world_size, "127.0.0.1", port)
            process = context.Process(target=_main, args=(function, spec, args, sender), daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        results: dict[int, Any] = {}
        while len(results) < world_size:
            ready = wait([p for i, p in enumerate(pipes) if i not in results], timeout_s)
            assert ready, (
                f"ranks {sorted(set(range(world_size)) - set(results))} gave no answer in {timeout_s} s"
            )
            for pipe in ready:
                succeeded, value = pipe.recv()
                assert succeeded, f"rank {pipes.index(pipe)}:\n{value}"
                results[pipes.index(pipe)] = value
        return [results[rank] for rank in range(world_size)]
    finally:
        for process in processes:
            process.kill()
            process.join()
