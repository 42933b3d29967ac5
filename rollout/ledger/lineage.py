"""The tree of policy versions, from the ledger's rows: which weights descend from which, and how far apart.

Each version but the first, 0, has a parent: the version whose weights its update started from. The *line* of
a version is the path from 0 to it. A restart abandons the versions that are not on the line of the version
that it restores. A *copy* has the weights of its parent: no update leads to it.
"""

from collections.abc import Collection, Mapping

INITIAL = 0
"""Version of the initial weights."""


class BrokenTree(ValueError):
    """The parents do not lead to version 0."""


def line_of(parents: Mapping[int, int], version: int) -> list[int]:
    """Return the versions from 0, left out, to ``version``. Raises BrokenTree."""
    line: list[int] = []
    while version != INITIAL:
        parent = parents.get(version)
        if parent is None:
            raise BrokenTree(f"version {version} was never begun")
        if parent >= version:
            raise BrokenTree(f"version {version} has the parent {parent}, which was begun later")
        line.append(version)
        version = parent
    return line[::-1]


def deepest_line(parents: Mapping[int, int], version: int) -> list[int]:
    """Return as much of the line of ``version`` as the parents tell, however broken they are."""
    line: list[int] = []
    while version != INITIAL and parents.get(version, version) < version:
        line.append(version)
        version = parents[version]
    return line[::-1]


def distance(parents: Mapping[int, int], copies: Collection[int], one_end: int, other_end: int) -> int:
    """Return the number of updates on the path between two versions. Raises BrokenTree.

    A parent has a smaller number than its children, so that the larger of two different versions is never an
    ancestor of the smaller one: it takes the next step up.
    """
    updates = 0
    low, high = sorted((one_end, other_end))
    while low != high:
        parent = parents.get(high)
        if parent is None or parent >= high or low < INITIAL:
            raise BrokenTree(f"version {high} has no parent that was begun before it")
        updates += high not in copies
        low, high = sorted((low, parent))
    return updates
