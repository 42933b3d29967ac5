"""Rules about the optimizers and about Megatron's layers."""

import importlib.util
import math
from collections.abc import Iterator
from functools import partial

from slipstream.configs.rules.models import (
    EXPERT_COUNTS,
    MODELS,
    POLICY,
    model_config,
    model_number,
    model_words,
)
from slipstream.configs.rules.rule import Rule
from slipstream.configs.schema import OptimizerConfig, RunConfig
from slipstream.configs.violations import Violation

OPTIMIZERS = ("actor.optimizer", "critic.optimizer")

RECOMPUTED_BY = {
    "recompute_modules": "selective",
    "recompute_method": "full",
    "recompute_num_layers": "full",
    "distribute_saved_activations": "full",
}
"""Fields of Megatron that refine a value of actor.recompute, and that value."""


def _optimizer(config: RunConfig, path: str) -> OptimizerConfig | None:
    trained = config.actor if path == "actor.optimizer" else config.critic
    return None if trained is None else trained.optimizer


def decay_goes_down(config: RunConfig, path: str) -> Iterator[Violation]:
    optimizer = _optimizer(config, path)
    if optimizer is None or optimizer.decay.type == "constant":
        return
    decay = optimizer.decay
    if decay.min_lr >= optimizer.lr:
        reason = f"expected less than {path}.lr ({optimizer.lr:g}), at which the decay begins"
        yield Violation(f"{path}.decay.min_lr", decay.min_lr, reason)
    for name, start in (("warmup_steps", optimizer.warmup_steps), ("decay.start", decay.start)):
        if decay.steps is not None and decay.steps <= start:
            reason = f"expected more than {path}.{name} ({start}), which it includes, or null for run.steps"
            yield Violation(f"{path}.decay.steps", decay.steps, reason)
            return


def gather_has_what_it_overlaps_with(config: RunConfig, path: str) -> Iterator[Violation]:
    optimizer = _optimizer(config, path)
    if optimizer is None or not optimizer.overlap_param_gather:
        return
    setting = f"{path}.overlap_param_gather"
    for name, is_set in (
        ("distributed", optimizer.distributed),
        ("overlap_grad_reduce", optimizer.overlap_grad_reduce),
    ):
        if not is_set:
            reason = f"the distributed optimizer overlaps both or neither; set {path}.{name} to true too"
            yield Violation(setting, True, f"{reason}, or this to false")
            return
    if config.actor.minibatches == 1:
        yield Violation(
            setting,
            True,
            "weights are published right after the last update of a training step, so with one update no "
            "forward pass is left to overlap with; set this to false, or actor.minibatches to at least 2",
        )


def recompute_details_fit(config: RunConfig) -> Iterator[Violation]:
    actor = config.actor
    for name, kind in RECOMPUTED_BY.items():
        if name in actor.megatron and actor.recompute != kind:
            reason = f"only actor.recompute: {kind} uses it, and actor.recompute is {actor.recompute}"
            yield Violation(f"actor.megatron.{name}", actor.megatron[name], reason)


