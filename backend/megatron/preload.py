"""Imported by the process that ranks are forked from (``backend.ranks``): torch and Megatron take seconds.

Nothing here may start a thread or touch a GPU, neither of which survives a fork. Where there are GPUs nothing
is imported: whether there is one cannot be asked without touching it.
"""

import warnings
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    import torch

    torch.set_num_threads(1)

    from backend.megatron.parallel import prepare_imports

    with warnings.catch_warnings(action="ignore"):  # about what is missing for training on GPUs
        prepare_imports()

        from backend import reward_model, scoring, trainer
        from backend.megatron import checkpoint, conversion

    __all__ = ["checkpoint", "conversion", "reward_model", "scoring", "trainer"]
