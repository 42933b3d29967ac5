"""Fills SGLang's own models with what plans send, and compares them with SGLang's loading of the checkpoint.

    python -m tests.sglang_matrix TENSOR EXPERT OUT FOLDER ...

The ranks of one engine build the model of each FOLDER, a checkpoint, trace its loader, and are filled from
the shards of trainers of every layout that fits the model. Every rank appends one JSON object for each model
and layout to OUT/RANK.jsonl: ``wrong``, names of parameters and buffers whose bits differ from those that
SGLang's loader gives; ``unfilled``, those that neither has filled; ``tensors``, how many there are.
``error`` says why a model could not be built or traced.
"""

import json
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tests.bridge_cases import LAYOUTS, same_bits, trainer_shards
from tests.sglang_ranks import run_ranks


def on_rank(rank: int, arguments: dict[Path, Any], *, out: Path) -> None:
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader

    from slipstream.bridge.engine.loader_trace import Wanted, trace
    from slipstream.bridge.families import model_spec
    from slipstream.bridge.model.layout import Layout
    from slipstream.bridge.shards.plan import entries
    from slipstream.bridge.shards.regions import Region
    from slipstream.bridge.shards.sends import EngineSeat, Sends, indexed

    def built(folder: Path) -> torch.nn.Module:
        model = DefaultModelLoader(LoadConfig()).initialize_model_for_startup(
            model_config=ModelConfig.from_server_args(arguments[folder]),
            device_config=DeviceConfig("cpu", gpu_id=0),
        )
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        return model

    def derive(model: torch.nn.Module) -> None:
        if hasattr(model, "post_load_weights"):
            model.post_load_weights()

    def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}

    def exchanged(name: str, regions: list[Region]) -> dict[str, Any]:
        """Return the tables of all ranks, by rank."""
        (out / f"{name}-{rank}").write_bytes(msgspec.msgpack.encode(regions))
        dist.barrier()
        tables = {}
        for other in range(dist.get_world_size()):
            decoded = msgspec.msgpack.decode((out / f"{name}-{other}").read_bytes(), type=list[Region])
            tables[str(other)] = indexed(decoded)
        return tables

    def compared(folder: Path) -> list[dict[str, object]]:
        spec = model_spec(folder)
        float32 = {
            name for entry in entries(spec, Layout()) if entry.mapping.float32 for name in entry.hf_names
        }
        tensors = {
            name: tensor if name in float32 else tensor.bfloat16()
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        loaded, model = built(folder), built(folder)
        loaded.load_weights((name, tensor.clone()) for name, tensor in tensors.items())  # it may change them
        derive(loaded)
        table = trace(model, [Wanted(name, tuple(t.shape), t.dtype) for name, t in tensors.items()])
        tables = exchanged(folder.name, table.regions)
        expected, found = state(loaded), state(model)
        before = {name: tensor.clone() for name, tensor in found.items()}
        unfilled = [name for name, t in expected.items() if t.is_floating_point() and bool(t.isnan().any())]
        results = []
        for name, layout in LAYOUTS.items():
            if layout.expert * layout.etp > layout.tensor and spec.geometry.experts is None:
                continue
            for tensor_name, tensor in found.items():
                tensor.copy_(before[tensor_name])
            for sender in range(layout.world_size):
                shards = trainer_shards(spec, layout, sender, tensors)
                sends = Sends(spec, layout, sender, packed=500, direct=2000)
                messages = sends.to_engine([*tables], tables, EngineSeat(0, 1)).get(rank, ())
                for move in (move for message in messages for move in message.moves):
                    source = torch.as_strided(
                        shards[move.source], move.shape, move.source_stride, move.source_offset
                    )
                    target = found[move.target]
                    offset = target.storage_offset() + move.target_offset
                    torch.as_strided(target, move.shape, move.target_stride, offset).copy_(source)
            derive(model)
            wrong = [each for each, tensor in expected.items() if not same_bits(found[each], tensor)]
            results.append(
                {"layout": name, "wrong": wrong, "unfilled": unfilled, "tensors": len(expected), "error": ""}
            )
        return results

    with (out / f"{rank}.jsonl").open("w") as file:
        for folder in arguments:
            try:
                with torch.no_grad():
                    results = compared(folder)
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                told = f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
                results = [{"layout": "", "error": told}]
            for result in results:
                file.write(json.dumps({"model": folder.name, "rank": rank, **result}) + "\n")
            file.flush()
            dist.barrier()


if __name__ == "__main__":
    _, tensor, expert, out, *folders = sys.argv
    run_ranks(
        [Path(folder) for folder in folders],
        partial(on_rank, out=Path(out)),
        tensor=int(tensor),
        expert=int(expert),
    )
