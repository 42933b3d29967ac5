"""Models that Megatron's layers cannot compute in some layouts, although the bridge maps them.

Imports no Megatron.
"""

from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.model.geometry import Geometry, LatentAttention
from slipstream.bridge.model.layout import Layout


def require_supported(geometry: Geometry, layout: Layout, *, shares_prefixes: bool = False) -> None:
    """Raise UnsupportedModel if a model cannot run in a layout, with the reason and what to set instead.

    ``shares_prefixes``: prefixes of trajectories are to be computed once.
    """
    problems: list[str] = []
    if layout.layer_spec == "transformer_engine" and (reason := needs_local(geometry)):
        problems.append(f"{reason}; set actor.layer_spec to local")
    if geometry.linear_biases and geometry.experts is not None and layout.etp > 1:
        problems.append(
            f"each of the {layout.etp} tensor-parallel ranks that share an expert would add its bias; set "
            "actor.parallel.expert_tensor to 1"
        )
    if shares_prefixes and (kind := _unshared_attention(geometry)):
        problems.append(f"its {kind} cannot compute shared prefixes once; set actor.share_prefixes to off")
    if problems:
        raise UnsupportedModel(f"{geometry.family}: {'; '.join(problems)}")


def _unshared_attention(geometry: Geometry) -> str | None:
    """Return the kind of attention that takes no keys of other trajectories; None: there is none."""
    if geometry.delta_layers:
        return "linear attention"
    attention = geometry.attention
    sparse = isinstance(attention, LatentAttention) and attention.indexer is not None
    return "sparse attention" if sparse else None


def needs_local(geometry: Geometry) -> str | None:
    """Return why a model cannot run with the layers of Transformer Engine; None: it can."""
    attention = geometry.attention
    if isinstance(attention, LatentAttention) and attention.indexer is not None:
        return "Megatron's sparse attention takes no packed sequences"
    return None
