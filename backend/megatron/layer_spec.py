"""The choice of the layer spec that the trainer builds its layers from."""

import importlib.util

from slipstream.bridge.model.layout import LayerSpec
from slipstream.configs.schema import ActorConfig


def layer_spec(actor: ActorConfig, dtype: str) -> LayerSpec:
    """Return the layer spec that ``actor.layer_spec`` names, or for ``auto`` the faster one that fits.

    That is Transformer Engine on GPUs where it is installed, for bfloat16 models without adapters: its
    attention kernels need bfloat16, and adapters need layers of the local spec.
    """
    if actor.layer_spec != "auto":
        return actor.layer_spec
    if actor.lora is not None or dtype != "bfloat16":
        return "local"
    if importlib.util.find_spec("transformer_engine") is None:
        return "local"
    import torch

    return "transformer_engine" if torch.cuda.is_available() else "local"
