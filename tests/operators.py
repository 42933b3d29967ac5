"""Counts operators that launch a kernel, and places where the host would wait for the device.

    python -W ignore -m tests.operators

prints both for a layer and for a micro-batch of 64 segments, for some models. The counts are taken on a CPU,
whose operators are those of a GPU where layers are of the local spec; what waits there is known by name.
"""

import contextlib
import tempfile
import traceback
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.backend.batch.micro_batch import MicroBatch, assemble
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.configs.schema import RunConfig
from tests.integration.test_megatron_parity import config_for, make_batch
from tests.integration.test_trainer_checkpoint import trainer_of
from tests.models import make_checkpoint
from tests.ranks import Job, run_jobs

SEGMENTS, VOCAB = 64, 101
FEW, MANY = 2, 4
"""Layers of the two models whose difference gives the counts of a layer."""

MODELS = {
    "grouped-query attention": ("qwen3", "", {}),
    "grouped-query attention, YaRN": ("qwen2", "yarn", {}),
    "latent attention": ("deepseek_v3", "", {"first_k_dense_replace": MANY}),
    "latent attention, YaRN": ("deepseek_v3", "yarn, DeepSeek", {"first_k_dense_replace": MANY}),
    "mixture of experts": ("qwen3_moe", "", {"mlp_only_layers": []}),
}
"""By name: the family, its rotary embedding and further fields of the HF config."""

WAITING = {
    "aten::_local_scalar_dense",  # item, bool, int, float, and a slice by a tensor
    "aten::nonzero",
    "aten::masked_select",
    "aten::is_nonzero",
    "aten::equal",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
}
"""Operators whose result the host waits for on a GPU."""
HOST = {"tolist", "numpy", "cpu"}
"""Methods that read a tensor on the host."""
NOT_LAUNCHED = {
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::detach",
    "aten::_unsafe_view",
}


