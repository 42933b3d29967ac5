"""Rules about the optimizers and about Megatron's layers."""

import importlib.util
from collections.abc import Iterator
from functools import partial

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


def context_needs_transformer_engine(config: RunConfig) -> Iterator[Violation]:
    context = config.actor.parallel.context
    if context > 1 and config.actor.layer_spec != "transformer_engine":
        yield Violation(
            "actor.parallel.context",
            context,
            "only Transformer Engine has attention over the tokens of several ranks; set actor.layer_spec to "
            f"transformer_engine (it is {config.actor.layer_spec}), or this to 1",
        )


def transformer_engine_is_installed() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


RULES = (
    *(Rule(partial(decay_goes_down, path=path), (path,)) for path in OPTIMIZERS),
    *(
        Rule(partial(gather_has_what_it_overlaps_with, path=path), (path, "actor.minibatches"))
        for path in OPTIMIZERS
    ),
    Rule(recompute_details_fit, ("actor.recompute", "actor.megatron")),
    Rule(transformer_engine_can_be_used, ("actor.layer_spec", "actor.lora", "cluster.device")),
    Rule(context_needs_transformer_engine, ("actor.layer_spec", "actor.parallel.context")),
)
