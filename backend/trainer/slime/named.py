"""The hooks of a recipe that run on ranks, by the names of their settings, and what is raised about them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from slipstream.configs.schema import HooksConfig
from slipstream.rollout.compat.slime.alias_path import make_slime_importable
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
    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
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
