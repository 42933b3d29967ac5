"""Groups that kill the trainer are found and never trained; all others are trained."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout.control.quarantine import MOST_TRIES, TRIES, Measures, Quarantine
from tests.tries import tries


def train_all(groups: list[int], culprits: set[int], batch_size: int) -> tuple[list[int], set[int], int]:
    """Train ``groups`` in their order, in a run that is started again after each failed step.

    A step fails if its batch holds a culprit. Return what was trained, what was quarantined, and the number
    of failed steps. Each start knows of earlier failures what the ledger tells: their groups.
    """
    trained: list[int] = []
    quarantined: set[int] = set()
    failures: list[list[int]] = []
    left = list(groups)
    search = Quarantine()
    while left:
        measures = search.measures()
        quarantined |= measures.quarantined
        left = [id_ for id_ in left if id_ not in measures.quarantined]
        for id_ in measures.quarantined:
            search.given_up(id_)
        if measures.quarantined:
            continue
        batch = [id_ for id_ in left if id_ not in measures.withheld][:batch_size]
        if not batch:  # everything else is trained: nothing is left to compare with
            batch = left[:batch_size]
        if culprits.isdisjoint(batch):
            trained += batch
            left = [id_ for id_ in left if id_ not in batch]
            search.trained(batch)
        else:
            failures.append(batch)
            assert len(failures) < 500, "the search does not end"
            unexplained = [failed for failed in failures if quarantined.isdisjoint(failed)]
            search = Quarantine([[id_ for id_ in failed if id_ in left] for failed in unexplained])
    return trained, quarantined, len(failures)


@tries(67)
@given(n=st.integers(1, 60), batch_size=st.integers(1, 16), data=st.data())
def test_a_culprit_is_quarantined_and_all_others_are_trained(n: int, batch_size: int, data):
    culprits = set(data.draw(st.lists(st.integers(0, n - 1), max_size=1)))
    trained, quarantined, failed = train_all(list(range(n)), culprits, batch_size)
    assert quarantined == culprits
    assert sorted(trained) == [id_ for id_ in range(n) if id_ not in culprits]
    assert failed <= TRIES + math.ceil(math.log2(batch_size)) + 1


@tries(67)
@given(n=st.integers(1, 60), batch_size=st.integers(1, 16), data=st.data())
def test_the_search_ends_with_any_number_of_culprits(n: int, batch_size: int, data):
    culprits = data.draw(st.sets(st.integers(0, n - 1), max_size=4))
    trained, quarantined, failed = train_all(list(range(n)), culprits, batch_size)
    assert culprits <= quarantined
    assert sorted([*trained, *quarantined]) == list(range(n)), "every group ends once"
    assert failed <= len(quarantined) * MOST_TRIES


@pytest.mark.parametrize("batch_size", [1, 2, 4, 256])
def test_one_culprit_costs_about_the_logarithm_of_a_batch(batch_size: int):
    for culprit in range(0, batch_size, max(1, batch_size // 8)):
        _, quarantined, failed = train_all(list(range(2 * batch_size)), {culprit}, batch_size)
        assert quarantined == {culprit}
        assert failed <= TRIES + math.log2(batch_size) + 1


def test_a_batch_that_failed_once_is_tried_again_as_it_is():
    assert Quarantine([[1, 2, 3, 4]]).measures() == Measures()
    assert Quarantine([[1, 2, 3, 4], [1, 2, 3, 4]]).measures().withheld == {3, 4}


def test_failures_without_a_common_group_accuse_nobody():
    assert Quarantine([[1, 2], [3, 4], [5, 6]]).measures() == Measures()


def test_the_last_suspect_is_tried_before_it_is_given_up():
    """The trainer may have died for reasons of its own, and then no group is to blame."""
    search = Quarantine([[1, 2], [1, 2]])
    assert search.measures() == Measures(withheld=frozenset({2}))
    search.trained([1])
    assert search.measures() == Measures(quarantined=frozenset({2})), "1 was trained, 2 has failed twice"
    search.trained([2])
    assert search.suspects == []
