"""Lets SGLang 0.5.21 run on a machine without a GPU. Used only when the device is ``cpu``.

Without AMX every SGLang layer takes its native PyTorch path. Only two things are missing then: packages that
SGLang imports and that have no CPU build, for which ``stand_ins/`` has replacements, and settings that fit
small CPUs. One thing is better: a process without CUDA can be forked.
"""

import importlib.util
import json
import multiprocessing
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.configs.installed import package_folder

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


PREPARE = f"{__name__}.fork_processes"
"""Import path of what is done in the server's process before the server starts."""


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


def without_other_models(model: Path) -> dict[str, str]:
    """Return the variable that keeps SGLang from importing its 240 models, of which it serves one.

    It has no effect, and is absent, if no model of SGLang's is called as ``config.json`` says.
    """
    folder = package_folder("sglang.srt.models")
    architectures: list[str] = []
    with suppress(OSError, ValueError):
        architectures = json.loads((model / "config.json").read_text()).get("architectures") or []
    files = sorted(folder.glob("*.py")) if folder and architectures else []
    needed = [file for file in files if f"class {architectures[0]}(".encode() in file.read_bytes()]
    if not needed:
        return {}
    return {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(file.stem for file in files if file not in needed)}


def fork_processes() -> None:
    """Let the server's processes begin as copies of the one that has imported SGLang.

    SGLang spawns them, because CUDA does not survive a fork: each imports SGLang again, for six seconds of a
    core and 200 MB.
    """
    from sglang.srt.entrypoints import engine

    prepare = engine._set_envs_and_config  # it sets SGLang's own start method

    def prepare_for_forks(server_args: Any) -> None:
        prepare(server_args)
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = prepare_for_forks


def _stand_in_paths() -> list[str]:
    """Return folders with stand-ins for packages that are missing or, like torchvision, need a CUDA torch."""
    always = [STAND_INS / "common"]
    return [str(path) for path in always + ([] if _has_triton() else [STAND_INS / "triton_missing"])]


def _has_triton() -> bool:
    """True if there is a triton that is no stand-in: this process may have stand-ins itself."""
    spec = importlib.util.find_spec("triton")
    return spec is not None and STAND_INS not in Path(spec.origin or "").parents
