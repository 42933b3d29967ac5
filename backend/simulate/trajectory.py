"""What a simulated episode leaves: how many tokens of which version, and no tokens."""

from dataclasses import dataclass, field

from slipstream.rollout.trajectory import Finish

Spans = tuple[tuple[int, int], ...]
"""(version, tokens) in the order of generation, neighbours of different versions; versions never decrease."""


def joined(first: Spans, then: Spans) -> Spans:
    """``then`` continues ``first``."""
    if first and then and first[-1][0] == then[0][0]:
        return (*first[:-1], (then[0][0], first[-1][1] + then[0][1]), *then[1:])
    return first + then


Sample = tuple[int, int, float, float]
"""What the workload says of an answer: (tokens of the prompt, of the answer, seconds of judging, reward)."""


class SimulatedTrajectory:
    """Stands for ``slipstream.rollout.trajectory.Trajectory`` wherever no token is looked at."""

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
        """Of the tokens that carry loss."""
        self.response_length = response_length
        """How many those are."""
        self.sampled_length = sample[1]
        self.retractions = retractions
        self.reward = reward

    @property
    def prompt_tokens(self) -> int:
        return self.sample[0]

    @property
    def oldest_version(self) -> int:
        """Raises ValueError when no token carries loss."""
        if not self.spans:
            raise ValueError("no token of this trajectory carries loss, so it has no oldest version")
        return self.spans[0][0]

    @property
    def n_versions(self) -> int:
        return len(self.spans)

    def masked_before(self, version: int) -> "SimulatedTrajectory":
        """The same episode, in which tokens older than ``version`` carry no loss."""
        kept = tuple(span for span in self.spans if span[0] >= version)
        length = sum(tokens for _, tokens in kept)
        return SimulatedTrajectory(self.sample, kept, length, self.retractions, self.reward)


@dataclass(slots=True)
class SimulatedPrompt:
    """One prompt instance, made anew for each group."""

    id: int
    """Its position in the stream."""
    _numbers: dict[object, int] = field(default_factory=dict)
    _attempts: dict[int, int] = field(default_factory=dict)

    def number(self, generator: object) -> int:
        """Which sample of the group asks. They start in order, and keep their generator when they retry."""
        return self._numbers.setdefault(generator, len(self._numbers))

    def attempt(self, number: int) -> int:
        """0, 1, 2, ... for the attempts at one sample."""
        attempt = self._attempts.get(number, 0)
        self._attempts[number] = attempt + 1
        return attempt
