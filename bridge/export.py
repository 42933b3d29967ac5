"""Executes an export plan: gathers shards bucket by bucket and yields HF-named tensors on the sender.

Collective: every rank of the first data-parallel replica iterates to the end, in step. Only the sender
(tensor rank 0 of stage 0) is given tensors; peak extra memory is the bucket in hand and the one being made.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from bridge.plan import Bucket, ExportPlan


@dataclass(frozen=True)
class ExportRank:
    """Where this process stands and which groups it gathers over."""

    stage: int
    tensor_rank: int
    tensor_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup

    @property
    def is_sender(self) -> bool:
        return self.stage == 0 and self.tensor_rank == 0


@dataclass(frozen=True)
class FlatBucket:
    """The HF tensors of one bucket, back to back in one flat tensor."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    flat: Tensor
    last: bool
    """The version is complete with this bucket."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views into ``flat``, by HF name."""
        parts = self.flat.split([prod(shape) for shape in self.shapes])
        for name, shape, part in zip(self.names, self.shapes, parts, strict=True):
            yield name, part.view(shape)


def _gather_stage(
    bucket: Bucket, plan: ExportPlan, parameters: dict[str, Tensor], rank: ExportRank
) -> Tensor | None:
    """On tensor rank 0 of the bucket's stage: its HF tensors, flat. None on the other ranks of the stage."""
    size = plan.layout.tensor
    shards = [parameters[entry.parameter].detach() for entry in bucket.entries]
    if size == 1:
        gathered = [[shard] for shard in shards]
    else:
        flat = torch.cat([shard.flatten() for shard in shards])
        parts = [torch.empty_like(flat) for _ in range(size)] if rank.tensor_rank == 0 else None
        dist.gather(flat, parts, group=rank.tensor_group, group_dst=0)
        if parts is None:
            return None
        lengths = [shard.numel() for shard in shards]
        by_rank = [part.split(lengths) for part in parts]
        gathered = [[part[i].view_as(shard) for part in by_rank] for i, shard in enumerate(shards)]
    tensors = (
        tensor
        for entry, parts in zip(bucket.entries, gathered, strict=True)
        for tensor in entry.mapping.merge(parts, plan.spec.geometry)
    )
    return torch.cat([tensor.flatten() for tensor in tensors])


@torch.no_grad()
def export(plan: ExportPlan, parameters: dict[str, Tensor], rank: ExportRank) -> Iterator[FlatBucket | None]:
    """Yield each bucket in plan order: a FlatBucket on the sender, None on every other rank."""
    sample = next(iter(parameters.values()))
    for bucket in plan.buckets:
        flat = _gather_stage(bucket, plan, parameters, rank) if rank.stage == bucket.stage else None
        if bucket.stage != 0 and rank.tensor_rank == 0:
            if rank.stage == bucket.stage:
                dist.send(flat, group=rank.pipeline_group, group_dst=0)
            elif rank.stage == 0:
                flat = torch.empty(bucket.numel, dtype=sample.dtype, device=sample.device)
                dist.recv(flat, group=rank.pipeline_group, group_src=bucket.stage)
        last = bucket is plan.buckets[-1]
        yield FlatBucket(bucket.hf_names, bucket.hf_shapes, flat, last) if rank.is_sender else None


_SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
)
"""What belongs to a checkpoint besides its weights."""


def _state_dtype(config: Path, dtype: torch.dtype) -> None:
    """Programs that are not told a dtype take the config's, which may be another one in the source."""
    hf = json.loads(config.read_text())
    spelling = "dtype" if "dtype" in hf else "torch_dtype"
    config.write_text(json.dumps(hf | {spelling: str(dtype).removeprefix("torch.")}, indent=2) + "\n")


def write_hf(buckets: Iterator[FlatBucket | None], source: Path, folder: Path) -> None:
    """Write the exported buckets as an HF checkpoint directory; config and tokenizer come from ``source``.

    One safetensors file per bucket and an index, in a temporary folder that is renamed at the end. Ranks
    that are not the sender only take part in the collectives.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    dtype = None
    weight_map: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(buckets, start=1):
        if bucket is None:
            continue
        if not weight_map:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        file = f"model-{number:05d}.safetensors"
        save_file(
            {name: t.contiguous().cpu() for name, t in bucket.tensors()}, partial / file, {"format": "pt"}
        )
        weight_map.update(dict.fromkeys(bucket.names, file))
        total += bucket.flat.nbytes
        dtype = bucket.flat.dtype
    if dtype is None:
        return
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for pattern in _SIDE_FILES:
        for file in source.glob(pattern):
            shutil.copy(file, partial)
    _state_dtype(partial / "config.json", dtype)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
