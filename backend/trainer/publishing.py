"""The sender's publisher, as the recipe wants it."""

from uuid import uuid4

from slipstream.bridge.publish.publication import Timeouts
from slipstream.bridge.publish.publisher import Publisher, Transport
from slipstream.bridge.shards.plan import ExportPlan
from slipstream.bridge.transport.delta import DeltaTransport
from slipstream.bridge.transport.disk import DiskTransport
from slipstream.bridge.transport.distributed import DistributedTransport
from slipstream.bridge.transport.tensor import TensorTransport
from slipstream.configs.schema import RunConfig

VERSIONS = "weights"
"""Of the disk transport, in the run folder."""


def make_publisher(config: RunConfig, plan: ExportPlan, *, address: str, backend: str) -> Publisher:
    """``address``: of this process, for the engines. ``backend``: nccl or gloo."""
    weights = config.weights
    answer_s = min(weights.answer_timeout_s, weights.timeout_s)
    timeouts = Timeouts(transfer_s=weights.timeout_s, answer_s=answer_s)
    return Publisher(
        _transport(config, plan, address, backend, timeouts),
        # Colocated engines have been stopped for the training step already.
        interrupt=None if config.rollout.engine.colocated else weights.interrupt,
        timeouts=timeouts,
    )


def _transport(
    config: RunConfig, plan: ExportPlan, address: str, backend: str, timeouts: Timeouts
) -> Transport:
    transport = config.weights.transport
    match transport.type:
        case "distributed":
            label = f"weights-{uuid4().hex}"
            return DistributedTransport(address=address, backend=backend, timeouts=timeouts, label=label)
        case "tensor":
            return TensorTransport()
        case "disk":
            return DiskTransport(transport.path or config.run.folder / VERSIONS, plan.spec.path)
        case "delta":
            return DeltaTransport(plan, config.model.dtype)
