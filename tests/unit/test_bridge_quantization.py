"""Quantized checkpoints: they are loaded as the values that they stand for, or refused with the reason."""

import json
from dataclasses import replace

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from slipstream.bridge.families import model_spec, spec_of
from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.hf.copy import write_copy
from slipstream.bridge.hf.files import write_hf
from slipstream.bridge.hf.index import HfCheckpointError
from slipstream.bridge.hf.quantization import BlockFp8, PackedInt4, quantization_of
from slipstream.bridge.hf.quantized import dequantized_fp8, dequantized_int4, quantized_fp8
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.shards.check import check_tensors
from slipstream.bridge.shards.load_hf import load_hf
from slipstream.bridge.shards.plan import entries
from tests.bridge_cases import CONFIG, DEEPSEEK, empty_parameters
from tests.quantized_models import FP8, INT4, expanded, fp8_parts, int4_parts, write_quantized

QWEN3 = {"model_type": "qwen3", **CONFIG, "hidden_size": 160, "intermediate_size": 320, "head_dim": 64}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    **CONFIG,
    **DEEPSEEK,
    "hidden_size": 160,
    "intermediate_size": 320,
    "moe_intermediate_size": 96,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}


def loaded(folder, layout=None, rank=0, dtype=torch.float32) -> list[dict[str, torch.Tensor]]:
    spec, layout = model_spec(folder), layout or Layout()
    parameters = empty_parameters(spec, layout, rank, dtype)
    load_hf(spec, layout, rank, parameters)
    return parameters