def recomputed_layers_divide(config: RunConfig, model: str) -> Iterator[Violation]:
    """Megatron takes layers that do not exist if a part of the model is no multiple of the number."""
    actor, path = config.actor, "actor.megatron.recompute_num_layers"
    number = actor.megatron.get("recompute_num_layers")
    if actor.recompute != "full" or not isinstance(number, int) or isinstance(number, bool):
        return  # recompute_details_fit, installed
    parts = actor.parallel.pipeline * actor.parallel.virtual_pipeline
    layers = model_number(config, "num_hidden_layers", model)
    sizes = actor.parallel.layers or ([layers // parts] if layers else [])
    is_block = actor.megatron.get("recompute_method") == "block"
    if number < 1:
        yield Violation(path, number, "expected 1 or more layers")
    elif not is_block and (wrong := [size for size in sizes if size % number]):
        reason = (
            f"expected a divisor of {wrong[0]}, the layers of a part of {model_words(model)}; or "
            "recompute_method: block, which computes the first layers of each part again"
        )
        yield Violation(path, number, reason)
    elif is_block and sizes and number > min(sizes):
        reason = f"expected at most {min(sizes)}, the layers of a part of {model_words(model)}"
        yield Violation(path, number, reason)


def auxiliary_losses_have_an_effect(config: RunConfig) -> Iterator[Violation]:
    fields = config.actor.megatron
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        value: object = fields.get(name)
        if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
            yield Violation(f"actor.megatron.{name}", value, "expected one number, 0 or more")
    kind = fields.get("moe_router_load_balancing_type", "none")
    if fields.get("moe_aux_loss_coeff") and kind == "none":
        yield Violation(
            "actor.megatron.moe_aux_loss_coeff",
            fields["moe_aux_loss_coeff"],
            "expected 0: it has an effect only with moe_router_load_balancing_type: aux_loss",
        )


UNNUMBERED = ("minimax_m2", "mixtral", "olmoe")
"""Models whose routers have no layer number in SGLang, which ends at the first request for their experts."""


def replayed_routes_exist(config: RunConfig) -> Iterator[Violation]:
    actor = config.actor
    if actor.routing_replay == "off":
        return
    whys: list[str] = []
    if model_config(config, POLICY) is not None and not any(model_number(config, n) for n in EXPERT_COUNTS):
        whys.append("the model has no experts")
    if actor.routing_replay == "rollout":
        kind = (model_config(config, POLICY) or {}).get("model_type")
        if kind in UNNUMBERED:
            whys.append(f"SGLang's {kind} does not tell the experts of tokens")
    elif actor.interpolate_logprobs or not actor.recompute_logprobs:
        whys.append("no pass for proximal log-probs is made; set actor.recompute_logprobs to true")
    elif actor.minibatches == 1:
        whys.append(
            "the only mini-batch has no pass for proximal log-probs; set actor.minibatches to 2 or more"
        )
    if actor.megatron.get("moe_router_fusion"):
        whys.append("the fused router takes no routes; leave actor.megatron.moe_router_fusion out")
    if config.rollout.hooks is not None and config.rollout.hooks.custom_model_provider:
        whys.append(
            "the routers of another model are not known to take routes; leave "
            "rollout.hooks.custom_model_provider out"
        )
    if whys:
        reason = "; ".join([*whys, "or set this to off"])
        yield Violation("actor.routing_replay", actor.routing_replay, reason)


def transformer_engine_can_be_used(config: RunConfig) -> Iterator[Violation]:
    if config.actor.layer_spec != "transformer_engine":
        return
    if config.cluster.device == "cpu":
        why = "Transformer Engine needs GPUs; set cluster.device to gpu"
    elif config.actor.lora is not None:
        why = "adapters cannot be added to layers of Transformer Engine; leave actor.lora out"
    elif not transformer_engine_is_installed():
        why = "Transformer Engine is not installed; run `pip install .[gpu]` on a machine with a GPU"
    else:
        return
    yield Violation("actor.layer_spec", "transformer_engine", f"{why}, or set this to auto or local")


def prefixes_can_be_shared(config: RunConfig) -> Iterator[Violation]:
    actor, hooks = config.actor, config.rollout.hooks
    if actor.share_prefixes == "off":
        return
    whys: list[str] = []
    if actor.parallel.context > 1:
        whys.append("context parallelism cuts every trajectory alike; set actor.parallel.context to 1")
    if actor.layer_spec == "transformer_engine":
        whys.append("its attention repeats them; set actor.layer_spec to auto or local")
    whys += [
        f"an auxiliary loss would count shared tokens once; leave actor.megatron.{name} out"
        for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff")
        if actor.megatron.get(name)
    ]
    whys += [
        f"{why}; leave rollout.hooks.{name} out"
        for name, why in (
            ("custom_loss_function", "a loss from logits expects those of whole trajectories"),
            ("custom_model_provider", "the attention of another model is not known to share them"),
        )
        if hooks is not None and getattr(hooks, name)
    ]
    if whys:
        reason = "; ".join([*whys, "or set this to off"])
        yield Violation("actor.share_prefixes", actor.share_prefixes, reason)


def context_needs_transformer_engine(config: RunConfig) -> Iterator[Violation]:
    context = config.actor.parallel.context
    if context > 1 and config.actor.layer_spec != "transformer_engine":
        yield Violation(
            "actor.parallel.context",
            context,
            "only Transformer Engine has attention over the tokens of several ranks; set actor.layer_spec to "
            f"transformer_engine (it is {config.actor.layer_spec}), or this to 1",
        )


def checkpoints_are_taken(config: RunConfig) -> Iterator[Violation]:
    local = config.checkpoint.local_dir
    if local is not None and not config.checkpoint.every:
        reason = "nothing is written there without checkpoints; set this to null, or checkpoint.every above 0"
        yield Violation("checkpoint.local_dir", str(local), reason)


def transformer_engine_is_installed() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


RULES = (
    *(Rule(partial(decay_goes_down, path=path), (path,)) for path in OPTIMIZERS),
    *(
        Rule(partial(gather_has_what_it_overlaps_with, path=path), (path, "actor.minibatches"))
        for path in OPTIMIZERS
    ),
    Rule(recompute_details_fit, ("actor.recompute", "actor.megatron")),
    *(
        Rule(
            partial(recomputed_layers_divide, model=model),
            (model, "actor.recompute", "actor.megatron", "actor.parallel"),
        )
        for model in MODELS
    ),
    Rule(
        replayed_routes_exist,
        (
            "actor.routing_replay",
            "actor.recompute_logprobs",
            "actor.interpolate_logprobs",
            "actor.minibatches",
            "actor.megatron",
            "model.path",
            "rollout.hooks.custom_model_provider",
        ),
    ),
    Rule(auxiliary_losses_have_an_effect, ("actor.megatron",)),
    Rule(transformer_engine_can_be_used, ("actor.layer_spec", "actor.lora", "cluster.device")),
    Rule(
        prefixes_can_be_shared,
        (
            "actor.share_prefixes",
            "actor.parallel.context",
            "actor.layer_spec",
            "actor.megatron",
            "rollout.hooks.custom_loss_function",
            "rollout.hooks.custom_model_provider",
        ),
    ),
    Rule(context_needs_transformer_engine, ("actor.layer_spec", "actor.parallel.context")),
    Rule(checkpoints_are_taken, ("checkpoint.local_dir", "checkpoint.every")),
)
