"""What SGLang 0.5.21 needs on a machine without a GPU. Used only when the device is ``cpu``.

Without AMX every SGLang layer takes its native PyTorch path, so only two things are missing: imports of
packages that have no CPU build, which ``stand_ins/`` answers, and settings that fit small CPUs.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

STAND_INS = Path(__file__).with_name("stand_ins")
"""Put on the PYTHONPATH of the server's process only: they would break torch.compile elsewhere."""

SERVER_ARGS: dict[str, Any] = {
    "attention_backend": "torch_native",  # the other backends are kernels
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.1,  # else SGLang reserves most of the machine's memory for KV
    "max_total_tokens": 16384,
    "sleep_on_idle": True,  # else an idle scheduler spins on a core that the trainer needs
}
"""Defaults under those of the recipe's ``rollout.engine.args``."""


def environment(tensor_parallel: int) -> dict[str, str]:
    """Environment variables of the server's process."""
    found = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",  # compiling small CPU models costs more than it saves
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [*_stand_in_paths(), os.environ.get("PYTHONPATH", "")])),
    }
    if tensor_parallel > 1:
        # One core per rank: SGLang otherwise wants a NUMA node for each.
        cores = sorted(os.sched_getaffinity(0))
        found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(cores[rank % len(cores)]) for rank in range(tensor_parallel)
        )
    return found


def _stand_in_paths() -> list[str]:
    """A stand-in for each package that is missing or, like torchvision, unusable with a CPU torch."""
    always = [STAND_INS / "common"]
    return [str(path) for path in always + ([] if _has_triton() else [STAND_INS / "triton_missing"])]


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