def written(folder, weights: dict[str, torch.Tensor], hf: dict) -> None:
    """Write an unquantized checkpoint."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(weights, folder / "model.safetensors")


# ---- loading


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tensor=2), Layout(tensor=2, data=2, expert=2, expert_tensor=1)]
)
@pytest.mark.parametrize(
    ("hf", "config"), [(QWEN3, FP8), (DEEPSEEK_V3, FP8), (QWEN3, INT4), (DEEPSEEK_V3, INT4)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantized_checkpoint_loads_like_one_that_holds_its_values(tmp_path, hf, config, layout, dtype):
    if layout.expert > 1 and hf is QWEN3:
        layout = Layout(tensor=2, pipeline=2)
    values = write_quantized(tmp_path / "quantized", hf, config)
    written(tmp_path / "plain", {name: value.to(torch.float32) for name, value in values.items()}, hf)
    rank = layout.world_size - 1
    quantized, plain = (loaded(tmp_path / each, layout, rank, dtype) for each in ("quantized", "plain"))
    for ours, expected in zip(quantized, plain, strict=True):
        assert ours.keys() == expected.keys()
        assert not [name for name in ours if not torch.equal(ours[name], expected[name])]
        assert not any(tensor.isnan().any() for tensor in ours.values())


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("block", [(128, 128), (64, 32)])
def test_scales_of_every_kind_and_blocks_of_other_sizes_are_read(tmp_path, scale, block):
    config = {**FP8, "weight_block_size": list(block), "scale_fmt": "ue8m0"}
    values = write_quantized(tmp_path, QWEN3, config, block=block, scale=scale)
    [parameters] = loaded(tmp_path)
    name = "model.layers.2.mlp.down_proj.weight"
    assert torch.equal(parameters["decoder.layers.2.mlp.linear_fc2.weight"], values[name].float())


def test_a_layer_that_is_left_unquantized_is_read_as_it_is(tmp_path):
    values = write_quantized(tmp_path, QWEN3, {**FP8, "modules_to_not_convert": ["model.layers.1"]})
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(file)
    del tensors[f"{name}_scale_inv"]
    save_file(tensors | {name: values[name].to(torch.bfloat16)}, file)
    [parameters] = loaded(tmp_path)
    assert torch.equal(
        parameters["decoder.layers.1.mlp.linear_fc2.weight"], values[name].to(torch.bfloat16).float()
    )


def test_layers_for_multi_token_prediction_may_be_quantized_too(tmp_path):
    write_quantized(tmp_path, DEEPSEEK_V3, FP8)
    file = tmp_path / "model.safetensors"
    extra, _ = fp8_parts("model.layers.4.eh_proj.weight", (160, 320), torch.Generator())
    save_file(load_file(file) | extra, file)
    hf = {**DEEPSEEK_V3, "num_nextn_predict_layers": 1, "quantization_config": FP8}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    loaded(tmp_path)


def test_only_one_tensor_is_dequantized_at_a_time(tmp_path, monkeypatch):
    """A rank needs no second copy of its weights: what was dequantized is gone when the next one is."""
    import gc
    import weakref

    from slipstream.bridge.hf import files

    write_quantized(tmp_path, QWEN3, FP8)
    alive: list[weakref.ref] = []
    most = 0

    def watched(*arguments):
        nonlocal most
        tensor = dequantized_fp8(*arguments)
        alive.append(weakref.ref(tensor))
        gc.collect()
        most = max(most, sum(reference() is not None for reference in alive))
        return tensor

    monkeypatch.setattr(files, "dequantized_fp8", watched)
    loaded(tmp_path)
    assert len(alive) == 4 * 7
    assert most == 3  # query, key and value are one parameter


def test_an_export_is_written_without_a_quantization(tmp_path):
    write_quantized(tmp_path / "source", QWEN3, FP8)
    bucket = FlatBucket(("a",), ((2,),), torch.zeros(2, dtype=torch.bfloat16), last=True)
    write_hf(iter([bucket]), tmp_path / "source", tmp_path / "out")
    plain = {**QWEN3, "torch_dtype": "bfloat16"}
    assert json.loads((tmp_path / "out/config.json").read_text()) == plain
    nested = {**QWEN3, "text_config": {"hidden_size": 8, "quantization_config": INT4}}
    (tmp_path / "source/config.json").write_text(json.dumps(nested))
    write_hf(iter([bucket]), tmp_path / "source", tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text()) == plain | {
        "text_config": {"hidden_size": 8}
    }


# ---- MXFP4, which transformers dequantizes itself

GPT_OSS = {"model_type": "gpt_oss", **CONFIG, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
GPT_OSS |= {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def write_mxfp4(folder) -> dict[str, torch.Tensor]:
    """Write a checkpoint with random experts in MXFP4. Returns all weights as transformers has them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**GPT_OSS, "quantization_config": MXFP4}))
    generator = torch.Generator().manual_seed(0)
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for entry in entries(spec_of(GPT_OSS, folder), Layout()):
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True):
            if name in values:
                continue
            if name.endswith("_proj"):
                experts, inputs, outputs = shape
                groups = (experts, outputs, inputs // 32)
                blocks = torch.randint(0, 256, (*groups, 16), generator=generator).to(torch.uint8)
                scales = torch.randint(100, 140, groups, generator=generator).to(torch.uint8)
                stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
                values[name] = convert_moe_packed_tensors(blocks, scales)
            else:
                stored[name] = values[name] = torch.randn(shape, generator=generator)
    save_file(stored, folder / "model.safetensors")
    return values


@pytest.mark.parametrize("layout", [Layout(), Layout(data=2, expert=2), Layout(pipeline=2)])
def test_experts_in_mxfp4_load_as_transformers_dequantizes_them(tmp_path, layout):
    values = write_mxfp4(tmp_path / "quantized")
    assert values["model.layers.0.mlp.experts.gate_up_proj"].dtype == torch.bfloat16
    written(tmp_path / "plain", {name: value.contiguous() for name, value in values.items()}, GPT_OSS)
    rank = layout.world_size - 1
    quantized, plain = (loaded(tmp_path / each, layout, rank) for each in ("quantized", "plain"))
    for ours, expected in zip(quantized, plain, strict=True):
        assert not [name for name in expected if not torch.equal(ours[name], expected[name])]
    spec = model_spec(tmp_path / "quantized")
    write_copy(spec.path, spec.quantization, tmp_path / "copy", dtype=torch.bfloat16, fp8=None)
    copied = load_file(tmp_path / "copy/model-00001.safetensors")
    assert all(torch.equal(copied[name], values[name]) for name in copied)


def test_parts_of_mxfp4_that_are_missing_or_do_not_fit_are_named(tmp_path):
    write_mxfp4(tmp_path / "model")
    first, second = (f"model.layers.{layer}.mlp.experts.down_proj" for layer in (0, 1))
    changed = {f"{first}_scales": None, f"{second}_scales": torch.zeros(4, 64, 9, dtype=torch.uint8)}
    message = problems(tmp_path / "model", {**GPT_OSS, "quantization_config": MXFP4}, **changed)
    assert f"{first}_blocks is there, and {first}_scales is missing" in message
    assert (
        f"{second}_blocks has shape (4, 64, 3, 16), which does not fit {second}_scales (4, 64, 9)" in message
    )
    assert len(message.splitlines()) == 3


# ---- the arithmetic


@pytest.mark.parametrize("shape", [(1, 8), (5, 96), (64, 160)])
@pytest.mark.parametrize("scale", [torch.bfloat16, torch.float16, torch.float32])
def test_int4_equals_the_library_bit_for_bit(shape, scale):
    group = 8 if shape == (1, 8) else 32
    arguments = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    parts, _ = int4_parts("weight", shape, torch.Generator().manual_seed(1), group, scale)
    expected = PackedQuantizationCompressor.decompress(dict(parts), scheme)["weight"]
    ours = dequantized_int4(parts["weight_packed"], parts["weight_scale"], shape[1])
    assert ours.dtype == expected.dtype == scale
    assert torch.equal(ours, expected)


def test_int4_whose_columns_do_not_fill_the_last_integer():
    parts, value = int4_parts("weight", (3, 20), torch.Generator(), group=10, scale=torch.float32)
    assert parts["weight_packed"].shape == (3, 3)
    ours = dequantized_int4(parts["weight_packed"], parts["weight_scale"], 20)
    assert torch.equal(ours.double(), value)


@pytest.mark.parametrize("ue8m0", [True, False])
def test_a_quantized_weight_is_within_half_a_step_of_the_weight(ue8m0):
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(
        -6, 4
    ).repeat_interleave(20)
    values, scale = quantized_fp8(weight, ue8m0=ue8m0)
    assert (values.shape, scale.shape) == ((300, 200), (3, 2))
    exact = values.double() * expanded(scale, 128, 128, weight.shape)
    # e4m3 has 3 bits behind the first one; below 2^-6 its steps are 2^-9.
    step = torch.maximum(weight.double().abs() / 16, expanded(scale, 128, 128, weight.shape) * 2.0**-10)
    assert ((exact - weight).abs() <= step * (1 + 1e-6)).all()
    if ue8m0:
        mantissa, _ = torch.frexp(scale)
        assert (mantissa == 0.5).all()


def test_a_weight_that_was_quantized_keeps_its_values():
    """So nothing is lost of unchanged weights when engines get them in the fp8 that they were loaded from."""
    weight = torch.randn(140, 260, generator=torch.Generator().manual_seed(0))
    values, scale = quantized_fp8(weight, ue8m0=True)
    once = dequantized_fp8(values, scale, (128, 128)).to(torch.bfloat16)
    assert torch.equal(dequantized_fp8(*quantized_fp8(once, ue8m0=True), (128, 128)), once.float())

    values, scale = quantized_fp8(weight, ue8m0=False)
    once = dequantized_fp8(values, scale, (128, 128)).to(torch.bfloat16)
    again, scale_again = quantized_fp8(once, ue8m0=False)
    assert torch.equal(again.view(torch.uint8), values.view(torch.uint8))
    assert (scale_again / scale - 1).abs().max() < 2.0**-8


def test_a_part_of_whole_blocks_is_quantized_as_within_the_whole():
    weight = torch.randn(400, 300, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    values, scale = quantized_fp8(weight, ue8m0=True)
    part, part_scale = quantized_fp8(weight[128:384, 128:], ue8m0=True)
    assert torch.equal(part.view(torch.uint8), values[128:384, 128:].contiguous().view(torch.uint8))
    assert torch.equal(part_scale, scale[1:3, 1:])


def test_blocks_of_zeros_stay_zeros():
    weight = torch.zeros(130, 256, dtype=torch.bfloat16)
    weight[129, 255] = 1.0
    values, scale = quantized_fp8(weight, ue8m0=True)
    assert scale.isfinite().all()
    assert torch.equal(dequantized_fp8(values, scale, (128, 128)), weight.float())


# ---- what the config says


def test_the_quantization_of_real_configs_is_recognized():
    assert quantization_of({}) is None
    assert quantization_of({"quantization_config": FP8}) == BlockFp8((128, 128), ue8m0=False)
    assert quantization_of({"quantization_config": {**FP8, "scale_fmt": "ue8m0"}}) == BlockFp8(
        (128, 128), True
    )
    assert quantization_of({"quantization_config": INT4}) == PackedInt4(32)
    assert quantization_of({"compression_config": INT4}) == PackedInt4(32)
    assert quantization_of({"text_config": {"quantization_config": INT4}}) == PackedInt4(32)


def int4_weights(**changed) -> dict:
    group = INT4["config_groups"]["group_0"]
    return {**INT4, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **changed}}}}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "awq", "bits": 4}, "by 'awq'.*zero points"),
        ({"quant_method": "gptq", "bits": 4}, "by 'gptq'.*zero points"),
        ({"quant_method": "quark"}, "by 'quark'.*no reader"),
        ({"quant_method": "fp8"}, "one scale for each tensor"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "stored scales of activations"),
        ({**FP8, "fmt": "e5m2"}, "only e4m3"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ({**INT4, "format": "float-quantized"}, "format 'float-quantized'"),
        ({**INT4, "kv_cache_scheme": {"num_bits": 8}}, "KV cache"),
        ({**INT4, "quantization_status": "frozen"}, "'frozen'"),
        ({**INT4, "sparsity_config": {"format": "sparse-24"}}, "places of zeros"),
        (int4_weights(symmetric=False), "symmetric=False"),
        (int4_weights(num_bits=8), "num_bits=8"),
        (int4_weights(actorder="group"), "actorder='group'"),
        (int4_weights(strategy="channel"), "strategy='channel'"),
    ],
)
def test_a_quantization_that_is_not_read_is_refused_with_the_reason_and_the_way_out(tmp_path, config, reason):
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, "quantization_config": config}))
    with pytest.raises(UnsupportedModel, match=reason) as raised:
        model_spec(tmp_path)
    if "weight_block_size is" not in reason:
        assert "name the checkpoint in bfloat16" in str(raised.value)


