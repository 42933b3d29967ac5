"""Policy versions: a tree whose distances are lags, over any number of restarts."""

import pytest

from slipstream.rollout.control.consumption import OnStale, ReadyFirst
from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.control.versions import ControlError, UnknownVersion, VersionTree

LINE = dict(enumerate(range(8), start=1))
"""Versions 1 to 8, each the child of the one before."""

TWO_RESTARTS = LINE | {9: 4, 10: 9, 11: 10, 12: 4}
"""The run was killed while version 8 was being made, and goes on from the checkpoint of version 4: 9, 10, 11.
Killed again, it goes on from the same checkpoint: 12.

    0 - 1 - 2 - 3 - 4 - 5 - 6 - 7 - 8
                    + - 9 - 10 - 11
                    + - 12
"""


# ---- two restarts from one checkpoint


def restarted_twice(policy: OnStale) -> RolloutControl:
    """Return the core of a run with bound 2 that was restored twice from version 4, before it begins 12."""
    tree = VersionTree(LINE | {9: 4, 10: 9, 11: 10})
    return RolloutControl(1, 2, consumption=ReadyFirst(policy), versions=tree, version=4)


def test_a_token_that_is_too_old_is_not_trained_after_two_restarts_from_one_checkpoint():
    """Version 7 is three updates away from version 4. Renumbered twice, its tokens had a lag of 2."""
    control = restarted_twice(OnStale.MASK)
    assert control.lag(7) == 3
    assert control.restore_ready(0, {7, 6, 4})
    assert control.take_batch() == {0: frozenset({7})}

    control = restarted_twice(OnStale.DROP)
    assert not control.restore_ready(0, {7})


def test_a_fresh_token_is_trained_after_two_restarts_from_one_checkpoint():
    """Version 4 is served again: its tokens have lag 0. Renumbered twice, they had lag 5 and were masked."""
    control = restarted_twice(OnStale.MASK)
    assert control.lag(4) == 0
    assert control.restore_ready(0, {4, 9})
    assert control.take_batch() == {0: frozenset()}


def test_the_next_version_after_two_restarts_was_never_begun_before():
    control = restarted_twice(OnStale.MASK)
    assert (control.version, control.step) == (4, 4)
    control.finished(control.admit().id, {4})
    control.take_batch()
    assert control.begin_step() == 12
    control.published(12)
    assert (control.version, control.step, control.versions.parent(12)) == (12, 5, 4)


# ---- distances by eye


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        (0, 0, 0),
        (0, 1, 1),
        (0, 8, 8),
        (3, 7, 4),
        (4, 9, 1),
        (4, 12, 1),
        (9, 12, 2),
        (11, 12, 4),
        (11, 9, 2),
        (8, 12, 5),
        (8, 11, 7),
        (7, 9, 4),
        (5, 12, 2),
        (3, 12, 2),
        (1, 11, 6),
        (0, 12, 5),
    ],
)
def test_distances_after_two_restarts_from_one_checkpoint(a, b, distance):
    tree = VersionTree(TWO_RESTARTS)
    assert tree.distance(a, b) == tree.distance(b, a) == distance


SCATTERED = {1: 0, 2: 1, 3: 2, 4: 1, 5: 4, 6: 5, 7: 4, 8: 0, 9: 8, 10: 5, 11: 10}
"""Restarts from 1, from 4, from 0, and from 5, as with checkpoints that were chosen by hand.

    0 - 1 - 2 - 3
    |   + - 4 - 5 - 6
    |       |   + - 10 - 11
    |       + - 7
    + - 8 - 9
"""


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        (3, 6, 5),
        (3, 7, 4),
        (6, 7, 3),
        (6, 11, 3),
        (7, 11, 4),
        (9, 11, 7),
        (9, 3, 5),
        (9, 8, 1),
        (5, 11, 2),
        (2, 10, 4),
        (1, 11, 4),
        (4, 1, 1),
    ],
)
def test_distances_in_a_tree_with_branches_of_branches(a, b, distance):
    tree = VersionTree(SCATTERED)
    assert tree.distance(a, b) == tree.distance(b, a) == distance


@pytest.mark.parametrize(
    ("version", "of", "expected"),
    [
        (0, 11, True),
        (4, 11, True),
        (5, 11, True),
        (11, 11, True),
        (11, 5, False),
        (6, 11, False),
        (7, 11, False),
        (2, 4, False),
        (8, 9, True),
        (8, 11, False),
        (1, 9, False),
    ],
)
def test_ancestors_are_the_versions_on_the_way_up(version, of, expected):
    assert VersionTree(SCATTERED).is_ancestor(version, of) is expected


def test_parents_and_updates_of_every_version():
    tree = VersionTree(SCATTERED)
    assert tree.parent(0) is None
    assert {version: tree.parent(version) for version in SCATTERED} == SCATTERED
    depths = [0, 1, 2, 3, 2, 3, 4, 3, 1, 2, 4, 5]
    assert [tree.updates(version) for version in range(12)] == depths


