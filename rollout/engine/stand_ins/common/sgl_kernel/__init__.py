"""The functions of sgl_kernel that SGLang calls on a CPU without AMX, in PyTorch. All others raise if called.

Every process of the server imports this module. So it also replaces ``torch.cuda.synchronize``, which
SGLang's weight checker calls on every device, by a function that does nothing.

SGLang takes the presence of ``torch.ops.sgl_kernel.convert_weight_packed`` for AMX. It stays absent, so that
every layer takes its native path.
"""

import torch

__version__ = "0.0.0+cpu"

torch.cuda.synchronize = lambda device=None: None


def assign_req_to_token_pool_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    """Write consecutive runs of ``out_cache_loc`` into [start, end) of the given rows of ``req_to_token``."""
    taken = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        run = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = run.to(req_to_token.dtype)
        taken += end - start


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def unavailable(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU or AMX")

    return unavailable
