"""Simulated completions and trajectories: the number of tokens of each version, and no tokens.

The classes are the real ones wherever no token is looked at. Fields that would hold tokens do not exist:
the others are set by name in the instance, past the constructors that would need the tokens.
"""

import msgspec

from slipstream.rollout.tokens.teacher import TeacherScores
from slipstream.rollout.tokens.trajectory import (
    UNSAMPLED,
    Completion,
    Finish,
    RewardParts,
    Run,
    Trajectory,
    TrajectoryHeader,
)

Spans = tuple[tuple[int, int], ...]
"""(version, tokens) in the order of generation, neighbours of different versions; versions never decrease."""


def joined(first: Spans, then: Spans) -> Spans:
    """Return the spans of ``first`` continued by ``then``."""
    if first and then and first[-1][0] == then[0][0]:
        return (*first[:-1], (then[0][0], first[-1][1] + then[0][1]), *then[1:])
    return first + then


Sample = tuple[int, int, float, float]
"""A completion as the workload draws it: prompt tokens, completion tokens, seconds of judging, reward."""


class SimulatedCompletion(Completion):
    """The completion of one simulated request."""

    sample: Sample
    version_spans: Spans

    def __init__(self, sample: Sample, version_spans: Spans, retractions: int) -> None:
        self.__dict__.update(
            sample=sample, version_spans=version_spans, retractions=retractions, finish=Finish.STOP
        )


class SimulatedTrajectory(Trajectory):
    """The trajectory of one simulated episode: a header."""

    sample: Sample

    def __init__(
        self, sample: Sample, version_spans: Spans, retractions: int, reward: float | None = None
    ) -> None:
        """``version_spans``: those of the completion. All of its tokens carry loss."""
        end = sample[0]
        runs: list[Run] = [(UNSAMPLED, False, end)] if end else []
        for version, tokens in version_spans:
            end += tokens
            runs.append((version, True, end))
        header = TrajectoryHeader(tuple(runs), Finish.STOP, retractions, reward)
        self.__dict__.update(sample=sample, header=header, reward=reward)

    def judged(
        self,
        reward: float,
        parts: RewardParts = (),
        teacher: TeacherScores | None = None,
        turn_rewards: tuple[tuple[int, float | None], ...] = (),
    ) -> "SimulatedTrajectory":
        """Return the same episode with its reward. Simulated rewards judge no turns and have no teacher."""
        assert teacher is None and not turn_rewards
        judged = SimulatedTrajectory.__new__(SimulatedTrajectory)
        header = msgspec.structs.replace(self.header, reward=reward, reward_parts=parts)
        judged.__dict__.update(sample=self.sample, header=header, reward=reward)
        return judged
