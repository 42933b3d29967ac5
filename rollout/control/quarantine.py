"""Finds the groups that kill the trainer, and keeps them from being trained. Pure.

A batch whose training step ends the trainer is tried once more: the reason may have been another one. When
the step fails again, the groups of the batch are suspects, and every further batch holds only half of them:

    suspects   a b c d      withheld   c d      the step fails        suspects a b
                                                the step is trained   suspects c d
    suspects   a b          withheld   b        the step fails        a is quarantined
                                                the step is trained   suspect b, which is tried alone

So a culprit among n groups is found after about log2(n) further steps. Every other group is trained: also the
last suspect, if the steps had failed for another reason. A failed step ends the run; the next start of the
run learns of all failed steps from the ledger and goes on with the search.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

TRIES = 2
"""Number of failed steps that make suspects of the groups which were in all of them."""


@dataclass(frozen=True)
class Measures:
    """What to do before the next batch is taken."""

    quarantined: frozenset[int] = frozenset()
    """Groups that must never be trained."""
    withheld: frozenset[int] = frozenset()
    """Groups that the next batch must not hold."""


class Quarantine:
    """The suspects of a run. A culprit is only ever searched for among groups that fail together."""

    def __init__(self, failures: Iterable[Collection[int]] = ()) -> None:
        """``failures``: groups of every failed step of the run, in order, as far as they have not ended."""
        self._suspects: list[int] = []
        self._tries = 0
        self._is_found = False
        """The only suspect was also the only one in a batch that failed."""
        for groups in failures:
            self.failed(groups)

    @property
    def suspects(self) -> list[int]:
        """Groups of which at least one is believed to kill the trainer. Empty before ``TRIES`` failures."""
        return list(self._suspects) if self._tries >= TRIES else []

    def failed(self, groups: Collection[int]) -> None:
        """Note that a step with these groups has ended the trainer."""
        common = [id_ for id_ in self._suspects if id_ in groups]
        self._tries = self._tries + 1 if common else 1
        self._suspects = common or sorted(groups)
        self._is_found = len(common) == 1

    def ended(self, groups: Collection[int]) -> None:
        """Note that these groups were trained, or have ended otherwise."""
        self._suspects = [id_ for id_ in self._suspects if id_ not in groups]

    def measures(self) -> Measures:
        """Return what to do before the next batch."""
        suspects = self.suspects
        if suspects and self._is_found:
            return Measures(quarantined=frozenset(suspects))
        return Measures(withheld=frozenset(suspects[(len(suspects) + 1) // 2 :]))
