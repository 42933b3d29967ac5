"""The order in which the weights of a recipe's layout leave the trainer."""

from slipstream.backend.megatron.layer_spec import layer_spec
from slipstream.backend.megatron.supported import require_supported
from slipstream.bridge.hf.index import ITEMSIZE
from slipstream.bridge.model.layout import LayerSpec, Layout
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.plan import ExportPlan, make_plan
from slipstream.configs.schema import ActorConfig, TransportConfig

EXPORT_BUCKET_MB = 256
"""Size of a bucket where only files are written: the engines get their weights shard by shard."""


def bucket_mb(transport: TransportConfig) -> int:
    """Return the size of the buckets in which whole HF tensors leave the trainer, in MiB."""
    return EXPORT_BUCKET_MB if transport.type == "shards" else transport.bucket_mb


def export_plan(
    actor: ActorConfig,
    dtype: str,
    transport: TransportConfig,
    spec: ModelSpec,
    *,
    layers: LayerSpec | None = None,
) -> ExportPlan:
    """Return the export plan of the recipe's layout. Raises UnevenSplit and UnsupportedModel.

    ``dtype``: that of the weights, by torch's name. ``layers``: the layer spec of
    the ranks; None: the one that ``actor.layer_spec`` gives on this machine.
    """
    layers = layers or layer_spec(actor, dtype, spec.geometry)
    layout = Layout.of(actor.parallel, layers)
    require_supported(spec.geometry, layout, shares_prefixes=actor.share_prefixes == "auto")
    return make_plan(spec, layout, bucket_mb(transport) * 2**20, ITEMSIZE[dtype])
