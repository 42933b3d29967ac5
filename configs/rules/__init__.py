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
    live,
    lora,
    objective,
    parsers,
    rollout,
    trainer,
)
from slipstream.configs.rules.rule import Rule
from slipstream.configs.schema import RunConfig
from slipstream.configs.violations import Violation

RULES: tuple[Rule, ...] = (
    *objective.RULES,
    *trainer.RULES,
    *rollout.RULES,
    *hooks.RULES,
    *parsers.RULES,
    *gateway.RULES,
    *live.RULES,
    *judge.RULES,
    *layout.RULES,
    *lora.RULES,
    *engine.RULES,
    *inputs.RULES,
)


def check_rules(config: RunConfig, unsure: Collection[str] = ()) -> Iterator[Violation]:
    """Check every rule that reads none of the ``unsure`` paths."""
    for rule in RULES:
        if not any(map(rule.is_affected_by, unsure)):
            yield from rule.check(config)
