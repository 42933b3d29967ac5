"""The choice of the layer spec that the trainer builds its layers from."""

import importlib.util

from slipstream.bridge.model.layout import LayerSpec
from slipstream.configs.schema import ActorConfig


def layer_spec(actor: ActorConfig, dtype: str) -> LayerSpec:
    """Return the layer spec that ``actor.layer_spec`` names, or for ``auto`` the faster one that fits.

    That is Transformer Engine on GPUs where it is installed, for bfloat16 models without adapters: its
    attention kernels need bfloat16, and adapters need layers of the local spec.
    """
    if layer_spec_on_gpus(actor, dtype) == "local" or actor.layer_spec != "auto":
        return layer_spec_on_gpus(actor, dtype)
    if importlib.util.find_spec("transformer_engine") is None:
        return "local"
    import torch

    return "transformer_engine" if torch.cuda.is_available() else "local"


def layer_spec_on_gpus(actor: ActorConfig, dtype: str) -> LayerSpec:
    """Return the layer spec of ``actor.layer_spec`` on machines with GPUs and Transformer Engine."""
    if actor.layer_spec != "auto":
        return actor.layer_spec
    return "transformer_engine" if actor.lora is None and dtype == "bfloat16" else "local"
