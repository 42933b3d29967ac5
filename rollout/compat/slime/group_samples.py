"""The trajectories of a group as slime's samples, for hooks that see whole groups.

episode of this process  ──► the samples that its hooks have returned, with all that they hold
episode of another one   ──► samples that are made of its trajectory
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, cast

from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.compat.slime.rebuilt_samples import SampleRebuilder
from slipstream.rollout.tokens.tokenizer import Tokenizer
from slipstream.rollout.tokens.trajectory import Prompt, Trajectory

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
        self._samples: dict[_Key, list[object]] = {}

    def keep(self, prompt: Prompt, trajectories: Sequence[Trajectory], samples: Sequence[object]) -> None:
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

    def of(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[object | None]:
        """Return the sample of each trajectory, none of them twice; None where there is none."""
        taken: Counter[_Key] = Counter()
        samples: list[object | None] = []
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

    def of(self, prompt: Prompt, trajectories: Sequence[Trajectory], group: int | None = None) -> list[Any]:
        """Return a sample for each trajectory of a group, and a list for one with siblings.

        ``group``: number of the group; None: the samples keep the indices that they have.
        """
        parts = [trajectory.split() for trajectory in trajectories]
        returned = iter(self._returned.of(prompt, [part for siblings in parts for part in siblings]))
        samples: list[Any] = []
        for number, (trajectory, siblings) in enumerate(zip(trajectories, parts, strict=True)):
            # A sum of all parts has the reward of the episode; a sample that was returned has its own.
            of_episode = [next(returned) or self._made(prompt, part) for part in siblings]
            for sample in cast("list[Any]", of_episode):
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

    def _made(self, prompt: Prompt, trajectory: Trajectory) -> Any:
        sample = self._rebuild.sample(trajectory, prompt, prompt.id, None)
        sample.reward = None
        return sample


def flat(samples: Sequence[Any]) -> list[Any]:
    """Return the samples of a group without the lists of siblings."""
    return [
        sample
        for each in samples
        for sample in (cast("list[Any]", each) if isinstance(each, list) else [each])
    ]
