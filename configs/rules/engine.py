"""Rules about the ranks of an engine: how they divide the model, and over which nodes they are spread."""

from collections.abc import Iterator
from typing import cast

from slipstream.configs.installed.served import Ability, can
from slipstream.configs.rules.models import (
    EXPERT_COUNTS,
    POLICY,
    model_config,
    model_number,
)
from slipstream.configs.rules.rule import Rule
from slipstream.configs.schema import RunConfig
from slipstream.configs.violations import Violation, one_of

ENGINE = "rollout.engine"
COUNTS_OF_ENGINES = ("count", "min_count", "max_count")
NAMES = ("nodes", "tensor_parallel", "data_parallel", "expert_parallel", "pipeline_parallel")
SPLIT = tuple(f"{ENGINE}.{name}" for name in NAMES)


def counts_are_in_order(config: RunConfig) -> Iterator[Violation]:
    engine = config.rollout.engine
    for name, value, fits, words in (
        ("min_count", engine.min_count, engine.fewest <= engine.count, "at most"),
        ("max_count", engine.max_count, engine.most >= engine.count, "at least"),
    ):
        if value is not None and not fits:
            yield Violation(
                f"{ENGINE}.{name}", value, f"expected {words} {engine.count}, which is {ENGINE}.count"
            )
        elif value is not None and value != engine.count and engine.colocated:
            reason = f"expected null: with {ENGINE}.colocated the engines are where the trainer's GPUs are"
            yield Violation(f"{ENGINE}.{name}", value, reason)


def ranks_divide(config: RunConfig) -> Iterator[Violation]:
    engine = config.rollout.engine
    if engine.tensor_parallel % engine.data_parallel:
        reason = f"expected a divisor of {engine.tensor_parallel}, which is {ENGINE}.tensor_parallel"
        yield Violation(f"{ENGINE}.data_parallel", engine.data_parallel, reason)
    if engine.tensor_parallel % engine.expert_parallel:
        reason = f"expected a divisor of {engine.tensor_parallel}, which is {ENGINE}.tensor_parallel"
        yield Violation(f"{ENGINE}.expert_parallel", engine.expert_parallel, reason)
    if engine.ranks % engine.nodes:
        reason = (
            f"expected a divisor of {engine.ranks}, the ranks of an engine "
            "(tensor_parallel * pipeline_parallel), so that each node has equally many"
        )
        yield Violation(f"{ENGINE}.nodes", engine.nodes, reason)
    elif engine.pipeline_parallel % engine.nodes and engine.nodes % engine.pipeline_parallel:
        reason = (
            f"expected a divisor or a multiple of {engine.pipeline_parallel}, which is "
            f"{ENGINE}.pipeline_parallel: a node has whole pipeline stages, or a stage has whole nodes"
        )
        yield Violation(f"{ENGINE}.nodes", engine.nodes, reason)


def nodes_are_there(config: RunConfig) -> Iterator[Violation]:
    nodes = config.rollout.engine.nodes
    if nodes > 1 and config.cluster.type == "local":
        reason = "expected 1: with cluster.type: local there is this machine alone; use cluster.type: slurm"
        yield Violation(f"{ENGINE}.nodes", nodes, reason)


def model_divides(config: RunConfig) -> Iterator[Violation]:
    engine = config.rollout.engine
    layers = model_number(config, "num_hidden_layers")
    if layers and engine.pipeline_parallel > layers:
        reason = f"expected at most {layers}, the number of layers of the model"
        yield Violation(f"{ENGINE}.pipeline_parallel", engine.pipeline_parallel, reason)
    if engine.expert_parallel == 1 or model_config(config) is None:
        return
    experts = next(filter(None, (model_number(config, name) for name in EXPERT_COUNTS)), None)
    if experts is None:
        reason = "expected 1: the model has no experts"
        yield Violation(f"{ENGINE}.expert_parallel", engine.expert_parallel, reason)
        return
    if experts % engine.expert_parallel:
        reason = f"expected a divisor of {experts}, the number of experts of the model"
        yield Violation(f"{ENGINE}.expert_parallel", engine.expert_parallel, reason)
    width = model_number(config, "moe_intermediate_size")
    shares = engine.tensor_parallel // engine.expert_parallel
    if width and shares and width % shares:
        reason = (
            f"leaves {shares} ranks for an expert (tensor_parallel / expert_parallel); expected a divisor of "
            f"{width}, the intermediate size of an expert"
        )
        yield Violation(f"{ENGINE}.expert_parallel", engine.expert_parallel, reason)


