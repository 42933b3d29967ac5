"""The order in which the weights of a recipe's layout leave the trainer."""

from slipstream.backend.megatron.layer_spec import layer_spec
from slipstream.bridge.hf.index import ITEMSIZE
from slipstream.bridge.model.layout import LayerSpec, Layout
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.plan import ExportPlan, make_plan
from slipstream.configs.schema import RunConfig


def export_plan(config: RunConfig, spec: ModelSpec, *, layers: LayerSpec | None = None) -> ExportPlan:
    """Return the export plan of the recipe's layout. Raises UnevenSplit.

    layers: the layer spec of the ranks; None: the one that ``actor.layer_spec`` gives on this machine.
    """
    bucket_bytes = config.weights.transport.bucket_mb * 2**20
    layout = Layout.of(config.actor.parallel, layers or layer_spec(config.actor, config.model.dtype))
    return make_plan(spec, layout, bucket_bytes, ITEMSIZE[config.model.dtype])
