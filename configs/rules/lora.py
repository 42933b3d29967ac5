"""Rules about the adapters of the policy, and about serving them."""

from collections.abc import Iterator

from slipstream.configs.rules.layout import LINEAR_HEADS
from slipstream.configs.rules.models import POLICY, model_config, model_number
from slipstream.configs.rules.rule import Rule
from slipstream.configs.schema import RunConfig
from slipstream.configs.violations import Violation, one_of

SERVED = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type`` with which engines compute with an adapter what they do with merged weights."""

MERGED = "or set actor.lora.serve to merged"


def lora_targets_exist(config: RunConfig) -> Iterator[Violation]:
    lora = config.actor.lora
    if lora is None or lora.targets is None or model_config(config) is None:
        return
    names = ["linear_proj", "linear_fc1", "linear_fc2"]
    if model_number(config, "kv_lora_rank") is None:
        names.append("linear_qkv")
    else:
        names += ["linear_kv_down_proj", "linear_kv_up_proj"]
        low_rank = model_number(config, "q_lora_rank") is not None
        names += ["linear_q_down_proj", "linear_q_up_proj"] if low_rank else ["linear_q_proj"]
    if model_number(config, LINEAR_HEADS) is not None:
        names += ["in_proj", "out_proj"]
    if missing := [name for name in lora.targets if name not in names]:
        reason = f"the model has no {one_of(missing)}; its linear layers are {', '.join(sorted(names))}"
        yield Violation("actor.lora.targets", lora.targets, reason)


def adapter_can_be_served(config: RunConfig) -> Iterator[Violation]:
    lora = config.actor.lora
    if lora is None or not config.actor.serves_adapter:
        return
    if config.rollout.engine.takes_turns:
        yield Violation(
            "actor.lora.serve",
            "adapter",
            "colocated engines keep their requests while the trainer trains, and SGLang binds a request to "
            "the adapter that it began with; expected 'merged', or set rollout.engine.colocated to false",
        )
    elif config.weights.interrupt not in ("abort", "drain"):
        yield Violation(
            "weights.interrupt",
            config.weights.interrupt,
            "SGLang binds a request to the adapter that it began with, so running requests must be cut off "
            f"and continued with the next (abort), or end before (drain); expected one of them, {MERGED}",
        )
    kind = (model_config(config) or {}).get("model_type", SERVED[0])
    if kind not in SERVED:
        yield Violation(
            "actor.lora.serve",
            "adapter",
            f"the model is of the type {kind}, and SGLang's adapters have been found to compute what merged "
            f"weights do for {', '.join(SERVED)} only; expected 'merged'",
        )


RULES = (
    Rule(lora_targets_exist, (POLICY, "actor.lora.targets")),
    Rule(
        adapter_can_be_served, (POLICY, "actor.lora.serve", "weights.interrupt", "rollout.engine.colocated")
    ),
)
