"""The parts of a collector where a recipe names hooks of slime, in place of its own."""

from collections.abc import Callable

from slipstream.configs.schema import HooksConfig, RunConfig
from slipstream.rollout.compat.hooks import CallSurroundings, HookParts
from slipstream.rollout.compat.slime import make_slime_importable
from slipstream.rollout.compat.slime.arguments import SlimeArguments, slime_arguments
from slipstream.rollout.compat.slime.function_calls import FunctionCalls, SetEvaluation
from slipstream.rollout.compat.slime.group_hooks import GroupJudge, GroupSamples, HookFilter, ReturnedSamples
from slipstream.rollout.compat.slime.hook_workflow import HookWorkflow
from slipstream.rollout.compat.slime.leased_groups import LeasedGroups, pop_first
from slipstream.rollout.compat.slime.recipe_reward import PATH as RECIPE_REWARD
from slipstream.rollout.compat.slime.recipe_reward import answer_by
from slipstream.rollout.compat.slime.rollout_calls import FunctionWorkflow, RolloutCalls
from slipstream.rollout.prompts import checked_prompts
from slipstream.rollout.reward.value import EpisodeJudge
from slipstream.rollout.system.plugins import resolve
from slipstream.rollout.tokens.teacher import TeacherNeeds
from slipstream.rollout.tokens.tokenizer import Tokenizer


def hook_parts(
    config: RunConfig,
    tokenizer: Tokenizer,
    judge: EpisodeJudge,
    version: Callable[[], int],
    surroundings: Callable[[], CallSurroundings],
) -> HookParts:
    """Make the parts of ``rollout.compat.hooks.hook_parts``."""
    hooks, rollout = config.rollout.hooks, config.rollout
    assert hooks is not None
    make_slime_importable()
    arguments = slime_arguments(config)
    evaluation, has_teacher = None, TeacherNeeds.of(config.actor).logps
    if (path := hooks.evaluating) is not None:
        around, groups = surroundings(), _leased_groups(config, arguments)
        shared = arguments.copied()
        if hooks.custom_rm is None and hooks.rm_type is None and rollout.reward is not None:
            shared.custom_rm_path = RECIPE_REWARD
            answer_by(judge)
        calls = FunctionCalls(shared, groups, around)
        evaluation = SetEvaluation(path, calls, rollout.reward_key).evaluate
        if hooks.rollout_function is not None:  # it calls the other hooks of episodes and groups itself
            rollouts = RolloutCalls(hooks.rollout_function, calls, groups)
            workflow = FunctionWorkflow(
                rollouts, arguments, rollout.reward_key, version, has_teacher=has_teacher
            )
            return HookParts(workflow, evaluation=evaluation)
    returned = ReturnedSamples(_most_episodes(config))
    samples = GroupSamples(arguments, tokenizer, returned)
    return HookParts(
        HookWorkflow(arguments, hooks, rollout.reward_key, returned, version, has_teacher=has_teacher)
        if _are_of_episodes(hooks)
        else None,
        HookFilter(hooks, arguments, samples)
        if hooks.dynamic_sampling_filter or hooks.rollout_sample_filter or hooks.rollout_all_samples_process
        else None,
        GroupJudge(arguments, samples, rollout.judging, rollout.reward_key) if hooks.group_rm else None,
        evaluation,
    )


def _leased_groups(config: RunConfig, arguments: SlimeArguments) -> LeasedGroups:
    """Return the data source of rollout functions. Raises PluginError."""
    path = config.rollout.hooks and config.rollout.hooks.buffer_filter
    return LeasedGroups(
        arguments,
        pop_first if path is None else resolve(path),
        prompts=sum(1 for file in config.training_files for _ in checked_prompts(file)),
        patience_s=config.rollout.episode_timeout_s / 2,
    )


def _are_of_episodes(hooks: HooksConfig) -> bool:
    return bool(
        hooks.custom_generate_function
        or hooks.rollout_sample_hook
        or hooks.custom_rm
        or hooks.rm_type
        or hooks.data_source
    )


def _most_episodes(config: RunConfig) -> int:
    """Return the number of episodes whose groups may be unfinished: those of all slots, with room for further
    attempts, and those of an evaluation.
    """
    rollout = config.rollout
    groups = (rollout.max_head_offpolicyness + 1) * rollout.batch_size * rollout.over_sampling
    return 2 * round(groups * rollout.n_samples_per_prompt) + rollout.max_concurrent
