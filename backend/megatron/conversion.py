"""What each rank does of a conversion between HF and Megatron checkpoints: on the CPU, with no optimizer."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from slipstream.backend.megatron.parallel import RankSpec, initialize
from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.files import write_hf
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.shards.export import export
from slipstream.bridge.shards.plan import make_plan
from slipstream.configs.schema import ActorConfig, LoraConfig, ParallelConfig

COLLECTIVE_TIMEOUT_S = 3600
"""A rank may wait this long for another one: that reads its slices, or writes a file, on a slow disk."""

FILE_BYTES = 2**30
"""Of one safetensors file. The first rank holds two of them in memory besides its own weights."""

DTYPES = (torch.bfloat16, torch.float32)


@contextmanager
def _joined(rank: RankSpec, parallel: ParallelConfig) -> Iterator[torch.device]:
    """Inside, this process is a rank of Megatron's groups. After an error they are left to its end."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the ranks of a large layout are more than a machine's GPUs
    warnings.filterwarnings("ignore", module="megatron|torch")  # about what is missing for training
    yield initialize(rank, parallel, seed=0, timeout_s=COLLECTIVE_TIMEOUT_S)
    from megatron.core import parallel_state

    dist.barrier()  # a rank that leaves would look like a lost peer to those at work
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def write_megatron(
    rank: RankSpec, model: Path, parallel: ParallelConfig, dtype_name: str, folder: Path
) -> None:
    """Read this rank's slices of the HF checkpoint and write them into ``folder``, which exists."""
    with _joined(rank, parallel) as device:
        from slipstream.backend.megatron.checkpoint_writer import BackgroundSave
        from slipstream.backend.megatron.model import build_model
        from slipstream.backend.megatron.weights import content_of, sharded_weights

        spec, dtype = model_spec(model), getattr(torch, dtype_name)
        parts = build_model(spec, ActorConfig(parallel=parallel, layer_spec="local"), dtype, device)
        about = {"content": content_of(spec.geometry, dtype), "layout": parallel.model_dump()}
        saving = BackgroundSave.begin({"model": sharded_weights(parts), "about": about}, folder)
        saving.finish(COLLECTIVE_TIMEOUT_S / 2)


def write_huggingface(
    rank: RankSpec, checkpoint: Path, model: Path, parallel: ParallelConfig, folder: Path
) -> list[str]:
    """Read this rank's share of the weights in ``checkpoint``; the first rank writes them all to ``folder``,
    with adapters merged into them.

    Gives the reasons, on every rank the same, if the checkpoint is not one of the model at ``model``.
    """
    with _joined(rank, parallel) as device:
        from megatron.core import dist_checkpointing

        from slipstream.backend.megatron import weights
        from slipstream.backend.megatron.lora import adapt
        from slipstream.backend.megatron.model import empty_model, named_shards

        spec, layout = model_spec(model), Layout.of(parallel)
        stored = weights.stored_tensors(checkpoint)
        dtype = stored[weights.WORDS].dtype if weights.WORDS in stored else None
        if dtype not in DTYPES:
            return [f"{weights.WORDS}: {dtype or 'missing'}; expected {' or '.join(map(str, DTYPES))}"]
        about = dist_checkpointing.load_common_state_dict(str(checkpoint)).get("about", {})
        content = weights.content_of(spec.geometry, dtype)
        if found := weights.differences(content, about.get("content", content)):
            return found
        parts = empty_model(spec, ActorConfig(parallel=parallel, layer_spec="local"), dtype, device)
        if adapters := about.get("content", {}).get(weights.ADAPTERS):
            adapt(parts, spec, layout, rank.rank, LoraConfig.model_validate(adapters), seed=0)
        sharded = weights.sharded_weights(parts)
        wanted = weights.wanted_tensors(sharded)
        if found := _of_all_ranks(weights.mismatches(wanted, stored, spec.geometry.vocab)):
            return found
        if found := sorted(stored.keys() - set(_of_all_ranks(list(wanted)))):
            return [f"{name}: not in this model" for name in found]
        weights.load_weights(parts, sharded, checkpoint)
        plan = make_plan(spec, layout, FILE_BYTES, dtype.itemsize)
        write_hf(export(plan, [named_shards(part) for part in parts], rank.rank), model, folder)
        return []


def _of_all_ranks(found: list[str]) -> list[str]:
    """What any rank has found, each once. Collective."""
    by_rank: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, found)
    return sorted({what for found in by_rank for what in found})
