"""What a collector runs in place of its own parts where a recipe names hooks of slime."""

from slipstream.configs.schema import PluginConfig, RunConfig
from slipstream.rollout.compat.slime.alias_path import make_slime_importable
from slipstream.rollout.compat.slime.arguments import slime_arguments
from slipstream.rollout.compat.slime.endpoint import EpisodeEndpoints
from slipstream.rollout.compat.slime.hook_filter import HookFilter
from slipstream.rollout.compat.slime.hook_workflow import HookWorkflow
from slipstream.rollout.plugins import PluginError
from slipstream.rollout.tokenizer import Tokenizer
from slipstream.rollout.trajectory import Prompt, Trajectory


class Unrewarded:
    """The reward of a recipe whose hooks reward: no trajectory may come without one."""

    def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        raise ValueError(
            f"the hooks have left prompt {prompt.id} without a reward, and the recipe has no rollout.reward"
        )


UNREWARDED = PluginConfig(path="slipstream.rollout.compat.slime.parts.Unrewarded")


def hook_workflow(config: RunConfig, endpoints: EpisodeEndpoints | None) -> HookWorkflow | None:
    """Return the workflow of a recipe's hooks; None: it names none that an episode runs.

    ``endpoints``: None where the collector serves no `/generate`. Raises PluginError, and ValueError and
    OSError for ``custom_config_path``.
    """
    hooks = config.rollout.hooks
    if hooks is None or not (
        hooks.custom_generate_function or hooks.rollout_sample_hook or hooks.custom_rm or hooks.rm_type
    ):
        return None
    if endpoints is None and hooks.custom_generate_function is not None:
        raise PluginError(
            f"rollout.hooks.custom_generate_function: {hooks.custom_generate_function} sends its requests to "
            "/generate, which collectors do not serve"
        )
    make_slime_importable()
    return HookWorkflow(slime_arguments(config), hooks, endpoints)


def hook_filter(config: RunConfig, tokenizer: Tokenizer) -> HookFilter | None:
    """Return the filter that a recipe's hooks name; None: they name none. Raises PluginError."""
    hooks = config.rollout.hooks
    if hooks is None or hooks.dynamic_sampling_filter is None:
        return None
    make_slime_importable()
    return HookFilter(hooks.dynamic_sampling_filter, slime_arguments(config), tokenizer)
