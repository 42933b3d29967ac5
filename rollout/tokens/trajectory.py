"""Plain data of generation: prompts, completions, trajectories and groups. No I/O.

In array names, T is the number of tokens of one trajectory, prompt included.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.rollout.tokens.named_numbers import NamedNumbers, means_by_name
from slipstream.rollout.tokens.routes import Experts, Routes, joined_routes, placed_routes
from slipstream.rollout.tokens.teacher import TeacherScores, placed

Messages = list[dict[str, Any]]
"""A chat: one dictionary for each message, with at least `role` and `content`."""

Owner = TypeVar("Owner")
Value = TypeVar("Value")


class computed_once(Generic[Owner, Value]):
    """``functools.cached_property`` without its lock, which costs microseconds per use in Python 3.11."""

    def __init__(self, compute: Callable[[Owner], Value]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type[Owner], name: str) -> None:
        self._name = name

    def __get__(self, instance: Owner, owner: type[Owner]) -> Value:
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt set: what the policy is asked, and what a reward compares with.

    The first line of a jsonl file

        {"prompt": "What is 2+2?", "label": "4", "level": 1}

    becomes ``Prompt(id=0, prompt="What is 2+2?", label="4", metadata={"level": 1})``.
    Messages between processes hold a prompt as it is.
    """

    id: int
    """Row number in the prompt set, from 0. Rows of several files are counted on."""
    prompt: str | Messages
    """A text, or a chat: the column `prompt`, or as the recipe says (`data.columns`)."""
    label: Any = None
    """Whatever the reward compares with: the column `label`; None where the row has none."""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    """All other columns of the row, by name, or those of the column `data.columns.metadata`."""
    file: str = field(default="", compare=False, repr=False)
    """Path of the prompt set; empty for a prompt from elsewhere."""
    line: int = field(default=0, compare=False, repr=False)
    """Line of a jsonl file, or row of a parquet file, from 1; 0 for a prompt from elsewhere."""
    source: str = field(default="", compare=False, repr=False)
    """Name of its file among several (`data.sources`, `eval.sets`); empty where there is one."""

    @property
    def reference(self) -> str:
        """The prompt as messages name it: ``prompt 3 (data/train.jsonl, line 4)``."""
        if not self.file:
            return f"prompt {self.id}"
        row = "row" if self.file.endswith(".parquet") else "line"
        return f"prompt {self.id} ({self.file}, {row} {self.line})"

    def messages(self) -> Messages:
        """Return the prompt as a chat. A text becomes one user message."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt


class Finish(StrEnum):
    """Reason why a completion ended."""

    STOP = "stop"
    """The policy sampled an end token."""
    LENGTH = "length"
    """The token budget, ``sampling.max_new_tokens``, was used up."""
    PARTIAL = "partial"
    """The completion has not ended: more tokens follow, in the same request or in the next one."""


@dataclass(frozen=True)
class Span:
    """Version span: tokens [start, end) of one completion were sampled from policy ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Completion:
    """The tokens that an engine generated for one request, with the log-prob and policy version of each.

    All three come from the engine; text is never tokenized again. Raises ValueError when there are not as
    many log-probs as tokens, or when the spans do not tile the tokens.
    """

    tokens: tuple[int, ...]
    """Token ids, without those of the request."""
    logprobs: tuple[float, ...]
    """Behaviour log-prob of each token, from the engine: natural logarithm, at the sampling temperature."""
    spans: tuple[Span, ...]
    """Version spans, in order and without gaps: from 0 to ``len(tokens)``."""
    finish: Finish
    retractions: int = 0
    """Number of times that the engine took the request off the GPU and computed its KV cache again."""
    matched: int | str | None = None
    """The token id or the stop text that has ended the completion, as the engine says; None: neither."""
    routes: Routes | None = field(default=None, compare=False, repr=False)
    """Experts of its tokens, and of those of its request that no earlier completion has had. None: the recipe
    does not ask for them (``actor.routing_replay``), or the engine has not given any."""

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.logprobs)} log-probs")
        end = 0
        for span in self.spans:
            if span.start != end or span.end <= span.start:
                raise ValueError(f"version spans {self.spans} do not tile {len(self.tokens)} tokens")
            end = span.end
        if end != len(self.tokens):
            raise ValueError(f"version spans {self.spans} do not tile {len(self.tokens)} tokens")

    def versions(self) -> npt.NDArray[np.int32]:
        """Return the policy version of each token, int32 [tokens]."""
        lengths = [span.end - span.start for span in self.spans]
        return np.repeat(np.array([span.version for span in self.spans], dtype=np.int32), lengths)


