"""Scores of a teacher: log-probs that another model, or the policy with a hint, gives to sampled tokens.

In array names, T is the number of tokens, and K the number of the teacher's likeliest tokens at each place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # most processes that import this read no recipe
    from slipstream.configs.schema import ActorConfig

Floats = npt.NDArray[np.float32]

LARGEST_LOGPROB = 1e-3
"""Log-probs may be above 0 by what rounding adds."""


@dataclass(frozen=True, eq=False)
class TeacherScores:
    """Log-probs of the T tokens of a trajectory, or of a turn, under a teacher.

    A workflow sets them as ``Trajectory.teacher``, a reward returns them in ``Judgement.teacher``, and a
    judge of live turns in ``Verdict.teacher``:

        TeacherScores(logp_T)
        TeacherScores(logp_T, top_ids_TK, top_logp_TK)      # for actor.advantage of type teacher_topk

    NaN stands for a value that there is not: of a token that nobody sampled, or of a turn without a hint. A
    token without a value has no teacher's part in its loss. The log-probs are natural logarithms at the
    sampling temperature, given the tokens before in the same trajectory and whatever else the teacher sees.

    Raises ValueError for arrays that do not fit each other, for values that are neither NaN nor log-probs,
    and for ids that are below 0 or occur twice at the same place.
    """

    logp_T: Floats
    """float32 [T]: log-prob of each token."""
    top_ids_TK: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    """int32 [T, K]: ids of the teacher's likeliest tokens at each place, in any order. K is 0 without them.
    Not read where the log-prob is NaN."""
    top_logp_TK: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """float32 [T, K]: their log-probs."""

    def __post_init__(self) -> None:
        self._convert("logp_T", np.float32, "fiu", 1)
        self._convert("top_ids_TK", np.int32, "iu", 2)
        self._convert("top_logp_TK", np.float32, "fiu", 2)
        if not self.top_ids_TK.size and not self.top_logp_TK.size:
            object.__setattr__(self, "top_ids_TK", np.zeros((len(self.logp_T), 0), np.int32))
            object.__setattr__(self, "top_logp_TK", np.zeros((len(self.logp_T), 0), np.float32))
        expected = (len(self.logp_T), self.top_ids_TK.shape[1])
        if self.top_ids_TK.shape != self.top_logp_TK.shape or self.top_ids_TK.shape != expected:
            raise ValueError(
                f"a teacher's top-k ids are {self.top_ids_TK.shape} and their log-probs "
                f"{self.top_logp_TK.shape}, expected [T, K] each with T = {len(self.logp_T)} tokens"
            )
        for name, values in (("log-probs", self.logp_T), ("top-k log-probs", self.top_logp_TK)):
            wrong = values[~(np.isnan(values) | (np.isfinite(values) & (values <= LARGEST_LOGPROB)))]
            if len(wrong):
                raise ValueError(
                    f"a teacher's {name} {wrong[:5].tolist()}, expected finite numbers of at most 0, or NaN "
                    "where there is no value"
                )
        self._check_ids()

    def _convert(self, name: str, dtype: npt.DTypeLike, kinds: str, dimensions: int) -> None:
        value = cast(object, getattr(self, name))
        if not isinstance(value, np.ndarray):
            raise ValueError(f"{name} of a teacher is of type {type(value).__name__}, expected an array")
        array = cast("npt.NDArray[np.generic]", value)
        if array.dtype.kind not in kinds or array.ndim != dimensions:
            raise ValueError(
                f"{name} of a teacher is {array.ndim}-dimensional {array.dtype}, expected {dimensions} "
                f"dimensions of {np.dtype(dtype)}"
            )
        object.__setattr__(self, name, np.ascontiguousarray(array, dtype))

    def _check_ids(self) -> None:
        has_TK = ~np.isnan(self.top_logp_TK)
        if (self.top_ids_TK[has_TK] < 0).any():
            raise ValueError("a teacher's top-k ids are below 0, expected token ids")
        # Places without a value get ids that no other place has.
        distinct_TK = np.where(has_TK, self.top_ids_TK, -1 - np.arange(self.k, dtype=np.int32))
        ordered_TK = np.sort(distinct_TK, axis=1)
        if (ordered_TK[:, 1:] == ordered_TK[:, :-1]).any():
            raise ValueError("a teacher's top-k ids hold a token twice at the same place")

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.logp_T)

    @property
    def k(self) -> int:
        """Largest number of the teacher's likeliest tokens at a place; 0: there are none."""
        return self.top_ids_TK.shape[1]

    @property
    def largest_id(self) -> int:
        """Largest of the token ids that are read; -1: there are none."""
        return int(np.max(self.top_ids_TK, initial=-1, where=~np.isnan(self.top_logp_TK)))

    @property
    def has_T(self) -> npt.NDArray[np.bool_]:
        """True for tokens with a log-prob, bool [T]."""
        return ~np.isnan(self.logp_T)

    @property
    def has_top_T(self) -> npt.NDArray[np.bool_]:
        """True for tokens at whose place the teacher's likeliest tokens are known, bool [T]."""
        return np.count_nonzero(~np.isnan(self.top_logp_TK), axis=1) > 0

    def part(self, start: int, end: int) -> "TeacherScores":
        """Return the scores of the tokens [start, end)."""
        return TeacherScores(self.logp_T[start:end], self.top_ids_TK[start:end], self.top_logp_TK[start:end])

    def take(self, places: npt.NDArray[np.integer]) -> "TeacherScores":
        """Return the scores of the tokens at ``places``, in that order."""
        return TeacherScores(self.logp_T[places], self.top_ids_TK[places], self.top_logp_TK[places])


