"""Support for Megatron-Core (0.16.1, 0.19.2) on a machine without a GPU.

Megatron assumes a current CUDA device throughout, and touches it in places that have nothing to do with
kernels. Each patch below answers one such place; the mathematics is untouched. The patches are process-wide,
so ``install`` runs in trainer processes only (``parallel.initialize``), before the Megatron modules that use
them are imported.
"""

import contextlib
import importlib.util
import sys
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

_CPU = torch.device("cpu")
_installed = False


def install() -> None:
    """Patch torch and Megatron for CPU tensors. Does nothing on a machine with a GPU, or a second time."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    _stand_in_for_triton_modules()
    _no_compilation()
    _current_device_is_the_cpu()
    _streams_do_nothing()
    _cuda_literals_mean_the_cpu()
    _random_states_of_the_cpu()
    _mixture_of_experts()
    _parts_of_different_sizes()
    _latent_attention()
    _tensor_type_names()


def _stand_in_for_triton_modules() -> None:
    """Since 0.18 one module on the training path imports triton unguarded: a CUDA-graph memory feature."""
    name = "megatron.core.transformer.moe.ops.paged_stash"
    if importlib.util.find_spec("triton") is not None:
        return

    class Absent(types.ModuleType):
        def __getattr__(self, attribute: str) -> Callable[..., None]:
            if attribute.startswith("__"):
                raise AttributeError(attribute)

            def unavailable(*args: object, **kwargs: object) -> None:
                raise RuntimeError(f"{name}.{attribute} needs triton")

            return unavailable

    sys.modules[name] = Absent(name)


def _no_compilation() -> None:
    """jit_fuser is torch.compile: slow to warm up, and it needs a C++ compiler at run time.

    The first import of Megatron decorates functions with it, before it can be disabled. The decorator alone
    imports torch's compiler, for a second of a core.
    """

    def as_it_is(function: Callable[..., Any] | None = None, **options: object) -> Callable[..., Any]:
        return as_it_is if function is None else function

    compiled, torch.compile = torch.compile, as_it_is
    try:
        from megatron.core import jit
    finally:
        torch.compile = compiled
    jit.disable_jit_fuser()


def _current_device_is_the_cpu() -> None:
    """About 60 sites allocate on ``torch.cuda.current_device()``; pipeline schedules synchronize."""
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.synchronize = lambda *args, **kwargs: None


class _Event:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def record(self, *args: object) -> None: ...
    def wait(self, *args: object) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "_Event") -> float:
        return 0.0


class _Stream:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def wait_stream(self, *args: object) -> None: ...
    def wait_event(self, *args: object) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, *args: object) -> _Event:
        return _Event()


def _streams_do_nothing() -> None:
    """Token dispatchers, shared experts and overlapped gradient reduction create side streams."""
    stream = _Stream()
    torch.cuda.Stream, torch.cuda.Event = _Stream, _Event
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args, **kwargs: stream
    torch.cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda self, s: None


def _cuda_literals_mean_the_cpu() -> None:
    """``device="cuda"`` is written out for token counts, optimizer scalars and causal masks."""
    import torch.utils._device as device_contexts

    def redirected(create: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapped(*args: object, **kwargs: object) -> Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = _CPU
            return create(*args, **kwargs)

        return wrapped

    # ``with torch.device("meta")``, under which transformers makes its models, knows constructors by
    # identity, and remembers them at its first use, which must come before they are replaced.
    device_contexts._device_constructors()
    for name in ("tensor", "zeros", "ones", "empty"):
        setattr(torch, name, redirected(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


def _random_states_of_the_cpu() -> None:
    """The tensor-parallel random states, and those of activation recomputation, are CUDA generators'."""
    from megatron.core.tensor_parallel import random as megatron_random

    class CpuStatesTracker(megatron_random.CudaRNGStatesTracker):
        def add(self, name: str, seed: int) -> None:
            self._is_initialized = True
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"random state {name!r} or seed {seed} exists already")
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Generator[None]:
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    megatron_random.CudaRNGStatesTracker = CpuStatesTracker
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _mixture_of_experts() -> None:
    """Without Transformer Engine 0.16 reads an undefined name; dispatch splits must be numbers."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

    def to_cpu(
        tensor: Tensor | None, as_numpy: bool = False, record_stream: bool = False
    ) -> Tensor | np.ndarray | None:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


def _parts_of_different_sizes() -> None:
    """Ranks that share an expert have different numbers of tokens; gloo exchanges parts of one size alone."""
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gathered(
        part: Tensor, group: dist.ProcessGroup, sizes: Sequence[int] | None = None, use_buffer: bool = False
    ) -> Tensor:
        if sizes is None or group.size() == 1:
            return gather(part, group, sizes, use_buffer)
        padded = part.new_zeros(max(1, *sizes), *part.shape[1:])
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group)
        return torch.cat([each[:size] for each, size in zip(parts, sizes, strict=True)])

    def scattered(
        whole: Tensor, group: dist.ProcessGroup, sizes: Sequence[int] | None = None, use_buffer: bool = False
    ) -> Tensor:
        if sizes is None or group.size() == 1:
            return scatter(whole, group, sizes, use_buffer)
        total = whole.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.split(list(sizes))[group.rank()].clone()

    mappings._gather_along_first_dim = gathered
    mappings._reduce_scatter_along_first_dim = scattered


def _latent_attention() -> None:
    """Without Transformer Engine it asks whether a layer is an instance of a name that is no class."""
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


def _tensor_type_names() -> None:
    """Optimizers and gradient clipping compare ``Tensor.type()`` with 'torch.cuda.FloatTensor'."""
    tensor_class: Any = torch.Tensor
    original = tensor_class.type

    def cuda_name(self: Tensor, *args: object, **kwargs: object) -> Tensor | str:
        result = original(self, *args, **kwargs)
        if args or kwargs or not isinstance(result, str):
            return result
        return result.replace("torch.", "torch.cuda.", 1)

    tensor_class.type = cuda_name
