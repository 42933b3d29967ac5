"""Samples rebuilt from what Slipstream has recorded of episodes."""

from collections.abc import Callable
from typing import Any, Protocol, cast

from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.compat.slime.episode_samples import metadata_of
from slipstream.rollout.plugins import resolve
from slipstream.rollout.tokenizer import Tokenizer
from slipstream.rollout.trajectory import UNSAMPLED, EvaluatedSet, Finish, Group, Prompt, Trajectory


class EvaluatedResult(Protocol):
    """What is known of an evaluation episode."""

    @property
    def reward(self) -> float: ...
    @property
    def response_length(self) -> int: ...
    @property
    def is_truncated(self) -> bool: ...


class SampleRebuilder:
    """Makes slime's `Sample` of trajectories: tokens, masks, log-probs, rewards and statuses.

    What a generate function has put on its samples besides is not there: it was not recorded.
    """

    def __init__(self, args: SlimeArguments, tokenizer: Tokenizer) -> None:
        """``slime`` must be importable."""
        self._sample: Callable[..., Any] = resolve("slime.utils.types.Sample")
        self._reward_key: str | None = args.reward_key
        self._tokenizer = tokenizer

    def of_group(self, group: Group) -> list[list[Any]]:
        """Return the samples of each episode of a group: several where it has several trajectories."""
        count = len(group.trajectories)
        return [
            [self.sample(part, group.prompt, group.id, group.id * count + index) for part in episode.split()]
            for index, episode in enumerate(group.trajectories)
        ]

    def sample(self, trajectory: Trajectory, prompt: Prompt, group: int, index: int | None) -> Any:
        """Return the sample of one trajectory. ``index``: of its episode over the run, if known."""
        sampled = trajectory.versions_T != UNSAMPLED
        start = int(sampled.argmax())
        tokens = trajectory.tokens_T.tolist()
        statuses = cast("Any", self._sample).Status
        reward = trajectory.reward
        return self._sample(
            group_index=group,
            index=index,
            rollout_id=index,
            prompt=prompt.prompt,
            label=prompt.label,
            metadata=metadata_of(prompt),
            tokens=tokens,
            response=self._tokenizer.decode(tokens[start:]),
            response_length=len(tokens) - start,
            loss_mask=trajectory.loss_mask_T[start:].astype(int).tolist(),
            rollout_log_probs=trajectory.logprobs_T[start:].tolist(),
            weight_versions=[str(version) for version in sorted({*trajectory.versions_T[sampled].tolist()})],
            reward=reward if self._reward_key is None else {self._reward_key: reward},
            status=statuses.TRUNCATED if trajectory.finish is Finish.LENGTH else statuses.COMPLETED,
        )

    def evaluated(self, prompt: Prompt, result: "EvaluatedResult") -> Any:
        """Return the sample of an evaluation episode, of which only lengths and rewards are recorded."""
        statuses = cast("Any", self._sample).Status
        return self._sample(
            index=prompt.id,
            rollout_id=prompt.id,
            prompt=prompt.prompt,
            label=prompt.label,
            metadata=metadata_of(prompt),
            response_length=result.response_length,
            reward=result.reward if self._reward_key is None else {self._reward_key: result.reward},
            status=statuses.TRUNCATED if result.is_truncated else statuses.COMPLETED,
        )

    def of_set(self, evaluated: EvaluatedSet, number: int) -> Any:
        """Return a sample of an evaluation by a function, of which only lengths and rewards are recorded."""
        statuses = cast("Any", self._sample).Status
        reward = evaluated.rewards[number]
        return self._sample(
            index=number,
            rollout_id=number,
            response_length=evaluated.lengths[number],
            reward=reward if self._reward_key is None else {self._reward_key: reward},
            status=statuses.TRUNCATED if evaluated.truncated[number] else statuses.COMPLETED,
        )
