"""Trajectories and prompts of a simulation: numbers of tokens by version, without the tokens."""

from dataclasses import dataclass, field

from slipstream.rollout.trajectory import Finish

Spans = tuple[tuple[int, int], ...]
"""(version, tokens) in the order of generation. Versions increase from span to span."""


def joined(first: Spans, then: Spans) -> Spans:
    """Return ``first`` continued by ``then``."""
    if first and then and first[-1][0] == then[0][0]:
        return (*first[:-1], (then[0][0], first[-1][1] + then[0][1]), *then[1:])
    return first + then


Sample = tuple[int, int, float, float]
"""A completion of the workload: (prompt tokens, completion tokens, seconds of judging, reward)."""


class SimulatedTrajectory:
    """Takes the place of ``slipstream.rollout.trajectory.Trajectory`` wherever no token is looked at."""

    __slots__ = ("response_length", "retractions", "reward", "sample", "sampled_length", "spans")

    finish = Finish.STOP

    def __init__(
        self,
        sample: Sample,
        spans: Spans,
        response_length: int,
        retractions: int,
        reward: float | None = None,
    ) -> None:
        self.sample = sample
        self.spans = spans
        """Version spans of the tokens that carry loss."""
        self.response_length = response_length
        """Number of tokens that carry loss."""
        self.sampled_length = sample[1]
        self.retractions = retractions
        self.reward = reward

    @property
    def prompt_tokens(self) -> int:
        return self.sample[0]

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token that carries loss. Raises ValueError if no token does."""
        if not self.spans:
            raise ValueError("no token of this trajectory carries loss, so it has no oldest version")
        return self.spans[0][0]

    @property
    def n_versions(self) -> int:
        return len(self.spans)

    def masked_before(self, version: int) -> "SimulatedTrajectory":
        """Return a copy in which tokens older than ``version`` carry no loss."""
        kept = tuple(span for span in self.spans if span[0] >= version)
        length = sum(tokens for _, tokens in kept)
        return SimulatedTrajectory(self.sample, kept, length, self.retractions, self.reward)


@dataclass(slots=True)
class SimulatedPrompt:
    """The prompt of one group."""

    id: int
    """Position in the stream."""
    _numbers: dict[object, int] = field(default_factory=dict)
    _attempts: dict[int, int] = field(default_factory=dict)

    def number(self, generator: object) -> int:
        """Return the number of the sample that ``generator`` serves.

        Samples start in order, and a retry keeps its generator.
        """
        return self._numbers.setdefault(generator, len(self._numbers))

    def attempt(self, number: int) -> int:
        """Count an attempt at sample ``number``, and return how many there were before."""
        attempt = self._attempts.get(number, 0)
        self._attempts[number] = attempt + 1
        return attempt
