"""Simulated completions and trajectories: the number of tokens of each version, and no tokens.

The classes are the real ones wherever no token is looked at. Fields that would hold tokens do not exist:
the others are set by name in the instance, past the constructors that would need the tokens.
"""

from dataclasses import dataclass, field

from slipstream.rollout.trajectory import Completion, Finish, Prompt, Trajectory

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
    """The trajectory of one simulated episode."""

    sample: Sample
    version_spans: Spans
    """Spans of the tokens that carry loss."""

    def __init__(
        self,
        sample: Sample,
        version_spans: Spans,
        response_length: int,
        retractions: int,
        reward: float | None = None,
    ) -> None:
        """``response_length``: number of tokens that carry loss."""
        self.__dict__.update(
            sample=sample,
            version_spans=version_spans,
            response_length=response_length,
            sampled_length=sample[1],
            retractions=retractions,
            reward=reward,
            finish=Finish.STOP,
            turn_rewards=(),
        )

    @property
    def prompt_tokens(self) -> int:
        return self.sample[0]

    @property
    def oldest_version(self) -> int:
        """Smallest version among the tokens that carry loss. Raises ValueError when none does."""
        if not self.version_spans:
            raise ValueError("no token of this trajectory carries loss, so it has no oldest version")
        return self.version_spans[0][0]

    @property
    def n_versions(self) -> int:
        return len(self.version_spans)

    def judged(self, reward: float) -> "SimulatedTrajectory":
        """Return the same episode with its reward."""
        return SimulatedTrajectory(
            self.sample, self.version_spans, self.response_length, self.retractions, reward
        )

    def masked_before(self, version: int) -> "SimulatedTrajectory":
        """Return the same episode, in which tokens older than ``version`` carry no loss."""
        kept = tuple(span for span in self.version_spans if span[0] >= version)
        length = sum(tokens for _, tokens in kept)
        return SimulatedTrajectory(self.sample, kept, length, self.retractions, self.reward)


@dataclass(frozen=True)
class SimulatedPrompt(Prompt):
    """One prompt instance, made anew for each group. ``id`` is its position in the stream."""

    _numbers: dict[object, int] = field(default_factory=dict)
    _attempts: dict[int, int] = field(default_factory=dict)

    def number(self, generator: object) -> int:
        """Return the number of the sample that asks. Samples start in order and keep their generator."""
        return self._numbers.setdefault(generator, len(self._numbers))

    def attempt(self, number: int) -> int:
        """Return 0, 1, 2, ... for the attempts at one sample."""
        attempt = self._attempts.get(number, 0)
        self._attempts[number] = attempt + 1
        return attempt
