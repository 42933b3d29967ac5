"""What the servers of a recipe's engines are: of its settings, without Ray and without a machine."""

from pathlib import Path

from slipstream.bridge.engine.orders import TAKE
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.adapter import adapter_spec
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.judge import OwnEngines
from slipstream.rollout.engine.adapters import AdapterServing
from slipstream.rollout.engine.server_process import (
    LIVE_SERVER_ARGS,
    ROUTES_SERVER_ARGS,
    ReplicaSpec,
    ServerSpec,
)
from slipstream.rollout.system import gpu_environment
from slipstream.rollout.system.network import LOOPBACK


def engine_spec(config: RunConfig, model: Path, device: str, adapters: AdapterServing | None) -> ServerSpec:
    """Return what the servers of the policy's engines have in common, of which ``server_args`` makes
    SGLang's arguments. Their actors choose ports and versions.

    ``model``: the HF checkpoint from which they start. ``device``, ``adapters``: as of ``ServerSpec``.
    """
    engine = config.rollout.engine
    return ServerSpec(
        model.resolve(),
        config.model.dtype,
        device,
        engine.tensor_parallel,
        _host(config),
        port=0,
        version=0,
        seed=config.run.seed,
        data_parallel=engine.data_parallel,
        expert_parallel=engine.expert_parallel,
        pipeline_parallel=engine.pipeline_parallel,
        nodes=engine.nodes,
        args=({} if adapters is not None else _weight_loader(config))
        | ({} if config.gateway is None else dict(LIVE_SERVER_ARGS))
        | (dict(ROUTES_SERVER_ARGS) if config.actor.routing_replay == "rollout" else {})
        | engine.args,
        environment=_environment(config, device),
        replica=None if adapters is not None else _replica_of(config),
        adapters=adapters,
    )


def judge_engine_spec(config: RunConfig, engines: OwnEngines, device: str) -> ServerSpec:
    """Return what the servers of the judge's own engines have in common."""
    return ServerSpec(
        engines.path.resolve(),
        engines.dtype,
        device,
        engines.tensor_parallel,
        _host(config),
        port=0,
        version=0,
        seed=config.run.seed,
        args=engines.args,
        environment=_environment(config, device),
    )


def adapters_of(config: RunConfig, spec: ModelSpec) -> AdapterServing | None:
    """Return the adapters that the engines load; None: they get whole weights."""
    lora = config.actor.lora
    if lora is None or not config.actor.serves_adapter:
        return None
    adapter = adapter_spec(spec, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
    return AdapterServing(lora.rank, tuple(adapter.leaves))


def _host(config: RunConfig) -> str:
    """Return the address on which engines listen; empty: that of their node in the Ray cluster."""
    return LOOPBACK if config.cluster.type == "local" else ""


def _environment(config: RunConfig, device: str) -> dict[str, str]:
    if device != "cuda":
        return {}
    return gpu_environment.environment(config.rollout.engine, config.actor.parallel, "engines")


def _weight_loader(config: RunConfig) -> dict[str, object]:
    """Return the engine argument that names the loader of the weights' transport, if it has one."""
    takes_orders = config.weights.transport.type in ("shards", "tensor")
    return {"custom_weight_loader": [TAKE]} if takes_orders else {}


def _replica_of(config: RunConfig) -> ReplicaSpec | None:
    """Return where an engine keeps a copy of the weights, if the transport needs one."""
    transport = config.weights.transport
    if transport.type != "delta":
        return None
    return ReplicaSpec("slipstream.bridge.transport.replica.mount", str(transport.memory))
