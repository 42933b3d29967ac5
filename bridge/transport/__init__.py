"""Ways for the weights to reach the engines: ``weights.transport.type``.

             before the pause                        in the pause
distributed  the group, if its members have changed  a broadcast of each bucket
tensor                                               each bucket through memory of the node
disk         a checkpoint                            every engine reads it
delta        what has changed, to the engines' nodes every engine reads the copy that is kept there
"""

from typing import Protocol

from slipstream.bridge.publication import Buckets, Publication


class Transport(Protocol):
    """Lives on the sender, from one version to the next. Single caller.

    Both calls leave in ``publication`` who is still in it. The first one begins with the buckets where they
    begin; what is left of them at the end is consumed by the publisher.
    """

    async def prepare(self, publication: Publication, buckets: Buckets) -> None:
        """What can be done while the engines generate."""
        ...

    async def update(self, publication: Publication, buckets: Buckets, *, flush_cache: bool) -> None:
        """What they have to stand still for."""
        ...