# ---- files that do not fit


PROJECTION = "model.layers.0.mlp.down_proj.weight"


def problems(folder, hf, **changed: torch.Tensor | None) -> str:
    file = folder / "model.safetensors"
    tensors = load_file(file) | changed
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    (folder / "config.json").write_text(json.dumps(hf))
    with pytest.raises(HfCheckpointError) as raised:
        check_tensors(model_spec(folder))
    return str(raised.value)


def test_parts_of_fp8_weights_that_are_missing_or_do_not_fit_are_named(tmp_path):
    write_quantized(tmp_path, QWEN3, FP8)
    other = "model.layers.1.mlp.down_proj.weight"
    third = "model.layers.2.mlp.down_proj.weight"
    message = problems(
        tmp_path,
        {**QWEN3, "quantization_config": FP8},
        **{
            f"{PROJECTION}_scale_inv": None,
            f"{other}_scale_inv": torch.ones(1, 1),
            f"{third}_scale_inv": torch.ones(2, 3, dtype=torch.int32),
        },
    )
    assert f"{PROJECTION} is in fp8, and {PROJECTION}_scale_inv is missing" in message
    assert f"{other}_scale_inv has shape (1, 1), which does not fit {other} with (160, 320)" in message
    assert f"{third}_scale_inv holds I32" in message
    assert len(message.splitlines()) == 4


