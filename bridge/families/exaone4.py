"""EXAONE 4: norms on the outputs of attention and of the feed-forward network, and none on their inputs.

In models with windows, only the layers with a window rotate queries and keys.
"""

from dataclasses import replace

from slipstream.bridge.families.olmo2 import mappings
from slipstream.bridge.hf.config import HfConfig, integer
from slipstream.bridge.model.geometry import Geometry, geometry_of, grouped_attention, window_of
from slipstream.bridge.model.rope import rope_of

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    stated = geometry_of(hf, grouped_attention(hf, qk_norm=True), rope_of(hf))
    stated = replace(stated, pre_norms=False, post_norms=True)
    if hf.get("sliding_window", 0) is None:
        return stated
    window = window_of(hf, every=_period(hf))
    within = window.layers if window is not None else ()
    unrotated = tuple(layer for layer in range(stated.n_layers) if layer not in within)
    return replace(stated, window=window, unrotated_layers=unrotated)


def _period(hf: HfConfig) -> int:
    """Read after how many layers the pattern repeats, the last of which has no window."""
    pattern = hf.get("sliding_window_pattern")
    return len(pattern) if isinstance(pattern, str) else integer(hf, "sliding_window_pattern") or 4
