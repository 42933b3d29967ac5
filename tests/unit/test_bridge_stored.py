"""What the files of a checkpoint say beyond its config: the head, stacked experts, and what contradicts."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.backend.driver.start.engine_model import checkpoint_notes, engine_problems
from slipstream.bridge.families import FAMILIES, model_spec, spec_of
from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.hf.copy import write_copy
from slipstream.bridge.hf.files import write_hf
from slipstream.bridge.hf.index import HfCheckpointError, stored_tensors
from slipstream.bridge.hf.kept import Kept
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.mapping import Transposed
from slipstream.bridge.model.spec import value_spec
from slipstream.bridge.shards.adapter import NoAdapter, adapter_spec
from slipstream.bridge.shards.check import check_tensors
from slipstream.bridge.shards.fp8 import is_stored_for_engines
from slipstream.bridge.shards.plan import entries
from slipstream.configs.load import load_recipe
from slipstream.configs.rules.inputs import NO_INPUTS
from slipstream.configs.schema import EngineConfig
from slipstream.rollout.engine.model_limits import UNSERVED
from tests.bridge_cases import MIXTURES, TEXT_PARTS
from tests.models import make_checkpoint, stack_experts

WORDS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INDEX = "model.safetensors.index.json"


def state(folder: Path, **levels: bool | None) -> None:
    """Write ``tie_word_embeddings`` of the whole and of the text into the config; None: leave it out."""
    hf = json.loads((folder / "config.json").read_text())
    for level, value in levels.items():
        of_level = hf if level == "whole" else hf["text_config"]
        of_level.pop("tie_word_embeddings", None)
        if value is not None:
            of_level["tie_word_embeddings"] = value
    (folder / "config.json").write_text(json.dumps(hf))


def stated(folder: Path) -> list[bool | None]:
    hf = json.loads((folder / "config.json").read_text())
    return [level.get("tie_word_embeddings") for level in (hf, hf.get("text_config", {}))]


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    file = folder / "model.safetensors"
    kept = {name: t for name, t in (load_file(file) | tensors).items() if t is not None}
    save_file(kept, file, {"format": "pt"})


def in_files(folder: Path, index: dict[str, str], **files: dict[str, torch.Tensor]) -> None:
    """Replace the single file of a checkpoint by several with an index."""
    (folder / "model.safetensors").unlink()
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors", {"format": "pt"})
    weight_map = {name: f"{file}.safetensors" for name, file in index.items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def mapped(folder: Path) -> set[str]:
    return {name for entry in entries(model_spec(folder), Layout()) for name in entry.hf_names}


# ---- the head


def test_a_head_with_values_of_its_own_is_not_tied_whatever_the_config_says(tmp_path):
    folder = make_checkpoint(tmp_path, tied=False)
    state(folder, whole=True)
    spec = model_spec(folder)
    assert not spec.geometry.tied_embeddings
    assert HEAD in mapped(folder)
    check_tensors(spec)
    [note] = spec.notes
    assert "tie_word_embeddings: true" in note and f"{HEAD} has values of its own" in note


def test_one_row_of_its_own_makes_a_head_untied(tmp_path):
    folder = make_checkpoint(tmp_path, tied=True)
    head = load_file(folder / "model.safetensors")[WORDS].clone()
    change(folder, **{HEAD: head})
    assert model_spec(folder).geometry.tied_embeddings
    head[100, 63] += 1
    change(folder, **{HEAD: head})
    assert not model_spec(folder).geometry.tied_embeddings


@pytest.mark.parametrize(("whole", "text"), [(True, False), (True, None), (False, True), (None, True)])
@pytest.mark.parametrize("family", sorted(TEXT_PARTS))
def test_either_level_of_the_config_may_be_wrong_about_the_head(tmp_path, family, whole, text):
    untied, tied = (make_checkpoint(tmp_path / str(tie), family, tied=tie) for tie in (False, True))
    for folder in (untied, tied):
        state(folder, whole=whole, text=text)
    spec = model_spec(untied)
    assert not spec.geometry.tied_embeddings and spec.corrects_tie and len(spec.notes) == 1
    check_tensors(spec)
    spec = model_spec(tied)
    assert spec.geometry.tied_embeddings and spec.corrects_tie == (False in (whole, text))
    check_tensors(spec)


def test_a_config_that_agrees_with_the_files_is_not_corrected(tmp_path):
    for tied in (True, False):
        spec = model_spec(make_checkpoint(tmp_path / str(tied), tied=tied))
        assert spec.geometry.tied_embeddings == tied
        assert (spec.notes, spec.corrects_tie, spec.tied_head) == ((), False, None)


def test_a_config_without_weights_is_taken_at_its_word(tmp_path):
    folder = make_checkpoint(tmp_path, tied=False)
    state(folder, whole=True)
    (folder / "model.safetensors").unlink()
    assert model_spec(folder).geometry.tied_embeddings


def test_a_missing_head_is_refused_with_what_the_config_would_have_to_say(tmp_path):
    folder = make_checkpoint(tmp_path, tied=False)
    change(folder, **{HEAD: None})
    for value in (False, None):
        state(folder, whole=value)
        with pytest.raises(HfCheckpointError, match=r"missing: lm_head\.weight .*tie_word_embeddings: true"):
            check_tensors(model_spec(folder))
    check_tensors(value_spec(model_spec(folder)))  # a critic has no such head


def export(folder: Path, target: Path) -> Path:
    """Write the mapped tensors of a checkpoint as a run does, in buckets of one tensor."""
    spec, tensors = model_spec(folder), load_file(folder / "model.safetensors")
    buckets = [
        FlatBucket((name,), (tuple(tensors[name].shape),), tensors[name].flatten(), last=False)
        for name in sorted(mapped(folder))
    ]
    write_hf(iter(buckets), folder, target, kept=spec.kept)
    return target


@pytest.mark.parametrize("family", ["qwen3", "mistral3"])
def test_an_export_says_of_the_head_what_the_files_show(tmp_path, family):
    folder = make_checkpoint(tmp_path / "model", family, tied=False)
    state(folder, whole=True)
    target = export(folder, tmp_path / "out")
    assert True not in stated(target)
    assert stored_tensors(target).keys() == stored_tensors(folder).keys()


@pytest.mark.parametrize("family", ["qwen3", "mistral3", "gemma3_text"])
def test_an_export_stores_a_tied_head_if_its_source_does(tmp_path, family):
    folder = make_checkpoint(tmp_path / "model", family, tied=True)
    [words] = model_spec(folder).mappings.embedding[0].hf
    head = "language_model.lm_head.weight" if family == "mistral3" else HEAD
    change(folder, **{head: load_file(folder / "model.safetensors")[words]})
    target = export(folder, tmp_path / "out")
    assert stored_tensors(target).keys() == stored_tensors(folder).keys()
    assert model_spec(target).tied_head == (head, words)


def test_a_head_by_a_name_that_the_family_does_not_know_is_not_dropped(tmp_path):
    folder = make_checkpoint(tmp_path, "mistral3", tied=True)
    change(folder, **{HEAD: torch.zeros(101, 64)})
    with pytest.raises(HfCheckpointError, match=r"not mapped: lm_head\.weight"):
        check_tensors(model_spec(folder))


# ---- layers for multi-token prediction


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("deepseek_v3", "model.layers.4.eh_proj.weight"),
        ("kimi_k25", "language_model.model.layers.4.eh_proj.weight"),
        ("qwen3_next", "mtp.fc.weight"),
        ("qwen3_5_moe", "mtp.fc.weight"),
    ],
)
def test_an_export_has_the_layers_for_multi_token_prediction_of_its_source(tmp_path, family, extra):
    folder = make_checkpoint(tmp_path / "model", family, tied=False)
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    change(folder, **{extra: torch.randn(64, 128)})
    assert extra not in mapped(folder)
    target = export(folder, tmp_path / "out")
    assert stored_tensors(target).keys() == stored_tensors(folder).keys()
    [file] = {tensor.file for name, tensor in stored_tensors(target).items() if name == extra}
    assert torch.equal(load_file(file)[extra], load_file(folder / "model.safetensors")[extra])


def test_quantized_tensors_that_are_passed_through_are_dequantized(tmp_path):
    source = make_checkpoint(tmp_path / "model", tied=False)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps(config))
    values, scale = torch.randn(64, 64).to(torch.float8_e4m3fn), torch.full((1, 1), 0.5)
    change(source, **{"mtp.fc.weight": values, "mtp.fc.weight_scale_inv": scale})
    bucket = FlatBucket(("a",), ((4,),), torch.ones(4), last=True)
    write_hf(iter([bucket]), source, tmp_path / "out", kept=Kept(("mtp.",)))
    found = stored_tensors(tmp_path / "out")
    assert found.keys() == {"a", "mtp.fc.weight"}
    [written] = {found["mtp.fc.weight"].file}
    assert torch.equal(load_file(written)["mtp.fc.weight"], values.float() * 0.5)


# ---- experts

STACKED = ("gpt_oss", "qwen3_vl_moe")
"""Families that have no other form."""


@pytest.mark.parametrize("family", [family for family in MIXTURES if family not in STACKED])
def test_the_experts_of_every_family_are_read_single_and_stacked(tmp_path, family):
    folder = make_checkpoint(tmp_path, family, tied=False)
    check_tensors(model_spec(folder))
    single = mapped(folder)
    stack_experts(folder)
    check_tensors(model_spec(folder))
    stacked = mapped(folder)
    assert stacked <= load_file(folder / "model.safetensors").keys()
    assert {name for name in single - stacked if ".experts." not in name} == set()
    assert {name.rpartition(".experts.")[2] for name in stacked - single} == {"gate_up_proj", "down_proj"}


def test_stacked_experts_of_either_orientation_are_told_apart_by_their_shapes(tmp_path):
    """transformers stacks those of Qwen3-VL as it computes; published ones are transposed."""
    folder = make_checkpoint(tmp_path, "qwen3_vl_moe", tied=False)
    forms = set()
    for _ in range(2):
        check_tensors(model_spec(folder))
        layer = model_spec(folder).mappings.layers[0]
        forms.add(tuple(isinstance(mapping.split, Transposed) for mapping in layer if mapping.per_expert))
        stack_experts(folder)
    assert forms == {(True, True), (False, False)}
    config = json.loads((folder / "config.json").read_text())
    published = spec_of(config, folder).mappings.layers[0]
    assert all(isinstance(mapping.split, Transposed) for mapping in published if mapping.per_expert)


def test_layers_may_have_their_experts_in_different_forms(tmp_path):
    folder = make_checkpoint(tmp_path / "single", "qwen3_moe", tied=False)
    other = make_checkpoint(tmp_path / "stacked", "qwen3_moe", tied=False)
    stack_experts(other)
    single, stacked = (load_file(each / "model.safetensors") for each in (folder, other))
    first = "model.layers.0."
    mixed = {name: t for name, t in single.items() if not name.startswith(first)}
    mixed |= {name: t for name, t in stacked.items() if name.startswith(first)}
    save_file(mixed, folder / "model.safetensors", {"format": "pt"})
    check_tensors(model_spec(folder))
    assert mapped(folder) == mixed.keys()


def test_stacked_experts_have_no_adapters(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3_moe", tied=False)
    adapter_spec(model_spec(folder), rank=2, alpha=2, targets=None)
    stack_experts(folder)
    with pytest.raises(NoAdapter, match="HF stacks in one tensor"):
        adapter_spec(model_spec(folder), rank=2, alpha=2, targets=None)


# ---- index and files


def sharded(folder: Path, **moved: str | None) -> dict[str, torch.Tensor]:
    """Write a model in two files; ``moved``: what the index says of tensors instead, None: nothing."""
    make_checkpoint(folder, tied=False)
    tensors = load_file(folder / "model.safetensors")
    of_first = {name for name in tensors if ".layers.0." in name}
    first = {name: t for name, t in tensors.items() if name in of_first}
    second = {name: t for name, t in tensors.items() if name not in of_first}
    index = {name: "first" if name in of_first else "second" for name in tensors} | moved
    in_files(folder, {n: f for n, f in index.items() if f is not None}, first=first, second=second)
    return tensors


def test_files_that_the_index_does_not_name_are_named_and_not_read(tmp_path):
    tensors = sharded(tmp_path)
    stale = {HEAD: torch.zeros(101, 64), WORDS: torch.ones(101, 64)}
    save_file(stale, tmp_path / "model-00003-of-00003.safetensors")
    spec = model_spec(tmp_path)
    assert spec.notes == (f"not read, because {INDEX} does not name them: model-00003-of-00003.safetensors",)
    assert {tensor.file.name for tensor in check_tensors(spec).values()} == {
        "first.safetensors",
        "second.safetensors",
    }
    assert check_tensors(spec).keys() == tensors.keys()


def test_a_head_in_a_file_that_the_index_does_not_name_is_not_the_model_s(tmp_path):
    tensors = sharded(tmp_path)
    rest = {name: t for name, t in load_file(tmp_path / "second.safetensors").items() if name != HEAD}
    save_file(rest, tmp_path / "second.safetensors")
    save_file({HEAD: tensors[HEAD]}, tmp_path / "head.safetensors")
    index = {name: "first" if ".layers.0." in name else "second" for name in tensors if name != HEAD}
    weight_map = {name: f"{file}.safetensors" for name, file in index.items()}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(HfCheckpointError, match=r"(?s)missing: lm_head.*not read.*: head\.safetensors"):
        check_tensors(model_spec(tmp_path))
    state(tmp_path, whole=True)
    spec = model_spec(tmp_path)
    check_tensors(spec)
    assert spec.geometry.tied_embeddings and "head.safetensors" in spec.notes[0]


def test_files_beside_a_single_one_are_named(tmp_path):
    make_checkpoint(tmp_path)
    for name in ("consolidated", "model-00001-of-00002"):
        save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / f"{name}.safetensors")
    [note] = model_spec(tmp_path).notes
    assert note.endswith(
        "beside model.safetensors: consolidated.safetensors, model-00001-of-00002.safetensors"
    )


@pytest.mark.parametrize(
    ("moved", "note"),
    [
        ({HEAD: "first"}, f"{INDEX} names other files for tensors than those that hold them: {HEAD}"),
        ({HEAD: None}, f"{INDEX} lacks tensors that its files hold, which are read: {HEAD}"),
        (
            {"model.old.weight": "first"},
            f"{INDEX} names tensors that none of its files holds: model.old.weight",
        ),
    ],
)
def test_an_index_that_is_wrong_about_a_tensor_is_told_and_the_files_count(tmp_path, moved, note):
    sharded(tmp_path, **moved)
    spec = model_spec(tmp_path)
    assert spec.notes == (note,) and not spec.geometry.tied_embeddings
    check_tensors(spec)


def test_a_tensor_in_two_files_is_told_if_it_is_the_same_and_refused_if_not(tmp_path):
    tensors = sharded(tmp_path)
    first = load_file(tmp_path / "first.safetensors")
    save_file({**first, WORDS: tensors[WORDS]}, tmp_path / "first.safetensors")
    spec = model_spec(tmp_path)
    assert spec.notes == (f"{WORDS} is in first.safetensors and in second.safetensors, with the same values",)
    check_tensors(spec)
    save_file({**first, WORDS: tensors[WORDS] + 1}, tmp_path / "first.safetensors")
    with pytest.raises(HfCheckpointError, match=f"{WORDS} is in first.* and in second.*with other values"):
        check_tensors(model_spec(tmp_path))
    with pytest.raises(HfCheckpointError, match="its files contradict each other"):
        stored_tensors(tmp_path)


def test_a_single_file_beside_an_index_of_others_is_refused_with_everything_else(tmp_path):
    tensors = sharded(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    save_file({}, tmp_path / "first.safetensors")
    with pytest.raises(HfCheckpointError) as raised:
        check_tensors(model_spec(tmp_path))
    assert "model.safetensors is beside model.safetensors.index.json" in str(raised.value)
    assert "missing: model.layers.0.mlp.up_proj.weight" in str(raised.value)


# ---- engines


def test_engines_start_from_a_copy_whose_config_is_right_about_the_head(tmp_path):
    folder = make_checkpoint(tmp_path / "model", tied=False)
    assert is_stored_for_engines(model_spec(folder), None)
    state(folder, whole=True)
    spec = model_spec(folder)
    assert not is_stored_for_engines(spec, None)
    write_copy(folder, None, tmp_path / "copy", dtype=torch.float32, fp8=None, tied=spec.kept.tied)
    assert is_stored_for_engines(model_spec(tmp_path / "copy"), None)
    assert stored_tensors(tmp_path / "copy").keys() == stored_tensors(folder).keys()


def test_a_user_is_told_of_the_contradiction_and_of_the_copy(tmp_path):
    folder = make_checkpoint(tmp_path / "tied", tied=False)
    state(folder, whole=True)
    sound = make_checkpoint(tmp_path / "sound", tied=False)

    def notes(policy: Path, reference: Path, **options: bool) -> list[str]:
        paths = (
            f"model.path={policy}",
            f"actor.kl={{coefficient: 0.1, reference: {{type: checkpoint, path: {reference}}}}}",
        )
        config = load_recipe(Path("quickstart"), [*paths, f"run.root={tmp_path}", f"prepare={NO_INPUTS}"])
        return checkpoint_notes(config, model_spec(policy), **{"has_engines": True} | options)

    contradiction, copy = notes(folder, sound)
    assert contradiction.startswith(
        "model.path: config.json says tie_word_embeddings: true, and in the files"
    )
    assert copy.endswith(
        f"a copy of model.path that a run writes: {tmp_path / 'quickstart' / 'engine-model'}"
    )
    assert notes(folder, sound, has_engines=False) == [contradiction]
    assert notes(folder, folder, has_engines=False)[0] == contradiction
    assert notes(sound, folder) == [contradiction.replace("model.path", "actor.kl.reference.path", 1)]
    assert notes(sound, sound) == []


def test_stacked_experts_are_for_engines_that_read_them(tmp_path):
    config = SimpleNamespace(rollout=SimpleNamespace(engine=EngineConfig()))
    for family, read in (("qwen3_moe", False), ("qwen3_5_moe", True)):
        folder = make_checkpoint(tmp_path / family, family, tied=False)
        assert engine_problems(config, model_spec(folder)) == []
        stack_experts(folder)
        problems = engine_problems(config, model_spec(folder))
        assert problems == [] if read else "SGLang reads those of qwen3_moe one by one" in problems[0]


def test_stacked_experts_are_for_engines_that_read_them_in_their_orientation(tmp_path):
    config = SimpleNamespace(rollout=SimpleNamespace(engine=EngineConfig()))
    folder = make_checkpoint(tmp_path, "qwen3_vl_moe", tied=False)
    [problem] = engine_problems(config, model_spec(folder))
    assert "each as [outputs, inputs], and SGLang reads those of qwen3_vl_moe as [inputs, outp" in problem
    stack_experts(folder)
    assert engine_problems(config, model_spec(folder)) == []


def test_models_that_sglang_cannot_serve_anywhere_are_refused(tmp_path):
    config = SimpleNamespace(rollout=SimpleNamespace(engine=EngineConfig()))
    for family in UNSERVED:
        folder = make_checkpoint(tmp_path / family, family, tied=True)
        [problem] = engine_problems(config, model_spec(folder))
        assert UNSERVED[family] in problem


@pytest.mark.parametrize(
    ("family", "known"), [("gemma3_text", (True,)), ("qwen3_moe", (False,)), ("llama", (True, False))]
)
def test_a_head_that_engines_do_not_know_is_refused(tmp_path, family, known):
    config = SimpleNamespace(rollout=SimpleNamespace(engine=EngineConfig()))
    for tied in (True, False):
        problems = engine_problems(
            config, model_spec(make_checkpoint(tmp_path / str(tied), family, tied=tied))
        )
        assert (problems == []) == (tied in known)
        assert not problems or "its head is" in problems[0]


# ---- published names


NORMS = ("input_layernorm", "post_attention_layernorm")
QKVO = tuple(f"self_attn.{x}_proj" for x in "qkvo")
QKV_BIAS = tuple(f"self_attn.{x}_proj.bias" for x in "qkv")
QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
MLP = tuple(f"mlp.{x}_proj" for x in ("gate", "up", "down"))
EXPERTS = ("mlp.gate", *(f"mlp.experts.#.{x}_proj" for x in ("gate", "up", "down")))
SHARED = tuple(f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down"))
BIASED = (*MLP, *EXPERTS, *SHARED, "mlp.gate.e_score_correction_bias")
GATED = ("mlp.shared_expert_gate", *(f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")))
LATENT = (
    *("q_a_proj", "q_a_layernorm", "q_b_proj"),
    *("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"),
)
LATENT = tuple(f"self_attn.{name}" for name in LATENT)
INDEXER = ("k_norm.bias", "k_norm", "weights_proj", "wk", "wq_b")
INDEXER = tuple(f"self_attn.indexer.{name}" for name in INDEXER)
DELTA = tuple(f"linear_attn.{name}" for name in ("A_log", "dt_bias", "conv1d", "norm", "out_proj"))
SPLIT_DELTA = (*DELTA, *(f"linear_attn.in_proj_{x}" for x in ("qkv", "z", "a", "b")))
LLAMA = (*NORMS, *QKVO, *MLP)
NORM_BIASES = tuple(f"{name}.bias" for name in NORMS)
POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
GLM4 = (
    *(*NORMS, "post_self_attn_layernorm", "post_mlp_layernorm", *QKVO, *QKV_BIAS),
    *("mlp.gate_up_proj.weight", "mlp.down_proj"),
)
SOFTMAX = (*NORMS, *QKVO, *EXPERTS)
PUBLISHED = {
    "arcee": (*NORMS, *QKVO, "mlp.up_proj", "mlp.down_proj"),
    "deepseek_v2": (*NORMS, *LATENT, *MLP, *EXPERTS, *SHARED),
    "ernie4_5": LLAMA,
    "exaone4": (*POST_NORMS, *QKVO, *QK_NORMS, *MLP),
    "gemma": LLAMA,
    "gemma3": (*LLAMA, *QK_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "glm": (*NORMS, *QKVO, *QKV_BIAS, "mlp.gate_up_proj.weight", "mlp.down_proj"),
    "glm4": GLM4,
    "glm4v": GLM4,
    "glm46v": GLM4,
    "solar_open": (*NORMS, *QKVO, *EXPERTS, *SHARED, "mlp.gate.e_score_correction_bias"),
    "youtu": (*NORMS, *LATENT, *MLP),
    "glm4v_moe": (*NORMS, *QKVO, *QKV_BIAS, *BIASED),
    "granite": LLAMA,
    "helium": LLAMA,
    "nemotron": (*NORMS, *NORM_BIASES, *QKVO, "mlp.up_proj", "mlp.down_proj"),
    "stablelm": (*LLAMA, *NORM_BIASES, *QKV_BIAS),
    "mimo": (*LLAMA, *QKV_BIAS),
    "mixtral": (
        *(*NORMS, *QKVO, "block_sparse_moe.gate"),
        *(f"block_sparse_moe.experts.#.w{n}" for n in (1, 2, 3)),
    ),
    "olmo2": (*POST_NORMS, *QKVO, *QK_NORMS, *MLP),
    "olmoe": (*SOFTMAX, *QK_NORMS),
    "phi3": (
        *(*NORMS, "self_attn.qkv_proj", "self_attn.o_proj"),
        *("mlp.gate_up_proj.weight", "mlp.down_proj"),
    ),
    "qwen2_5_vl": (*LLAMA, *QKV_BIAS),
    "qwen2_moe": (*SOFTMAX, *QKV_BIAS, *MLP, *GATED),
    "qwen3_vl_moe": (
        *(*NORMS, *QKVO, *QK_NORMS, "mlp.gate", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
    "smollm3": LLAMA,
    "deepseek_v3": (*NORMS, *LATENT, *BIASED),
    "deepseek_v32": (*NORMS, *LATENT, *INDEXER, *BIASED),
    "gemma3_text": (*LLAMA, *QK_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "glm4_moe": (*NORMS, *QKVO, *QKV_BIAS, *QK_NORMS, *BIASED),
    "glm4_moe_lite": (*NORMS, *LATENT, *BIASED),
    "glm_moe_dsa": (*NORMS, *LATENT, *INDEXER, *BIASED),
    "gpt_oss": (
        *(*NORMS, *QKVO, *QKV_BIAS, "self_attn.o_proj.bias", "self_attn.sinks"),
        *("mlp.router", "mlp.router.bias", "mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"),
        *("mlp.experts.down_proj", "mlp.experts.down_proj_bias"),
    ),
    "kimi_k2": (*NORMS, *LATENT, *BIASED),
    "kimi_k25": (*NORMS, *LATENT, *BIASED),
    "llama": LLAMA,
    "minimax_m2": (
        *(*NORMS, *QKVO, *QK_NORMS),
        *(f"block_sparse_moe.{name}" for name in ("gate", "e_score_correction_bias")),
        *(f"block_sparse_moe.experts.#.w{n}" for n in (1, 2, 3)),
    ),
    "mistral": LLAMA,
    "mistral3": LLAMA,
    "qwen2": (*LLAMA, *QKV_BIAS),
    "qwen3": (*LLAMA, *QK_NORMS),
    "qwen3_5": (*LLAMA, *QK_NORMS, *SPLIT_DELTA),
    "qwen3_5_moe": (
        *(*NORMS, *QKVO, *QK_NORMS, *SPLIT_DELTA, *GATED, "mlp.gate"),
        *("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
    "qwen3_moe": (*NORMS, *QKVO, *QK_NORMS, *MLP, *EXPERTS),
    "qwen3_next": (
        *(*NORMS, *QKVO, *QK_NORMS, *DELTA, "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
        *(*MLP, *EXPERTS, *GATED),
    ),
    "qwen3_vl": (*LLAMA, *QK_NORMS),
    "seed_oss": (*LLAMA, *QKV_BIAS),
}
"""Names of the tensors of a layer, by the indexes of published checkpoints; # stands for an expert. Those
without an ending are of weights."""
PREFIXES = {
    "gemma3": ("language_model.model.", "language_model.lm_head."),
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe"), ("model.language_model.", "lm_head.")),
    "kimi_k25": ("language_model.model.", "language_model.lm_head."),
    "mistral3": ("language_model.model.", "language_model.lm_head."),
    "qwen3_5": ("model.language_model.", "lm_head."),
    "qwen3_5_moe": ("model.language_model.", "lm_head."),
    "qwen3_vl": ("model.language_model.", "lm_head."),
    "qwen3_vl_moe": ("model.language_model.", "lm_head."),
}
"""Beginnings of the names of a decoder and of its head in models that read more than text."""
BARE = ("bias", "A_log", "dt_bias", "sinks", "gate_up_proj", "gate_up_proj_bias", "down_proj_bias")


def published_name(name: str) -> str:
    kind = name.rpartition(".")[2]
    if kind == "weight":
        return name
    stacked = name == "mlp.experts.down_proj"
    return name if kind in BARE or stacked or kind == "e_score_correction_bias" else f"{name}.weight"


@pytest.mark.parametrize("family", sorted(PUBLISHED))
def test_the_names_by_a_config_alone_are_those_of_published_checkpoints(tmp_path, family):
    make_checkpoint(tmp_path, family, tied=False)
    spec = spec_of(json.loads((tmp_path / "config.json").read_text()), tmp_path)
    names = {name for entry in entries(spec, Layout()) for name in entry.hf_names}
    found = {re.sub(r"\.experts\.\d+\.", ".experts.#.", re.sub(r"layers\.\d+\.", "", name)) for name in names}
    decoder, head = PREFIXES.get(family, ("model.", "lm_head."))
    expected = {f"{decoder}{published_name(name)}" for name in PUBLISHED[family]}
    around = {f"{decoder}embed_tokens.weight", f"{decoder}norm.weight", f"{head}weight"}
    if spec.geometry.layer_norms:
        around.add(f"{decoder}norm.bias")
    assert found == {*expected, *around}


def test_every_family_with_checkpoints_of_its_own_has_its_published_names():
    assert PUBLISHED.keys() == FAMILIES.keys() - {"qwen3_5_text", "qwen3_5_moe_text"}
