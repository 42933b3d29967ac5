"""Counts the groups that need each segment. A segment that no group needs can be deleted.

A group needs the segments in which its chunks are, and those during which its rows were written: rows are
deleted together with the segment of their time. It does so from its admission until it is lost, or until the
version that was trained on it is released.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from slipstream.rollout.tokens.record import REF


class Holds:
    """Segments by group, and numbers of groups by segment."""

    def __init__(self) -> None:
        self.segments: dict[int, tuple[int, ...]] = {}
        """By group id; groups that have ended are missing."""
        self.groups: Counter[int] = Counter()
        """Number of groups that need a segment."""
        self.ever: Counter[int] = Counter()
        """Number of groups that have needed a segment since this process began."""
        self._alone: tuple[int, ...] = ()

    def know(self, segment: int) -> None:
        """Note that a segment exists, whether or not any group will need it."""
        self.ever[segment] += 0

    def begin(self, group: int) -> None:
        """Note that a group may need segments from now on."""
        self.segments.setdefault(group, ())

    def need(self, group: int, segment: int) -> None:
        """Note that a group, which has begun, needs a segment."""
        segments = self.segments[group]
        if segment in segments:
            return
        if segments:
            self.segments[group] = (*segments, segment)
        else:
            if self._alone != (segment,):
                self._alone = (segment,)  # most groups share one tuple
            self.segments[group] = self._alone
        self.groups[segment] += 1
        self.ever[segment] += 1

    def need_all(self, group: int, refs: bytes) -> None:
        """Note that a group needs all segments in ``refs``."""
        for segment, _, _, _ in REF.iter_unpack(refs):
            self.need(group, segment)

    def let_go(self, group: int, segments: Iterable[int]) -> None:
        """Note that a group no longer needs these segments."""
        released = set(segments)
        present = self.segments[group]
        self.segments[group] = tuple(segment for segment in present if segment not in released)
        for segment in released.intersection(present):
            self.groups[segment] -= 1

    def end(self, group: int) -> None:
        """Note that a group needs nothing any more."""
        for segment in self.segments.pop(group, ()):
            self.groups[segment] -= 1

    def forget(self, segment: int) -> None:
        """Forget a segment that was deleted."""
        del self.groups[segment], self.ever[segment]


class Eras:
    """The rows that were written while each segment was the newest: the *era* of the segment."""

    def __init__(self, first_rows: Iterable[tuple[int, int]]) -> None:
        """``first_rows``: segment, and the first row of its era."""
        self._starts = sorted((row, segment) for segment, row in first_rows)

    @property
    def newest(self) -> int | None:
        return self._starts[-1][1] if self._starts else None

    def begin(self, segment: int, row: int) -> None:
        """Begin the era of a new segment with ``row``."""
        self._starts.append((row, segment))

    def recent(self, number: int) -> set[int]:
        """Return the segments of the last eras."""
        return {segment for _, segment in self._starts[-number:]}

    def of(self, row: int) -> int | None:
        """Return the segment in whose era a row was written."""
        number = bisect_right(self._starts, row, key=lambda era: era[0])
        return self._starts[number - 1][1] if number else None

    def rows(self, segment: int) -> tuple[int, int] | None:
        """Return the first row of an era and of the next one; None for a segment without an era."""
        for (start, name), (stop, _) in pairwise(self._starts):
            if name == segment:
                return start, stop
        return None

    def forget(self, segment: int) -> None:
        """Forget an era whose rows were deleted. Rows of the era before end where they ended before."""
        self._starts = [(row, name) for row, name in self._starts if name != segment]