@dataclass
class Counts:
    """Counts of one stretch of computation."""

    operators: Counter[str] = field(default_factory=Counter)
    """By name: operators that compute something; views of tensors and allocations are none."""
    waits: Counter[str] = field(default_factory=Counter)
    """By what waits and where: how often."""

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(self.operators - other.operators, self.waits - other.waits)

    def __floordiv__(self, number: int) -> "Counts":
        return Counts(
            *(Counter({k: n // number for k, n in c.items()}) for c in (self.operators, self.waits))
        )


def _place() -> str:
    """The innermost two calls that are neither torch's nor this file's."""
    frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames[-2:]))


class _Dispatched(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if not func.is_view and name not in NOT_LAUNCHED:
            self.counts.operators[name] += 1
        if name in WAITING or _selects_by_mask(name, args):
            self.counts.waits[f"{name} at {_place()}"] += 1
        if name == "aten::repeat_interleave" and (kwargs or {}).get("output_size") is None:
            self.counts.waits[f"{name} at {_place()}"] += 1
        return func(*args, **kwargs or {})


def _selects_by_mask(name: str, args: Sequence[Any]) -> bool:
    """Return whether an operator indexes by a mask, whose true places the host would count.

    Putting a single value where a mask is true is a fill and counts nothing.
    """
    if name not in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return False
    masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
    return bool(masks) and (name == "aten::index" or args[2].numel() != 1)


class _Called(TorchFunctionMode):
    """Sees what never becomes an operator on a CPU."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOST and "device_batch.py" not in _place():  # which fills the host's buffer
            self.counts.waits[f"{name} at {_place()}"] += 1
        # Without a device the tensor stays on the host, and one from a tensor is on its device already.
        made = name in ("tensor", "as_tensor") and not isinstance(args[0], torch.Tensor)
        if made and (kwargs or {}).get("device") is not None:
            self.counts.waits[f"{name} with a device at {_place()}"] += 1
        return func(*args, **kwargs or {})


@contextlib.contextmanager
def counted() -> Generator[Counts]:
    """Count what is computed inside."""
    counts = Counts()

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        counts.waits[f"cuda at {_place()}"] += 1
        return self

    with patch.object(torch.Tensor, "cuda", cuda), _Called(counts), _Dispatched(counts):
        yield counts


# ---- of a model


@dataclass
class PassCounts:
    """Counts of training passes over one and two micro-batches of the same shape."""

    forward: Counts
    """The forward pass of the first micro-batch through the layers, without the LM head."""
    one: Counts
    two: Counts
    copies: int
    """Copies to the device of the second pass, over two micro-batches."""


def microbatches_of(batch: TrainBatch, count: int) -> list[MicroBatch]:
    return [assemble(batch, list(range(i * SEGMENTS, (i + 1) * SEGMENTS))) for i in range(count)]


def passes(rank: RankSpec, config: RunConfig) -> PassCounts:
    """Train on one micro-batch, then on two, each of 64 segments of many lengths."""
    single = make_batch(VOCAB, n=SEGMENTS, seed=0)
    batches = [TrainBatch(0, single.trajectories * count, np.tile(single.group_N, count)) for count in (1, 2)]
    with trainer_of(rank, config) as trainer:
        from slipstream.backend.megatron import device_batch

        policy, copied = trainer._policy, Mock(wraps=device_batch.copied)
        forward, run = policy._forward, policy._run
        by_forward: list[Counts] = []
        by_run: list[Counts] = []

        def counting_forward(*args: Any) -> Any:
            with counted() as counts:
                output = forward(*args)
            by_forward.append(counts)
            return output

        def counting_run(*args: Any, **options: Any) -> Any:
            with counted() as counts:
                results = run(*args, **options)
            by_run.append(counts)
            return results

        for count, batch in enumerate(batches, start=1):
            microbatches = microbatches_of(batch, count)
            trainer.microbatches = lambda _, microbatches=microbatches: ([microbatches], {})
            trainer.train(batch)  # what is cached is made outside of the count
            policy._run = counting_run
            copied.reset_mock()
            with patch.object(device_batch, "copied", copied):
                trainer.train(replace_version(batch, trainer.step))
            policy._run = run
        copies = copied.call_count
        policy._forward = counting_forward
        trainer.train(replace_version(batches[1], trainer.step))
        return PassCounts(by_forward[-1], *by_run, copies)


def replace_version(batch: TrainBatch, version: int) -> TrainBatch:
    return TrainBatch(version, batch.trajectories, batch.group_N)


@dataclass
class ModelCounts:
    """Counts of a layer's forward pass, and of a whole micro-batch with its backward pass."""

    layer: Counts
    microbatch: Counts
    copies: int
    """Copies to the device of a step of two micro-batches."""


def measured(folder: Path) -> dict[str, ModelCounts]:
    """Return the counts of every model in ``MODELS``."""
    jobs: dict[tuple[str, int], Job] = {}
    for name, (family, rope, sizes) in MODELS.items():
        for layers in (FEW, MANY):
            path = make_checkpoint(
                folder / f"{name} {layers}", family, rope=rope, tied=False, num_hidden_layers=layers, **sizes
            )
            config = config_for(path, {})
            jobs[name, layers] = Job(1, passes, (config,))
    results = run_jobs(jobs)
    counts: dict[str, ModelCounts] = {}
    for name in MODELS:
        [few], [many] = results[name, FEW], results[name, MANY]
        counts[name] = ModelCounts(
            (many.forward - few.forward) // (MANY - FEW), few.two - few.one, few.copies
        )
    return counts


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        counts = measured(Path(folder))
    print("| model | operators of a layer | waits of a layer | operators of a micro-batch | its waits |")
    print("| --- | --- | --- | --- | --- |")
    for name, model in counts.items():
        layer, whole = model.layer, model.microbatch
        figures = [counter.total() for c in (layer, whole) for counter in (c.operators, c.waits)]
        print(f"| {name} | {' | '.join(map(str, figures))} |")
    for name, model in counts.items():
        print(f"{name}: {dict(model.layer.operators.most_common())}")
        for place, number in sorted(model.microbatch.waits.items()):
            print(f"{name}: {number} x {place}")


if __name__ == "__main__":
    main()
