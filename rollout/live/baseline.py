"""The baseline of the score of a turn: a running mean of the scores that were trained. Pure.

A live trajectory is alone in its group, so that no other trajectory of the prompt says what was to be
expected. The mean over all turns trained so far does. A turn that is trained gets weight 1 in it, and reduces
the weight of those before by ``decay``:

    mean = sum of decay^age * score / sum of decay^age

The mean depends only on the turns that the present weights were trained on, and on their order. A restart
computes it again from the ledger.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slipstream.configs.schema.live import NoBaseline, RunningBaseline


class Score(NamedTuple):
    """The score of one turn."""

    key: int
    """Number that stands for the API key."""
    score: float


class _Mean:
    __slots__ = ("total", "weight")

    def __init__(self, total: float = 0.0, weight: float = 0.0) -> None:
        self.total = total
        self.weight = weight

    def add(self, score: float, decay: float) -> None:
        self.total = self.total * decay + score
        self.weight = self.weight * decay + 1

    @property
    def value(self) -> float | None:
        return self.total / self.weight if self.weight else None


class ScoreBaseline:
    """The baseline of a run."""

    def __init__(
        self, settings: RunningBaseline | NoBaseline, trained: Iterable[tuple[int, float]] = ()
    ) -> None:
        """``trained``: key and score of the turns that were trained, in the order of their training."""
        self._settings = settings
        self._all = _Mean()
        self._by_key: dict[int, _Mean] = {}
        self.trained(Score(*each) for each in trained)

    def advantages(self, scores: Sequence[Score]) -> list[float]:
        """Return the advantage of each turn of a batch.

        Before anything was trained, the mean of the batch stands for what is not known yet.
        """
        if isinstance(self._settings, NoBaseline):
            return [each.score for each in scores]
        overall = self._all.value
        if overall is None:
            overall = sum(each.score for each in scores) / max(len(scores), 1)
        return [each.score - self._expected(each.key, overall) for each in scores]

    def trained(self, scores: Iterable[Score]) -> None:
        """Take in the scores of turns that were trained, in order."""
        if isinstance(self._settings, NoBaseline):
            return
        decay = self._settings.decay
        for key, score in scores:
            if self._settings.per == "key":
                if key not in self._by_key:
                    overall = self._all.value
                    self._by_key[key] = _Mean() if overall is None else _Mean(overall, 1.0)
                self._by_key[key].add(score, decay)
            self._all.add(score, decay)

    @property
    def mean(self) -> float | None:
        """The mean over all users; None: nothing was trained, or there is no baseline."""
        return self._all.value

    def _expected(self, key: int, overall: float) -> float:
        mean = self._by_key.get(key)
        value = None if mean is None else mean.value
        return overall if value is None else value
