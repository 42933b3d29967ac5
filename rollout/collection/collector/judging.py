"""Judging as a collector's episodes see it.

    trajectory without a reward ──► text of its last completion ──► judges ──► reward    (a stage of its own)
    group with such a trajectory ─► texts of all of its members ──► judges ──► rewards   (rewards of groups)
    workflow asks for a reward  ──────────────────────────────────► judges ──► reward    (inside the episode)

Judging has attempts and time limits of its own: it never costs a completion, nor the time of an episode.

waits for       ``Judges.score`` and ``score_group``
unblocked by    the answer of a judge process, or the end of the last attempt (``JudgePool``)
"""

from collections.abc import Collection, Sequence
from typing import Protocol, cast

from slipstream.rollout.collection.collector.recording import Recording
from slipstream.rollout.reward.judge.judge_pool import JudgeStatus
from slipstream.rollout.reward.reasoning import Markers, answer_in, markers_of
from slipstream.rollout.reward.value import Judgement
from slipstream.rollout.system.time_limit import TimeLimit
from slipstream.rollout.tokens.tokenizer import Tokenizer, said
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Prompt, Trajectory


class Judges(Protocol):
    """Asks the recipe's reward: ``rollout.reward.judge.judge_pool.JudgePool``, or a model of it."""

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> Judgement:
        """Raises JudgingFailed after the last attempt."""
        ...

    async def score_group(
        self, prompt: Prompt, responses: Sequence[str], trajectories: Sequence[Trajectory]
    ) -> list[Judgement]:
        """Raises JudgingFailed after the last attempt."""
        ...

    @property
    def of_groups(self) -> bool:
        """True if the reward judges all episodes of a group at once."""
        ...

    def status(self) -> JudgeStatus:
        """Return how busy the judges are."""
        ...


class Judging:
    """Judges whole trajectories by their last completion."""

    def __init__(
        self,
        judges: Judges,
        tokenizer: Tokenizer,
        *,
        reads_reasoning: bool = True,
        stops: Sequence[str] = (),
    ) -> None:
        """``reads_reasoning``: the reward gets the reasoning before an answer too. ``stops``: the stop texts
        of the recipe, which belong to answers."""
        self._judges = judges
        self._tokenizer = tokenizer
        self._stops = stops
        self._markers = () if reads_reasoning else _markers_of(tokenizer)

    @property
    def of_groups(self) -> bool:
        """True if only a whole group can be judged."""
        return self._judges.of_groups

    async def judge(self, prompt: Prompt, trajectory: Trajectory) -> Judgement:
        """Return the judgement of a trajectory. A reward of groups gets it as a group of its own.

        Raises JudgingFailed.
        """
        if self.of_groups:
            return (await self.judge_group(prompt, [trajectory]))[0]
        response = self._response(trajectory)
        return await self._judges.score(prompt, response, trajectory)

    async def judge_group(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Judgement]:
        """Return the judgement of each trajectory of a group. Raises JudgingFailed."""
        responses = [self._response(trajectory) for trajectory in trajectories]
        return await self._judges.score_group(prompt, responses, trajectories)

    def _response(self, trajectory: Trajectory) -> str:
        return last_response(self._tokenizer, trajectory, self._markers, self._stops)


class WorkflowReward:
    """The recipe's reward as a workflow asks for it, in the middle of an episode."""

    def __init__(self, judges: Judges, limit: TimeLimit, recording: Recording | None = None) -> None:
        """``recording``: of the episode; what has ended of it is recorded before it is judged."""
        self._judges = judges
        self._limit = limit
        self._recording = recording

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        """Return the reward. Raises JudgingFailed, which a workflow must let through."""
        if self._recording is not None:
            self._recording.write_ends()
        with self._limit.suspended():
            return (await self._judges.score(prompt, response, trajectory)).reward


_TAIL = 16
"""Tokens of a prompt in which the begin of the reasoning is looked for: templates end with it."""


def last_response(
    tokenizer: Tokenizer, trajectory: Trajectory, markers: Markers = (), stops: Sequence[str] = ()
) -> str:
    """Return what the trajectory's last completion says, a stop text of ``stops`` included.

    ``markers``: reasoning between these is cut off.
    """
    start = end = previous_end = 0
    was_sampled = False
    for version, _, run_end in trajectory.header.runs:
        is_sampled = version != UNSAMPLED
        if is_sampled:
            start, end = (start if was_sampled else previous_end), run_end
        was_sampled, previous_end = is_sampled, run_end
    text = said(tokenizer, trajectory.tokens_T[start:end].tolist(), trajectory.finish, stops=stops)
    if not markers:
        return text
    before = tokenizer.decode(trajectory.tokens_T[max(0, start - _TAIL) : start].tolist()).rstrip()
    return answer_in(text, markers, is_begun=any(before.endswith(begin) for begin, _ in markers))


def _markers_of(tokenizer: Tokenizer) -> Markers:
    template: object = getattr(tokenizer, "chat_template", None)
    vocabulary = getattr(tokenizer, "get_vocab", dict)
    return markers_of(template if isinstance(template, str) else "", cast("Collection[str]", vocabulary()))
