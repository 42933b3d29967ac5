"""``args``: slime's names with the values of the recipe, as hooks read and write them.

The address at which hooks find the policy is among them.
"""

import copy
import difflib
import inspect
from argparse import Namespace
from typing import Any
from urllib.parse import urlsplit

from slipstream.configs.rules.hooks import read_custom_config
from slipstream.configs.schema import ColumnsConfig, EvalSamplingConfig, HooksConfig, RunConfig, path_text
from slipstream.configs.schema.hooks import HOOK_NAMES
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.rollout.system.plugins import resolve
from slipstream.rollout.tokens.evaluated_set import HELD_OUT
from slipstream.rollout.workflow.endpoint import OpenEndpoint

REWARD_KEY: str = RolloutConfig.model_fields["reward_key"].default
"""The recipe's key of rewards, unless it names one. Then slime has none: rewards are numbers."""


class SlimeArguments(Namespace):
    """Slime's names with the recipe's values. It may be changed and copied; every episode has a copy.

    A name that it does not hold is an AttributeError that names the nearest ones, so that ``getattr`` with a
    default works as everywhere.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python itself looks for when an object is copied or stored
            raise AttributeError(name)
        names = sorted(vars(self))
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
        nearest = f" Nearest: {', '.join(near)}." if near else ""
        raise AttributeError(
            f"args has no {name!r}: Slipstream has no setting for this name of slime.{nearest} It holds "
            f"{len(names)} names (vars(args)); rollout.hooks.custom_config_path adds names of your own"
        )

    def copied(self) -> "SlimeArguments":
        """Return a copy that shares nothing with this one."""
        return copy.deepcopy(self)


def slime_arguments(config: RunConfig) -> SlimeArguments:
    """Return the arguments of a recipe with a section ``rollout.hooks``, and those of its own file.

    ``sglang_router_ip`` and ``sglang_router_port`` are missing: they belong to an episode. Raises ValueError
    for a name of the file that a setting of the recipe decides, and OSError.
    """
    hooks = config.rollout.hooks or HooksConfig()
    values = {**_constants(), **_recipe_values(config), **_hook_values(hooks)}
    if hooks.custom_config_path is not None:
        from_file = read_custom_config(hooks.custom_config_path)
        recipe = {**_recipe_values(config), **_hook_values(hooks)}
        decided = [name for name, value in from_file.items() if name in recipe and recipe[name] != value]
        if decided:
            raise ValueError(
                f"{hooks.custom_config_path} sets {', '.join(sorted(decided))}, which the recipe decides "
                "otherwise: set the recipe instead"
            )
        values |= from_file
    return SlimeArguments(**values)


def _constants() -> dict[str, object]:
    """Return names whose values are the same in every run: what Slipstream does not do, or does otherwise."""
    off = (
        "ci_test",
        "debug_rollout_only",
        "debug_train_only",
        "mask_offpolicy_in_partial_rollout",
        "partial_rollout",
        "sglang_enable_deterministic_inference",
        "use_distributed_post",
        "allgather_cp",
        "get_mismatch_metrics",
        "keep_old_actor",
        "use_opsm",
        "use_unbiased_kl",
    )
    none = (
        "dump_details",
        "eval_max_prompt_len",
        "eval_min_new_tokens",
        "eval_reward_key",
        "multimodal_keys",
        "rollout_max_prompt_len",
        "router_policy",
        "sglang_model_routers",
        "sglang_speculative_algorithm",
        "tool_key",
        "save_debug_train_data",
    )
    return {
        **dict.fromkeys(off, False),
        **dict.fromkeys(none),
        "loss_mask_type": "qwen",
        "rollout_global_dataset": True,
        "rollout_skip_special_tokens": False,
        "sglang_dp_size": 1,
        "log_probs_chunk_size": -1,
    }


def _recipe_values(config: RunConfig) -> dict[str, object]:
    return {**_of_generation(config), **_of_data(config), **_of_training(config)}


def _of_generation(config: RunConfig) -> dict[str, object]:
    rollout, engine, sampling = config.rollout, config.rollout.engine, config.rollout.sampling
    engines = engine.count
    return {
        "colocate": engine.colocated,
        "hf_checkpoint": str(config.model.path),
        "rollout_num_engines": engines,
        "rollout_num_gpus": engines * engine.ranks,
        "rollout_num_gpus_per_engine": engine.ranks,
        "sglang_server_concurrency": max(1, rollout.max_concurrent // engines),
        "rollout_batch_size": rollout.batch_size,
        "over_sampling_batch_size": round(rollout.batch_size * rollout.over_sampling),
        "n_samples_per_prompt": rollout.n_samples_per_prompt,
        "rollout_temperature": sampling.temperature,
        "rollout_top_p": sampling.top_p,
        "rollout_top_k": sampling.top_k,
        "rollout_max_response_len": sampling.max_new_tokens,
        "rollout_stop": sampling.stop or None,
        "rollout_stop_token_ids": sampling.stop_token_ids or None,
        "rollout_max_context_len": engine.args.get("context_length"),
        "reward_key": None if rollout.reward_key == REWARD_KEY else rollout.reward_key,
        "num_rollout": config.run.steps,
        "start_rollout_id": 0,
    }


def _of_data(config: RunConfig) -> dict[str, object]:
    evaluation = config.eval
    sampled = evaluation.sampling if evaluation is not None else EvalSamplingConfig()
    columns = config.data.columns if config.data is not None else ColumnsConfig()
    length = config.rollout.sampling.max_new_tokens
    path = config.data.path if config.data is not None else None
    sets = [part for file in config.held_out_files for part in (file.name or HELD_OUT, path_text(file.path))]
    return {
        "apply_chat_template_kwargs": dict(config.model.template_args),
        "prompt_data": None if path is None else path_text(path),
        "input_key": columns.prompt,
        "label_key": columns.label,
        "metadata_key": columns.metadata or "metadata",
        "prompt_columns": columns.model_dump(),
        "prompt_template": config.data.prompt_template if config.data is not None else None,
        "rollout_shuffle": config.data.shuffle if config.data is not None else False,
        "rollout_seed": config.run.seed,
        "seed": config.run.seed,
        "eval_prompt_data": sets or None,
        "eval_interval": (evaluation.every or None) if evaluation is not None else None,
        "eval_max_response_len": (sampled.max_new_tokens or length) if evaluation is not None else None,
        "eval_max_context_len": config.rollout.engine.args.get("context_length"),
        "eval_max_prompts": evaluation.max_prompts if evaluation is not None else None,
        "eval_temperature": sampled.temperature,
        "eval_top_p": sampled.top_p,
        "eval_top_k": sampled.top_k,
        "n_samples_per_eval_prompt": evaluation.n_samples_per_prompt if evaluation is not None else 1,
        "skip_eval_before_train": evaluation is not None and not evaluation.before_training,
        "save": str(config.run.folder),
        "load": str(config.run.folder),
        "save_interval": config.checkpoint.every or None,
    }


def _of_training(config: RunConfig) -> dict[str, object]:
    actor, parallel, optimizer = config.actor, config.actor.parallel, config.actor.optimizer
    hooks = config.rollout.hooks
    groups = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor or parallel.tensor,
        "sequence_parallel": parallel.sequence,
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": parallel.world_size,
        "global_batch_size": groups // actor.minibatches,
        "num_steps_per_rollout": actor.minibatches,
        "use_rollout_routing_replay": actor.routing_replay == "rollout",
        "use_routing_replay": actor.routing_replay != "off",
        "max_tokens_per_gpu": actor.microbatch_tokens,
        "use_dynamic_batch_size": True,
        "lr": optimizer.lr,
        "clip_grad": optimizer.clip_grad,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "advantage_estimator": actor.estimator,
        "grpo_std_normalization": actor.estimator == "grpo",
        "rewards_normalization": actor.estimator != "reward",
        "eps_clip": getattr(actor.objective, "clip_low", None),
        "eps_clip_high": getattr(actor.objective, "clip_high", None),
        "entropy_coef": actor.entropy_bonus,
        "use_kl_loss": actor.kl is not None and actor.kl.where == "loss",
        "kl_loss_coef": actor.kl.coefficient if actor.kl is not None else 0.0,
        "calculate_per_token_loss": actor.averaging == "token",
        "use_tis": actor.use_decoupled_loss,
        "tis_clip": actor.correction.weight_cap,
        "tis_clip_low": 0.0,
        "use_rollout_logprobs": not (actor.recompute_logprobs or actor.interpolate_logprobs),
        "eps_clip_c": getattr(actor.objective, "bound", None),
        "loss_type": "policy_loss" if hooks is None or not hooks.custom_loss_function else "custom_loss",
        "kl_coef": actor.kl.coefficient if actor.kl is not None and actor.kl.where == "reward" else 0.0,
        "kl_loss_type": actor.kl.estimator if actor.kl is not None else "k1",
        "use_critic": config.critic is not None,
        "gamma": config.critic.discount if config.critic is not None else 1.0,
        "lambd": config.critic.gae_lambda if config.critic is not None else 1.0,
        "normalize_advantages": actor.advantage_norm is not None,
    }


def _hook_values(hooks: HooksConfig) -> dict[str, object]:
    return {
        **{f"{name}_path": getattr(hooks, name) for name in HOOK_NAMES},
        **{name: getattr(hooks, name) for name in _PLAIN},
        "apply_chat_template": hooks.apply_chat_template,
        "custom_config_path": str(hooks.custom_config_path) if hooks.custom_config_path else None,
    }


_PLAIN = ("group_rm", "rm_type", "rm_url")
"""Settings of hooks that slime has under the same names."""


def address(args: SlimeArguments, endpoint: OpenEndpoint) -> None:
    """Let hooks find an endpoint under slime's names."""
    url = urlsplit(endpoint.base_url)
    args.sglang_router_ip = f"episode:{endpoint.api_key}@{url.hostname}"
    args.sglang_router_port = url.port


def prepare_requests(arguments: SlimeArguments) -> None:
    """Make the HTTP client of a checkout of slime, which its own start would make. The alias needs none."""
    requests = resolve("slime.utils.http_utils.post")
    prepare = inspect.getmodule(requests)
    make = getattr(prepare, "init_http_client", None)
    if make is not None:
        make(arguments)