def test_parts_of_int4_weights_that_are_missing_or_do_not_fit_are_named(tmp_path):
    write_quantized(tmp_path, QWEN3, INT4)
    other = "model.layers.1.mlp.down_proj.weight"
    message = problems(
        tmp_path,
        {**QWEN3, "quantization_config": INT4},
        **{f"{PROJECTION}_shape": None, f"{other}_scale": torch.ones(160, 9)},
    )
    assert f"{PROJECTION}_packed is there, and {PROJECTION}_shape is missing" in message
    assert f"{other}_packed has shape (160, 40), which does not fit {other}_scale with (160, 9)" in message
    assert len(message.splitlines()) == 3


def test_a_shape_that_contradicts_the_scales_is_an_error(tmp_path):
    write_quantized(tmp_path, QWEN3, INT4)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {f"{PROJECTION}_shape": torch.tensor([160, 319])}, file)
    with pytest.raises(HfCheckpointError, match=r"weight_shape is \(160, 319\).*\(160, 320\)"):
        loaded(tmp_path)


def test_a_quantized_vision_tower_is_refused_because_exports_pass_it_through(tmp_path):
    write_quantized(tmp_path, QWEN3, FP8)
    file, name = tmp_path / "model.safetensors", "model.visual.blocks.0.attn.qkv.weight"
    tower, _ = fp8_parts(name, (160, 160), torch.Generator())
    save_file(load_file(file) | tower, file)
    spec = model_spec(tmp_path)
    spec = replace(spec, mappings=replace(spec.mappings, passed_through=("model.visual.",)))
    with pytest.raises(HfCheckpointError, match=f"{name} is quantized, and not of the language model"):
        check_tensors(spec)


@pytest.mark.parametrize("config", [None, INT4])
def test_fp8_weights_that_the_config_does_not_announce_are_refused(tmp_path, config):
    """They were copied as if their scales were 1."""
    write_quantized(tmp_path, QWEN3, FP8)
    message = problems(tmp_path, {**QWEN3, "quantization_config": config})
    assert f"{PROJECTION} holds F8_E4M3, and quantization_config in config.json announces" in message


def test_the_quantization_of_a_language_model_may_stand_in_its_part_of_the_config():
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    stated = quantization_of({"quantization_config": settings})
    assert stated is not None
    assert quantization_of({"text_config": {"quantization_config": settings}}) == stated
    assert quantization_of({"text_config": {}}) is None
