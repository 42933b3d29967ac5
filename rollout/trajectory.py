"""What is generated: prompts, engine outputs, trajectories, groups. Plain data, no I/O.

Legend for array names: T tokens of one trajectory, prompt included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import isfinite
from typing import Any, Generic, TypeVar

import numpy as np

Messages = list[dict[str, Any]]

T = TypeVar("T")


class computed_once(Generic[T]):
    """``functools.cached_property`` without its lock, which costs microseconds a time in Python 3.11."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> T:
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt set. ``label`` is whatever the reward compares with."""

    id: int
    prompt: str | Messages
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def messages(self) -> Messages:
        """The prompt as a chat: plain text is one user message."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt


class Finish(StrEnum):
    """Why generation ended."""

    STOP = "stop"
    LENGTH = "length"
    PARTIAL = "partial"
    """Not over: what there is so far of an answer that goes on, here or in another request."""


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) of one output were sampled from policy ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Completion:
    """One engine answer: the engine's own token ids, log-probs and version spans, never re-tokenized."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    finish: Finish
    retractions: int = 0

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.logprobs)} log-probs")
        at = 0
        for span in self.spans:
            if span.start != at or span.end <= span.start:
                raise ValueError(f"version spans {self.spans} do not tile {len(self.tokens)} tokens")
            at = span.end
        if at != len(self.tokens):
            raise ValueError(f"version spans {self.spans} do not tile {len(self.tokens)} tokens")

    def versions(self) -> np.ndarray:
        """int32 [tokens]: the version of each token."""
        lengths = [span.end - span.start for span in self.spans]
        return np.repeat(np.array([span.version for span in self.spans], dtype=np.int32), lengths)


UNSAMPLED = int(np.iinfo(np.int32).min)
"""The version of a token that no policy sampled (prompt, tool output)."""


@dataclass(frozen=True)
class Trajectory:
    """One episode as the trainer sees it: all of its tokens, and which of them carry loss."""

    tokens_T: np.ndarray
    """int64"""
    loss_mask_T: np.ndarray
    """bool: sampled by the policy and to be trained."""
    logprobs_T: np.ndarray
    """float32 log-probs under the behaviour policy; 0 where not sampled, never read there."""
    versions_T: np.ndarray
    """int32 policy version of each token; UNSAMPLED where not sampled."""
    finish: Finish
    retractions: int = 0
    reward: float | None = None
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """Of each turn, in their order: where it ends (the position behind it), and what it is worth by itself.
    Empty where only the episode is judged. Used with ``actor.turns``."""

    def __post_init__(self) -> None:
        if self.turn_rewards:
            self._check_turns()

    def _check_turns(self) -> None:
        start = 0
        for end, reward in self.turn_rewards:
            if not start < end <= len(self.tokens_T):
                raise ValueError(
                    f"a turn ends at {end}, the one before it at {start}, of {len(self.tokens_T)} tokens"
                )
            if not isfinite(reward):
                raise ValueError(f"the turn that ends at {end} has the reward {reward}")
            start = end

    @computed_once
    def runs(self) -> list[tuple[int, bool, int]]:
        """Runs of tokens that are alike: their version, whether they carry loss, and where the run ends."""
        versions_T, loss_mask_T = self.versions_T, self.loss_mask_T
        if not len(versions_T):
            return []
        changes_T = (versions_T[1:] != versions_T[:-1]) | (loss_mask_T[1:] != loss_mask_T[:-1])
        lasts = [*changes_T.nonzero()[0].tolist(), len(versions_T) - 1]
        return [(versions_T.item(last), loss_mask_T.item(last), last + 1) for last in lasts]

    @computed_once
    def response_length(self) -> int:
        """Tokens that carry loss."""
        found = start = 0
        for _, trained, end in self.runs:
            if trained:
                found += end - start
            start = end
        return found

    @computed_once
    def sampled_length(self) -> int:
        """Tokens that a policy sampled, those included that carry no loss because they are too old."""
        found = start = 0
        for version, _, end in self.runs:
            if version != UNSAMPLED:
                found += end - start
            start = end
        return found

    def turn_T(self) -> np.ndarray:
        """int64: the turn of each token, counted from 0; behind the last one as many as there are turns."""
        ends = np.array([end for end, _ in self.turn_rewards], np.int64)
        return np.searchsorted(ends, np.arange(len(self.tokens_T)), side="right")

    @property
    def oldest_version(self) -> int:
        """The smallest version among the tokens that carry loss. Raises ValueError when none does."""
        try:
            return min([version for version, trained, _ in self.runs if trained])
        except ValueError:
            raise ValueError("no token of this trajectory carries loss: it has no oldest version") from None

    @property
    def n_versions(self) -> int:
        return len({version for version, trained, _ in self.runs if trained})

    def with_versions(self, versions_T: np.ndarray) -> "Trajectory":
        """The same episode, its tokens numbered otherwise."""
        return replace(self, versions_T=versions_T)

    def masked_before(self, version: int) -> "Trajectory":
        """The same episode, in which tokens older than ``version`` carry no loss."""
        return replace(self, loss_mask_T=self.loss_mask_T & (self.versions_T >= version))


class TrajectoryBuilder:
    """Grows a trajectory from the parts of an episode, in order.

        builder = TrajectoryBuilder(prompt_ids)
        builder.add_completion(completion)      # carries loss
        builder.reward_turn(0.5)                # if turns are judged
        builder.add_context(tool_output_ids)    # does not
        trajectory = builder.build()

    Tokens are never decoded and encoded again.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._mask: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self._finish = Finish.STOP
        self._retractions = 0
        self._turn_rewards: list[tuple[int, float]] = []
        self.add_context(prompt_ids)

    @property
    def tokens(self) -> list[int]:
        """Everything so far: what the next generation request has to send."""
        return list(self._tokens)

    def add_context(self, tokens: Sequence[int]) -> None:
        n = len(tokens)
        self._tokens += tokens
        self._mask.append(np.zeros(n, bool))
        self._logprobs.append(np.zeros(n, np.float32))
        self._versions.append(np.full(n, UNSAMPLED, np.int32))

    def add_completion(self, completion: Completion) -> None:
        self._tokens += completion.tokens
        self._mask.append(np.ones(len(completion.tokens), bool))
        self._logprobs.append(np.array(completion.logprobs, np.float32))
        self._versions.append(completion.versions())
        self._finish = completion.finish
        self._retractions += completion.retractions

    def reward_turn(self, reward: float) -> None:
        """What was added since the last call, or since the beginning, is worth ``reward`` by itself."""
        self._turn_rewards.append((len(self._tokens), reward))

    def build(self) -> Trajectory:
        """Raises ValueError when no token was sampled: the episode has failed, nothing can be trained."""
        if not any(mask.any() for mask in self._mask):
            raise ValueError(f"an episode of {len(self._tokens)} tokens, none of them sampled by the policy")
        return Trajectory(
            np.array(self._tokens, np.int64),
            np.concatenate(self._mask),
            np.concatenate(self._logprobs),
            np.concatenate(self._versions),
            self._finish,
            self._retractions,
            turn_rewards=tuple(self._turn_rewards),
        )


@dataclass(frozen=True)
class Group:
    """The n trajectories of one prompt instance, complete and judged."""

    id: int
    """Admission order over the run's life."""
    prompt: Prompt
    admitted_at: int
    """The policy version that was current at admission."""
    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> np.ndarray:
        """float64 [n]"""
        return np.array([t.reward for t in self.trajectories], np.float64)
