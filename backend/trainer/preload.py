"""Imports for the process that ranks are forked from: torch and Megatron take seconds to import.

Nothing here may start a thread or touch a GPU, neither of which survives a fork. On a machine with GPUs
nothing is imported, because torch cannot say whether there is one without touching it.
"""

import warnings
from pathlib import Path

from slipstream.rollout.system.garbage import kept_for_good

if not Path("/dev/nvidiactl").exists():
    with kept_for_good(), warnings.catch_warnings(action="ignore"):  # about what is missing for GPUs
        import torch

        torch.set_num_threads(1)

        from slipstream.backend.megatron.parallel import prepare_imports

        prepare_imports()

        from slipstream.backend.megatron import checkpoint, conversion
        from slipstream.backend.trainer import rank, reward_model, scoring

    __all__ = ["checkpoint", "conversion", "rank", "reward_model", "scoring"]
