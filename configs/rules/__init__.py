"""Rules between settings, and between settings and the files that they name.

A rule is a small function from a ``RunConfig`` to violations, registered with the settings that it reads. It
is skipped if one of them is itself wrong, so that each mistake is reported once. Single values are checked by
the schema, and fields of Megatron and SGLang by ``installed``.
"""

from collections.abc import Collection, Iterator

from slipstream.configs.rules import (
    engine,
    gateway,
    hooks,
    inputs,
    judge,
    layout,
    lora,
    objective,
    parsers,
    rollout,
    trainer,
)
from slipstream.configs.rules.rule import Rule
from slipstream.configs.schema import (
    DiskTransportConfig,
    RunConfig,
    ShardsTransportConfig,
    TensorTransportConfig,
    TransportConfig,
)
from slipstream.configs.violations import Violation

RULES: tuple[Rule, ...] = (
    *objective.RULES,
    *trainer.RULES,
    *rollout.RULES,
    *hooks.RULES,
    *parsers.RULES,
    *gateway.RULES,
    *judge.RULES,
    *layout.RULES,
    *lora.RULES,
    *engine.RULES,
    *inputs.RULES,
)

TRANSPORTS: tuple[TransportConfig, ...] = (
    ShardsTransportConfig(),
    TensorTransportConfig(),
    DiskTransportConfig(),
)
"""The transports of which one takes the place of another, the fastest first. ``delta`` is not among them:
its engines are started with room for a replica."""


def check_rules(config: RunConfig, unsure: Collection[str] = ()) -> Iterator[Violation]:
    """Check every rule that reads none of the ``unsure`` paths."""
    for rule in RULES:
        if not any(map(rule.is_affected_by, unsure)):
            yield from rule.check(config)


def slower_transports(config: RunConfig) -> Iterator[TransportConfig]:
    """Yield the transports that may take the place of the recipe's, by the rules, the fastest first."""
    weights, order = config.weights, [each.type for each in TRANSPORTS]
    if config.actor.serves_adapter or weights.transport.type not in order:
        return
    for transport in TRANSPORTS[order.index(weights.transport.type) + 1 :]:
        changed = config.model_copy(update={"weights": weights.model_copy(update={"transport": transport})})
        rules = [rule for rule in RULES if rule.is_affected_by("weights.transport")]
        if not any(True for rule in rules for _ in rule.check(changed)):
            yield transport
