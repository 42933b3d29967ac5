"""Messages between a judge pool and a judge process, one in each frame of ``system.stream``, as msgpack.

    pool ──► process     JudgeSetup first, then questions, and Withdrawal
    process ──► pool     JudgeReady or StartFailure first, then answers, Unscored and Retiring

    question             answer          asks about
    EpisodeQuestion      Scored          an episode
    GroupQuestion        GroupScored     all episodes of a group at once
    TurnQuestion         Ruled           a turn of a live user

Arrays travel as raw little-endian bytes. Nothing is pickled, so that user code cannot make the pool run code.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec
import numpy as np

from slipstream.rollout.reward.live import NO_VOTES, JudgedTurn, VoteCounts
from slipstream.rollout.reward.value import TurnRewards
from slipstream.rollout.system import stream
from slipstream.rollout.tokens.record import decode_scores, encode_scores
from slipstream.rollout.tokens.trajectory import (
    Finish,
    Messages,
    Prompt,
    RewardParts,
    Trajectory,
)

LONGEST_REPLY = 1 << 24
"""Bytes in a frame of a judge process. Replies are shortened far below it: a longer one is garbage."""

CONNECTION_CLOSED = 199
"""Exit code of a judge process that can neither read questions nor send replies any more."""

QUESTION = "question_"
"""Begin of the name of the function that asks an overlapping question; its number follows."""


class ModelSetup(msgspec.Struct, array_like=True, frozen=True):
    """The language model that the recipe's section ``judge`` names, for code that asks it."""

    settings: dict[str, object]
    """The section, as plain data."""
    policy: str
    """Folder of the policy, whose tokenizer the policy's engines and the teacher have."""
    template_args: dict[str, object] = {}
    """Variables of the policy's chat template."""


class JudgeSetup(msgspec.Struct, array_like=True):
    """Everything that a judge process needs before its first question."""

    path: str
    """Import path of the reward."""
    args: dict[str, object]
    timeout_s: float
    start_timeout_s: float
    memory_mb: int | None
    section: str = "rollout.judging"
    """Section of the recipe with the settings, for messages."""
    of_turns: bool = False
    """The judge is one of live turns, and not a reward."""
    reward_key: str = "reward"
    """Name of the number that trains, where the reward returns a mapping."""
    model: ModelSetup | None = None
    """None: the recipe names none."""


class FinishedEpisode(msgspec.Struct, array_like=True, gc=False):
    """A trajectory, and the text of its last completion."""

    response: str
    tokens: bytes
    """int32, as are the versions."""
    loss_mask: bytes
    logprobs: bytes
    """float32"""
    versions: bytes
    finish: str
    retractions: int
    reward: float | None
    turn_rewards: tuple[tuple[int, float | None], ...]
    reward_parts: RewardParts
    siblings: tuple[int, ...]
    teacher: bytes = b""
    """Encoded scores of a teacher; empty: there are none."""

    def trajectory(self) -> Trajectory:
        """Return the trajectory. Its arrays belong to the caller, who may change them."""
        return Trajectory(
            np.frombuffer(self.tokens, "<i4").astype(np.int64),
            np.frombuffer(self.loss_mask, np.bool_).copy(),
            np.frombuffer(self.logprobs, "<f4").astype(np.float32),
            np.frombuffer(self.versions, "<i4").astype(np.int32),
            Finish(self.finish),
            self.retractions,
            self.reward,
            turn_rewards=self.turn_rewards,
            reward_parts=self.reward_parts,
            siblings=self.siblings,
            teacher=decode_scores(self.teacher, self.length) if self.teacher else None,
        )

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.loss_mask)


class EpisodeQuestion(msgspec.Struct, array_like=True, tag="q", gc=False):
    """A finished episode whose reward is asked for."""

    number: int
    prompt: Prompt
    episode: FinishedEpisode
    engines: bytes = b""
    """The engines that serve now (``rollout.engine.asked_engines.encoded``), if the judge asks any."""

    def arguments(self) -> tuple[Prompt, str, Trajectory]:
        """Return the arguments of ``Reward.score``."""
        return self.prompt, self.episode.response, self.episode.trajectory()


class GroupQuestion(msgspec.Struct, array_like=True, tag="g", gc=False):
    """The finished episodes of a group, whose rewards are asked for at once."""

    number: int
    prompt: Prompt
    episodes: list[FinishedEpisode]
    engines: bytes = b""

    def arguments(self) -> tuple[Prompt, list[str], list[Trajectory]]:
        """Return the arguments of ``GroupReward.score_group``."""
        responses = [episode.response for episode in self.episodes]
        return self.prompt, responses, [episode.trajectory() for episode in self.episodes]


class TurnQuestion(msgspec.Struct, array_like=True, tag="t", gc=False):
    """A turn of a live user whose worth is asked for."""

    number: int
    turn: JudgedTurn
    next_state: Messages
    engines: bytes = b""

    def arguments(self) -> tuple[JudgedTurn, Messages]:
        """Return the arguments of ``LiveJudge.judge``."""
        return self.turn, self.next_state


