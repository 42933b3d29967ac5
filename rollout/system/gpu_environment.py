"""Environment variables of processes on GPUs: trainer and engines must agree on some, and need others.

This is the only place that sets them, but for what an engine compiles with, which depends on its node
(``rollout/engine/toolchain.py``). ``variables`` is the table that `slipstream plan` shows, and
``environment`` is what the actors of both sides apply before CUDA is loaded. A value of the table replaces
the one that the run was started with, because a value that reaches only one side of a process group makes
NCCL fail or hang in its first collective.
"""

from dataclasses import dataclass
from typing import Literal

from slipstream.configs.schema import EngineConfig
from slipstream.configs.schema.actor import ParallelConfig

Side = Literal["trainer", "engines"]

AGREED = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
"""Variables whose values the processes of one group must share."""

HOST_THREADS = 8
"""Threads of PyTorch's operators on the host, for each process. An H100 node has at least twelve cores for
each GPU; Ray would leave a process that asks for one CPU with a single thread."""


@dataclass(frozen=True)
class Variable:
    """An environment variable, its value, the processes that get it, and the reason."""

    name: str
    value: str
    who: tuple[Side, ...]
    why: str


def variables(engine: EngineConfig, parallel: ParallelConfig) -> tuple[Variable, ...]:
    """Return the variables of a run on GPUs, in the order in which they are shown."""
    symmetric = bool(engine.args.get("enable_symm_mem"))
    multicast = symmetric or bool(engine.args.get("enable_nccl_nvls"))
    both: tuple[Side, ...] = ("trainer", "engines")
    table = [
        Variable(
            "NCCL_CUMEM_ENABLE",
            str(int(symmetric)),
            both,
            "SGLang sets it from its argument enable_symm_mem, and a group of trainer and engines must agree",
        ),
        Variable(
            "NCCL_NVLS_ENABLE",
            str(int(multicast)),
            both,
            "SGLang sets it from enable_nccl_nvls, and a group of trainer and engines must agree",
        ),
        Variable(
            "OMP_NUM_THREADS",
            str(HOST_THREADS),
            both,
            "Ray gives an actor that asks for one CPU a single thread",
        ),
    ]
    if parallel.tensor > 1 or parallel.context > 1:
        table.append(
            Variable(
                "CUDA_DEVICE_MAX_CONNECTIONS",
                "1",
                ("trainer",),
                "before Blackwell, Megatron overlaps communication with computation only if kernels start in "
                "the order of their launches; SGLang sets 8 for itself",
            )
        )
    if engine.takes_turns:
        table.append(
            Variable(
                "SGLANG_MEMORY_SAVER_CUDA_GRAPH",
                "1",
                ("engines",),
                "without it an engine keeps the memory of its CUDA graphs while the trainer has the GPU",
            )
        )
    return tuple(table)


def environment(engine: EngineConfig, parallel: ParallelConfig, side: Side) -> dict[str, str]:
    """Return the variables of one side."""
    return {variable.name: variable.value for variable in variables(engine, parallel) if side in variable.who}
