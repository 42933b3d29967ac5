"""The parts of a recipe that cannot fit into a GPU, whatever the activations turn out to be."""

from collections.abc import Sequence

from slipstream.backend.memory.engine import EngineMemory
from slipstream.backend.memory.trainer import StageMemory
from slipstream.configs.schema import RunConfig

GIB = 2**30


def misfits(
    config: RunConfig, stages: Sequence[StageMemory], engine: EngineMemory | None, gpu_memory: int | None
) -> list[str]:
    """Return a line for everything that is too large; none if the bytes of a GPU's memory are not known.

    Only what is computed exactly is compared: weights, gradients and optimizer of the trainer, weights of an
    engine. Activations are an estimate, and the KV cache takes what is left.
    """
    if gpu_memory is None:
        return []
    memory = gpu_memory / GIB
    problems: list[str] = []
    worst = max(stages, key=lambda stage: stage.held)
    exact = worst.held - worst.runtime
    if exact > gpu_memory:
        problems.append(
            f"actor.parallel: weights, gradients and optimizer take {exact / GIB:.1f} GiB on each rank of "
            f"pipeline stage {worst.stage}, and a GPU has {memory:g} GiB (cluster.gpu_memory_gib); split the "
            "model over more ranks (tensor, pipeline, expert), or the optimizer with "
            "actor.optimizer.distributed"
        )
    if engine is not None and engine.pool is not None and engine.pool <= 0:
        ranks = config.rollout.engine.tensor_parallel
        problems.append(
            f"rollout.engine.tensor_parallel: the weights take {engine.weights / GIB:.1f} GiB on each of the "
            f"{ranks} ranks of an engine, which leaves no room for a KV cache: a GPU has {memory:g} GiB "
            f"(cluster.gpu_memory_gib), of which SGLang leaves {engine.reserved / GIB:.1f} GiB free; use "
            "more ranks, up to the GPUs of one node: an engine cannot span nodes"
        )
    return problems
