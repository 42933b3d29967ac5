"""``rollout.hooks``: code written for slime, which runs unchanged."""

from typing import Literal

from pydantic import Field

from slipstream.configs.schema.base import PathSetting, Section
from slipstream.configs.schema.plugin import ImportPath


class HooksConfig(Section):
    """Code written for slime (https://github.com/THUDM/slime), which runs unchanged: functions and classes
    with slime's signatures, by their import paths."""

    custom_generate_function: ImportPath | None = Field(
        default=None,
        description="`async (args, sample, sampling_params[, evaluation])`: runs one episode and returns a "
        "sample or a list of them. null: one completion of the prompt.",
    )
    custom_rm: ImportPath | None = Field(
        default=None,
        description="`async (args, sample)`, or `(args, samples)` for lists: returns the reward, a number "
        "or a mapping with `rollout.reward_key`. null: `rollout.reward`, for samples that have no reward "
        "yet.",
    )
    group_rm: bool = Field(
        default=False, description="Ask `custom_rm` once for all samples of a group, as `(args, samples)`."
    )
    rm_type: Literal["math", "dapo", "deepscaler", "f1", "gpqa", "remote_rm", "random"] | None = Field(
        default=None, description="Name of a reward that comes with slime; null: none."
    )
    rm_url: str | None = Field(default=None, description="Server of `rm_type: remote_rm`; null: none.")
    rollout_sample_hook: list[ImportPath] = Field(
        default=[],
        description="`(args, sample, *, rollout_id, evaluation)`, plain or `async`: called for every "
        "sample before its reward, in this order; returns the sample to go on with, or null.",
    )
    dynamic_sampling_filter: ImportPath | None = Field(
        default=None,
        description="`(args, samples, **kwargs)`: says whether a group is trained, as a boolean or a "
        "`DynamicFilterOutput`.",
    )
    rollout_sample_filter: ImportPath | None = Field(
        default=None,
        description="`(args, groups)`: sets `remove_sample` of samples that are not trained. Called with one "
        "group at a time.",
    )
    rollout_function: ImportPath | None = Field(
        default=None,
        description="`(args, rollout_id, data_source, evaluation=False)`: collects the groups of a batch, "
        "and calls the other hooks of episodes and groups itself.",
    )
    eval_function: ImportPath | None = Field(
        default=None,
        description="`(args, rollout_id, data_source, evaluation=True)`: evaluates whole sets. null: "
        "`rollout_function`; if that is null too, Slipstream evaluates each prompt.",
    )
    data_source: ImportPath | None = Field(
        default=None,
        description="Class `(args)` with `get_samples`, `add_samples`, `save`, `load` and `__len__`: gives "
        "the prompts, from a process beside the driver. null: those of `data.path`.",
    )
    buffer_filter: ImportPath | None = Field(
        default=None,
        description="`(args, rollout_id, buffer, num_samples)`: takes groups out of those that "
        "`rollout_function` has given back. null: the first ones.",
    )
    rollout_all_samples_process: ImportPath | None = Field(
        default=None,
        description="`(args, groups, data_source)`: sees all groups, filtered ones included. Called with "
        "one group at a time, and with an empty data source.",
    )
    custom_reward_post_process: ImportPath | None = Field(
        default=None, description="`(args, samples)`: returns raw rewards and rewards of a batch."
    )
    custom_convert_samples_to_train_data: ImportPath | None = Field(
        default=None, description="`(args, samples)`: returns the training data of a batch as a mapping."
    )
    custom_rollout_log_function: ImportPath | None = Field(
        default=None,
        description="`(rollout_id, args, samples, rollout_extra_metrics, rollout_time)`: logs a batch; if "
        "it returns true, Slipstream's own metrics of the batch are skipped.",
    )
    custom_eval_rollout_log_function: ImportPath | None = Field(
        default=None,
        description="`(rollout_id, args, data, extra_metrics)`: logs an evaluation; if it returns true, "
        "Slipstream's own metrics of the evaluation are skipped.",
    )
    rollout_data_postprocess: ImportPath | None = Field(
        default=None, description="`(args, rollout_id, rollout_data)`: changes a rank's data of a batch."
    )
    custom_advantage_function: ImportPath | None = Field(
        default=None, description="`(args, rollout_data)`: sets `advantages` and `returns`."
    )
    custom_loss_function: ImportPath | None = Field(
        default=None,
        description="`(args, batch, logits, sum_of_sample_mean)`: returns the loss and its metrics.",
    )
    custom_tis_function: ImportPath | None = Field(
        default=None,
        description="`(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, "
        "response_lengths, **kwargs)`: returns the loss, its masks and its metrics.",
    )
    custom_pg_loss_reducer_function: ImportPath | None = Field(
        default=None,
        description="`(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)`: returns "
        "the function that reduces the losses of tokens to one number.",
    )
    custom_megatron_init: ImportPath | None = Field(
        default=None, description="`(args)`: called once on each rank before the model is made."
    )
    custom_megatron_before_log_prob_hook: ImportPath | None = Field(
        default=None, description="`(args, model, store_prefix)`: called before log-probs are computed."
    )
    custom_megatron_before_train_step_hook: ImportPath | None = Field(
        default=None,
        description="`(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)`: called before "
        "each optimizer update.",
    )
    custom_model_provider: ImportPath | None = Field(
        default=None, description="`(pre_process, post_process[, vp_stage])`: makes the model of a rank."
    )
    custom_update_weight_post_write: ImportPath | None = Field(
        default=None,
        description="`(args, version_dir, rollout_engines)`: called when a version's files are written.",
    )
    custom_config_path: PathSetting | None = Field(
        default=None, description="YAML file with a mapping: further names of `args`, with their values."
    )
    apply_chat_template: bool = Field(
        default=True,
        description="Give hooks the prompt as the text that the chat template writes; false: as it stands "
        "in the prompt set.",
    )
    import_timeout_s: float = Field(
        default=60,
        gt=0,
        description="Seconds that the import of one hook may take when the recipe is checked.",
    )

    batch_timeout_s: float = Field(
        default=300,
        gt=0,
        description="Seconds that a hook may take for one batch in its own process beside the driver. Then "
        "a hook that logs is ended, and Slipstream's metrics are logged; a hook that makes training data "
        "ends the run.",
    )

    @property
    def evaluating(self) -> str | None:
        """Import path of the function that evaluates whole sets; None: Slipstream does."""
        return self.eval_function or self.rollout_function

    def named(self) -> dict[str, list[str]]:
        """Return the import paths of each hook that the recipe names, by the name of the setting."""
        values = ((name, getattr(self, name)) for name in HOOK_NAMES)
        return {name: value if isinstance(value, list) else [value] for name, value in values if value}


NOT_CODE = (
    "group_rm",
    "rm_type",
    "rm_url",
    "custom_config_path",
    "apply_chat_template",
    "import_timeout_s",
    "batch_timeout_s",
)
"""Settings of the section that name no code."""

HOOK_NAMES = tuple(name for name in HooksConfig.model_fields if name not in NOT_CODE)
"""Settings that name code."""
