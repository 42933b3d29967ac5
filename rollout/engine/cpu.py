"""Lets SGLang 0.5.21 run on a machine without a GPU. Used only when the device is ``cpu``.

Without AMX every SGLang layer takes its native PyTorch path. Only four things are missing then: packages
that SGLang imports and that have no CPU build, for which ``stand_ins/`` has replacements; settings that fit
small CPUs; latent attention that reads what it has cached; and host memory without CUDA. One thing is
better: a process without CUDA can be forked.
"""

import functools
import importlib.util
import json
import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.configs.installed.served import files_of, model_files

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


PREPARE = f"{__name__}.prepare"
"""Import path of what is done in the server's process before the server starts."""


PREPARE_ADAPTERS = f"{__name__}.pin_no_memory"
"""Import path of what is done besides in the process of a server that loads adapters."""


def environment(ranks: int, here: range | None = None) -> dict[str, str]:
    """Return the additional environment variables of the server's process.

    ``ranks``: number of ranks of the engine. ``here``: those of this server; None: all of them.
    """
    variables = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",  # compiling small CPU models costs more than it saves
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [*_stand_in_paths(), os.environ.get("PYTHONPATH", "")])),
    }
    if ranks > 1:
        # One core per rank: SGLang otherwise wants a NUMA node for each.
        cores = sorted(os.sched_getaffinity(0))
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(cores[rank % len(cores)]) for rank in here or range(ranks)
        )
    return variables


def without_other_models(model: Path) -> dict[str, str]:
    """Return the variable that keeps SGLang from importing its 240 models, of which it serves one.

    It has no effect, and is absent, if no model of SGLang's is called as ``config.json`` says.
    """
    architectures: list[str] = []
    with suppress(OSError, ValueError):
        architectures = json.loads((model / "config.json").read_text()).get("architectures") or []
    needed = files_of(architectures[0]) if architectures else []
    if not needed:
        return {}
    return {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(f.stem for f in model_files() if f not in needed)}


def prepare() -> None:
    """Change SGLang in the server's process, of which its other processes are copies."""
    fork_processes()
    attend_to_cached_latents()
    fill_padding()
    register_no_memory()


def attend_to_cached_latents() -> None:
    """Let ``torch_native`` compute the latent attention of DeepSeek-V3 from its cache.

    The cache has a latent vector for each token. SGLang chooses for each attention backend whether keys and
    values are expanded from it or the expansion is absorbed into queries and outputs. It knows no choice for
    ``torch_native`` and takes that of triton, which expands them in the prefill and passes them by the cache.
    But ``torch_native`` reads the cache, so its log-probs would be nonsense.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    handlers.AttentionBackendRegistry.register("torch_native", handlers._dispatch_mla_subtype)


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


def pin_no_memory() -> None:
    """Make torch ignore requests for pinned memory, which it refuses without a GPU.

    SGLang's adapters ask for it wherever they are.
    """
    import torch

    for name in ("arange", "empty", "tensor", "zeros"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, device=None: self


def _without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **options: Any) -> Any:
        return make(*args, **options)

    return made


def register_no_memory() -> None:
    """Let SGLang keep the experts of tokens on the host, whose memory it registers with CUDA everywhere."""
    from sglang.srt.mem_cache.pool_host import common

    common._cuda_host_register = lambda buffer, granularity=None: None


def fill_padding() -> None:
    """Let data-parallel attention pad its batches, for which this backend of attention lacks a number.

    A group of ranks without a request computes one token that nobody reads, as on the other backends.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1  # pyright: ignore


def _stand_in_paths() -> list[str]:
    """Return folders with stand-ins for packages that are missing or, like torchvision, need a CUDA torch."""
    always = [STAND_INS / "common"]
    return [str(path) for path in always + ([] if _has_triton() else [STAND_INS / "triton_missing"])]


def _has_triton() -> bool:
    """True if there is a triton that is no stand-in: this process may have stand-ins itself."""
    spec = importlib.util.find_spec("triton")
    return spec is not None and STAND_INS not in Path(spec.origin or "").parents
