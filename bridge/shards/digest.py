"""A digest of tensors that is as cheap as reading them, on a CPU or a GPU.

The bytes are read as 32-bit words, each is multiplied by a number that depends on its place, and the products
are added in 64-bit arithmetic (a multilinear hash). It finds transfers that went wrong, not forgeries.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK = 1 << 20
"""Words at a time: the memory that a digest needs does not grow with the tensor."""

_ODD = 0x1E3779B97F4A7C15
_SHIFT = 29


def digest(tensor: Tensor) -> int:
    """Return the digest of a contiguous tensor's bytes."""
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    padding = -raw.numel() % 4
    if padding:
        raw = torch.cat([raw, raw.new_zeros(padding)])
    words = raw.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for first in range(0, words.numel(), CHUNK):
        chunk = words[first : first + CHUNK].to(torch.int64)
        place = torch.arange(first + 1, first + 1 + chunk.numel(), dtype=torch.int64, device=words.device)
        factor = place * _ODD
        factor = (factor ^ (factor >> _SHIFT)) | 1
        total += ((chunk + 1) * factor).sum()
    return int(total)


def digests(tensors: Iterable[Tensor]) -> list[int]:
    return [digest(tensor) for tensor in tensors]