# ---- copies


def test_a_copy_is_a_further_name_for_the_weights_of_its_parent():
    """Versions 5 and 6 were lost, and 7 is a copy of 4.

    0 - 1 - 2 - 3 - 4 - 5 - 6
                    + = 7 - 8 - 9
    """
    tree = VersionTree({1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 5})
    assert tree.begin(4, is_copy=True) == 7
    assert [tree.begin(7), tree.begin(8)] == [8, 9]
    assert (tree.updates(7), tree.updates(9), tree.parent(7)) == (4, 6, 4)
    assert [tree.distance(version, 7) for version in (4, 3, 6, 8, 9)] == [0, 1, 2, 1, 2]
    assert [tree.distance(version, 9) for version in (4, 3, 6, 8, 7)] == [2, 3, 4, 1, 2]
    assert tree.is_ancestor(4, of=9) and tree.is_ancestor(7, of=9) and not tree.is_ancestor(6, of=9)


def test_two_copies_of_one_version_are_the_same_weights():
    """The trainer has died while it published version 2, and 3 is published instead."""
    tree = VersionTree([(1, 0), (2, 0), (3, 0), (4, 3)], copies={2, 3})
    assert (tree.distance(2, 3), tree.distance(2, 4), tree.distance(1, 2)) == (0, 1, 1)


def test_a_copy_of_the_version_with_the_number_before_is_no_update():
    tree = VersionTree([(1, 0), (2, 1), (3, 2)], copies=[2])
    assert (tree.updates(2), tree.updates(3), tree.distance(1, 3)) == (1, 2, 1)


# ---- numbers


def test_numbers_count_up_whatever_the_parent():
    tree = VersionTree()
    assert tree.next == 1
    assert [tree.begin(0), tree.begin(1), tree.begin(1), tree.begin(0), tree.begin(4)] == [1, 2, 3, 4, 5]
    assert tree.next == 6
    assert (tree.distance(2, 3), tree.distance(3, 5)) == (2, 4)


def test_a_tree_can_be_built_from_pairs_in_any_order_or_while_the_run_goes_on():
    grown = VersionTree()
    for parent in SCATTERED.values():
        grown.begin(parent)
    built = VersionTree(reversed(SCATTERED.items()))
    assert grown.next == built.next
    for a in range(12):
        for b in range(12):
            assert grown.distance(a, b) == built.distance(a, b) == VersionTree(SCATTERED).distance(a, b)


@pytest.mark.parametrize("version", [-1, 12, 10**9])
@pytest.mark.parametrize(
    "query",
    [
        lambda tree, version: tree.distance(version, 3),
        lambda tree, version: tree.distance(3, version),
        lambda tree, version: tree.distance(version, version),
        lambda tree, version: tree.updates(version),
        lambda tree, version: tree.parent(version),
        lambda tree, version: tree.is_ancestor(version, 3),
        lambda tree, version: tree.is_ancestor(3, version),
        lambda tree, version: tree.begin(version),
    ],
)
def test_a_version_that_was_never_begun_is_named(query, version):
    tree = VersionTree(SCATTERED)
    with pytest.raises(UnknownVersion, match=f"policy version {version} was never begun.* 0 to 11") as raised:
        query(tree, version)
    assert raised.value.version == version
    assert isinstance(raised.value, ControlError)
    assert tree.next == 12


def test_a_number_that_was_skipped_is_unknown():
    """A number whose beginning was never written down has made nothing."""
    tree = VersionTree([(1, 0), (3, 1)])
    assert tree.next == 4
    assert tree.distance(0, 3) == 2
    with pytest.raises(UnknownVersion, match="version 2 "):
        tree.distance(2, 3)


@pytest.mark.parametrize(
    ("parents", "error", "message"),
    [
        ([(1, 0), (1, 0)], ControlError, "version 1 has the parent 0, but version 1 was begun already"),
        ([(0, 0)], ControlError, "version 0 has the parent 0, but version 0 was begun already"),
        ([(1, 0), (2, 3), (3, 1)], UnknownVersion, "policy version 3 was never begun"),
        ([(1, 1)], UnknownVersion, "policy version 1 was never begun"),
    ],
)
def test_a_tree_that_cannot_be_is_refused(parents, error, message):
    with pytest.raises(error, match=message):
        VersionTree(parents)


def test_a_long_run_with_many_restarts_is_one_line_for_each_of_them():
    """Restarts every 1,000 steps, each from 100 versions back: the size of the tree is that of its lines."""
    tree = VersionTree()
    version = 0
    for _ in range(100):
        for _ in range(1_000):
            version = tree.begin(version)
        version -= 100
    assert tree.next == 100_001
    assert tree.updates(version) == 100 * 900
    # From the dead end of the line before: 100 updates up to the fork, 900 down.
    assert tree.distance(99_000, version) == 1_000
    assert tree.distance(0, version) == 90_000
