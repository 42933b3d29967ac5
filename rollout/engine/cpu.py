"""Lets SGLang 0.5.21 run on a machine without a GPU. Used only when the device is ``cpu``.

Without AMX every SGLang layer takes its native PyTorch path. Only two things are missing then: packages that
SGLang imports and that have no CPU build, for which ``stand_ins/`` has replacements, and settings that fit
small CPUs.
"""

import importlib.util
import os
from pathlib import Path

STAND_INS = Path(__file__).with_name("stand_ins")
"""Folders for the PYTHONPATH of the server's process only: they would break torch.compile elsewhere."""

SERVER_ARGS: dict[str, object] = {
    "attention_backend": "torch_native",  # the other backends are kernels
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.1,  # else SGLang reserves most of the machine's memory for KV
    "max_total_tokens": 16384,
    "sleep_on_idle": True,  # else an idle scheduler spins on a core that the trainer needs
}
"""ServerArgs for the CPU; the recipe's ``rollout.engine.args`` override them."""


def environment(tensor_parallel: int) -> dict[str, str]:
    """Return the additional environment variables of the server's process."""
    variables = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",  # compiling small CPU models costs more than it saves
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [*_stand_in_paths(), os.environ.get("PYTHONPATH", "")])),
    }
    if tensor_parallel > 1:
        # One core per rank: SGLang otherwise wants a NUMA node for each.
        cores = sorted(os.sched_getaffinity(0))
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(cores[rank % len(cores)]) for rank in range(tensor_parallel)
        )
    return variables


def _stand_in_paths() -> list[str]:
    """Return folders with stand-ins for packages that are missing or, like torchvision, need a CUDA torch."""
    always = [STAND_INS / "common"]
    return [str(path) for path in always + ([] if _has_triton() else [STAND_INS / "triton_missing"])]


def _has_triton() -> bool:
    """Return whether there is a triton that is no stand-in: this process may have stand-ins itself."""
    spec = importlib.util.find_spec("triton")
    return spec is not None and STAND_INS not in Path(spec.origin or "").parents
