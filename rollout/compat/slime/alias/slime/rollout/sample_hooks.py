"""Hooks that see every sample before it is judged."""

import inspect

from slime.utils.misc import load_function
from slime.utils.types import Sample

_rollout_id: int | None = None


def set_current_rollout_id(rollout_id: int | None) -> None:
    """Set the ``rollout_id`` of hooks that are given none."""
    global _rollout_id
    _rollout_id = rollout_id


async def apply_rollout_sample_hooks(args, value, **kwargs):
    """Return ``value``, a sample or nested lists of them, as ``rollout_sample_hook_path`` leaves it.

    A hook gets those of ``kwargs`` that it has parameters for. It returns a sample, or None for the same one.
    """
    paths = getattr(args, "rollout_sample_hook_path", None)
    if not paths:
        return value
    if isinstance(value, list):
        return [await apply_rollout_sample_hooks(args, item, **kwargs) for item in value]
    if not isinstance(value, Sample):
        raise TypeError(f"Rollout sample hooks expected Sample or list, got {type(value).__name__}.")
    for path in paths:
        value = await _applied(path, args, value, {"rollout_id": _rollout_id, **kwargs})
    return value


async def _applied(path: str, args, sample: Sample, kwargs: dict) -> Sample:
    hook = load_function(path)
    parameters = inspect.signature(hook).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = {parameter.name for parameter in parameters}
        kwargs = {name: value for name, value in kwargs.items() if name in names}
    result = hook(args, sample, **kwargs)
    if inspect.isawaitable(result):
        result = await result
    if result is None:
        return sample
    if not isinstance(result, Sample):
        raise TypeError(f"{path} returned {type(result).__name__}, expected Sample or None.")
    return result
