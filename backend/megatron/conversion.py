"""One rank's part of a conversion between HF and Megatron checkpoints: on the CPU, without an optimizer."""

import os
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict, cast

import torch
import torch.distributed as dist

from slipstream.backend.megatron.parallel import RankSpec, initialize, leave
from slipstream.bridge.families import model_spec
from slipstream.bridge.group.pinned import PinnedPool
from slipstream.bridge.hf.files import write_hf
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.shards.export import export
from slipstream.bridge.shards.plan import make_plan
from slipstream.configs.schema import ActorConfig, LoraConfig, ParallelConfig
from slipstream.rollout.system import plugins

COLLECTIVE_TIMEOUT_S = 3600
"""Longest wait for another rank, which may be reading its slices or writing a file on a slow disk."""

FILE_BYTES = 2**30
"""Size of one safetensors file. The first rank holds two of them in memory besides its own weights."""

DTYPES = (torch.bfloat16, torch.float32)


class _About(TypedDict, total=False):
    """The description of itself that a checkpoint carries; a checkpoint of Megatron-LM has none."""

    content: dict[str, object]


@contextmanager
def _joined(rank: RankSpec, parallel: ParallelConfig) -> Generator[torch.device]:
    """Make this process a rank of Megatron's groups, which it leaves at the end, except after an error."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the ranks of a large layout outnumber a machine's GPUs
    warnings.filterwarnings("ignore", module="megatron|torch")  # about what is missing for training
    yield initialize(rank, parallel, seed=0, timeout_s=COLLECTIVE_TIMEOUT_S)
    leave()


def write_megatron(
    rank: RankSpec,
    model: Path,
    parallel: ParallelConfig,
    dtype_name: str,
    folder: Path,
    families: Mapping[str, str],
) -> None:
    """Read this rank's slices of the HF checkpoint and write them into ``folder``, which exists.

    ``families``: import paths of model families of the user's, by ``model_type``.
    """
    with _joined(rank, parallel) as device:
        from slipstream.backend.megatron.checkpoint_writer import BackgroundSave
        from slipstream.backend.megatron.model import build_model
        from slipstream.backend.megatron.weights import content_of, sharded_weights

        spec, dtype = model_spec(model, plugins.resolved(families)), getattr(torch, dtype_name)
        parts = build_model(spec, _settings(parallel), dtype, device)
        about = {"content": content_of(spec.geometry, dtype), "layout": parallel.model_dump()}
        saving = BackgroundSave.begin({"model": sharded_weights(parts), "about": about}, folder, PinnedPool())
        saving.finish(COLLECTIVE_TIMEOUT_S / 2)


def write_huggingface(
    rank: RankSpec,
    checkpoint: Path,
    model: Path,
    parallel: ParallelConfig,
    folder: Path,
    families: Mapping[str, str],
    *,
    adapter_alone: bool = False,
) -> list[str]:
    """Read this rank's share of the weights in ``checkpoint``; the first rank writes them all to ``folder``.

    Adapters are merged into the weights; with ``adapter_alone`` they are all that is written, in PEFT's
    format. Returns the reasons, the same on every rank, if ``checkpoint`` is
    not one of the model at ``model``. ``families``: as of ``write_megatron``.
    """
    with _joined(rank, parallel) as device:
        from megatron.core import dist_checkpointing

        from slipstream.backend.megatron import weights
        from slipstream.backend.megatron.lora import AdapterExport, adapt
        from slipstream.backend.megatron.model import empty_model, named_shards

        spec, layout = model_spec(model, plugins.resolved(families)), Layout.of(parallel)
        stored = weights.stored_tensors(checkpoint)
        dtype = stored[weights.WORDS].dtype if weights.WORDS in stored else None
        if dtype not in DTYPES:
            return [f"{weights.WORDS}: {dtype or 'missing'}; expected {' or '.join(map(str, DTYPES))}"]
        about = cast("_About", dist_checkpointing.load_common_state_dict(str(checkpoint)).get("about", {}))
        content = weights.content_of(spec.geometry, dtype)
        if problems := weights.differences(content, about.get("content", content)):
            return problems
        parts, lora = empty_model(spec, _settings(parallel), dtype, device), None
        if adapters := about.get("content", {}).get(weights.ADAPTERS):
            lora = LoraConfig.model_validate(adapters)
            adapt(parts, spec, layout, rank.rank, lora, seed=0)
        elif adapter_alone:
            return [f"{weights.ADAPTERS}: missing; expected a checkpoint of a run that trains an adapter"]
        sharded = weights.sharded_weights(parts)
        needed = weights.needed_tensors(sharded)
        if problems := _union_over_ranks(weights.mismatches(needed, stored, spec.geometry.vocab)):
            return problems
        if unknown := sorted(stored.keys() - set(_union_over_ranks(list(needed)))):
            return [f"{name}: not in this model" for name in unknown]
        weights.load_weights(parts, sharded, checkpoint)
        if lora is not None and adapter_alone:
            AdapterExport(parts, spec, layout, lora, rank.rank).write(folder)
            return []
        plan = make_plan(spec, layout, FILE_BYTES, dtype.itemsize)
        buckets = export(plan, [named_shards(part) for part in parts], rank.rank)
        write_hf(buckets, model, folder, kept=spec.kept)
        return []


def _settings(parallel: ParallelConfig) -> ActorConfig:
    return ActorConfig.model_validate({"parallel": parallel, "layer_spec": "local"})


def _union_over_ranks(texts: list[str]) -> list[str]:
    """Return the texts of all ranks, each once. Collective."""
    by_rank: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, texts)
    return sorted({text for of_rank in by_rank for text in of_rank})