UNSAMPLED = int(np.iinfo(np.int32).min)
"""Version of a token that no policy sampled: prompt, tool output."""


RewardParts = NamedNumbers
"""Numbers that a reward has given beside the one that trains."""

LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Largest magnitude of a reward: trainers compute with them in float32."""


Run = tuple[int, bool, int]
"""Neighbouring tokens with the same version and loss mask: (version, carries loss, end)."""


class TrajectoryHeader(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Everything about a trajectory but its tokens and their log-probs.

    Decisions about a trajectory need no more: the driver never decodes tokens.
    """

    runs: tuple[Run, ...]
    """All tokens, in order."""
    finish: Finish
    retractions: int = 0
    reward: float | None = None
    turn_rewards: tuple[tuple[int, float | None], ...] = ()
    reward_parts: RewardParts = ()
    siblings: tuple[int, ...] = ()
    is_dropped: bool = False
    metrics: NamedNumbers = ()

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.runs[-1][2] if self.runs else 0

    @property
    def response_length(self) -> int:
        """Number of tokens that carry loss."""
        return sum(self.trained_tokens.values())

    @property
    def sampled_length(self) -> int:
        """Number of tokens that a policy sampled, including tokens that are too old to carry loss."""
        return count_tokens([self])[1]

    @property
    def trained_tokens(self) -> dict[int, int]:
        """Number of tokens that carry loss, by policy version."""
        return count_tokens([self])[0]

    def without(self, versions: frozenset[int]) -> "TrajectoryHeader":
        """Return a copy in which no token of ``versions`` carries loss."""
        runs = ((version, trained and version not in versions, end) for version, trained, end in self.runs)
        return msgspec.structs.replace(self, runs=tuple(runs))


def count_tokens(headers: Iterable[TrajectoryHeader]) -> tuple[dict[int, int], int]:
    """Return the number of tokens that carry loss, by policy version, and the number of sampled tokens."""
    trained: dict[int, int] = {}
    sampled = 0
    for header in headers:
        start = 0
        for version, carries_loss, end in header.runs:
            if carries_loss:
                trained[version] = trained.get(version, 0) + end - start
            if version != UNSAMPLED:
                sampled += end - start
            start = end
    return trained, sampled


