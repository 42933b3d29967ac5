"""Hooks that see whole groups, and the samples that they are given.

episode of this process  ──► the samples that its hooks have returned, with all that they hold
episode of another one   ──► samples that are made of its trajectory

group ──► group_rm ──► dynamic_sampling_filter ──► rollout_sample_filter
                              │ rejected                │
                              └─────────────────────────┴──► rollout_all_samples_process ──► trained, or not
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NoReturn, cast

import numpy as np

from slipstream.configs.schema import HooksConfig
from slipstream.configs.schema.rollout import JudgingConfig
from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.compat.slime.episode_samples import SampleLike, judgement_of_reward, metadata_of
from slipstream.rollout.reward.judge.judge_errors import JudgingFailed
from slipstream.rollout.reward.value import Judgement
from slipstream.rollout.system.plugins import resolve
from slipstream.rollout.tokens.evaluated_set import EvaluatedSet
from slipstream.rollout.tokens.named_numbers import means_by_name
from slipstream.rollout.tokens.tokenizer import Tokenizer
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Group, Prompt, Trajectory

LONGEST_WAIT_S = 60.0
"""Seconds between two attempts at the longest."""

Hook = Callable[..., Any]


class SampleRebuilder:
    """Makes slime's `Sample` of trajectories: tokens, masks, log-probs, rewards and statuses.

    What a generate function has put on its samples besides is not there: it was not recorded.
    """

    def __init__(self, args: SlimeArguments, tokenizer: Tokenizer) -> None:
        """``slime`` must be importable."""
        self._sample: Callable[..., SampleLike] = resolve("slime.utils.types.Sample")
        self._reward_key: str | None = args.reward_key
        self._tokenizer = tokenizer

    def of_group(self, group: Group) -> list[list[SampleLike]]:
        """Return the samples of each episode of a group: several where it has several trajectories."""
        count = len(group.trajectories)
        return [
            [self.sample(part, group.prompt, group.id, group.id * count + index) for part in episode.split()]
            for index, episode in enumerate(group.trajectories)
        ]

    def sample(self, trajectory: Trajectory, prompt: Prompt, group: int, index: int | None) -> SampleLike:
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

    def of_set(self, evaluated: EvaluatedSet) -> list[SampleLike]:
        """Return the samples of an evaluation, of which only lengths and rewards are recorded."""
        statuses = cast("Any", self._sample).Status
        samples: list[SampleLike] = []
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


def _asked(prompt: Prompt) -> dict[str, object]:
    """Return what a sample says of its prompt."""
    return {"prompt": prompt.prompt, "label": prompt.label, "metadata": metadata_of(prompt)}


_Key = tuple[int, bytes]
"""Prompt, and a digest of the tokens and log-probs of one trajectory."""


class ReturnedSamples:
    """Samples that hooks of this process have returned, by the trajectories that were made of them.

    A hook may put anything on a sample, and reads that again when its group is judged or filtered.
    """

    def __init__(self, most: int) -> None:
        """``most``: number of episodes to keep the samples of. The oldest ones are given up."""
        self._most = most
        self._episodes: deque[list[_Key]] = deque()
        self._samples: dict[_Key, list[SampleLike]] = {}

    def keep(self, prompt: Prompt, trajectories: Sequence[Trajectory], samples: Sequence[SampleLike]) -> None:
        """Keep the samples that the trajectories of an episode were made of."""
        keys = [_key(prompt, trajectory) for trajectory in trajectories]
        for key, sample in zip(keys, samples, strict=True):
            self._samples.setdefault(key, []).append(sample)
        self._episodes.append(keys)
        if len(self._episodes) > self._most:
            for key in self._episodes.popleft():
                kept = self._samples[key]
                del kept[0]
                if not kept:
                    del self._samples[key]

    def of(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[SampleLike | None]:
        """Return the sample of each trajectory, none of them twice; None where there is none."""
        taken: Counter[_Key] = Counter()
        samples: list[SampleLike | None] = []
        for trajectory in trajectories:
            key = _key(prompt, trajectory)
            kept = self._samples.get(key, ())
            samples.append(kept[taken[key]] if taken[key] < len(kept) else None)
            taken[key] += 1
        return samples


def _key(prompt: Prompt, trajectory: Trajectory) -> _Key:
    content = trajectory.tokens_T.tobytes() + trajectory.logprobs_T.tobytes()
    return prompt.id, blake2b(content, digest_size=16).digest()


class GroupSamples:
    """Makes samples of groups."""

    def __init__(self, arguments: SlimeArguments, tokenizer: Tokenizer, returned: ReturnedSamples) -> None:
        """``slime`` must be importable. Raises PluginError."""
        self._rebuild = SampleRebuilder(arguments, tokenizer)
        self._reward_key = cast("str | None", arguments.reward_key)
        self._returned = returned

    def of(
        self, prompt: Prompt, trajectories: Sequence[Trajectory], group: int | None = None
    ) -> list[SampleLike | list[SampleLike]]:
        """Return a sample for each trajectory of a group, and a list for one with siblings.

        ``group``: number of the group; None: the samples keep the indices that they have.
        """
        parts = [trajectory.split() for trajectory in trajectories]
        returned = iter(self._returned.of(prompt, [part for siblings in parts for part in siblings]))
        samples: list[SampleLike | list[SampleLike]] = []
        for number, (trajectory, siblings) in enumerate(zip(trajectories, parts, strict=True)):
            # A sum of all parts has the reward of the episode; a sample that was returned has its own.
            of_episode = [next(returned) or self._made(prompt, part) for part in siblings]
            for sample in of_episode:
                if sample.reward is None or not (self._reward_key and isinstance(sample.reward, Mapping)):
                    sample.reward = self._reward(trajectory, sample.reward)
                if group is not None:
                    sample.group_index = group
                    sample.index = sample.rollout_id = group * len(trajectories) + number
            samples.append(of_episode if trajectory.siblings else of_episode[0])
        return samples

    def _reward(self, trajectory: Trajectory, value: object) -> object:
        """Return the reward as hooks read it: a mapping if the recipe names the key of one."""
        if trajectory.reward is None or isinstance(value, float | int):
            return value
        if self._reward_key is None:
            return trajectory.reward
        return {self._reward_key: trajectory.reward, **dict(trajectory.reward_parts)}

    def _made(self, prompt: Prompt, trajectory: Trajectory) -> SampleLike:
        sample = self._rebuild.sample(trajectory, prompt, prompt.id, None)
        sample.reward = None
        return sample


def flat(samples: Sequence[SampleLike | list[SampleLike]]) -> list[SampleLike]:
    """Return the samples of a group without the lists of siblings."""
    return [sample for each in samples for sample in (each if isinstance(each, list) else [each])]


class GroupJudge:
    """Asks ``custom_rm`` for the rewards of all samples of a group at once, in the collector."""

    of_groups = True

    def __init__(
        self,
        arguments: SlimeArguments,
        samples: GroupSamples,
        settings: JudgingConfig,
        reward_key: str,
    ) -> None:
        """``settings``: time limit and attempts of one question. Raises PluginError."""
        self._ask: Callable[..., Awaitable[object]] = resolve("slime.rollout.rm_hub.batched_async_rm")
        self._arguments = arguments
        self._samples = samples
        self._settings = settings
        self._reward_key = reward_key

    async def judge(self, prompt: Prompt, trajectory: Trajectory) -> Judgement:
        """Return the reward of a trajectory that is a group of its own. Raises JudgingFailed."""
        return (await self.judge_group(prompt, [trajectory]))[0]

    async def judge_group(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Judgement]:
        """Return the rewards of a group. Raises JudgingFailed after the last attempt."""
        failure, wait_s = "", self._settings.retry_after_s
        for attempt in range(self._settings.attempts):
            if attempt:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            try:
                async with asyncio.timeout(self._settings.timeout_s):
                    return await self._judgements(prompt, trajectories)
            except TimeoutError:
                failure = f"no answer within {self._settings.timeout_s:g} s (rollout.judging.timeout_s)"
            except (Exception, SystemExit, KeyboardInterrupt) as error:  # user code
                failure = f"{type(error).__name__}: {error}"
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                failure = f"{type(error).__name__}, which the hook has raised itself"
        raise JudgingFailed(
            f"rollout.hooks.group_rm: {self._settings.attempts} attempts at the rewards of a group have "
            f"failed, the last one with {failure}"
        )

    async def _judgements(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Judgement]:
        samples = self._samples.of(prompt, trajectories)
        everything = flat(samples)
        rewards = list(cast("Sequence[object]", await self._ask(self._arguments.copied(), everything)))
        if len(rewards) != len(everything):
            raise ValueError(f"it returned {len(rewards)} rewards for {len(everything)} samples")
        judgements = iter([judgement_of_reward(reward, self._reward_key) for reward in rewards])
        for sample, reward in zip(everything, rewards, strict=True):
            sample.reward = reward
        return [_mean([next(judgements) for _ in flat([sample])]) for sample in samples]


def _mean(judgements: Sequence[Judgement]) -> Judgement:
    """Return the judgement of an episode: the mean of those of its samples."""
    reward = sum(judgement.reward / len(judgements) for judgement in judgements)
    return Judgement(reward, tuple(means_by_name(judgement.parts for judgement in judgements).items()))


class HookFailed(RuntimeError):
    """A hook that sees a group has raised something."""


class NoDataSource:
    """The data source that ``rollout_all_samples_process`` is given: prompts are the recipe's."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"the data source has no {name!r}: Slipstream admits the prompts of the recipe in its order, and "
            "puts no samples back"
        )


