"""No transport of weights: the engines keep those that they hold, under the number of the next version.

For runs that train nothing, in which generation, lags and pauses should be those of a run that does.
"""

from slipstream.bridge.publish.bucket_stream import BucketStream
from slipstream.bridge.publish.publication import Publication


class RenamedWeights:
    """Moves the version of each engine, and nothing else."""

    async def prepare(self, publication: Publication, buckets: BucketStream) -> None:
        """Do nothing."""

    async def update(self, publication: Publication, buckets: BucketStream) -> None:
        await publication.each("rename", lambda engine: engine.rename_version(publication.version))
