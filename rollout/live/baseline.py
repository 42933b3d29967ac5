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

from slipstream.configs.schema.advantage import Estimator
from slipstream.configs.schema.live import NoBaseline, RunningBaseline


class Score(NamedTuple):
    """The score of one turn."""

    key: int
    """Number that stands for the API key."""
    score: float
    group: tuple[float, float, int] | None = None
    """Mean, standard deviation and number of the rewards of its group; None: it is alone."""


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


EPS = 1e-6
"""Added to the standard deviation of a group, as for groups of prompts."""


def group_advantage(score: float, group: tuple[float, float, int], estimator: Estimator) -> float:
    """Return the advantage of a score in a group with this mean, standard deviation and number of rewards.

    ``grpo`` divides by the standard deviation, ``rloo`` compares with the mean of the others, and ``reward``
    with nothing. The other estimators whiten over a batch, or have a critic: here they compare with the mean.
    """
    mean, deviation, size = group
    match estimator:
        case "grpo":
            return (score - mean) / (deviation + EPS)
        case "rloo":
            return (score - mean) * size / (size - 1) if size > 1 else 0.0
        case "reward":
            return score
        case _:
            return score - mean


class ScoreBaseline:
    """The baseline of a run."""

    def __init__(
        self,
        settings: RunningBaseline | NoBaseline,
        trained: Iterable[tuple[int, float]] = (),
        *,
        estimator: Estimator = "grpo",
    ) -> None:
        """``trained``: key and score of the turns that were trained, in the order of their training.
        ``estimator``: of the recipe's rewards, for groups of sessions.
        """
        self._settings = settings
        self._estimator: Estimator = estimator
        self._all = _Mean()
        self._by_key: dict[int, _Mean] = {}
        self.trained(Score(*each) for each in trained)

    def advantages(self, scores: Sequence[Score]) -> list[float]:
        """Return the advantage of each turn of a batch.

        Before anything was trained, the mean of the batch stands for what is not known yet. The score of a
        turn whose session belongs to a group is compared with the group's rewards alone.
        """
        alone = [each.score for each in scores if each.group is None]
        overall = self._all.value
        if overall is None:
            overall = sum(alone) / max(len(alone), 1)
        return [self._advantage(each, overall) for each in scores]

    def _advantage(self, each: Score, overall: float) -> float:
        if each.group is not None:
            return group_advantage(each.score, each.group, self._estimator)
        if isinstance(self._settings, NoBaseline):
            return each.score
        return each.score - self._expected(each.key, overall)

    def trained(self, scores: Iterable[Score]) -> None:
        """Take in the scores of turns that were trained, in order."""
        if isinstance(self._settings, NoBaseline):
            return
        decay = self._settings.decay
        for key, score, _ in scores:
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
