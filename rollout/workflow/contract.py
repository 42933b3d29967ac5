"""The methods of a workflow, and the content of its context."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, SupportsFloat

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.tokens.tokenizer import Tokenizer
from slipstream.rollout.tokens.trajectory import Completion, Prompt, Trajectory
from slipstream.rollout.workflow.endpoint import PolicyEndpoint
from slipstream.rollout.workflow.numbers import EpisodeNumbers


class Generator(Protocol):
    """Continues token ids with the current policy. A workflow finds it in its context.

        completion = await context.generator.generate(builder.tokens, context.sampling)

    Many requests may run at one time; the engines batch them.
    """

    async def generate(self, input_ids: Sequence[int], sampling: SamplingConfig) -> Completion:
        """Return the completion of ``input_ids``: at most ``sampling.max_new_tokens`` new tokens.

        The request survives weight updates and the loss of engines, so that a completion may hold tokens of
        several policy versions (``Completion.spans``). Its ``finish`` is STOP or LENGTH, never PARTIAL.

        Raises InvalidRequest when ``input_ids`` is empty, holds an id outside the vocabulary, or leaves no
        room for the new tokens, and EngineError when an engine refuses the request: the attempt fails.
        NoEngine and LedgerError end the run; a workflow must not catch them.
        """
        ...


class Judge(Protocol):
    """Asks the recipe's reward, which runs in a process of its own. A workflow finds it in its context.

    reward = await context.reward.score(prompt, text, trajectory)
    """

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        """Return the reward of an episode, a finite number.

        Raises JudgingFailed when every attempt at judging has failed; a workflow must not catch it.
        """
        ...


class GroupRejected(Exception):
    """A workflow raises this where its group is not worth training: it is counted as ``filtered``."""


@dataclass(frozen=True, slots=True)
class EpisodePlace:
    """The place of an episode in the run."""

    group: int
    sample: int
    """Number of the episode in its group, from 0."""
    version: int
    """Policy version at the group's admission: no token that is trained may be of an older one."""


@dataclass(frozen=True, slots=True)
class WorkflowContext:
    """Everything that an episode may use."""

    generator: Generator
    tokenizer: Tokenizer
    reward: Judge
    sampling: SamplingConfig
    """``rollout.sampling`` of the recipe, or in an evaluation the sampling of evaluations."""
    endpoint: PolicyEndpoint | None = None
    """An endpoint for agents. None unless the workflow has an attribute ``needs_endpoint`` that is true."""
    reward_key: str = "reward"
    """``rollout.reward_key`` of the recipe: the name of the number that trains, in a mapping of rewards."""
    is_evaluation: bool = False
    """True in an evaluation, none of whose episodes is trained."""
    place: EpisodePlace | None = None
    """None in an evaluation."""
    numbers: EpisodeNumbers = field(default_factory=EpisodeNumbers)
    """Numbers recorded so far. Each attempt at an episode begins without any."""

    def metric(self, name: str, value: SupportsFloat) -> None:
        """Record a number of the episode, such as the tool calls in it. It is shown, and trains nothing.

        Each training step logs the mean, the smallest and the largest value over its episodes that have
        recorded the name, as ``episode/NAME``, ``episode/NAME/min`` and ``episode/NAME/max``. A name that is
        recorded again gets the later value.

        Raises MetricError for a value that is not a finite number, for a name of other characters than
        letters, digits, ``_``, ``-`` and ``.``, and for the 33rd name of an episode.
        """
        self.numbers.record(name, value)


class Workflow(Protocol):
    """Runs episodes. Any class with this method is one; it need not inherit from ``Workflow``.

        class WithHint:
            async def run(self, prompt: Prompt, context: WorkflowContext) -> Trajectory:
                ids = context.tokenizer.apply_chat_template(
                    prompt.messages(), add_generation_prompt=True, return_dict=False
                )
                builder = TrajectoryBuilder(ids)
                first = await context.generator.generate(builder.tokens, context.sampling)
                builder.add_completion(first)
                builder.add_context(HINT_IDS)
                last = await context.generator.generate(builder.tokens, context.sampling)
                builder.add_completion(last)
                return builder.build()

    A recipe names the class, and gives its arguments as ``args``:

        rollout:
          workflow: {path: my_package.workflows.WithHint}

    One instance in each collector process runs many episodes at one time on one event loop: keep no state of
    an episode in ``self``, and never block. A workflow that computes for ``rollout.collector_timeout_s``
    without awaiting anything ends its process. When a process ends, an unfinished episode is run again from
    its beginning in another one; completions that it asks for again with the same input are not generated
    again.

    A workflow may have ``async def close(self)``, which is called when its process ends in good order.
    """

    async def run(self, prompt: Prompt, context: WorkflowContext) -> Trajectory | Sequence[Trajectory]:
        """Run one episode and return its trajectory, or several: of sub-agents, or of a context that was
        rewritten on the way. These have one advantage, and where the loss is a mean over trajectories, they
        count as one. A group may have more of them in one episode than in another.

        A trajectory without a reward is judged by the recipe's reward, which is asked with the text of the
        last completion (of the last trajectory). A workflow that knows better sets ``reward`` to a finite
        number itself; it may also ask ``context.reward``, whose time does not count towards the time limit of
        the episode.

        Raise an exception when the episode fails for a reason outside the policy. It is run again, up to
        ``rollout.episode_attempts`` times, and then its group is counted as ``failed``. An episode that
        takes longer than ``rollout.episode_timeout_s`` is cancelled, which counts as a failed attempt.
        Raise GroupRejected when nothing of the group is to be trained.
        """
        ...
