"""What a collector runs in place of its own parts where a recipe names hooks of slime."""

from dataclasses import dataclass

from slipstream.configs.schema import HooksConfig, PluginConfig, RunConfig
from slipstream.rollout.compat.slime.alias_path import make_slime_importable
from slipstream.rollout.compat.slime.arguments import SlimeArguments, slime_arguments
from slipstream.rollout.compat.slime.group_judge import GroupJudge
from slipstream.rollout.compat.slime.group_samples import GroupSamples, ReturnedSamples
from slipstream.rollout.compat.slime.hook_filter import HookFilter
from slipstream.rollout.compat.slime.hook_workflow import HookWorkflow
from slipstream.rollout.teacher import TeacherNeeds
from slipstream.rollout.tokenizer import Tokenizer
from slipstream.rollout.trajectory import Prompt, Trajectory


class Unrewarded:
    """The reward of a recipe whose hooks reward: no trajectory may come without one."""

    def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        raise ValueError(
            f"the hooks have left prompt {prompt.id} without a reward, and the recipe has no rollout.reward"
        )


UNREWARDED = PluginConfig(path="slipstream.rollout.compat.slime.parts.Unrewarded")


@dataclass(frozen=True)
class HookParts:
    """Parts that a recipe's hooks replace; None: the collector's own one stays."""

    workflow: HookWorkflow | None = None
    filter: HookFilter | None = None
    reward: GroupJudge | None = None


def hooks_need_endpoint(config: RunConfig) -> bool:
    """Return whether a hook of the recipe may ask the policy."""
    hooks = config.rollout.hooks
    return hooks is not None and bool(hooks.custom_generate_function or hooks.custom_rm)


def hook_parts(config: RunConfig, tokenizer: Tokenizer) -> HookParts:
    """Return the parts that a recipe's hooks replace.

    Raises PluginError, and ValueError and OSError for ``custom_config_path``.
    """
    hooks, rollout = config.rollout.hooks, config.rollout
    if hooks is None:
        return HookParts()
    make_slime_importable()
    arguments = slime_arguments(config)
    returned = ReturnedSamples(_most_episodes(config))
    samples = GroupSamples(arguments, tokenizer, returned)
    return HookParts(
        _workflow(config, arguments, returned) if _are_of_episodes(hooks) else None,
        HookFilter(hooks, arguments, samples) if _are_of_groups(hooks) else None,
        GroupJudge(arguments, samples, rollout.judging, rollout.reward_key) if hooks.group_rm else None,
    )


def _workflow(config: RunConfig, arguments: SlimeArguments, returned: ReturnedSamples) -> HookWorkflow:
    hooks = config.rollout.hooks or HooksConfig()
    return HookWorkflow(
        arguments,
        hooks,
        config.rollout.reward_key,
        returned,
        has_teacher=TeacherNeeds.of(config.actor).logps,
    )


def _are_of_episodes(hooks: HooksConfig) -> bool:
    return bool(
        hooks.custom_generate_function or hooks.rollout_sample_hook or hooks.custom_rm or hooks.rm_type
    )


def _are_of_groups(hooks: HooksConfig) -> bool:
    return bool(
        hooks.dynamic_sampling_filter or hooks.rollout_sample_filter or hooks.rollout_all_samples_process
    )


def _most_episodes(config: RunConfig) -> int:
    """Return the number of episodes whose groups may be unfinished: those of all slots, with room for further
    attempts, and those of an evaluation.
    """
    rollout = config.rollout
    groups = (rollout.max_head_offpolicyness + 1) * rollout.batch_size * rollout.over_sampling
    return 2 * round(groups * rollout.n_samples_per_prompt) + rollout.max_concurrent
