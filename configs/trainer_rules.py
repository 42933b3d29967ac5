"""What must hold between the settings of the optimizer and of Megatron's model (``rules.RULES``)."""

import importlib.util
from collections.abc import Iterator

from slipstream.configs.schema import RunConfig
from slipstream.configs.violations import Violation

RECOMPUTED_BY = {
    "recompute_modules": "selective",
    "recompute_method": "full",
    "recompute_num_layers": "full",
    "distribute_saved_activations": "full",
}
"""Fields of Megatron that say more about one value of actor.recompute."""


def decay_goes_down(config: RunConfig, path: str) -> Iterator[Violation]:
    """``path``: the optimizer's."""
    of = config.actor if path == "actor.optimizer" else config.critic
    if of is None or of.optimizer.decay.type == "constant":
        return
    optimizer = of.optimizer
    min_lr, steps = optimizer.decay.min_lr, optimizer.decay.steps
    if min_lr >= optimizer.lr:
        reason = f"expected less than {path}.lr ({optimizer.lr:g}), from where it comes down"
        yield Violation(f"{path}.decay.min_lr", min_lr, reason)
    for name, start in (("warmup_steps", optimizer.warmup_steps), ("decay.start", optimizer.decay.start)):
        if steps is not None and steps <= start:
            reason = f"expected more than {path}.{name} ({start}), which it includes, or null: run.steps"
            yield Violation(f"{path}.decay.steps", steps, reason)
            return


def gather_has_what_it_overlaps_with(config: RunConfig, path: str) -> Iterator[Violation]:
    """``path``: the optimizer's."""
    of = config.actor if path == "actor.optimizer" else config.critic
    if of is None or not of.optimizer.overlap_param_gather:
        return
    optimizer, setting = of.optimizer, f"{path}.overlap_param_gather"
    for name in ("distributed", "overlap_grad_reduce"):
        if not getattr(optimizer, name):
            reason = f"it is a part of the distributed optimizer: set {path}.{name} to true as well"
            yield Violation(setting, True, f"{reason}, or this to false")
            return
    if config.actor.minibatches == 1:
        yield Violation(
            setting,
            True,
            "weights are published right after the last update of a training step, so with one update there "
            "is no forward pass to overlap with: set this to false, or actor.minibatches to at least 2",
        )


def recompute_details_fit(config: RunConfig) -> Iterator[Violation]:
    actor = config.actor
    for name, kind in RECOMPUTED_BY.items():
        if name in actor.megatron and actor.recompute != kind:
            reason = f"only actor.recompute: {kind} has it, and actor.recompute is {actor.recompute}"
            yield Violation(f"actor.megatron.{name}", actor.megatron[name], reason)


def transformer_engine_can_be_used(config: RunConfig) -> Iterator[Violation]:
    if config.actor.layer_spec != "transformer_engine":
        return
    otherwise = "or set this to auto or local"
    if config.cluster.device == "cpu":
        why = "Transformer Engine needs GPUs: set cluster.device to gpu"
    elif config.actor.lora is not None:
        why = "adapters are for plain layers, not for those of Transformer Engine: leave actor.lora out"
    elif not transformer_engine_is_installed():
        why = "Transformer Engine is not installed here: `pip install .[gpu]` on a machine with a GPU does"
    else:
        return
    yield Violation("actor.layer_spec", "transformer_engine", f"{why}, {otherwise}")


def context_needs_transformer_engine(config: RunConfig) -> Iterator[Violation]:
    context = config.actor.parallel.context
    if context > 1 and config.actor.layer_spec != "transformer_engine":
        yield Violation(
            "actor.parallel.context",
            context,
            "attention over tokens of several ranks is Transformer Engine's: set actor.layer_spec to "
            f"transformer_engine (it is {config.actor.layer_spec}), or this to 1",
        )


def transformer_engine_is_installed() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None
