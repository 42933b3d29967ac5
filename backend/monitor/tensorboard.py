"""Writes TensorBoard event files with tensorboard's own writer and protos, without torch or tensorflow."""

import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

# protobuf makes these classes when their modules are imported: a type checker cannot see them.
from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
    SummaryMetadata,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.tensor_shape_pb2 import (
    TensorShapeProto,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.types_pb2 import (
    DT_DOUBLE,  # pyright: ignore[reportAttributeAccessIssue]
    DT_STRING,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.plugins.histogram import metadata as histogram_plugin
from tensorboard.plugins.text import metadata as text_plugin
from tensorboard.summary.writer.event_file_writer import EventFileWriter

MAX_BUCKETS = 64
"""Largest number of buckets of a histogram. Every permitted lag is smaller and so has a bucket of its own."""


class HistogramBucket(NamedTuple):
    """Number of observations from `first` to `last`, both included."""

    first: int
    last: int
    count: int


def integer_buckets(values: Iterable[int] | Mapping[int, int]) -> list[HistogramBucket]:
    """Group integers, or integers with their counts, into buckets without gaps; return [] for no integers.

    There is one bucket per integer as long as at most `MAX_BUCKETS` are needed. Beyond that all buckets have
    the smallest sufficient width of 2, 4, 8, ... and start at its multiples, so that all steps line up.

    Raises:
        TypeError: a value is not an integer.
    """
    counts: Counter[int] = Counter()
    for value, count in Counter(values if isinstance(values, Mapping) else iter(values)).items():
        if count:
            counts[operator.index(value)] += operator.index(count)
    if not counts:
        return []
    width, low, high = 1, min(counts), max(counts)
    while high // width - low // width >= MAX_BUCKETS:
        width *= 2
    totals: Counter[int] = Counter()
    for value, count in counts.items():
        totals[value // width] += count
    return [
        HistogramBucket(index * width, (index + 1) * width - 1, totals[index])
        for index in range(low // width, high // width + 1)
    ]


class EventWriter:
    """Writes one event file into `folder`, which TensorBoard shows as one run.

    `clock` gives Unix seconds. `descriptions` maps tags to the markdown that TensorBoard shows for a chart.
    """

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] = time.time,
        descriptions: Mapping[str, str] | None = None,
    ) -> None:
        self._file = EventFileWriter(str(folder))
        self._clock = clock
        self._descriptions = dict(descriptions or {})
        self._introduced: set[str] = set()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write all `values` as one event, in float32 like every TensorBoard scalar."""
        summary = Summary()
        for tag, value in values.items():
            summary.value.add(tag=tag, simple_value=value, metadata=self._metadata(tag, None))
        self._write(step, summary)

    def histogram(self, step: int, tag: str, buckets: Sequence[HistogramBucket]) -> None:
        """Write buckets of integers. The bucket of a single integer k spans k-1/2 to k+1/2."""
        rows = [(bucket.first - 0.5, bucket.last + 0.5, bucket.count) for bucket in buckets]
        edges_K3 = np.array(rows, dtype="<f8").reshape(-1, 3)
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in edges_K3.shape])
        tensor = TensorProto(dtype=DT_DOUBLE, tensor_shape=shape, tensor_content=edges_K3.tobytes())
        metadata = self._metadata(tag, histogram_plugin)
        self._write(step, Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)]))

    def text(self, step: int, tag: str, markdown: str) -> None:
        """Write a text, which TensorBoard shows on its text page."""
        tensor = TensorProto(dtype=DT_STRING, tensor_shape=TensorShapeProto(), string_val=[markdown.encode()])
        metadata = self._metadata(tag, text_plugin)
        self._write(step, Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)]))

    def flush(self) -> None:
        """Write everything so far to the file."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()

    def _metadata(self, tag: str, plugin: ModuleType | None) -> SummaryMetadata | None:
        """Return the metadata of a tag, or None after its first event: TensorBoard reads only that one."""
        if tag in self._introduced:
            return None
        self._introduced.add(tag)
        description = self._descriptions.get(tag, "")
        if plugin is None:
            return SummaryMetadata(summary_description=description)
        return plugin.create_summary_metadata(tag, description)

    def _write(self, step: int, summary: Summary) -> None:
        self._file.add_event(Event(wall_time=self._clock(), step=step, summary=summary))
