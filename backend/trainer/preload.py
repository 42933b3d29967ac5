"""Imported by the process that ranks are forked from, because torch and Megatron take seconds to import.

Nothing here may start a thread or touch a GPU, neither of which survives a fork. Where there are GPUs nothing
is imported: whether there is one cannot be asked without touching it.
"""

import warnings
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    import torch

    torch.set_num_threads(1)

    from slipstream.backend.megatron.parallel import prepare_imports

    with warnings.catch_warnings(action="ignore"):  # about what is missing for training on GPUs
        prepare_imports()

        from slipstream.backend.megatron import checkpoint, conversion
        from slipstream.backend.trainer import rank, reward_model, scoring

    __all__ = ["checkpoint", "conversion", "rank", "reward_model", "scoring"]