class HookFilter:
    """Asks the recipe's hooks about every finished group.

    Each is called with one group, as soon as that is complete: no group waits for the others of a batch.
    """

    def __init__(self, hooks: HooksConfig, arguments: SlimeArguments, samples: GroupSamples) -> None:
        """Raises PluginError."""
        self._filter = _resolved(hooks.dynamic_sampling_filter)
        self._sample_filter = _resolved(hooks.rollout_sample_filter)
        self._process = _resolved(hooks.rollout_all_samples_process)
        self._call: Hook = resolve("slime.rollout.filter_hub.base_types.call_dynamic_filter")
        self._arguments = arguments
        self._samples = samples

    def choose(self, group: Group) -> Sequence[Trajectory] | None:
        """Return the trajectories of a group as they are to be trained; None: it is not trained.

        ``keep_when_insufficient`` has no meaning here: there is always a next group. Raises HookFailed.
        """
        args = self._arguments.copied()
        samples = self._samples.of(group.prompt, group.trajectories, group.id)
        is_kept = self._is_kept(args, samples)
        if is_kept and self._sample_filter is not None:
            _called("rollout_sample_filter", self._sample_filter, args, [samples])
        if self._process is not None:
            _called("rollout_all_samples_process", self._process, args, [samples], NoDataSource())
        if not is_kept:
            return None
        return [_trained(*pair) for pair in zip(group.trajectories, samples, strict=True)]

    def _is_kept(self, args: SlimeArguments, samples: list[SampleLike | list[SampleLike]]) -> bool:
        if self._filter is None:
            return True
        return bool(_called("dynamic_sampling_filter", self._call, self._filter, args, samples).keep)


def _resolved(path: str | None) -> Hook | None:
    return None if path is None else resolve(path)


def _called(name: str, hook: Hook, *args: object) -> Any:
    try:
        return hook(*args)
    except Exception as error:  # user code
        raise HookFailed(f"rollout.hooks.{name} raised {type(error).__name__}: {error}") from error


def _trained(trajectory: Trajectory, sample: SampleLike | list[SampleLike]) -> Trajectory:
    """Return a trajectory without the loss of the samples that hooks have removed."""
    siblings = flat([sample])
    if not any(each.remove_sample for each in siblings):
        return trajectory
    parts = zip(trajectory.split(), siblings, strict=True)
    masks = [part.loss_mask_T & (not each.remove_sample) for part, each in parts]
    return replace(trajectory, loss_mask_T=np.concatenate(masks))
