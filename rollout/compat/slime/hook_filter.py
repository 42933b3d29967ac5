"""slime's filters of groups: which groups are trained, and which of their samples.

group ──► dynamic_sampling_filter ──► rollout_sample_filter ──► rollout_all_samples_process ──► trained
                 └── rejected ───────────────────────────────────────▲
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from slipstream.configs.schema import HooksConfig
from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.compat.slime.group_samples import GroupSamples, flat
from slipstream.rollout.system.plugins import resolve
from slipstream.rollout.tokens.trajectory import Group, Trajectory

Hook = Callable[..., Any]


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

    def _is_kept(self, args: SlimeArguments, samples: list[Any]) -> bool:
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


def _trained(trajectory: Trajectory, sample: Any) -> Trajectory:
    """Return a trajectory without the loss of the samples that hooks have removed."""
    siblings = flat([sample])
    if not any(each.remove_sample for each in siblings):
        return trajectory
    parts = zip(trajectory.split(), siblings, strict=True)
    masks = [part.loss_mask_T & (not each.remove_sample) for part, each in parts]
    return replace(trajectory, loss_mask_T=np.concatenate(masks))
