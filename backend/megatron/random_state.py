"""The random states of one rank: torch, Megatron's tensor-parallel generators, numpy and ``random``."""

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed


def capture() -> dict[str, Any]:
    """The present states, as tensors and plain numbers: what ``torch.load`` reads without running code."""
    name, keys, *rest = np.random.get_state()
    tensor_parallel = get_cuda_rng_tracker().get_states()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tensor_parallel": {of: state.clone() for of, state in tensor_parallel.items()},
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
        "python": random.getstate(),
    }


def restore(states: dict[str, Any]) -> None:
    """Go on from what ``capture`` gave on the same rank of the same layout."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tensor_parallel"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(states["python"])


def reseed(seed: int, step: int, rank: int) -> None:
    """Begin anew in a layout that no states were saved for; the same arguments give the same states.

    torch is seeded from (seed, step) alone: ranks that hold shards of one tensor must draw the same numbers
    for what they all hold, and Megatron adds the tensor-parallel rank for what they do not. numpy and
    ``random`` are seeded from (seed, step, rank).
    """
    common = int(np.random.SeedSequence((seed, step)).generate_state(1)[0])
    torch.manual_seed(common)
    model_parallel_cuda_manual_seed(common)
    own = int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0])
    np.random.seed(own)
    random.seed(own)
