"""slime's rollout function, called again and again with the groups that are leased to a collector.

    episodes of a group wait ──► leased ──► rollout function, in a thread ──► samples: the episodes go on
                                   ▲               │  │
                                   └──given back───┘  └─ neither returned nor given back: GroupRejected

One call runs at a time, as in slime. It is asked for as many groups as wait when it begins, a batch at the
most. So a call ends even if a restart has left a part of a batch, and however many collectors share it.

Completions that the engines sample meanwhile are kept for the whole call, because requests do not name their
episode. They are lost with the process: then the groups are leased again, and the function is called again.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.compat.slime.episode_samples import (
    NothingSampled,
    SampleLike,
    WrongReturn,
    attest,
    declared,
    drawn_onto,
    fields_of,
    is_sampled,
    trajectory_of,
)
from slipstream.rollout.compat.slime.function_calls import FunctionCalls, FunctionFailed, OutputMetrics
from slipstream.rollout.compat.slime.leased_groups import GROUP, LeasedGroups, SampleGroup, number_of
from slipstream.rollout.compat.slime.recipe_reward import PROMPT
from slipstream.rollout.compat.slime.sample_matching import SampledReplies
from slipstream.rollout.engine.engine_pool import NoEngine
from slipstream.rollout.system.changes import Changes
from slipstream.rollout.system.plugins import resolve
from slipstream.rollout.tokens.named_numbers import NamedNumbers
from slipstream.rollout.tokens.tokenizer import Tokenizer
from slipstream.rollout.tokens.trajectory import Prompt, Trajectory
from slipstream.rollout.workflow import EpisodePlace, GroupRejected, WorkflowContext
from slipstream.rollout.workflow.endpoint import EndedEpisode, Reply

GATHER_S = 0.05
"""Seconds for which a call waits for another group, and a group for another one of its episodes."""


class SampledEpisode(NamedTuple):
    """One episode as a function has made it."""

    samples: list[SampleLike]
    """Several: siblings."""
    replies: SampledReplies
    """The replies of the engines to all episodes of the call."""
    untrained: SampledReplies
    """Further replies, which the trainer cannot reproduce."""
    numbers: NamedNumbers
    """Metrics of the call."""


@dataclass
class _OpenGroup:
    samples: SampleGroup
    episodes: dict[int, "asyncio.Future[SampledEpisode]"] = field(
        default_factory=dict[int, "asyncio.Future[SampledEpisode]"]
    )
    is_leased: bool = False


class RolloutCalls:
    """Calls the recipe's rollout function. Single event loop. ``close`` it."""

    def __init__(self, path: str, calls: FunctionCalls, groups: LeasedGroups) -> None:
        """``path``: of the function. ``groups``: the data source of ``calls``."""
        arguments = calls.args
        self._path = path
        self._metrics = OutputMetrics(path)
        self._calls = calls
        self._batch = cast("int", arguments.rollout_batch_size)
        self._over_sampling = arguments.over_sampling_batch_size / max(1, self._batch)
        self._episodes = cast("int", arguments.n_samples_per_prompt)
        self._leased = groups
        self._groups: dict[int, _OpenGroup] = {}
        self._changes = Changes()
        self._rollout_id = -1
        self._replies: list[Reply] = []
        """The replies of this call, and of earlier calls from which groups were given back."""
        self._serving: asyncio.Task[None] | None = None

    async def episode(self, place: EpisodePlace, make: Callable[[int], SampleLike]) -> SampledEpisode:
        """Return what the function makes of one episode. ``make``: returns the samples of its group.

        Raises GroupRejected when it drops the group, FunctionFailed, WrongReturn and NoEngine.
        """
        loop = asyncio.get_running_loop()
        if self._serving is None or self._serving.done():
            # Not inside the time limit of this episode.
            self._serving = loop.create_task(
                self._serve(), name="calls of the rollout function", context=Context()
            )
        group = self._groups.get(place.group)
        if group is None:
            group = self._groups[place.group] = _OpenGroup([make(i) for i in range(self._episodes)])
            loop.call_later(GATHER_S, self._lease, place.group, group)
        future = group.episodes[place.sample] = loop.create_future()
        if len(group.episodes) == self._episodes:
            self._lease(place.group, group)
        try:
            with self._calls.around.limit.suspended():  # calls have the time limit
                return await future
        finally:
            group.episodes.pop(place.sample, None)
            if not group.episodes and self._groups.get(place.group) is group:
                del self._groups[place.group]
                self._leased.withdraw(place.group)

    async def close(self) -> None:
        """Give up the call that runs. Its thread ends with the process."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait({self._serving})
        await self._calls.close()

    # ---- calls

    def _lease(self, number: int, group: _OpenGroup) -> None:
        """Let the function draw a group, whether or not all of its episodes need it."""
        if not group.is_leased and self._groups.get(number) is group:
            group.is_leased = True
            self._leased.lease(number, group.samples)
            self._changes.notify()

    async def _serve(self) -> None:
        failure: BaseException = asyncio.CancelledError()
        try:
            while True:
                await self._gathered()
                async with self._calls.turn:
                    await self._call()
        except NoEngine as error:
            failure = error
        except Exception as error:
            failure = FunctionFailed(f"{self._path} cannot be called: {error}")
        finally:
            for number in list(self._groups):
                self._end(number, failure)

    async def _gathered(self) -> None:
        """Wait until a batch can be drawn, or until no further group comes."""
        await self._changes.first(lambda: self._leased.available or None)
        while (available := self._leased.available) < self._batch:
            try:
                async with asyncio.timeout(GATHER_S):
                    await self._changes.first(lambda n=available: self._leased.available > n or None)
            except TimeoutError:
                return

    async def _call(self) -> None:
        """Call the function once, and let episodes go on."""
        args, size = self._calls.args, min(self._batch, self._leased.available)
        if not size:  # withdrawn meanwhile
            return
        args.rollout_batch_size = size
        args.over_sampling_batch_size = max(size, round(size * self._over_sampling))
        self._rollout_id = max(self._rollout_id + 1, self._calls.around.version())
        self._leased.begin_call()
        ended, returned, failure = EndedEpisode((), ()), list[SampleGroup](), None
        numbers: NamedNumbers = ()
        try:
            output, ended = await self._calls.call(self._path, self._rollout_id, evaluation=False)
            numbers, returned = self._metrics.read(output), self._returned(output.samples)
        except (FunctionFailed, WrongReturn) as error:
            failure = error
        finally:
            drawn = self._leased.end_call()
        self._replies += ended.replies
        replies = SampledReplies(self._replies), SampledReplies(ended.untrained)
        for number, group in placed(returned, drawn):
            drawn.remove(number)
            self._deliver(number, group, *replies, numbers)
        for number in drawn:
            self._end(number, failure or GroupRejected(f"{self._path} has not returned it"))
        if not self._leased.buffer:
            self._replies = []

    def _returned(self, samples: object) -> list[SampleGroup]:
        """Return the groups that a function has returned. Raises WrongReturn."""
        groups = cast("list[object]", samples if isinstance(samples, list) else [samples])
        for group in groups:
            if not isinstance(group, list):
                kind = type(group).__name__
                raise WrongReturn(f"{self._path} returned {kind}, expected lists of samples, one a group")
        return cast("list[SampleGroup]", groups)

    def _deliver(
        self,
        number: int,
        group: SampleGroup,
        replies: SampledReplies,
        untrained: SampledReplies,
        numbers: NamedNumbers,
    ) -> None:
        if len(group) != self._episodes:
            reason = f"{self._path} returned a group of {len(group)}, expected {self._episodes} samples"
            self._end(number, WrongReturn(f"{reason} (rollout.n_samples_per_prompt)"))
            return
        waiting = self._groups.pop(number, None)
        for place, future in list(waiting.episodes.items()) if waiting is not None else ():
            each = group[place]
            samples = cast("list[SampleLike]", each if isinstance(each, list) else [each])
            if not future.done():
                future.set_result(SampledEpisode(samples, replies, untrained, numbers))

    def _end(self, number: int, reason: BaseException) -> None:
        waiting = self._groups.pop(number, None)
        for future in list(waiting.episodes.values()) if waiting is not None else ():
            if future.done():
                continue
            if isinstance(reason, asyncio.CancelledError):
                future.cancel()
            else:
                future.set_exception(reason)


def placed(groups: Sequence[SampleGroup], drawn: Sequence[int]) -> list[tuple[int, SampleGroup]]:
    """Return the groups that a call has returned with the numbers under which they are leased.

    One whose samples do not say where they come from takes the place of a group that was dropped. A group
    that is returned a second time is left out, and so are those beyond the ones that were drawn.
    """
    left = dict.fromkeys(drawn)
    found: list[tuple[int, SampleGroup]] = []
    others: list[SampleGroup] = []
    for group in groups:
        number = number_of(group)
        if number in left:
            del left[number]
            found.append((number, group))
        elif number not in drawn:
            others.append(group)
    return [*found, *zip(left, others, strict=False)]


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
