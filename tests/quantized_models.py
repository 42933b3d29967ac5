"""Checkpoints of random quantized weights, with the values that the weights stand for."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized import pack_to_int32
from safetensors.torch import save_file

from slipstream.bridge.families import spec_of
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.shards.plan import entries

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
"""DeepSeek-V3's ``quantization_config``."""

INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "actorder": None,
            },
        }
    },
}
"""Kimi-K2-Thinking's ``quantization_config``, shortened."""


def expanded(scale: torch.Tensor, rows: int, columns: int, shape: Iterable[int]) -> torch.Tensor:
    """Return the factor of each element of a weight in float64. ``rows`` and ``columns``: of a block."""
    m, n = shape
    row_M, column_N = torch.arange(m) // rows, torch.arange(n) // columns
    return scale.double()[row_M[:, None], column_N[None, :]]


def fp8_parts(
    name: str, shape: tuple[int, ...], generator: torch.Generator, block=(128, 128), scale=torch.float32
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a block-fp8 weight and its values in float64."""
    q = (100 * torch.randn(shape, generator=generator)).clamp(-448, 448).to(torch.float8_e4m3fn)
    blocks = [-(-size // length) for size, length in zip(shape, block, strict=True)]
    s = (torch.rand(blocks, generator=generator) * 1e-3 + 1e-5).float()
    s = torch.exp2(s.log2().ceil()).to(scale) if scale == torch.float8_e8m0fnu else s.to(scale)
    value = q.double() * expanded(s.float(), *block, shape)
    return {name: q, f"{name}_scale_inv": s}, value


def int4_parts(
    name: str, shape: tuple[int, ...], generator: torch.Generator, group=32, scale=torch.bfloat16
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a packed int4 weight and its values in float64."""
    rows, columns = shape
    q = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)
    s = (torch.rand(rows, columns // group, generator=generator) * 1e-2 + 1e-4).to(scale)
    value = q.double() * expanded(s.float(), 1, group, shape)
    stem = name.removesuffix("weight")
    return {
        f"{stem}weight_packed": pack_to_int32(q, 4),
        f"{stem}weight_scale": s,
        f"{stem}weight_shape": torch.tensor(shape),
    }, value.to(scale).double()


def write_quantized(
    folder: Path, hf: Mapping[str, Any], config: Mapping[str, Any], seed: int = 0, **options: Any
) -> dict[str, torch.Tensor]:
    """Write a checkpoint whose projections are quantized. Returns the values of all weights in float64."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**hf, "quantization_config": config}))
    generator = torch.Generator().manual_seed(seed)
    make = fp8_parts if config["quant_method"] == "fp8" else int4_parts
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for entry in entries(spec_of(hf, folder), Layout()):
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True):
            if name.endswith("_proj.weight") or name.endswith("_with_mqa.weight"):
                parts, values[name] = make(name, shape, generator, **options)
                stored |= parts
            else:
                stored[name] = torch.randn(shape, generator=generator)
                values[name] = stored[name].double()
    save_file(stored, folder / "model.safetensors")
    return values