def model_can(config: RunConfig) -> Iterator[Violation]:
    engine = config.rollout.engine
    architectures = (model_config(config) or {}).get("architectures")
    if not isinstance(architectures, list) or not architectures:
        return
    name = str(cast("list[object]", architectures)[0])
    abilities: tuple[tuple[Ability, int, str], ...] = (
        ("data_parallel", engine.data_parallel, "data-parallel attention"),
        ("pipeline_parallel", engine.pipeline_parallel, "pipeline stages"),
    )
    for ability, size, words in abilities:
        if size > 1 and can(name, ability) is False:
            yield Violation(f"{ENGINE}.{ability}", size, f"expected 1: SGLang's {name} has no {words}")


def device_can(config: RunConfig) -> Iterator[Violation]:
    groups = config.rollout.engine.expert_parallel
    if groups > 1 and config.cluster.device == "cpu":
        reason = "expected 1 with cluster.device: cpu: SGLang divides experts into groups on GPUs only"
        yield Violation(f"{ENGINE}.expert_parallel", groups, reason)


COUNTS = (
    "max_running_requests",
    "max_total_tokens",
    "context_length",
    "max_prefill_tokens",
    "decode_log_interval",
)
"""Fields of SGLang's ServerArgs that count something, which SGLang itself does not look at."""


def args_are_in_range(config: RunConfig) -> Iterator[Violation]:
    args = config.rollout.engine.args
    for name in COUNTS:
        value = args.get(name)
        if isinstance(value, int) and value < 1:
            yield Violation(f"{ENGINE}.args.{name}", value, "expected 1 or more")
    fraction, chunk = args.get("mem_fraction_static"), args.get("chunked_prefill_size")
    if isinstance(fraction, int | float) and not 0 < fraction < 1:
        reason = "expected a number between 0 and 1: the share of a GPU's memory for weights and KV cache"
        yield Violation(f"{ENGINE}.args.mem_fraction_static", fraction, reason)
    if isinstance(chunk, int) and chunk != -1 and chunk < 1:
        reason = "expected 1 or more tokens, or -1 for prompts in one piece"
        yield Violation(f"{ENGINE}.args.chunked_prefill_size", chunk, reason)


TELLING = ("auto", "triton", "deep_gemm", "cutlass")
"""Backends of SGLang's ``moe_runner_backend`` that are told which experts to run. Others choose them inside
their kernels, and SGLang does not know which."""


def engines_tell_routes(config: RunConfig) -> Iterator[Violation]:
    args, name = config.rollout.engine.args, "moe_runner_backend"
    if config.actor.routing_replay == "rollout" and args.get(name, "auto") not in TELLING:
        reason = (
            "SGLang does not know the experts of tokens with it, which actor.routing_replay: rollout needs; "
            f"expected {' or '.join(TELLING)}, or leave it out"
        )
        yield Violation(f"{ENGINE}.args.{name}", args[name], reason)


def graphs_can_rest(config: RunConfig) -> Iterator[Violation]:
    """SGLang ends at its start otherwise: the graphs for prompts cannot release their memory."""
    engine, name = config.rollout.engine, "cuda_graph_backend_prefill"
    value = engine.args.get(name, "disabled")
    if engine.takes_turns and value != "disabled":
        reason = (
            f"an engine that takes turns with the trainer ({ENGINE}.colocated) releases its memory, which "
            "these graphs do not; expected 'disabled', or leave it out"
        )
        yield Violation(f"{ENGINE}.args.{name}", value, reason)


