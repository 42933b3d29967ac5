"""Engines in fp8: what they are sent, over which transports, and which models and layouts they can hold."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.bridge.families import model_spec, spec_of
from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.hf.copy import write_copy
from slipstream.bridge.hf.index import stored_tensors
from slipstream.bridge.hf.quantization import BlockFp8, EngineFp8
from slipstream.bridge.hf.quantized import dequantized_fp8, quantized_fp8
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.publish.bucket_stream import BucketStream
from slipstream.bridge.publish.publication import Publication, Timeouts
from slipstream.bridge.shards.fp8 import engine_fp8, fp8_problems, is_stored_for_engines, sent_by
from slipstream.bridge.shards.load_hf import load_hf
from slipstream.bridge.shards.plan import ExportPlan, make_plan
from slipstream.bridge.shards.quantize import engine_buckets
from slipstream.bridge.transport import patches
from slipstream.bridge.transport.delta import DeltaTransport
from slipstream.bridge.transport.disk import DiskTransport
from slipstream.bridge.transport.replica import Opening, Replica, StartingWeights
from slipstream.configs.published import MODELS
from tests.bridge_cases import CONFIG, DEEPSEEK, empty_parameters
from tests.quantized_models import FP8, INT4, write_quantized

MOE = {
    "model_type": "deepseek_v3",
    **CONFIG,
    **DEEPSEEK,
    "num_hidden_layers": 2,
    "hidden_size": 200,
    "intermediate_size": 320,
    "moe_intermediate_size": 140,
    "n_routed_experts": 2,
}
MOE_SPEC = spec_of(MOE, Path())
FORMAT = EngineFp8()


def weights(spec: ModelSpec, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    plan = make_plan(spec, Layout(), 10**6, 2)
    return {
        name: torch.randn(shape, generator=generator).to(torch.float32 if bucket.float32 else torch.bfloat16)
        for bucket in plan.buckets
        for name, shape in zip(bucket.hf_names, bucket.hf_shapes, strict=True)
    }


def exported(plan: ExportPlan, tensors: dict[str, torch.Tensor]):
    """Yield the buckets that an export would make; a bucket that is no longer in use is overwritten."""
    previous = None
    for number, bucket in enumerate(plan.buckets, start=1):
        if previous is not None:
            previous.zero_()
        flat = torch.cat([tensors[name].flatten() for name in bucket.hf_names])
        yield FlatBucket(bucket.hf_names, bucket.hf_shapes, flat, number == len(plan.buckets))
        previous = flat


def expected(tensors: dict[str, torch.Tensor], ue8m0: bool = True) -> dict[str, torch.Tensor]:
    """Return what engines should hold."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.split(".")[-2].endswith(("_proj", "_proj_with_mqa")):
            result[name], result[f"{name}_scale_inv"] = quantized_fp8(tensor, ue8m0=ue8m0)
        else:
            result[name] = tensor
    return result


def in_files(folder: Path) -> dict[str, torch.Tensor]:
    return {name: load_file(stored.file)[name] for name, stored in stored_tensors(folder).items()}


