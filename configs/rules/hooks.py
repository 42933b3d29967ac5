"""Rules about ``rollout.hooks``: hooks that exclude each other, and the file that they read."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import yaml

from slipstream.configs.rules.rule import Rule, setting
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.plugin import PluginConfig
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.configs.violations import Violation

SECTION = "rollout.hooks"

INSTEAD_OF = {
    "custom_generate_function": ("rollout.workflow",),
    "rollout_sample_hook": ("rollout.workflow",),
    "custom_rm": ("rollout.workflow", "rollout.reward"),
    "rm_type": ("rollout.workflow", "rollout.reward"),
    "dynamic_sampling_filter": ("rollout.group_filter",),
    "rollout_sample_filter": ("rollout.group_filter",),
    "rollout_all_samples_process": ("rollout.group_filter",),
    "rollout_function": ("rollout.workflow",),
}
"""Hooks that do what another setting names code for."""

REPLACED_BY = {
    "rm_type": ("custom_rm",),
    "custom_reward_post_process": ("custom_convert_samples_to_train_data",),
    "custom_tis_function": ("custom_loss_function",),
    "custom_pg_loss_reducer_function": ("custom_loss_function",),
}
"""Hooks that are never called when one of the others is named: it does their work itself."""


def hooks_do_not_exclude_each_other(config: RunConfig) -> Iterator[Violation]:
    hooks = config.rollout.hooks
    if hooks is None:
        return
    for name, others in REPLACED_BY.items():
        for other in others:
            if getattr(hooks, name) and getattr(hooks, other):
                yield Violation(
                    f"{SECTION}.{name}", getattr(hooks, name), f"expected null: {SECTION}.{other} replaces it"
                )
    for name, places in INSTEAD_OF.items():
        for place in places:
            named = setting(config, place, PluginConfig)
            if getattr(hooks, name) and named is not None and named.path != _default_path(place):
                reason = f"expected null: {place} names code for the same"
                yield Violation(f"{SECTION}.{name}", getattr(hooks, name), reason)


def hooks_have_what_they_need(config: RunConfig) -> Iterator[Violation]:
    hooks = config.rollout.hooks
    if hooks is None:
        return
    if hooks.group_rm and hooks.custom_rm is None and hooks.rm_type is None:
        reason = f"expected false: neither {SECTION}.custom_rm nor {SECTION}.rm_type rewards anything"
        yield Violation(f"{SECTION}.group_rm", True, reason)
    if hooks.rm_type == "remote_rm" and hooks.rm_url is None:
        reason = f"expected the server that {SECTION}.rm_type: remote_rm asks"
        yield Violation(f"{SECTION}.rm_url", None, reason)
    if hooks.rm_url is not None and hooks.rm_type != "remote_rm" and hooks.custom_rm is None:
        reason = f"expected null: only {SECTION}.rm_type: remote_rm and {SECTION}.custom_rm ask a server"
        yield Violation(f"{SECTION}.rm_url", hooks.rm_url, reason)
    if hooks.buffer_filter is not None and hooks.rollout_function is None:
        reason = f"expected null: only {SECTION}.rollout_function gives groups back into a buffer"
        yield Violation(f"{SECTION}.buffer_filter", hooks.buffer_filter, reason)
    if hooks.eval_function is not None and config.eval is None:
        reason = "expected null: the recipe has no section eval, so that nothing is evaluated"
        yield Violation(f"{SECTION}.eval_function", hooks.eval_function, reason)


def a_data_source_gets_one_path(config: RunConfig) -> Iterator[Violation]:
    """A data source of slime's finds its prompts at ``args.prompt_data``, which is one path."""
    hooks, data = config.rollout.hooks, config.data
    if hooks is not None and hooks.data_source is not None and data is not None and data.sources:
        yield Violation(
            "data.sources",
            [source.name for source in data.sources],
            f"expected one file, data.path: {SECTION}.data_source ({hooks.data_source}) reads one path, "
            "args.prompt_data, and would get none. Name one file in data.path; or leave "
            f"{SECTION}.data_source out, and data.sources are mixed by their weights without it",
        )


def hooks_on_ranks_are_called(config: RunConfig) -> Iterator[Violation]:
    """Hooks that the rest of the recipe would leave uncalled, or would contradict."""
    hooks, actor = config.rollout.hooks, config.actor
    if hooks is None:
        return
    if hooks.custom_tis_function is not None:
        name = f"{SECTION}.custom_tis_function"
        if not actor.use_decoupled_loss:
            reason = "expected true: the hook takes the place of the importance weight"
            yield Violation("actor.use_decoupled_loss", False, f"{reason} ({name} is set)")
        if actor.correction.token is not None and actor.correction.token.type == "mask":
            reason = f"expected null or cap: {name} drops tokens itself"
            yield Violation("actor.correction.token", "mask", reason)
    if hooks.custom_loss_function is not None and actor.objective.type == "plugin":
        reason = f"expected another type: {SECTION}.custom_loss_function computes the loss"
        yield Violation("actor.objective.type", "plugin", reason)
    if hooks.custom_update_weight_post_write is not None and config.weights.transport.type != "disk":
        reason = f"expected disk: other transports write no files ({SECTION}.custom_update_weight_post_write)"
        yield Violation("weights.transport", config.weights.transport.type, reason)
    if hooks.custom_eval_rollout_log_function is not None and config.eval is None:
        reason = "expected null: the recipe has no section eval, so that nothing is evaluated"
        name = f"{SECTION}.custom_eval_rollout_log_function"
        yield Violation(name, hooks.custom_eval_rollout_log_function, reason)
    own_terms = (actor.teacher_term, actor.plugin_term)
    if hooks.custom_advantage_function is not None and any(own_terms):
        reason = f"expected no term but of rewards: {SECTION}.custom_advantage_function sets the advantages"
        yield Violation("actor.advantage", [term.type for term in actor.advantage], reason)


def custom_config_is_a_mapping(config: RunConfig) -> Iterator[Violation]:
    path = setting(config, f"{SECTION}.custom_config_path", Path)
    if path is None:
        return
    try:
        read_custom_config(path)
    except (OSError, ValueError) as error:
        yield Violation(f"{SECTION}.custom_config_path", str(path), f"expected a YAML file: {error}")


def read_custom_config(path: Path) -> dict[str, object]:
    """Return the names and values of a file at ``custom_config_path``. Raises OSError, ValueError."""
    try:
        values: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from None
    if values is None:
        return {}
    names = list(cast("dict[object, object]", values)) if isinstance(values, dict) else [None]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path} holds no mapping of names to values")
    return cast("dict[str, object]", values)


def _default_path(place: str) -> str | None:
    default = RolloutConfig.model_fields[place.removeprefix("rollout.")].default
    return default.path if isinstance(default, PluginConfig) else None


RULES = (
    Rule(
        hooks_do_not_exclude_each_other,
        (SECTION, "rollout.workflow", "rollout.reward", "rollout.group_filter"),
    ),
    Rule(hooks_have_what_they_need, (SECTION, "eval")),
    Rule(a_data_source_gets_one_path, (f"{SECTION}.data_source", "data")),
    Rule(hooks_on_ranks_are_called, (SECTION, "actor", "weights.transport", "eval")),
    Rule(custom_config_is_a_mapping, (f"{SECTION}.custom_config_path",)),
)
