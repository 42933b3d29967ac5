"""The policy versions of a run and the distances between them, restarts included. Pure.

A policy version is a name for one set of weights: 0 for the initial weights, then counting up over the whole
life of the run. No number is used twice, and no version is ever renumbered. The parent of a version is the
version whose weights its update started from. After a restart from the checkpoint of version c the engines
serve c again, and the next version is a child of c. So versions form a tree:

    0 - 1 - 2 - 3 - 4 - 5 - 6 - 7      killed while 7 was being made; the newest checkpoint is that of 4
                    |
                    + - 8 - 9          killed again before there is another checkpoint
                    |
                    + - 10 - 11        the present line: 0 1 2 3 4 10 11

The distance between two versions is the number of updates on the path between them: up to their last common
ancestor and down again. From 6 to 11 it is 2 + 2, from 8 to 10 it is 1 + 1, from 3 to 11 it is 3.

A *copy* is a version without an update: a further name for the weights of its parent, from which it has the
distance 0. The weights of a restored trainer get one where engines must have them that hold a larger version.

    >>> tree = VersionTree({1: 0, 2: 1})
    >>> tree.begin(parent=1)
    3
    >>> tree.distance(2, 3)
    2
    >>> copy = tree.begin(parent=1, is_copy=True)
    >>> tree.distance(1, copy), tree.distance(2, copy)
    (0, 1)
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from typing import cast


class ControlError(RuntimeError):
    """An event is impossible in the present state: a bug in the caller, never bad input."""


class UnknownVersion(ControlError):
    """A policy version was named that the run has never begun."""

    def __init__(self, version: int, newest: int) -> None:
        super().__init__(f"policy version {version} was never begun: this run has the versions 0 to {newest}")
        self.version = version


class VersionTree:
    """Policy versions of a run and their parents.

    The tree is stored as *lines*: consecutive numbers, each the parent of the next, and one update away from
    it. An uninterrupted run is one line, and each restart and each copy begins another one. The cost of a
    query depends on the number of lines on its path, and not on the number of versions.
    """

    def __init__(
        self, parents: Mapping[int, int] | Iterable[tuple[int, int]] = (), copies: Collection[int] = ()
    ) -> None:
        """``parents``: version and parent of every version that was ever begun, published or not.
        ``copies``: the copies among them.

        Version 0 is always there. Raises ControlError when a version occurs twice, and UnknownVersion when a
        parent was not begun before its child.
        """
        self._starts = [0]
        """First version of each line, in ascending order."""
        self._ends = [0]
        """Last version of each line."""
        self._forks = [-1]
        """Parent of the first version of each line."""
        self._depths = [0]
        """Number of updates that led to the first version of each line."""
        last = 0
        pairs = cast(Mapping[int, int], parents).items() if isinstance(parents, Mapping) else parents
        for version, parent in sorted(pairs):
            if version <= last:
                raise ControlError(
                    f"version {version} has the parent {parent}, but version {last} was begun already: "
                    "each version above 0 is begun once"
                )
            self._add(version, parent, is_copy=version in copies)
            last = version

    @property
    def next(self) -> int:
        """Number of the next version, which was never begun before."""
        return self._ends[-1] + 1

    def begin(self, parent: int, *, is_copy: bool = False) -> int:
        """Take the number ``next`` for a child of ``parent``, and return it. Raises UnknownVersion."""
        version = self.next
        self._add(version, parent, is_copy=is_copy)
        return version

    def parent(self, version: int) -> int | None:
        """Return the version whose weights ``version`` started from, or has if it is a copy; None for 0.

        Raises UnknownVersion.
        """
        line = self._line(version)
        if version > self._starts[line]:
            return version - 1
        return self._forks[line] if line else None

    def updates(self, version: int) -> int:
        """Return the number of updates that led to ``version``. Raises UnknownVersion."""
        line = self._line(version)
        return self._depths[line] + version - self._starts[line]

    def distance(self, a: int, b: int) -> int:
        """Return the number of updates on the path between two versions. Raises UnknownVersion."""
        if self._line(a) == self._line(b):
            return abs(a - b)
        return self.updates(a) + self.updates(b) - 2 * self.updates(self._last_common_ancestor(a, b))

    def is_ancestor(self, version: int, of: int) -> bool:
        """True if the weights of ``of`` are those of ``version`` or descend from them.

        Raises UnknownVersion.
        """
        return self._last_common_ancestor(version, of) == version

    def _add(self, version: int, parent: int, *, is_copy: bool) -> None:
        if parent == self._ends[-1] == version - 1 and not is_copy:
            self._ends[-1] = version
            return
        depth = self.updates(parent) + (not is_copy)
        self._starts.append(version)
        self._ends.append(version)
        self._forks.append(parent)
        self._depths.append(depth)

    def _line(self, version: int) -> int:
        line = bisect_right(self._starts, version) - 1
        if line < 0 or version > self._ends[line]:
            raise UnknownVersion(version, self._ends[-1])
        return line

    def _last_common_ancestor(self, a: int, b: int) -> int:
        line_a, line_b = self._line(a), self._line(b)
        while line_a != line_b:
            # A line forks from an earlier one, so that no ancestor of b lies in a line that begins after b's.
            if line_a > line_b:
                a = self._forks[line_a]
                line_a = self._line(a)
            else:
                b = self._forks[line_b]
                line_b = self._line(b)
        return min(a, b)
