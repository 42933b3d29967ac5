"""Looks at the hooks of a recipe before a run: every path that leads nowhere, every wrong signature.

recipe ──► [setting, path] ──► process that imports them ──► one answer each: null, or what is wrong
                 ▲                         │
                 └──── those after it ◄────┘ an import that does not end is a problem of its own
"""

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slipstream.configs.schema import HooksConfig, RunConfig
from slipstream.rollout.compat.slime import make_slime_importable
from slipstream.rollout.compat.slime.arguments import slime_arguments
from slipstream.rollout.system.imports import ImportEnding, ask
from slipstream.rollout.system.plugins import PluginError, resolve


def hook_problems(config: RunConfig) -> list[str]:
    """Return everything that is wrong with ``rollout.hooks``, each with the name of its setting."""
    hooks = config.rollout.hooks
    if hooks is None:
        return []
    problems = list(_import_problems(hooks))
    try:
        slime_arguments(config)
    except (OSError, ValueError) as error:
        problems.append(f"rollout.hooks.custom_config_path: {error}")
    return problems


def _import_problems(hooks: HooksConfig) -> Iterator[str]:
    left = [(setting, path) for setting, paths in hooks.named().items() for path in paths]
    while left:
        answers, ending = ask(
            f"{__name__}.answers_to",
            json.dumps(left).encode(),
            len(left),
            hooks.import_timeout_s,
        )
        if ending is not None:
            answers = [*answers, _said(ending, hooks.import_timeout_s)]
        for (setting, path), problem in zip(left, answers, strict=False):
            if problem is not None:
                yield f"rollout.hooks.{setting}: {path} {problem}"
        left = left[len(answers) :]


def _said(ending: ImportEnding, timeout_s: float) -> str:
    if ending is ImportEnding.ENDED:
        return "ends the process that imports it"
    return f"is not imported within {timeout_s:g} s (rollout.hooks.import_timeout_s)"


@dataclass(frozen=True)
class HookSignature:
    """How one hook is called."""

    positional: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    is_awaited: bool = False
    methods: tuple[str, ...] = ()
    """Methods of the instances, if the hook is a class."""
    optional: bool = False
    """``keywords`` are passed only if there are parameters for them."""

    def __str__(self) -> str:
        return f"({', '.join([*self.positional, *(f'{name}=...' for name in self.keywords)])})"


_TIS = (
    "pg_loss",
    "train_log_probs",
    "rollout_log_probs",
    "loss_masks",
    "total_lengths",
    "response_lengths",
)
_ROLLOUT = HookSignature(("args", "rollout_id", "data_source"), ("evaluation",))
_OF_BATCH = HookSignature(("args", "samples"))

SIGNATURES = {
    "custom_generate_function": HookSignature(
        ("args", "sample", "sampling_params"), ("evaluation",), is_awaited=True, optional=True
    ),
    "custom_rm": HookSignature(("args", "sample"), is_awaited=True),
    "rollout_sample_hook": HookSignature(("args", "sample"), ("rollout_id", "evaluation"), optional=True),
    "dynamic_sampling_filter": _OF_BATCH,
    "rollout_sample_filter": HookSignature(("args", "groups")),
    "rollout_function": _ROLLOUT,
    "eval_function": _ROLLOUT,
    "data_source": HookSignature(
        ("args",), methods=("get_samples", "add_samples", "save", "load", "__len__")
    ),
    "buffer_filter": HookSignature(("args", "rollout_id", "buffer", "num_samples")),
    "rollout_all_samples_process": HookSignature(("args", "groups", "data_source")),
    "custom_reward_post_process": _OF_BATCH,
    "custom_convert_samples_to_train_data": _OF_BATCH,
    "custom_rollout_log_function": HookSignature(
        ("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time")
    ),
    "custom_eval_rollout_log_function": HookSignature(("rollout_id", "args", "data", "extra_metrics")),
    "rollout_data_postprocess": HookSignature(("args", "rollout_id", "rollout_data")),
    "custom_advantage_function": HookSignature(("args", "rollout_data")),
    "custom_loss_function": HookSignature(("args", "batch", "logits", "sum_of_sample_mean")),
    "custom_tis_function": HookSignature(("args",), _TIS),
    "custom_pg_loss_reducer_function": HookSignature(
        ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss")
    ),
    "custom_megatron_init": HookSignature(("args",)),
    "custom_megatron_before_log_prob_hook": HookSignature(("args", "model", "store_prefix")),
    "custom_megatron_before_train_step_hook": HookSignature(
        ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler")
    ),
    "custom_model_provider": HookSignature(("pre_process", "post_process"), ("vp_stage",), optional=True),
    "custom_update_weight_post_write": HookSignature(("args", "version_dir", "rollout_engines")),
}
"""By the name of the setting in ``rollout.hooks``."""


def problem_with(hook: object, signature: HookSignature) -> str | None:
    """Return why ``hook`` cannot be called with ``signature``; None: it can."""
    if not callable(hook):
        return f"is a {type(hook).__name__}, expected a function of {signature}"
    if signature.methods:
        return _problem_with_class(hook, signature)
    if isinstance(hook, type):
        return f"is a class, expected a function of {signature}"
    if (problem := _problem_with_call(hook, signature)) is not None:
        return problem
    function = inspect.unwrap(hook)
    if signature.is_awaited and inspect.isfunction(function) and not inspect.iscoroutinefunction(function):
        return f"is no coroutine function, expected `async def` with {signature}: it is awaited"
    return None


def _problem_with_class(hook: object, signature: HookSignature) -> str | None:
    if not isinstance(hook, type):
        return f"is no class, expected one of {signature} with the methods {', '.join(signature.methods)}"
    missing = [name for name in signature.methods if not callable(getattr(hook, name, None))]
    if missing:
        return f"has no {', '.join(missing)}, expected the methods {', '.join(signature.methods)}"
    return _problem_with_call(hook, signature)


def _problem_with_call(hook: Callable[..., object], signature: HookSignature) -> str | None:
    try:
        parameters = inspect.signature(hook)
    except (TypeError, ValueError):
        return None  # a builtin, which does not say
    names = signature.keywords
    if signature.optional and not any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.parameters.values()
    ):
        names = tuple(name for name in names if name in parameters.parameters)
    try:
        parameters.bind(*signature.positional, **dict.fromkeys(names))
    except TypeError as error:
        return f"has the parameters {parameters}, expected {signature}: {error}"
    return None


def answers_to(request: bytes) -> Iterator[str | None]:
    """Yield what is wrong with each hook of the request; None: nothing."""
    make_slime_importable()
    for setting, path in json.loads(request):
        yield _problem(setting, path)


def _problem(setting: str, path: str) -> str | None:
    try:
        return problem_with(resolve(path), SIGNATURES[setting])
    except PluginError as error:
        return str(error).removeprefix(f"{path}: ")
    except BaseException as error:  # user code: its import may raise anything, and exit
        return f"its import raises {type(error).__name__}: {error}"
