"""The hooks of a recipe that run on ranks, by the names of their settings, and what is raised about them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from slipstream.configs.schema import HooksConfig
from slipstream.rollout.compat.slime import make_slime_importable
from slipstream.rollout.system.plugins import resolve

ON_RANKS = (
    "rollout_data_postprocess",
    "custom_advantage_function",
    "custom_loss_function",
    "custom_tis_function",
    "custom_pg_loss_reducer_function",
    "custom_megatron_init",
    "custom_megatron_before_log_prob_hook",
    "custom_megatron_before_train_step_hook",
    "custom_model_provider",
    "custom_update_weight_post_write",
)
"""Settings of ``rollout.hooks`` whose code runs on ranks."""


class HookError(RuntimeError):
    """A hook has raised, or has returned or changed what it must not. The message names the hook."""


@dataclass(frozen=True)
class NamedHook:
    """A function of the user's, with the setting that names it."""

    setting: str
    path: str
    function: Callable[..., object]

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the function. Raises HookError for whatever it raises."""
        try:
            return self.function(*args, **kwargs)
        except Exception as error:
            raise HookError(f"{self} has raised {type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        return f"rollout.hooks.{self.setting} ({self.path})"

    def wrong(self, problem: str) -> HookError:
        """Return the error about something that the function has returned or changed."""
        return HookError(f"{self} {problem}")


def load_hooks(hooks: HooksConfig, settings: Iterable[str] = ON_RANKS) -> dict[str, NamedHook]:
    """Import the hooks that ``settings`` name, by setting. Raises PluginError.

    Each of these settings names at most one function. ``slime`` is importable afterwards.
    """
    named = hooks.named()
    chosen = {setting: named[setting][0] for setting in settings if setting in named}
    if chosen:
        make_slime_importable()
    return {setting: NamedHook(setting, path, resolve(path)) for setting, path in chosen.items()}


def checked_tensor(hook: NamedHook, name: str, value: object, shape: tuple[int, ...]) -> Tensor:
    """Return ``value`` if it is a floating-point tensor of ``shape``. Raises HookError."""
    if not isinstance(value, Tensor):
        raise hook.wrong(f"gives {name} as {_kind(value)}, expected a tensor of shape {list(shape)}")
    if tuple(value.shape) != shape:
        raise hook.wrong(f"gives {name} of shape {list(value.shape)}, expected {list(shape)}")
    if not value.is_floating_point():
        raise hook.wrong(f"gives {name} of type {value.dtype}, expected floating-point numbers")
    return value


def checked_scalar(hook: NamedHook, name: str, value: object) -> Tensor:
    """Return ``value`` if it is a floating-point tensor with a single number. Raises HookError."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.reshape(())
    return checked_tensor(hook, name, value, ())


def checked_list(
    hook: NamedHook,
    name: str,
    values: object,
    lengths: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return the numbers of one sample after the other, as one tensor of ``dtype``, without gradient.

    ``values``: a sequence of one tensor or list for each sample, of ``lengths`` numbers. Raises HookError.
    """
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise hook.wrong(f"gives {name} as {_kind(values)}, expected a list of one tensor for each sample")
    parts = cast("Sequence[object]", values)
    if len(parts) != len(lengths):
        raise hook.wrong(f"gives {name} of {len(parts)} samples, expected those of {len(lengths)}")
    checked: list[Tensor] = []
    for number, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        try:
            tensor = torch.as_tensor(part).detach()
        except (TypeError, ValueError, RuntimeError):
            raise hook.wrong(f"gives {name}[{number}] as {_kind(part)}, expected a tensor") from None
        if tuple(tensor.shape) != (length,):
            raise hook.wrong(f"gives {name}[{number}] of shape {list(tensor.shape)}, expected [{length}]")
        if tensor.is_complex():
            raise hook.wrong(f"gives {name}[{number}] of type {tensor.dtype}, expected real numbers")
        checked.append(tensor.to(device=device, dtype=dtype))
    return torch.cat([torch.empty(0, dtype=dtype, device=device), *checked])


def require_finite(hook: NamedHook, name: str, value: Tensor, inputs: Sequence[Tensor] = ()) -> None:
    """Raise HookError unless ``value`` is finite, or one of ``inputs`` is not: the step is skipped then."""
    if bool(value.detach().isfinite().all()):
        return
    if all(bool(each.detach().isfinite().all()) for each in inputs):
        raise hook.wrong(f"gives {name} with numbers that are not finite, though all of its inputs are")


def checked_metrics(hook: NamedHook, metrics: object) -> Mapping[str, object]:
    """Return metrics by name. Raises HookError."""
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise hook.wrong(f"gives its metrics as {_kind(metrics)}, expected a mapping by name")
    return cast("Mapping[str, object]", metrics)


def checked_tuple(hook: NamedHook, value: object, names: Sequence[str]) -> tuple[object, ...]:
    """Return ``value`` if it is a tuple of as many things as ``names``. Raises HookError."""
    expected = f"({', '.join(names)})"
    if not isinstance(value, tuple | list):
        raise hook.wrong(f"returns {_kind(value)}, expected {expected}")
    things = tuple(cast("Sequence[object]", value))
    if len(things) != len(names):
        raise hook.wrong(f"returns {len(things)} things, expected {expected}")
    return things


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