def share_is_of_a_shared_gpu(config: RunConfig) -> Iterator[Violation]:
    engine, name = config.rollout.engine, "mem_fraction_static"
    share = engine.gpu_share
    if share is None:
        return
    if not engine.colocated:
        reason = f"expected null, or {ENGINE}.colocated: true: these engines have GPUs of their own"
        yield Violation(f"{ENGINE}.gpu_share", share, reason)
    if config.cluster.device == "cpu":
        yield Violation(f"{ENGINE}.gpu_share", share, "expected null with cluster.device: cpu")
    if name in engine.args:
        reason = f"{ENGINE}.gpu_share is the share of memory of these engines: set that, and leave this out"
        yield Violation(f"{ENGINE}.args.{name}", engine.args[name], reason)


def adapters_are_verified(config: RunConfig) -> Iterator[Violation]:
    engine = config.rollout.engine
    split = {name: getattr(engine, name) for name in NAMES if name != "tensor_parallel"}
    given = [f"{ENGINE}.{name}" for name, size in split.items() if size > 1]
    if config.actor.serves_adapter and given:
        reason = f"adapters have not been verified in SGLang with {one_of(given)} above 1; expected 'merged'"
        yield Violation("actor.lora.serve", "adapter", reason)


def transport_reaches_every_rank(config: RunConfig) -> Iterator[Violation]:
    engine, transport = config.rollout.engine, config.weights.transport.type
    if config.actor.serves_adapter:
        return  # adapters_are_verified
    if engine.nodes > 1 and transport == "tensor":
        reason = (
            f"an engine over several nodes ({ENGINE}.nodes) shares no memory with the trainer's first rank; "
            "expected 'shards' or 'disk'"
        )
        yield Violation("weights.transport.type", transport, reason)
    elif engine.nodes > 1 and transport == "delta":
        reason = (
            f"an engine over several nodes ({ENGINE}.nodes) would have its copy of the weights on the first "
            "node alone; expected 'shards' or 'disk'"
        )
        yield Violation("weights.transport.type", transport, reason)
    elif engine.pipeline_parallel > 1 and transport in ("shards", "tensor"):
        reason = (
            f"only versions in files reach the ranks of later pipeline stages, and "
            f"{ENGINE}.pipeline_parallel is {engine.pipeline_parallel}; expected 'disk'"
            + (" or 'delta'" if engine.nodes == 1 else "")
        )
        yield Violation("weights.transport.type", transport, reason)


RULES = (
    Rule(counts_are_in_order, (*(f"{ENGINE}.{name}" for name in COUNTS_OF_ENGINES), f"{ENGINE}.colocated")),
    Rule(ranks_divide, SPLIT),
    Rule(nodes_are_there, (f"{ENGINE}.nodes", "cluster.type")),
    Rule(model_divides, (POLICY, *SPLIT)),
    Rule(model_can, (POLICY, f"{ENGINE}.data_parallel", f"{ENGINE}.pipeline_parallel")),
    Rule(device_can, (f"{ENGINE}.expert_parallel", "cluster.device", "cluster.type")),
    Rule(
        transport_reaches_every_rank,
        (f"{ENGINE}.nodes", f"{ENGINE}.pipeline_parallel", "weights.transport", "actor.lora"),
    ),
    Rule(args_are_in_range, (f"{ENGINE}.args",)),
    Rule(engines_tell_routes, (f"{ENGINE}.args", "actor.routing_replay")),
    Rule(graphs_can_rest, (f"{ENGINE}.args", f"{ENGINE}.colocated", f"{ENGINE}.gpu_share")),
    Rule(
        share_is_of_a_shared_gpu,
        (f"{ENGINE}.gpu_share", f"{ENGINE}.colocated", f"{ENGINE}.args", "cluster.device"),
    ),
    Rule(adapters_are_verified, ("actor.lora", *SPLIT)),
)
