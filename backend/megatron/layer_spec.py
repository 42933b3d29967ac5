"""The choice of the layer spec that the trainer builds its layers from."""

import importlib.util

from slipstream.backend.megatron.supported import needs_local
from slipstream.bridge.model.geometry import Geometry
from slipstream.bridge.model.layout import LayerSpec
from slipstream.configs.schema import ActorConfig


def layer_spec(actor: ActorConfig, dtype: str, geometry: Geometry) -> LayerSpec:
    """Return the layer spec that ``actor.layer_spec`` names, or for ``auto`` the faster one that fits.

    That is Transformer Engine on GPUs where it is installed, for bfloat16 models without adapters: its
    attention kernels need bfloat16, and adapters need layers of the local spec. So do sparse attention and
    shared prefixes.
    """
    on_gpus = layer_spec_on_gpus(actor, dtype, geometry)
    if on_gpus == "local" or actor.layer_spec != "auto":
        return on_gpus
    if importlib.util.find_spec("transformer_engine") is None:
        return "local"
    import torch

    return "transformer_engine" if torch.cuda.is_available() else "local"


def layer_spec_on_gpus(actor: ActorConfig, dtype: str, geometry: Geometry) -> LayerSpec:
    """Return the layer spec of ``actor.layer_spec`` on machines with GPUs and Transformer Engine."""
    if actor.layer_spec != "auto":
        return actor.layer_spec
    plain = actor.lora is None and actor.share_prefixes == "off"
    fits = plain and dtype == "bfloat16" and needs_local(geometry) is None
    return "transformer_engine" if fits else "local"
