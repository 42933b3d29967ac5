"""The arithmetic of quantized weights. Formats and names are in ``hf.quantization``.

The results equal those of SGLang (``block_quant_dequant``, ``per_block_cast_to_fp8``) and of the library
compressed-tensors bit for bit.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.bridge.hf.quantization import BITS, BLOCK, FP8_SUFFIX, EngineFp8

LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_AMAX = 1e-4
"""Smallest magnitude that a block is scaled to; a block of zeros has it. The value is SGLang's."""

MXFP4_VALUES = tuple(
    sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
)
"""The values of the 16 codes of e2m1: the highest bit is the sign."""

ROWS_AT_A_TIME = 16 * BLOCK
"""Rows that are quantized at a time, which bounds the memory needed besides the result."""


def dequantized_fp8(values: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Return values * scale in float32.

    ``values``: float8_e4m3fn [rows, columns]. ``scale``: [ceil(rows / block[0]), ceil(columns / block[1])].
    """
    weight = values.to(torch.float32)
    by_column = scale.to(torch.float32).repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    for rows, factors in zip(torch.split(weight, block[0]), by_column, strict=True):
        rows.mul_(factors)
    return weight


def dequantized_int4(packed: Tensor, scale: Tensor, columns: int) -> Tensor:
    """Return values * scale in the dtype of ``scale``.

    ``packed``: int32 [rows, ceil(columns / 8)]; the lowest bits of an integer hold the first of its values,
    plus 8. ``scale``: [rows, groups]; the groups have the same number of columns.
    """
    shifts = torch.arange(0, 32, BITS, dtype=torch.int32, device=packed.device)
    unsigned = ((packed.unsqueeze(-1) >> shifts) & (2**BITS - 1)).flatten(1)[:, :columns]
    weight = (unsigned - 2 ** (BITS - 1)).to(scale.dtype)
    rows, groups = scale.shape
    return (weight.reshape(rows, groups, -1) * scale.unsqueeze(-1)).view(rows, columns)


def dequantized_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the weight of an expert in bfloat16: [inputs, outputs].

    ``blocks``: uint8 [outputs, groups, 16]; the low bits of a byte hold the first of its two values.
    ``scales``: uint8 [outputs, groups], exponents of two, plus 127.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).to(torch.int64)
    values = torch.tensor(MXFP4_VALUES, device=blocks.device)[codes]
    values *= scales.view(torch.float8_e8m0fnu).to(torch.float32).unsqueeze(-1)
    return values.flatten(1).T.to(torch.bfloat16)


def quantized_fp8(weight: Tensor, *, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Return a weight in float8_e4m3fn and float32 scales for its blocks of 128 x 128.

    ``weight``: [rows, columns]; blocks at its edges may be smaller. ``ue8m0``: round the scales up to powers
    of two. Blocks do not depend on each other: a part that begins at a multiple of 128 in both dimensions,
    and ends at one or at the edge, is quantized as within the whole.
    """
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    scales = [
        _quantize(source, target, ue8m0)
        for source, target in zip(
            *(torch.split(each, ROWS_AT_A_TIME) for each in (weight, values)), strict=True
        )
    ]
    return values, torch.cat(scales)


def engine_parts(fp8: EngineFp8 | None, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return the tensors by which an engine knows an HF tensor. ``fp8``: None: it holds nothing in fp8."""
    if fp8 is None or not fp8.quantizes(name):
        return [(name, tensor)]
    values, scale = quantized_fp8(tensor, ue8m0=fp8.ue8m0)
    return [(name, values), (name + FP8_SUFFIX, scale)]


def _quantize(weight: Tensor, target: Tensor, ue8m0: bool) -> Tensor:
    """Quantize ``weight`` into ``target``. Returns the scales."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(-1, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    largest = blocks.abs().float().amax((1, 3), keepdim=True).clamp(SMALLEST_AMAX)
    scale = largest / LARGEST
    if ue8m0:
        scale = _power_of_two(scale)
    values = (blocks * (1.0 / scale)).to(torch.float8_e4m3fn)
    target.copy_(values.view(padded.shape)[:rows, :columns])
    return scale.view(blocks.shape[0], blocks.shape[2])


def _power_of_two(scale: Tensor) -> Tensor:
    """Return the smallest powers of two that are not below ``scale``: positive, normal float32."""
    bits = scale.view(torch.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)
