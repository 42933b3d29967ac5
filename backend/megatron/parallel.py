"""The way of a trainer process into Megatron's process groups."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from slipstream.bridge.group.store import join_store, serve_store
from slipstream.configs.schema import ParallelConfig


@dataclass(frozen=True)
class RankSpec:
    """This process's place among the trainer's ranks, and the address where they meet."""

    rank: int
    world_size: int
    address: str
    """Address of rank 0."""
    port: int


def prepare_imports() -> None:
    """Make Megatron importable on this machine. Must be called before the first import of it."""
    from slipstream.backend.megatron import cpu

    cpu.install()


def initialize(
    spec: RankSpec, parallel: ParallelConfig, *, seed: int, timeout_s: float, gpu_share: float = 1.0
) -> torch.device:
    """Join the default group, make Megatron's groups, seed, and return the device of this rank.

    The order of ranks is Megatron's own (tensor fastest, then context, data and pipeline), and every rank
    makes all groups in the same order. ``timeout_s``: longest wait in a collective. ``gpu_share``: share of
    the GPU's memory that this rank may take.
    """
    prepare_imports()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from slipstream.backend.megatron import rotation

    rotation.install()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(0)  # Ray shows each rank only its own GPU
        if gpu_share < 1:
            torch.cuda.set_per_process_memory_fraction(gpu_share)
    meet = join_store if spec.rank else serve_store
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=meet(spec.address, spec.port, spec.world_size, timeout_s, wait=True),
        rank=spec.rank,
        world_size=spec.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    virtual = parallel.virtual_pipeline
    if virtual > 1 and parallel.pipeline == 2:
        from slipstream.backend.megatron import pipeline_shapes

        pipeline_shapes.install()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return torch.device("cuda", 0) if on_gpu else torch.device("cpu")


def leave() -> None:
    """Leave all groups together with the other ranks, after which this process can join others.

    Gloo's destructor keeps the interpreter's lock while it waits for its threads, and a thread that has just
    finished a collective may need the lock to free a tensor. The barrier, in whose wait the lock is free,
    lets it finish; without it two processes that made and left groups in turn stood still within 150 rounds.
    """
    from megatron.core import parallel_state

    dist.barrier()  # also, a rank that leaves would look like a lost peer to ranks still at work
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
