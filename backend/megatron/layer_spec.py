"""Which of Megatron's layer specs the trainer builds its layers from."""

import importlib.util

from slipstream.bridge.model.layout import LayerSpec
from slipstream.configs.schema import ActorConfig


def layer_spec(actor: ActorConfig, dtype: str) -> LayerSpec:
    """That of ``actor.layer_spec``; for ``auto`` Transformer Engine where it is there and of use.

    Its attention kernels are for bfloat16, and adapters are for layers of the local spec.
    """
    if actor.layer_spec != "auto":
        return actor.layer_spec
    if actor.lora is not None or dtype != "bfloat16":
        return "local"
    if importlib.util.find_spec("transformer_engine") is None:
        return "local"
    import torch

    return "transformer_engine" if torch.cuda.is_available() else "local"