def same(tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return tensors.keys() == others.keys() and all(
        tensors[name].dtype == others[name].dtype
        and torch.equal(tensors[name].view(torch.uint8), others[name].view(torch.uint8))
        for name in tensors
    )


PLAN = make_plan(MOE_SPEC, Layout(), 300_000, 2)


# ---- what engines get


def test_a_plan_says_beforehand_what_engines_get():
    buckets = list(engine_buckets(exported(PLAN, weights(MOE_SPEC, 0)), FORMAT))
    planned = sent_by(PLAN, "bfloat16", FORMAT)
    assert len(PLAN.buckets) > 2
    assert [(b.names, b.shapes, f"torch.{t.dtype}") for b, t in zip(buckets, planned, strict=True)] == [
        (t.names, t.shapes, str(b.flat.dtype)) for b, t in zip(buckets, planned, strict=True)
    ]
    assert [bucket.last for bucket in buckets] == [False] * (len(buckets) - 1) + [True]


def test_engines_without_a_quantization_get_the_buckets_as_they_are():
    buckets = list(exported(PLAN, weights(MOE_SPEC, 0)))
    assert all(a is b for a, b in zip(engine_buckets(iter(buckets), None), buckets, strict=True))


def test_quantized_buckets_do_not_share_the_memory_of_an_export():
    tensors = weights(MOE_SPEC, 0)
    got = dict(pair for b in list(engine_buckets(exported(PLAN, tensors), FORMAT)) for pair in b.tensors())
    assert same(got, expected(tensors))


def test_a_sender_that_stops_early_leaves_no_rank_waiting():
    taken = []
    source = (taken.append(bucket) or bucket for bucket in exported(PLAN, weights(MOE_SPEC, 0)))
    buckets = engine_buckets(source, FORMAT)
    next(buckets)
    buckets.close()
    assert len(taken) == len(PLAN.buckets)


def test_ranks_that_are_not_the_sender_have_nothing_to_quantize():
    assert list(engine_buckets(iter([None, None]), FORMAT)) == [None, None]


# ---- transports


def publish(transport, engine, version: int, buckets) -> None:
    async def run() -> None:
        publication = Publication(version, [engine], Timeouts(60, 60))
        with ThreadPoolExecutor(1) as thread:
            stream = BucketStream(engine_buckets(buckets, FORMAT), thread)
            await transport.prepare(publication, stream)
            await transport.update(publication, stream)
            await stream.exhaust()
        assert publication.report.failed == {}

    asyncio.run(run())


class Engine:
    """Holds what it loads from files."""

    name = address = "engine"
    ranks = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.replica = Replica(folder, StartingWeights(folder / "model"))
        self.sent = 0
        self.tensors: dict[str, torch.Tensor] = {}

    async def load_files(self, folder, *, version):
        self.folder = folder
        self.tensors = in_files(folder)

    async def replica_version(self):
        return self.replica.version()

    async def replica_begin(self, files):
        self.replica.begin(msgspec.msgpack.decode(files, type=Opening))

    async def replica_patch(self, number, patch):
        self.sent += len(patch)
        self.replica.patch(number, patches.decoded(patch))

    async def replica_commit(self, version):
        self.replica.commit(version)

    async def load_replica(self, *, version):
        self.tensors = in_files(self.folder)


def test_versions_on_disk_are_checkpoints_in_fp8(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/config.json").write_text(json.dumps({**MOE, "torch_dtype": "float32"}))
    config = FORMAT.config(weights(MOE_SPEC, 0))
    transport = DiskTransport(
        tmp_path / "versions", tmp_path / "source", dtype=torch.bfloat16, quantization=config
    )
    engine = Engine(tmp_path / "engine")
    for version in (1, 2):
        tensors = weights(MOE_SPEC, version)
        publish(transport, engine, version, exported(PLAN, tensors))
        assert same(engine.tensors, expected(tensors))
    hf = json.loads((engine.folder / "config.json").read_text())
    assert hf["torch_dtype"] == "bfloat16"
    assert hf["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
        "modules_to_not_convert": ["lm_head", "model.embed_tokens", "model.layers.1.mlp.gate"],
    }


def test_replicas_hold_fp8_and_follow_by_patches(tmp_path):
    engine, transport = Engine(tmp_path), DeltaTransport(PLAN, tmp_path / "model", "bfloat16", FORMAT)
    tensors = weights(MOE_SPEC, 1)
    publish(transport, engine, 1, exported(PLAN, tensors))
    assert same(engine.tensors, expected(tensors))
    whole, engine.sent = engine.sent, 0
    for tensor in tensors.values():
        tensor.flatten()[::100] *= -1.01
    publish(transport, engine, 2, exported(PLAN, tensors))
    assert same(engine.tensors, expected(tensors))
    assert engine.sent < whole / 5


# ---- where engines start from


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    spec = model_spec(folder)
    [parameters] = every = empty_parameters(spec, Layout(), 0, torch.bfloat16)
    load_hf(spec, Layout(), 0, every)
    return parameters


@pytest.mark.parametrize("quantization", [None, FP8, INT4])
def test_a_copy_for_engines_in_fp8_holds_what_a_version_would(tmp_path, quantization):
    source, copy = tmp_path / "source", tmp_path / "copy"
    hf = {**MOE, "hidden_size": 192, "moe_intermediate_size": 160, "v_head_dim": 16, "q_lora_rank": 64}
    hf |= {"kv_lora_rank": 32}
    values = write_quantized(source, hf, quantization or FP8)
    if quantization is None:
        save_file({n: v.to(torch.bfloat16) for n, v in values.items()}, source / "model.safetensors")
        (source / "config.json").write_text(json.dumps(hf))
    spec = model_spec(source)
    fp8 = engine_fp8("fp8", spec)
    write_copy(source, spec.quantization, copy, dtype=torch.bfloat16, fp8=fp8)
    plain = {name: value.to(torch.bfloat16) for name, value in values.items()}
    stored = in_files(copy)
    quantized = expected(plain, ue8m0=quantization is not FP8)
    for name in (name for name in quantized if f"{name}_scale_inv" in quantized):
        assert torch.equal(stored[name].view(torch.uint8), quantized[name].view(torch.uint8))
        assert torch.equal(stored[f"{name}_scale_inv"], quantized[f"{name}_scale_inv"])
    assert stored.keys() == quantized.keys()
    assert is_stored_for_engines(model_spec(copy), fp8)
    assert loaded(copy).keys() == loaded(source).keys()


def test_a_dequantized_copy_loads_like_the_checkpoint(tmp_path):
    write_quantized(tmp_path / "source", MOE, FP8)
    spec = model_spec(tmp_path / "source")
    write_copy(spec.path, spec.quantization, tmp_path / "copy", dtype=torch.bfloat16, fp8=None)
    ours, copied = loaded(tmp_path / "source"), loaded(tmp_path / "copy")
    assert all(torch.equal(ours[name], copied[name]) for name in ours)
    assert is_stored_for_engines(model_spec(tmp_path / "copy"), None)


def test_engines_start_from_a_checkpoint_only_if_it_holds_what_they_get_later(tmp_path):
    write_quantized(tmp_path / "fp8", MOE, FP8)
    spec = model_spec(tmp_path / "fp8")
    assert is_stored_for_engines(spec, engine_fp8("fp8", spec))
    assert not is_stored_for_engines(spec, None)
    file, name = tmp_path / "fp8/model.safetensors", "model.layers.0.self_attn.o_proj.weight"
    tensors = load_file(file)
    scale = tensors.pop(f"{name}_scale_inv")
    tensors[name] = dequantized_fp8(tensors[name], scale, (128, 128)).to(torch.bfloat16)
    save_file(tensors, file)
    assert not is_stored_for_engines(spec, engine_fp8("fp8", spec)), (
        "engines would get this projection in fp8"
    )
    smaller_blocks = replace(spec, quantization=BlockFp8((64, 64), ue8m0=False))
    assert not is_stored_for_engines(smaller_blocks, engine_fp8("fp8", spec))


def test_scales_are_of_the_kind_that_the_checkpoint_has():
    """A second rounding would change weights that training has not changed."""
    assert EngineFp8.of(None).ue8m0
    assert EngineFp8.of(BlockFp8((128, 128), ue8m0=True)).ue8m0
    assert not EngineFp8.of(BlockFp8((128, 128), ue8m0=False)).ue8m0


# ---- what engines can hold


def real(name: str) -> ModelSpec:
    hf = json.loads((MODELS / name / "config.json").read_text())
    hf.pop("quantization_config", None)
    return spec_of(hf, Path())


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("DeepSeek-V3", 16), ("Qwen3-235B-A22B", 4), ("Qwen3-8B", 4), ("Qwen3-32B", 8)],
)
def test_real_models_can_be_held_in_fp8(name, ranks):
    assert fp8_problems(real(name), FORMAT, ranks=ranks) == []


