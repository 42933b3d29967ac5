"""Episodes of a recipe whose rollout function collects whole batches."""

from collections.abc import Callable, Sequence

from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.compat.slime.declared_samples import attest, declared
from slipstream.rollout.compat.slime.episode_samples import (
    NothingSampled,
    SampleLike,
    drawn_onto,
    fields_of,
    is_sampled,
    trajectory_of,
)
from slipstream.rollout.compat.slime.leased_groups import GROUP
from slipstream.rollout.compat.slime.recipe_reward import PROMPT
from slipstream.rollout.compat.slime.rollout_calls import RolloutCalls, SampledEpisode
from slipstream.rollout.system.plugins import resolve
from slipstream.rollout.tokens.tokenizer import Tokenizer
from slipstream.rollout.tokens.trajectory import Prompt, Trajectory
from slipstream.rollout.workflow import EpisodePlace, WorkflowContext


class FunctionWorkflow:
    """Has every episode made by the rollout function."""

    def __init__(
        self,
        calls: RolloutCalls,
        arguments: SlimeArguments,
        reward_key: str,
        version: Callable[[], int],
        *,
        has_teacher: bool = False,
    ) -> None:
        """``version``: returns the policy version that the engines serve. ``has_teacher``: samples may have a
        teacher's log-probs, towards which the recipe trains. Raises PluginError.
        """
        self._calls = calls
        self._arguments = arguments
        self._reward_key = reward_key
        self._version = version
        self._has_teacher = has_teacher
        self._sample: Callable[..., SampleLike] = resolve("slime.utils.types.Sample")

    async def run(self, prompt: Prompt, context: WorkflowContext) -> Sequence[Trajectory]:
        """Return the trajectories of one episode: as many as the function has made samples of it.

        Raises GroupRejected when the function drops the group.
        """
        place = context.place
        if place is None:
            raise TypeError("a rollout function evaluates whole sets: rollout.hooks.eval_function")
        made = await self._calls.episode(
            place, lambda number: self._made(prompt, place, number, context.tokenizer)
        )
        trajectories = [self._trajectory(sample, made, place) for sample in made.samples]
        attest(context, trajectories)
        for name, value in made.numbers:
            context.metric(name, value)
        return trajectories

    async def close(self) -> None:
        """Give up the call that runs."""
        await self._calls.close()

    def _made(self, prompt: Prompt, place: EpisodePlace, number: int, tokenizer: Tokenizer) -> SampleLike:
        values = fields_of(prompt, self._arguments, tokenizer)
        index = place.group * self._arguments.n_samples_per_prompt + number
        sample = self._sample(**values | {"group_index": place.group, "index": index})
        setattr(sample, PROMPT, prompt)
        setattr(sample, GROUP, place.group)
        return drawn_onto(sample, prompt, number)

    def _trajectory(self, sample: SampleLike, made: SampledEpisode, place: EpisodePlace) -> Trajectory:
        try:
            return trajectory_of(
                sample, made.replies, self._reward_key, has_teacher=self._has_teacher, owner=place.group
            )
        except NothingSampled:
            if not sample.weight_versions or is_sampled(sample, made.untrained):
                raise
            return declared(sample, place.version, self._version(), self._reward_key)
