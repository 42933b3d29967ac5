"""A group between its slot and its batch, as the driver holds it: headers, and places in the ledger."""

from dataclasses import replace

from slipstream.rollout.ledger.rows.samples import OpenSample
from slipstream.rollout.tokens.trajectory import Prompt, TrajectoryHeader, count_tokens


class CollectedGroup:
    """A group that has a slot. Collectors work on it until it is complete; then it waits for its batch."""

    __slots__ = (
        "assignment",
        "blocks",
        "collector",
        "id",
        "prompt",
        "sampled_length",
        "samples",
        "trained_tokens",
        "unanswered",
        "version",
    )

    def __init__(self, id_: int, version: int, prompt: Prompt, samples: list[OpenSample | None]) -> None:
        self.id = id_
        self.version = version
        """Policy version at admission."""
        self.prompt = prompt
        self.samples = samples
        """Record of each episode; None: it has none."""
        self.assignment = 0
        """Number of the present assignment; 0: none."""
        self.collector = ""
        self.unanswered = sum(sample is None or not sample.is_whole for sample in samples)
        self.blocks = 0
        """Number of collectors that the group's workflow has stopped."""
        self.trained_tokens: dict[int, int] = {}
        """Number of tokens that carry loss, by policy version, once they are counted."""
        self.sampled_length = 0
        """Number of sampled tokens, once they are counted."""

    @property
    def judged(self) -> list[OpenSample]:
        """The judged trajectories."""
        return [sample for sample in self.samples if sample is not None and sample.judged is not None]

    @property
    def headers(self) -> list[TrajectoryHeader]:
        """The headers of the judged trajectories."""
        return [sample.judged for sample in self.samples if sample is not None and sample.judged is not None]

    def counted(self) -> "CollectedGroup":
        """Count the tokens of the judged trajectories, which are all of them, and return the group."""
        self.trained_tokens, self.sampled_length = count_tokens(self.headers)
        return self

    def masked(self, stale: frozenset[int]) -> "CollectedGroup":
        """Return the complete group, in which no token of the versions ``stale`` carries loss."""
        if not stale:
            return self
        samples = [
            replace(sample, judged=header.without(stale))
            for sample, header in zip(self.judged, self.headers, strict=True)
        ]
        return CollectedGroup(self.id, self.version, self.prompt, [*samples]).counted()
