"""What the files of a checkpoint say beyond its config: the head, stacked experts, and what contradicts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.hf.files import write_hf
from slipstream.bridge.hf.index import HfCheckpointError, stored_tensors
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.spec import value_spec
from slipstream.bridge.shards.adapter import NoAdapter, adapter_spec
from slipstream.bridge.shards.check import check_tensors
from slipstream.bridge.shards.plan import entries
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


# ---- experts

STACKED = "gpt_oss"
"""The family that has no other form."""


@pytest.mark.parametrize("family", [family for family in MIXTURES if family != STACKED])
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
