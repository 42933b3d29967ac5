"""What SGLang's own functions make of weights in fp8. In a process of its own, which imports SGLang.

    python -m tests.sglang_fp8 IN.safetensors OUT.safetensors

For each weight ``X`` of IN, OUT has ``X.values`` and ``X.scale`` of ``per_block_cast_to_fp8``, and
``X.float32`` and ``X.bfloat16`` of ``block_quant_dequant`` on these.
"""

import sys

import torch
from safetensors.torch import load_file, save_file

from slipstream.rollout.engine.server_process import let_import_sglang

if __name__ == "__main__":
    let_import_sglang()
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant, per_block_cast_to_fp8

    results: dict[str, torch.Tensor] = {}
    for name, weight in load_file(sys.argv[1]).items():
        values, scale = per_block_cast_to_fp8(weight)
        results |= {f"{name}.values": values, f"{name}.scale": scale}
        for dtype in ("float32", "bfloat16"):
            plain = block_quant_dequant(values, scale, [128, 128], getattr(torch, dtype))
            results[f"{name}.{dtype}"] = plain
    save_file({name: tensor.contiguous() for name, tensor in results.items()}, sys.argv[2])