def unscored(tokens: int, k: int = 0) -> TeacherScores:
    """Return scores of ``tokens`` tokens without a value, with room for ``k`` likeliest tokens at each."""
    return TeacherScores(
        np.full(tokens, np.nan, np.float32),
        np.full((tokens, k), -1, np.int32),
        np.full((tokens, k), np.nan, np.float32),
    )


def placed(tokens: int, parts: Sequence[tuple[int, TeacherScores]]) -> TeacherScores:
    """Return the scores of ``tokens`` tokens, made of (first token, scores) of some of them.

    Later ones replace earlier ones of the same tokens. Raises ValueError for other tokens.
    """
    whole = unscored(tokens, max((scores.k for _, scores in parts), default=0))
    for start, scores in parts:
        end = start + len(scores)
        if not 0 <= start <= end <= tokens:
            raise ValueError(f"a teacher's scores of the tokens {start} to {end} of {tokens} tokens")
        whole.logp_T[start:end] = scores.logp_T
        whole.top_logp_TK[start:end] = np.nan
        if scores.k:
            whole.top_ids_TK[start:end, : scores.k] = scores.top_ids_TK
            whole.top_logp_TK[start:end, : scores.k] = scores.top_logp_TK
    return whole


@dataclass(frozen=True)
class TeacherNeeds:
    """The scores of teachers that must come with trajectories, by ``actor.advantage``."""

    logps: bool = False
    """Log-probs of the sampled tokens."""
    tops: bool = False
    """Log-probs of the teacher's likeliest tokens."""
    alone: bool = False
    """The recipe has no other term, so that a trajectory without scores trains nothing."""

    @classmethod
    def of(cls, actor: "ActorConfig") -> "TeacherNeeds":
        """Return what the terms of a recipe need."""
        term = actor.teacher_term
        logps = term is not None and actor.teacher_model is None
        tops = actor.top_tokens_term is not None
        others = any((actor.reward_term, actor.plugin_term, actor.teacher_model))
        return cls(logps, tops, alone=(logps or tops) and not others)

    def problem(self, scores: TeacherScores | None, is_trained_T: npt.NDArray[np.bool_]) -> str | None:
        """Return what is missing, if anything. ``is_trained_T``: the tokens that carry loss.

        A token that has one of the needed values must have the other. A token without any is not taught.
        """
        if scores is None:
            scores = unscored(len(is_trained_T))
        needed = [(self.logps, scores.has_T, "log-prob"), (self.tops, scores.has_top_T, "likeliest tokens")]
        is_known_T = (scores.has_T | scores.has_top_T) & is_trained_T
        for is_needed, has_T, name in needed:
            missing = int((is_known_T & ~has_T).sum())
            if is_needed and missing:
                return (
                    f"a teacher's {name} at {missing} of {int(is_known_T.sum())} tokens that it has scored: "
                    "actor.advantage needs all of them"
                )
        if self.alone and is_trained_T.any() and not is_known_T.any():
            return "a teacher's scores of the tokens that carry loss: actor.advantage has no other term"
        return None


NOTHING_NEEDED = TeacherNeeds()
