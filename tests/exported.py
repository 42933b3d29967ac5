"""The weights of a trainer in the form in which a checkpoint gets them."""

from collections.abc import Iterator
from typing import Any

from slipstream.bridge.hf.bucket import FlatBucket


def buckets_of(trainer: Any) -> Iterator[FlatBucket | None]:
    """Export a rank's weights: buckets on the sender, None elsewhere. All ranks must iterate to the end."""
    import torch.distributed as dist

    from slipstream.bridge.shards.export import export

    return export(trainer._plan, trainer._parameters, dist.get_rank())
