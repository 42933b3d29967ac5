"""Traces SGLang's loader of a model of any size, which has no memory, on every rank of an engine.

    python -m benchmarks.publish.traces FOLDER TENSOR EXPERT OUT

FOLDER has a ``config.json``. Every rank builds SGLang's model on the device ``meta``, as it would build it in
an engine of TENSOR ranks, and traces its loader. The file OUT/RANK gets its regions, in MessagePack.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from slipstream.backend.trainer.publishing import published_tensors
from slipstream.bridge.engine.loader_trace import Wanted, trace
from slipstream.bridge.families import model_spec
from tests.sglang_ranks import run_ranks


def on_rank(rank: int, arguments: dict[Path, Any], *, out: Path) -> None:
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader
    from sglang.srt.model_loader.utils import get_model_architecture

    [(folder, own)] = arguments.items()
    config = ModelConfig.from_server_args(own)
    get_model_architecture(config)  # imports the model's file, which makes tensors of its own
    with loader.set_default_torch_dtype(config.dtype), torch.device("meta"):
        model = loader._initialize_model(config, LoadConfig(), None)
    published = published_tensors(model_spec(folder), "bfloat16")
    wanted = [Wanted(each.name, each.shape, getattr(torch, each.dtype)) for each in published]
    (out / str(rank)).write_bytes(msgspec.msgpack.encode(trace(model, wanted).regions))


if __name__ == "__main__":
    _, folder, tensor, expert, out = sys.argv
    run_ranks([Path(folder)], partial(on_rank, out=Path(out)), tensor=int(tensor), expert=int(expert))
