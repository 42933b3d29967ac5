"""TensorBoard event files, written with tensorboard's own writer and protos: no torch, no tensorflow."""

import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_DOUBLE, DT_STRING
from tensorboard.plugins.histogram import metadata as histogram_plugin
from tensorboard.plugins.text import metadata as text_plugin
from tensorboard.summary.writer.event_file_writer import EventFileWriter

MAX_BUCKETS = 64
"""More than any permitted lag, so that lags keep one bucket per integer; response lengths share buckets."""


class HistogramBucket(NamedTuple):
    """How many observations are in ``first..last`` (both included)."""

    first: int
    last: int
    count: int


def integer_buckets(values: Iterable[int] | Mapping[int, int]) -> list[HistogramBucket]:
    """Group integers (or a mapping integer -> how often) into buckets without gaps; [] when there are none.

    One bucket per integer while at most `MAX_BUCKETS` are needed. Beyond that all buckets have the smallest
    width of 2, 4, 8, ... that suffices, and start at multiples of it, so that all steps line up.

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
    totals = Counter()
    for value, count in counts.items():
        totals[value // width] += count
    return [
        HistogramBucket(index * width, (index + 1) * width - 1, totals[index])
        for index in range(low // width, high // width + 1)
    ]


class EventWriter:
    """One event file in `folder`, which TensorBoard shows as one run.

    `clock` gives Unix seconds. `descriptions` (tag -> markdown) is what TensorBoard tells about a chart.
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
        """Write all `values` as one event. They are kept in float32, as every TensorBoard scalar is."""
        summary = Summary()
        for tag, value in values.items():
            summary.value.add(tag=tag, simple_value=value, metadata=self._metadata(tag, None))
        self._write(step, summary)

    def histogram(self, step: int, tag: str, buckets: Sequence[HistogramBucket]) -> None:
        """Write integer buckets (see `integer_buckets`); that of one integer k spans k-1/2 to k+1/2."""
        rows = [(bucket.first - 0.5, bucket.last + 0.5, bucket.count) for bucket in buckets]
        edges_K3 = np.array(rows, dtype="<f8").reshape(-1, 3)
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in edges_K3.shape])
        tensor = TensorProto(dtype=DT_DOUBLE, tensor_shape=shape, tensor_content=edges_K3.tobytes())
        metadata = self._metadata(tag, histogram_plugin)
        self._write(step, Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)]))

    def text(self, step: int, tag: str, markdown: str) -> None:
        """Write a text for TensorBoard's text page."""
        tensor = TensorProto(dtype=DT_STRING, tensor_shape=TensorShapeProto(), string_val=[markdown.encode()])
        metadata = self._metadata(tag, text_plugin)
        self._write(step, Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)]))

    def flush(self) -> None:
        """Return when everything written so far is in the file."""
        self._file.flush()

    def close(self) -> None:
        """Flush and end the file; nothing may be written afterwards."""
        self._file.close()

    def _metadata(self, tag: str, plugin: ModuleType | None) -> SummaryMetadata | None:
        """What a tag is; None after its first event, because TensorBoard reads it there and nowhere else."""
        if tag in self._introduced:
            return None
        self._introduced.add(tag)
        description = self._descriptions.get(tag, "")
        if plugin is None:
            return SummaryMetadata(summary_description=description)
        return plugin.create_summary_metadata(tag, description)

    def _write(self, step: int, summary: Summary) -> None:
        self._file.add_event(Event(wall_time=self._clock(), step=step, summary=summary))