@dataclass(frozen=True)
class Trajectory:
    """One episode as the trainer sees it: all of its tokens, and which of them carry loss.

    A workflow builds it with ``TrajectoryBuilder`` and sets ``reward``:

        trajectory = builder.build()
        return replace(trajectory, reward=1.0)      # dataclasses.replace

    All arrays have one element per token, in the order in which the policy saw them; their shapes and
    dtypes are not checked. Raises ValueError when ``turn_rewards`` is not in order or not finite.
    """

    tokens_T: npt.NDArray[np.int64]
    """int64 token ids: prompt, completions and context."""
    loss_mask_T: npt.NDArray[np.bool_]
    """bool. True: the policy sampled the token, and it is trained."""
    logprobs_T: npt.NDArray[np.float32]
    """float32 behaviour log-probs: natural logarithm, at the sampling temperature. 0 where no policy sampled
    the token; never read there."""
    versions_T: npt.NDArray[np.int32]
    """int32 policy versions; UNSAMPLED where no policy sampled the token."""
    finish: Finish
    """Finish of the last completion."""
    retractions: int = 0
    """Retractions of all completions."""
    reward: float | None = None
    """Reward of the episode. None until it has been judged: a workflow that returns None leaves the judging
    to the recipe's reward."""
    turn_rewards: tuple[tuple[int, float | None], ...] = ()
    """(end, reward) of each turn, in order: the index of its last token + 1, and the reward of this turn
    alone. Empty where only the episode is judged. Used with ``actor.turns``. A reward is None for the turn of
    a live user that only a teacher has scored."""
    reward_parts: RewardParts = ()
    """Further numbers of the reward, by name. They are metrics and train nothing."""
    siblings: tuple[int, ...] = ()
    """End (index of the last token + 1) of each of several trajectories that are one episode (``joined``).
    Empty: there is one trajectory."""
    is_dropped: bool = False
    """The episode is left out of its group: it has no loss, and its reward is in no mean."""
    teacher: TeacherScores | None = None
    """Log-probs of the tokens under a teacher, for ``actor.advantage`` with terms of a teacher whose scores
    come with the trajectory. None: there are none."""
    metrics: NamedNumbers = ()
    """Numbers that the workflow has recorded of the episode. They train nothing."""
    routes_TW: npt.NDArray[np.uint16] | None = None
    """uint16 [T, W] experts that the engine sent the tokens to (``routes.py``), NO_ROUTE where that is not
    known. None: of no token."""

    def __post_init__(self) -> None:
        if self.teacher is not None and len(self.teacher) != len(self.tokens_T):
            raise ValueError(
                f"a teacher's scores of {len(self.teacher)} tokens, and {len(self.tokens_T)} tokens: "
                "expected one for each, NaN where there is no value"
            )
        if self.routes_TW is not None and len(self.routes_TW) != len(self.tokens_T):
            raise ValueError(
                f"the experts of {len(self.routes_TW)} tokens, and {len(self.tokens_T)} tokens: expected a "
                "row for each, NO_ROUTE where they are not known"
            )
        if self.is_dropped and self.loss_mask_T.any():
            raise ValueError("tokens of an episode that is dropped carry loss: use `without_loss`")
        if self.turn_rewards:
            self._check_turns()
        if self.siblings:
            self._check_siblings()

    def _check_siblings(self) -> None:
        ends = self.siblings
        if len(ends) < 2 or ends[-1] != len(self.tokens_T) or any(b <= a for a, b in pairwise((0, *ends))):
            raise ValueError(
                f"the trajectories of an episode of {len(self.tokens_T)} tokens end at {ends}: expected two "
                "or more ascending indices, up to the number of tokens"
            )

    def _check_turns(self) -> None:
        start = 0
        for end, reward in self.turn_rewards:
            if not start < end <= len(self.tokens_T):
                raise ValueError(
                    f"a turn ends at token {end}, but the turn before it ends at {start} and the trajectory "
                    f"has {len(self.tokens_T)} tokens: turns must be in order, each with at least one token"
                )
            if reward is not None and not abs(reward) <= LARGEST_REWARD:  # NaN is not
                raise ValueError(
                    f"the turn that ends at token {end} has the reward {reward}, expected a finite number of "
                    "float32"
                )
            start = end

    @computed_once
    def header(self) -> TrajectoryHeader:
        """Everything but the tokens and their log-probs."""
        return TrajectoryHeader(
            self._runs(),
            self.finish,
            self.retractions,
            self.reward,
            tuple((int(end), None if reward is None else float(reward)) for end, reward in self.turn_rewards),
            self.reward_parts,
            tuple(int(end) for end in self.siblings),
            self.is_dropped,
            self.metrics,
        )

    def _runs(self) -> tuple[Run, ...]:
        versions_T, loss_mask_T = self.versions_T, self.loss_mask_T
        if not len(versions_T):
            return ()
        changes_T = (versions_T[1:] != versions_T[:-1]) | (loss_mask_T[1:] != loss_mask_T[:-1])
        lasts = [*changes_T.nonzero()[0].tolist(), len(versions_T) - 1]
        return tuple((versions_T.item(last), loss_mask_T.item(last), last + 1) for last in lasts)

    @computed_once
    def response_length(self) -> int:
        """Number of tokens that carry loss."""
        return self.header.response_length

    @computed_once
    def sampled_length(self) -> int:
        """Number of tokens that a policy sampled, including tokens that are too old to carry loss."""
        return self.header.sampled_length

    def judged(
        self,
        reward: float,
        parts: RewardParts = (),
        teacher: TeacherScores | None = None,
        turn_rewards: tuple[tuple[int, float | None], ...] = (),
    ) -> "Trajectory":
        """Return a copy with the reward of the episode, and its parts.

        ``teacher``: takes the place of the scores that the trajectory has, if any; None: those stay.
        ``turn_rewards``: take the place of those of the trajectory; empty: those stay.
        """
        teacher = self.teacher if teacher is None else teacher
        turns = turn_rewards or self.header.turn_rewards
        header = msgspec.structs.replace(self.header, reward=reward, reward_parts=parts, turn_rewards=turns)
        # `replace` would look at each of a dozen fields, for every trajectory, and compute the header anew.
        trajectory = object.__new__(Trajectory)
        trajectory.__dict__.update(
            self.__dict__,
            reward=reward,
            reward_parts=parts,
            teacher=teacher,
            turn_rewards=turns,
            header=header,
        )
        trajectory.__post_init__()
        return trajectory

    def without_loss(self, *, is_dropped: bool = False) -> "Trajectory":
        """Return a copy of which no token carries loss. Its reward counts in the mean of its group, unless
        it ``is_dropped``."""
        return replace(self, loss_mask_T=np.zeros_like(self.loss_mask_T), is_dropped=is_dropped)

    def split(self) -> "tuple[Trajectory, ...]":
        """Return the trajectories that were ``joined``; this one if there is no other.

        Each has the finish and the reward of the episode.
        """
        if not self.siblings:
            return (self,)
        return tuple(self._part(start, end) for start, end in pairwise((0, *self.siblings)))

    def _part(self, start: int, end: int) -> "Trajectory":
        turns = tuple((turn - start, reward) for turn, reward in self.turn_rewards if start < turn <= end)
        return Trajectory(
            self.tokens_T[start:end],
            self.loss_mask_T[start:end],
            self.logprobs_T[start:end],
            self.versions_T[start:end],
            self.finish,
            self.retractions,
            self.reward,
            turns,
            self.reward_parts,
            is_dropped=self.is_dropped,
            teacher=None if self.teacher is None else self.teacher.part(start, end),
            metrics=self.metrics,
            routes_TW=None if self.routes_TW is None else self.routes_TW[start:end],
        )

    def turn_T(self, places: npt.NDArray[np.integer] | None = None) -> npt.NDArray[np.intp]:
        """Return the turn of each token, int64 [T], from 0, or of the tokens at ``places``.

        Tokens after the last turn get the number of turns.
        """
        ends = np.array([end for end, _ in self.turn_rewards], np.int64)
        places = np.arange(len(self.tokens_T)) if places is None else places
        return np.searchsorted(ends, places, side="right")


