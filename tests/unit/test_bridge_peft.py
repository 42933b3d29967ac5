"""Adapters in PEFT's format: what they are called, which can be read, and what fused layers make of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.bridge.families import FAMILIES, model_spec, spec_of
from slipstream.bridge.hf.peft import PeftFolder, write_peft
from slipstream.bridge.hf.peft_config import PeftError, PeftIndex, scale_of
from slipstream.bridge.model.layout import Layout, Shard
from slipstream.bridge.model.mapping import Vocabulary, copy_in
from slipstream.bridge.shards.adapter import (
    AdapterSpec,
    NoAdapter,
    a_name,
    adapter_spec,
    b_name,
    check_peft,
    factor_splits,
    is_adapted,
    peft_config_of,
)
from slipstream.bridge.shards.factors import read_factors
from slipstream.bridge.shards.plan import entries
from tests.bridge_cases import CONFIG
from tests.models import make_checkpoint

RANK = 4
CONFIG_OF_PEFT = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "bias": "none"}
QKV = [f"model.layers.0.self_attn.{x}_proj" for x in "qkv"]


def adapter(rank: int = RANK, targets: tuple[str, ...] | None = None) -> AdapterSpec:
    spec = spec_of(CONFIG | {"model_type": "qwen3", "head_dim": 24}, Path("model"))
    return adapter_spec(spec, rank=rank, alpha=2.0 * rank, targets=targets)


def shapes_of(which: AdapterSpec) -> dict[str, tuple[int, int]]:
    return {
        module: shape
        for layer, shapes in zip(which.modules, which.shapes, strict=True)
        for module, shape in zip(layer, shapes, strict=True)
    }


def of_peft(modules: Mapping[str, tuple[int, int]], rank: int = RANK) -> dict[str, Tensor]:
    """Every module has an A of its own, as PEFT trains them."""
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for module, (rows, columns) in modules.items():
        tensors[a_name(module)] = torch.randn(rank, columns)
        tensors[b_name(module)] = torch.randn(rows, rank)
    return tensors


def folder_of(path: Path, tensors: dict[str, Tensor], config: dict[str, Any] = CONFIG_OF_PEFT) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def test_every_linear_layer_of_the_decoder_has_factors_by_the_names_of_peft():
    modules = shapes_of(adapter())
    assert len(modules) == 7 * CONFIG["num_hidden_layers"]
    names = [name for entry in entries(adapter().factors, Layout()) for name in entry.hf_names]
    assert set(names) < {name(module) for module in modules for name in (a_name, b_name)}
    assert a_name(QKV[0]) in names and a_name(QKV[1]) not in names, "fused modules share the first one's A"
    assert {b_name(module) for module in QKV} < set(names)


def test_the_config_names_the_adapted_modules_only():
    config = peft_config_of(adapter(targets=("linear_qkv", "linear_fc2")), "/models/base")
    assert config["target_modules"] == ["down_proj", "k_proj", "q_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"]) == (RANK, 8)
    assert config["base_model_name_or_path"] == "/models/base"
    assert scale_of(config) == 2.0


def test_a_weight_that_is_shared_otherwise_cannot_have_an_adapter():
    with pytest.raises(NoAdapter, match="Vocabulary"):
        factor_splits(Vocabulary(100, 64), RANK)


def test_experts_that_hf_stacks_cannot_have_an_adapter(tmp_path: Path):
    spec = model_spec(make_checkpoint(tmp_path, "gpt_oss", tied=False))
    with pytest.raises(NoAdapter, match=r"set actor\.lora\.targets to \[linear_qkv, linear_proj\]"):
        adapter_spec(spec, rank=RANK, alpha=1.0, targets=None)
    of_attention = adapter_spec(spec, rank=RANK, alpha=1.0, targets=["linear_qkv", "linear_proj"])
    assert of_attention.leaves == ["k_proj", "o_proj", "q_proj", "v_proj"]


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"gpt_oss", "qwen3_vl_moe"}))
def test_the_product_of_a_ranks_factors_is_its_shard_of_the_product(tmp_path: Path, family: str):
    """However the ranks of a tensor-parallel group share the weight of a layer."""
    folder = make_checkpoint(tmp_path, family, tied=False)
    torch.manual_seed(0)
    splits = {
        (entry.split, len(entry.hf_names))
        for entry in entries(model_spec(folder), Layout())
        if is_adapted(entry.parameter, None)
    }
    assert len(splits) >= 4
    for split, _ in splits:
        a_split, b_split = factor_splits(split, RANK)
        a = torch.randint(-9, 9, (RANK, split.hf_shapes[0][1])).float()
        b = [torch.randint(-9, 9, (shape[0], RANK)).float() for shape in split.hf_shapes]
        for shard in (Shard(0, 2), Shard(1, 2)):
            whole, of_a, of_b = (
                torch.full(each.shard_shape(shard.size), torch.nan) for each in (split, a_split, b_split)
            )
            copy_in(whole, [factor @ a for factor in b], split.pieces(shard))
            copy_in(of_a, [a], a_split.pieces(shard))
            copy_in(of_b, b, b_split.pieces(shard))
            assert torch.equal(of_b @ of_a, whole)


@pytest.mark.parametrize("shared", [True, False])
def test_a_fused_layer_computes_what_its_modules_do_in_peft(tmp_path: Path, shared: bool):
    shapes = shapes_of(adapter())
    tensors = of_peft({module: shapes[module] for module in QKV})
    if shared:
        tensors |= {a_name(module): tensors[a_name(QKV[0])].clone() for module in QKV}
    rank = RANK if shared else 3 * RANK + 1
    drawn, outputs = torch.randn(rank, shapes[QKV[0]][1]), [shapes[module][0] for module in QKV]
    with PeftFolder(folder_of(tmp_path / "adapter", tensors)) as folder:
        a, b = read_factors(folder, QKV, outputs, drawn, scale=2.0)
        assert torch.equal(a[3 * RANK :], drawn[3 * RANK :]), "rows that nothing fills stay as drawn"
        for module, factor in zip(QKV, b, strict=True):
            expected = 2.0 * tensors[b_name(module)] @ tensors[a_name(module)]
            torch.testing.assert_close(2.0 * factor @ a, expected)
            if shared:
                assert torch.equal(factor, tensors[b_name(module)]) and torch.equal(
                    a, tensors[a_name(module)]
                )


def test_another_scale_goes_into_b(tmp_path: Path):
    shapes = shapes_of(adapter())
    tensors = of_peft({QKV[0]: shapes[QKV[0]]})
    drawn, outputs = torch.zeros(6, shapes[QKV[0]][1]), [shapes[module][0] for module in QKV]
    config = CONFIG_OF_PEFT | {"use_rslora": True}  # 8 / sqrt(4) = 4
    with PeftFolder(folder_of(tmp_path / "adapter", tensors, config)) as folder:
        a, (query, key, value) = read_factors(folder, QKV, outputs, drawn, scale=0.5)
    expected = 4.0 * tensors[b_name(QKV[0])] @ tensors[a_name(QKV[0])]
    torch.testing.assert_close(0.5 * query @ a, expected)
    assert not key.any() and not value.any(), "modules that PEFT did not adapt add nothing"


def test_modules_that_do_not_fit_into_one_a_are_refused_with_the_rank_that_they_need(tmp_path: Path):
    shapes = shapes_of(adapter())
    tensors = of_peft({module: shapes[module] for module in QKV})
    drawn = torch.zeros(RANK, shapes[QKV[0]][1])
    with (
        PeftFolder(folder_of(tmp_path / "adapter", tensors)) as folder,
        pytest.raises(PeftError, match=r"have 12 rows together.*set actor\.lora\.rank to at least 12"),
    ):
        read_factors(folder, QKV, [shapes[module][0] for module in QKV], drawn, scale=2.0)


def test_what_is_written_is_read_bit_for_bit(tmp_path: Path):
    tensors = {name: tensor.bfloat16() for name, tensor in of_peft(shapes_of(adapter())).items()}
    write_peft(tensors, peft_config_of(adapter(), "base"), tmp_path / "written")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["written"]
    index = PeftIndex(tmp_path / "written")
    check_peft(index, adapter())
    assert index.scale == 2.0 and index.names == tensors.keys()
    with PeftFolder(tmp_path / "written") as folder:
        for name, tensor in tensors.items():
            assert torch.equal(folder.tensor(name).view(torch.int16), tensor.view(torch.int16))


def changed(**fields: object) -> dict[str, object]:
    return CONFIG_OF_PEFT | fields


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (changed(peft_type="IA3"), "peft_type is 'IA3', expected 'LORA'"),
        (changed(use_dora=True), "use_dora: True: only adapters that are W"),
        (changed(modules_to_save=["lm_head"], bias="all"), "bias: 'all', modules_to_save"),
        (changed(rank_pattern={"q_proj": 2}), "rank_pattern"),
        (changed(r=0), "r is 0 and lora_alpha is 8, expected positive numbers"),
        ([], "expected a JSON object"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(tmp_path: Path, config: Any, reason: str):
    with pytest.raises(PeftError, match=reason):
        PeftIndex(folder_of(tmp_path / "adapter", {}, config))


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path):
    with pytest.raises(PeftError, match=r"holds no adapter: expected adapter_config\.json and adapter_model"):
        PeftIndex(tmp_path)
    folder = folder_of(tmp_path / "adapter", {})
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(PeftError, match=r"has no adapter_model\.safetensors; other formats, such as pickles"):
        PeftIndex(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"12345678901234567890")
    with pytest.raises(PeftError, match="cannot be read"):
        PeftIndex(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 4)}, "lm_head.*: no adapted layer has it"),
        ({b_name(QKV[2]): None}, "v_proj.lora_B.weight is missing"),
        ({a_name(QKV[2]): torch.zeros(4, 5)}, r"v_proj has A \(4, 5\) and B"),
        (
            {a_name(QKV[0]): torch.zeros(8, 64), b_name(QKV[0]): torch.zeros(96, 8)},
            r"q_proj has rank 8; set actor.lora.rank to at least that \(it is 4\)",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_the_model_is_refused(tmp_path: Path, change: dict, reason: str):
    tensors = of_peft(shapes_of(adapter())) | change
    folder = folder_of(tmp_path / "adapter", {k: v for k, v in tensors.items() if v is not None})
    with pytest.raises(PeftError, match=reason):
        check_peft(PeftIndex(folder), adapter())