class Withdrawal(msgspec.Struct, array_like=True, tag="w", gc=False):
    """A question whose reward is not needed any more. It is answered nevertheless."""

    number: int


class JudgeReady(msgspec.Struct, array_like=True, tag="r", gc=False):
    """The reward is constructed, and questions can be asked."""

    pid: int
    concurrent: bool
    """``score`` is a coroutine function, so that questions may overlap."""
    of_groups: bool = False
    """The reward judges all episodes of a group at once."""


class StartFailure(msgspec.Struct, array_like=True, tag="f", gc=False):
    """The reward cannot be imported or constructed."""

    reason: str


class Scored(msgspec.Struct, array_like=True, tag="s", gc=False):
    """The reward of an episode, a finite number."""

    number: int
    reward: float
    parts: RewardParts = ()
    teacher: bytes = b""
    """Encoded scores of a teacher; empty: there are none."""
    turn_rewards: TurnRewards = ()


class GroupScored(msgspec.Struct, array_like=True, tag="gs", gc=False):
    """The rewards of a group's episodes, in their order."""

    number: int
    judgements: list[tuple[float, RewardParts, bytes, TurnRewards]]
    """Reward, parts, encoded scores of a teacher and rewards of turns of each."""


class Ruled(msgspec.Struct, array_like=True, tag="v", gc=False):
    """The verdict on a turn."""

    number: int
    score: float | None
    """A finite number; None: there is no verdict yet."""
    hint: str | None = None
    teacher: bytes = b""
    """Encoded scores of a teacher; empty: there are none."""
    votes: VoteCounts = NO_VOTES
    nothing_to_learn: bool = False


class Blame(StrEnum):
    """Reason why an attempt failed, as far as it says whether another question can be the cause."""

    QUESTION = "question"
    """The attempt failed by itself."""
    MEMORY = "memory"
    """Memory ran out, which an earlier question or one that overlaps may have used up."""
    CANCELLED = "cancelled"
    """The attempt was cancelled by user code, perhaps by that of an overlapping question."""


class Unscored(msgspec.Struct, array_like=True, tag="u", gc=False):
    """A failed attempt at a question."""

    number: int
    reason: str
    """For the user, with the traceback."""
    blame: Blame = Blame.QUESTION


class Retiring(msgspec.Struct, array_like=True, tag="e", gc=False):
    """The process should be replaced as soon as it has answered its open questions."""

    reason: str


Question = EpisodeQuestion | GroupQuestion | TurnQuestion
Answer = Scored | GroupScored | Ruled
Request = Question | Withdrawal
Reply = JudgeReady | StartFailure | Answer | Unscored | Retiring

_encoder = msgspec.msgpack.Encoder()
SETUP = msgspec.msgpack.Decoder(JudgeSetup)
REQUEST = msgspec.msgpack.Decoder[Request](Request)
REPLY = msgspec.msgpack.Decoder[Reply](Reply)


def framed(message: JudgeSetup | Request | Reply) -> bytes:
    """Return the frame of a message. Raises TypeError, OverflowError or UnicodeEncodeError for values that
    msgpack does not have.
    """
    return stream.framed(_encoder.encode(message))


Engines = Callable[[], bytes]
"""Returns the engines that serve now: ``rollout.engine.asked_engines.encoded``."""


def framed_question(
    number: int, prompt: Prompt, response: str, trajectory: Trajectory, engines: Engines = bytes
) -> bytes:
    """Return the frame of a question. Raises what ``framed`` raises."""
    episode = _finished(response, trajectory)
    return framed(EpisodeQuestion(number, prompt, episode, engines()))


def framed_group(
    number: int,
    prompt: Prompt,
    responses: Sequence[str],
    trajectories: Sequence[Trajectory],
    engines: Engines = bytes,
) -> bytes:
    """Return the frame of a question about a whole group. Raises what ``framed`` raises."""
    episodes = [_finished(*each) for each in zip(responses, trajectories, strict=True)]
    return framed(GroupQuestion(number, prompt, episodes, engines()))


def _finished(response: str, trajectory: Trajectory) -> FinishedEpisode:
    return FinishedEpisode(
        response,
        trajectory.tokens_T.astype("<i4").tobytes(),
        trajectory.loss_mask_T.tobytes(),
        trajectory.logprobs_T.astype("<f4", copy=False).tobytes(),
        trajectory.versions_T.astype("<i4", copy=False).tobytes(),
        trajectory.finish.value,
        trajectory.retractions,
        None if trajectory.reward is None else float(trajectory.reward),
        trajectory.header.turn_rewards,
        trajectory.reward_parts,
        trajectory.header.siblings,
        b"" if trajectory.teacher is None else encode_scores(trajectory.teacher),
    )
