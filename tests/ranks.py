"""``slipstream.backend.cluster.local_ranks`` with the patience of a test."""

from collections.abc import Callable
from typing import Any

from slipstream.backend.cluster import local_ranks as ranks


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 180, fresh: bool = False
) -> list[Any]:
    return ranks.run_ranks(world_size, function, *args, timeout_s=timeout_s, fresh=fresh)
