"""Models that Megatron's layers cannot compute in some layouts, although the bridge maps them.

Imports no Megatron.
"""

from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.model.geometry import Geometry, LatentAttention
from slipstream.bridge.model.layout import Layout


def require_supported(geometry: Geometry, layout: Layout) -> None:
    """Raise UnsupportedModel if a model cannot run in a layout, with the reason and what to set instead."""
    problems: list[str] = []
    if layout.layer_spec == "transformer_engine" and (reason := needs_local(geometry)):
        problems.append(f"{reason}; set actor.layer_spec to local")
    if geometry.linear_biases and geometry.experts is not None and layout.etp > 1:
        problems.append(
            f"each of the {layout.etp} tensor-parallel ranks that share an expert would add its bias; set "
            "actor.parallel.expert_tensor to 1"
        )
    if problems:
        raise UnsupportedModel(f"{geometry.family}: {'; '.join(problems)}")


def needs_local(geometry: Geometry) -> str | None:
    """Return why a model cannot run with the layers of Transformer Engine; None: it can."""
    attention = geometry.attention
    if isinstance(attention, LatentAttention) and attention.indexer is not None:
        return "Megatron's sparse attention takes no packed sequences"
    return None
