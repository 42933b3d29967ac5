"""What SGLang's own models load from checkpoints in fp8, on a CPU: they are built and loaded, not run.

    python -m tests.sglang_models FOLDER ...

Each FOLDER has a checkpoint ``fp8`` and the same one dequantized, ``plain``. Prints one JSON object for each:
``fp8``, the parameters that the model holds in fp8; ``wrong``, parameters that were not filled, or that stand
for other values than those of the plain model; ``error``, why the model could not be built or loaded.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.sglang_ranks import run_ranks


def on_rank(rank: int, arguments: dict[Path, Any], *, folders: list[Path]) -> None:
    import torch
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant
    from sglang.srt.model_loader.loader import DefaultModelLoader

    def loaded(folder: Path) -> dict[str, torch.Tensor]:
        """Return the parameters of a model; what was not filled is NaN."""
        config = ModelConfig.from_server_args(arguments[folder])
        loader = DefaultModelLoader(LoadConfig())
        model = loader.initialize_model_for_startup(
            model_config=config, device_config=DeviceConfig("cpu", gpu_id=0)
        )
        parameters = {
            name: parameter.data
            for name, parameter in model.named_parameters()
            if not name.endswith((".k_scale", ".v_scale"))  # of the KV cache, which no checkpoint has
        }
        for parameter in parameters.values():
            if parameter.dtype == torch.float8_e4m3fn:
                parameter.view(torch.uint8).fill_(0x7F)
            else:
                parameter.fill_(torch.nan)
        source = DefaultModelLoader.Source.init_new(config, model)
        model.load_weights(loader._get_weights_iterator(source))
        return parameters

    def compared(folder: Path) -> dict[str, object]:
        try:
            quantized, plain = loaded(folder / "fp8"), loaded(folder / "plain")
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "fp8": [], "wrong": []}
        in_fp8 = [name for name, tensor in quantized.items() if tensor.dtype == torch.float8_e4m3fn]
        wrong = []
        for name, expected in plain.items():
            tensor = quantized[name]
            if name in in_fp8:
                scale = quantized[f"{name}_scale_inv"]
                tensor = block_quant_dequant(tensor, scale, [128, 128], torch.bfloat16)
            if expected.isnan().any() or not torch.equal(tensor, expected):
                wrong.append(name)
        return {"error": "", "fp8": in_fp8, "wrong": wrong}

    for folder in folders:
        print(json.dumps({"folder": folder.name, **compared(folder)}), flush=True)


if __name__ == "__main__":
    folders = [Path(each) for each in sys.argv[1:]]
    checkpoints = [folder / kind for folder in folders for kind in ("fp8", "plain")]
    run_ranks(checkpoints, partial(on_rank, folders=folders))