def joined(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Return the trajectories of one episode as one object, which travels and is stored as one.

    Its arrays hold those of all of them, in order. Its finish is the last one's, and its reward the mean of
    their rewards, or None if they have none. Raises ValueError if there is no trajectory, or if some have a
    reward and others do not.
    """
    if not trajectories:
        raise ValueError("an episode without a trajectory: nothing was sampled")
    trajectories = [part for trajectory in trajectories for part in trajectory.split()]
    if len(trajectories) == 1:
        return trajectories[0]
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    if rewards and len(rewards) < len(trajectories):
        raise ValueError(
            f"{len(rewards)} of the {len(trajectories)} trajectories of an episode have a reward: give one "
            "to all of them, or to none, so that the recipe's reward judges the episode"
        )
    ends = list(accumulate(len(trajectory.tokens_T) for trajectory in trajectories))
    return Trajectory(
        np.concatenate([trajectory.tokens_T for trajectory in trajectories]),
        np.concatenate([trajectory.loss_mask_T for trajectory in trajectories]),
        np.concatenate([trajectory.logprobs_T for trajectory in trajectories]),
        np.concatenate([trajectory.versions_T for trajectory in trajectories]),
        trajectories[-1].finish,
        sum(trajectory.retractions for trajectory in trajectories),
        sum(rewards) / len(rewards) if rewards else None,
        tuple(
            (start + end, reward)
            for start, trajectory in zip([0, *ends], trajectories, strict=False)
            for end, reward in trajectory.turn_rewards
        ),
        tuple(means_by_name(trajectory.reward_parts for trajectory in trajectories).items()),
        tuple(ends),
        all(trajectory.is_dropped for trajectory in trajectories),
        _joined_teacher(trajectories, ends),
        routes_TW=joined_routes((len(each.tokens_T), each.routes_TW) for each in trajectories),
    )


def _joined_teacher(trajectories: Sequence[Trajectory], ends: Sequence[int]) -> TeacherScores | None:
    parts = [
        (start, trajectory.teacher)
        for start, trajectory in zip((0, *ends), trajectories, strict=False)
        if trajectory.teacher is not None
    ]
    return placed(ends[-1], parts) if parts else None


class TrajectoryBuilder:
    """Builds a trajectory from the parts of an episode, in order.

        builder = TrajectoryBuilder(prompt_ids)
        completion = await generator.generate(builder.tokens, sampling)
        builder.add_completion(completion)      # carries loss
        builder.reward_turn(0.5)                # only where turns are judged
        builder.add_context(tool_output_ids)    # carries no loss
        trajectory = builder.build()

    Tokens are never decoded and encoded again, so that the trainer sees exactly what the policy sampled.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        """Start an episode with ``prompt_ids``, token ids that carry no loss."""
        self._tokens: list[int] = []
        self._logprobs: list[npt.NDArray[np.float32]] = []
        self._spans: list[tuple[int, bool, int]] = []
        """(version, carries loss, number of tokens) of all tokens, in order."""
        self._finish = Finish.STOP
        self._retractions = 0
        self._turn_rewards: list[tuple[int, float]] = []
        self._routes: list[tuple[int, Experts]] = []
        """(first token, experts), in order."""
        self.add_context(prompt_ids)

    @property
    def tokens(self) -> list[int]:
        """All token ids so far: the input of the next generation request. A copy."""
        return list(self._tokens)

    def add_context(self, tokens: Sequence[int]) -> None:
        """Append token ids that no policy sampled, such as tool output. They carry no loss."""
        self._tokens += tokens
        self._logprobs.append(np.zeros(len(tokens), np.float32))
        self._spans.append((UNSAMPLED, False, len(tokens)))

    def add_completion(self, completion: Completion) -> None:
        """Append a completion as the generator returned it. All of its tokens carry loss."""
        if completion.routes is not None:
            self._add_routes(completion.routes)
        self._tokens += completion.tokens
        self._logprobs.append(np.array(completion.logprobs, np.float32))
        self._spans += [(span.version, True, span.end - span.start) for span in completion.spans]
        self._finish = completion.finish
        self._retractions += completion.retractions

    def _add_routes(self, routes: Routes) -> None:
        """Note the experts of the completion that comes next.

        The experts of the request's tokens are left out, but for the last one, which gave the first token of
        the completion, unless the request has as many tokens as the episode so far.
        """
        length, start = len(self._tokens), routes.start
        if routes.request != length:
            start = max(start, routes.request - 1)
        first = start + length - routes.request
        if first >= 0 and start < routes.end:
            self._routes.append((first, routes.ids_RW[start - routes.start :]))

    def reward_turn(self, reward: float) -> None:
        """End a turn here and give it a reward. It begins where the turn before it ended, the first at 0."""
        self._turn_rewards.append((len(self._tokens), reward))

    def build(self) -> Trajectory:
        """Return the trajectory so far, without a reward of the episode.

        Raises ValueError when no token was sampled (the episode has failed: there is nothing to train), or
        when the rewards of turns are out of order or not finite.
        """
        versions, trained, lengths = zip(*self._spans, strict=True)
        if not any(trained):
            raise ValueError(f"an episode of {len(self._tokens)} tokens, none of them sampled by the policy")
        return Trajectory(
            np.array(self._tokens, np.int64),
            np.repeat(np.array(trained, np.bool_), lengths),
            np.concatenate(self._logprobs),
            np.repeat(np.array(versions, np.int32), lengths),
            self._finish,
            self._retractions,
            turn_rewards=tuple(self._turn_rewards),
            routes_TW=placed_routes(len(self._tokens), self._routes) if self._routes else None,
        )


@dataclass(frozen=True)
class Group:
    """The ``n_samples_per_prompt`` trajectories of one admitted prompt, complete and judged."""

    id: int
    """Admission number over the life of the run, from 0."""
    prompt: Prompt
    admitted_at: int
    """Policy version that was current at admission."""
    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> npt.NDArray[np.float64]:
        """Rewards of the episodes that are not dropped, float64."""
        rewards = [trajectory.reward for trajectory in self.trajectories if not trajectory.is_dropped]
        return np.array(rewards, np.float64)
