"""Rules about the layout of the model. Megatron and SGLang would refuse these layouts later."""

from collections.abc import Iterator
from functools import partial

from slipstream.configs.rules.models import (
    EXPERT_COUNTS,
    MODELS,
    OTHER_MODELS,
    POLICY,
    model_config,
    model_number,
    model_words,
)
from slipstream.configs.rules.rule import Rule, setting
from slipstream.configs.schema import RunConfig
from slipstream.configs.violations import Violation

LINEAR_HEADS = "linear_num_key_heads"
"""The number that only a config.json of a model with linear attention has."""
TENSOR, ENGINE_TENSOR = "actor.parallel.tensor", "rollout.engine.tensor_parallel"
ENGINE_DATA = "rollout.engine.data_parallel"


def sequence_parallel_needs_tensor(config: RunConfig) -> Iterator[Violation]:
    parallel = config.actor.parallel
    if parallel.sequence and parallel.tensor < 2:
        yield Violation(
            "actor.parallel.sequence",
            True,
            "sequence parallelism splits activations over the tensor-parallel group; "
            "set actor.parallel.tensor to at least 2, or this to false",
        )


def heads_split_over_ranks(config: RunConfig, path: str, model: str) -> Iterator[Violation]:
    ranks = setting(config, path, int)
    assert ranks is not None, f"{path} has a default"
    given, words = ranks, ""
    if path == ENGINE_TENSOR and (groups_of_ranks := config.rollout.engine.data_parallel) > 1:
        if ranks % groups_of_ranks:
            return  # rules/engine.py
        ranks //= groups_of_ranks
        words = f"splits heads over {ranks} ranks (tensor_parallel / data_parallel); "
    heads = model_number(config, "num_attention_heads", model)
    groups = model_number(config, "num_key_value_heads", model)
    if heads and heads % ranks:
        reason = f"expected a divisor of {heads}, the number of attention heads of {model_words(model)}"
        yield Violation(path, given, words + reason)
    elif groups and groups % ranks and (path == TENSOR or ranks % groups):
        also = "" if path == TENSOR else " or a multiple"
        reason = (
            f"expected a divisor{also} of {groups}, the number of key-value heads of {model_words(model)}"
        )
        yield Violation(path, given, words + reason)


def linear_heads_split_over_ranks(config: RunConfig, path: str, model: str) -> Iterator[Violation]:
    ranks, heads = setting(config, path, int), model_number(config, LINEAR_HEADS, model)
    if heads and ranks and heads % ranks:
        whose = f"the number of key heads of linear attention of {model_words(model)}"
        yield Violation(path, ranks, f"expected a divisor of {heads}, {whose}")


def linear_attention_has_whole_contexts(config: RunConfig, model: str) -> Iterator[Violation]:
    context = config.actor.parallel.context
    if context > 1 and model_number(config, LINEAR_HEADS, model):
        reason = (
            f"expected 1: {model_words(model)} has linear attention, whose state passes from token to token "
            "and is not handed from rank to rank"
        )
        yield Violation("actor.parallel.context", context, reason)


def stages_can_interleave(config: RunConfig) -> Iterator[Violation]:
    parallel = config.actor.parallel
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        reason = "expected 1: the interleaved schedule needs actor.parallel.pipeline > 1"
        yield Violation("actor.parallel.virtual_pipeline", parallel.virtual_pipeline, reason)


def layers_split_over_stages(config: RunConfig, model: str) -> Iterator[Violation]:
    parallel = config.actor.parallel
    parts = parallel.pipeline * parallel.virtual_pipeline
    layers = model_number(config, "num_hidden_layers", model)
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        return  # stages_can_interleave
    if parallel.layers is not None:
        if len(parallel.layers) != parts or layers not in (None, sum(parallel.layers)):
            total = f" that sum to {layers}, the number of layers of {model_words(model)}" if layers else ""
            reason = f"expected {parts} numbers (actor.parallel.pipeline * virtual_pipeline){total}"
            yield Violation("actor.parallel.layers", parallel.layers, reason)
    elif layers and layers % parts:
        interleaved = parallel.virtual_pipeline > 1
        path = f"actor.parallel.{'virtual_pipeline' if interleaved else 'pipeline'}"
        also = " for pipeline * virtual_pipeline" if interleaved else ""
        reason = (
            f"expected a divisor of {layers}{also}, the number of layers of {model_words(model)}; "
            "otherwise set actor.parallel.layers to the number of layers of each part"
        )
        yield Violation(path, setting(config, path, int), reason)


def experts_split_over_ranks(config: RunConfig, model: str) -> Iterator[Violation]:
    parallel = config.actor.parallel
    expert_tensor = parallel.expert_tensor or parallel.tensor
    experts = next(filter(None, (model_number(config, name, model) for name in EXPERT_COUNTS)), None)
    if model != POLICY and experts is None:
        return
    if experts is None and model_config(config, model) is not None:
        for name, ranks in (("expert", parallel.expert), ("expert_tensor", parallel.expert_tensor)):
            if ranks not in (None, 1):
                yield Violation(f"actor.parallel.{name}", ranks, "expected 1: the model has no experts")
        return
    stage_ranks = parallel.tensor * parallel.context * parallel.data
    if stage_ranks % (parallel.expert * expert_tensor):
        reason = (
            f"with {expert_tensor} ranks per expert (expert_tensor, or tensor) expected a divisor of "
            f"{stage_ranks}, the ranks of a pipeline stage (tensor * context * data)"
        )
        yield Violation("actor.parallel.expert", parallel.expert, reason)
    if experts and experts % parallel.expert:
        reason = f"expected a divisor of {experts}, the number of experts of {model_words(model)}"
        yield Violation("actor.parallel.expert", parallel.expert, reason)
    width = model_number(config, "moe_intermediate_size", model)
    if width and width % expert_tensor:
        reason = f"expected a divisor of {width}, the intermediate size of an expert"
        yield Violation("actor.parallel.expert_tensor", expert_tensor, reason)
    if experts and parallel.tensor > 1 and not parallel.sequence:
        reason = (
            "expected true: Megatron trains experts on tensor-parallel ranks with sequence parallelism only"
        )
        yield Violation("actor.parallel.sequence", False, reason)


RULES = (
    Rule(sequence_parallel_needs_tensor, ("actor.parallel.sequence", TENSOR)),
    Rule(partial(heads_split_over_ranks, path=TENSOR, model=POLICY), (POLICY, TENSOR)),
    Rule(
        partial(heads_split_over_ranks, path=ENGINE_TENSOR, model=POLICY),
        (POLICY, ENGINE_TENSOR, ENGINE_DATA),
    ),
    *(
        Rule(partial(heads_split_over_ranks, path=TENSOR, model=model), (model, TENSOR))
        for model in OTHER_MODELS
    ),
    *(
        Rule(partial(linear_heads_split_over_ranks, path=TENSOR, model=model), (model, TENSOR))
        for model in MODELS
    ),
    Rule(partial(linear_heads_split_over_ranks, path=ENGINE_TENSOR, model=POLICY), (POLICY, ENGINE_TENSOR)),
    *(
        Rule(partial(linear_attention_has_whole_contexts, model=model), (model, "actor.parallel.context"))
        for model in MODELS
    ),
    Rule(stages_can_interleave, ("actor.parallel",)),
    *(Rule(partial(layers_split_over_stages, model=model), (model, "actor.parallel")) for model in MODELS),
    *(Rule(partial(experts_split_over_ranks, model=model), (model, "actor.parallel")) for model in MODELS),
)
