"""Finds the groups that kill the trainer, and keeps them from being trained. Pure.

After a step that ends the trainer, the next batch is one of other groups, if there are enough: when the
trainer fails with any batch, no group is to blame. The failed batch is then tried once more: the reason may
have been another one. When its step fails again, its groups are suspects, and every further batch that is not
one of other groups holds only half of them:

    suspects   a b c d      withheld   c d      the step fails        suspects a b
                                                the step is trained   suspects c d
    suspects   a b          withheld   b        the step fails        suspect a
                                                the step is trained   suspect b, which is tried alone
    suspect    a            withheld   a        the step is trained   a is quarantined
                                                the step fails        suspects: the groups of this step

Halving assumes that one group is to blame; the last line proves it: a is quarantined only when every other
group of a batch that failed with it has been trained since. So a culprit among n groups is found after about
log2(n) further failures, and every other group is trained, also when the steps had failed for another reason.
Where culprits are so many that hardly a batch is without one, there is no such proof: then the group that was
in most failed steps is quarantined after ``MOST_TRIES`` of them.

A failed step ends the trainer. Its next start learns of earlier failures from the ledger, whether or not the
run has gone on meanwhile, and goes on with the search.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain

TRIES = 2
"""Number of failed steps that make suspects of the groups which were in all of them."""

MOST_TRIES = 8
"""Number of failed steps after which a group is quarantined without proof."""


@dataclass(frozen=True)
class Measures:
    """Measures to take before the next batch is taken."""

    quarantined: frozenset[int] = frozenset()
    """Groups that must never be trained."""
    withheld: frozenset[int] = frozenset()
    """Groups that the next batch must not hold."""


class Quarantine:
    """The suspects of a run."""

    def __init__(self, failures: Iterable[Collection[int]] = ()) -> None:
        """``failures``: every failed step of the run that no quarantined group explains, in order: its
        groups without those that were trained since.
        """
        self._search_anew(failures)

    def _search_anew(self, failures: Iterable[Collection[int]]) -> None:
        self._failures: list[list[int]] = []
        self._suspects: list[int] = []
        self._tries = 0
        self._has_failed = False
        for groups in failures:
            self.failed(groups)

    @property
    def suspects(self) -> list[int]:
        """Groups of which one is believed to kill the trainer. Empty before ``TRIES`` failures."""
        return list(self._suspects) if self._tries >= TRIES else []

    def failed(self, groups: Collection[int]) -> None:
        """Note that a step with these groups has ended the trainer."""
        self._failures.append(sorted(groups))
        self._has_failed = True
        common = [id_ for id_ in self._suspects if id_ in groups]
        self._tries = self._tries + 1 if common else 1
        self._suspects = common or sorted(groups)

    def trained(self, groups: Collection[int]) -> None:
        """Note that these groups were trained: they are innocent."""
        self._has_failed = False
        self._suspects = [id_ for id_ in self._suspects if id_ not in groups]
        self._failures = [
            left for failed in self._failures if (left := [id_ for id_ in failed if id_ not in groups])
        ]

    def given_up(self, id_: int) -> None:
        """Note that a group will never be trained. It explains every failed step that it was in."""
        self._search_anew([failed for failed in self._failures if id_ not in failed])

    @property
    def accused(self) -> frozenset[int]:
        """Groups that the next batch is to do without, if it can: those of failed steps. Empty when the last
        step was trained.
        """
        return frozenset(chain.from_iterable(self._failures)) if self._has_failed else frozenset()

    def measures(self) -> Measures:
        """Return what to do before the next batch."""
        suspects = self.suspects
        proven = frozenset(id_ for id_ in suspects if [id_] in self._failures)
        if proven:
            return Measures(quarantined=proven)
        for id_, failed in Counter(chain.from_iterable(self._failures)).most_common(1):
            if failed >= MOST_TRIES:
                return Measures(quarantined=frozenset({id_}))
        if len(suspects) == 1:
            is_accused = suspects[0] in self._failures[-1]
            return Measures(withheld=frozenset(suspects if is_accused else ()))
        return Measures(withheld=frozenset(suspects[(len(suspects) + 1) // 2 :]))
