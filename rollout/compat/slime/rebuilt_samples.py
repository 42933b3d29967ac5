"""Samples rebuilt from what Slipstream has recorded of episodes."""

from collections.abc import Callable
from typing import Any, cast

from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.compat.slime.episode_samples import metadata_of
from slipstream.rollout.system.plugins import resolve
from slipstream.rollout.tokens.evaluated_set import EvaluatedSet
from slipstream.rollout.tokens.tokenizer import Tokenizer
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Group, Prompt, Trajectory


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
            **_asked(prompt),
            tokens=tokens,
            response=self._tokenizer.decode(tokens[start:]),
            response_length=len(tokens) - start,
            loss_mask=trajectory.loss_mask_T[start:].astype(int).tolist(),
            rollout_log_probs=trajectory.logprobs_T[start:].tolist(),
            weight_versions=[str(version) for version in sorted({*trajectory.versions_T[sampled].tolist()})],
            reward=reward if self._reward_key is None else {self._reward_key: reward},
            status=statuses.TRUNCATED if trajectory.finish is Finish.LENGTH else statuses.COMPLETED,
        )

    def of_set(self, evaluated: EvaluatedSet) -> list[Any]:
        """Return the samples of an evaluation, of which only lengths and rewards are recorded."""
        statuses = cast("Any", self._sample).Status
        samples: list[Any] = []
        for number, reward in enumerate(evaluated.rewards):
            prompt = evaluated.prompts[number] if evaluated.prompts else None
            index = number if prompt is None else prompt.id
            samples.append(
                self._sample(
                    index=index,
                    rollout_id=index,
                    response_length=evaluated.lengths[number],
                    reward=reward if self._reward_key is None else {self._reward_key: reward},
                    status=statuses.TRUNCATED if evaluated.truncated[number] else statuses.COMPLETED,
                    **({} if prompt is None else _asked(prompt)),
                )
            )
        return samples


def _asked(prompt: Prompt) -> dict[str, Any]:
    """Return what a sample says of its prompt."""
    return {"prompt": prompt.prompt, "label": prompt.label, "metadata": metadata_of(prompt)}
