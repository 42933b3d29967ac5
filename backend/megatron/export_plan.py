"""The order in which a recipe's layout sends its weights out of the trainer."""

from slipstream.backend.megatron.layer_spec import layer_spec
from slipstream.bridge.hf.index import ITEMSIZE
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.plan import ExportPlan, make_plan
from slipstream.configs.schema import RunConfig


def export_plan(config: RunConfig, spec: ModelSpec) -> ExportPlan:
    """That of the recipe's layout. Raises UnevenSplit."""
    bucket_bytes = config.weights.transport.bucket_mb * 2**20
    layout = Layout.of(config.actor.parallel, layer_spec(config.actor, config.model.dtype))
    return make_plan(spec, layout, bucket_bytes, ITEMSIZE[config.model.dtype])