def test_sizes_that_sglang_cannot_multiply_are_named():
    """SGLang refuses them when it builds the model; 1536 columns of an expert are 192 on each of 8 ranks."""
    [problem] = fp8_problems(real("Qwen3-235B-A22B"), FORMAT, ranks=8)
    assert "mlp.experts.gate_proj has 192 rows on each of 8 ranks" in problem
    assert "mlp.experts.down_proj has 192 columns on each of 8 ranks" in problem
    assert "self_attn" not in problem
    assert fp8_problems(real("Qwen3-235B-A22B"), FORMAT, ranks=8, expert_ranks=8) == []
    [problem] = fp8_problems(real("SmolLM2-135M-Instruct"), FORMAT, ranks=1)
    assert "self_attn.q_proj has 576 rows and 576 columns on each of 1 ranks" in problem


def test_families_that_sglang_does_not_load_or_that_were_not_compared_are_refused(monkeypatch):
    with pytest.raises(
        UnsupportedModel, match=r"not supported for .* 'llama': SGLang .* without their scales"
    ):
        engine_fp8("fp8", real("Llama-3.1-70B-Instruct"))
    monkeypatch.setattr("slipstream.bridge.shards.fp8.FP8_FAMILIES", frozenset({"qwen2"}))
    with pytest.raises(
        UnsupportedModel, match=r"not supported for .* 'qwen3': .*not verified. It is for qwen2"
    ):
        engine_fp8("fp8", real("Qwen3-8B"))


def test_only_projections_of_decoder_layers_are_quantized():
    for name in weights(MOE_SPEC, 0):
        module = name.split(".")[-2]
        assert FORMAT.quantizes(name) == (module.endswith(("_proj", "_with_mqa"))), name
    assert not FORMAT.quantizes("model.layers.0.self_attn.q_proj.bias")
    assert not FORMAT.quantizes("vision_tower.encoder.layers.0.self_attn.q_proj.weight")
    assert FORMAT.quantizes("model.layers.0.block_sparse_moe.experts.3.w1.weight")
    assert FORMAT.quantizes("model.language_model.layers.0.self_attn.q_proj.weight")
