"""Public models by the facts of their config.json: mapped, or refused with all that is missing.

``public_models.jsonl`` has for each the settings that matter, and either the parameters of its language model
in billions, as published, or what the bridge lacks. docs/families.md has the same as a table.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.bridge.families import FAMILIES, spec_of
from slipstream.bridge.families.missing import EXAMINED, STRUCTURE, missing_parts
from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.shards.plan import entries
from tests.environment import ROOT

MODELS: list[dict[str, Any]] = [
    json.loads(line) for line in (ROOT / "tests/unit/public_models.jsonl").read_text().splitlines()
]
MAPPED = [model for model in MODELS if "billions" in model]
REFUSED = [model for model in MODELS if "missing" in model]
PAGE = ROOT / "docs/families.md"


def name_of(model: dict[str, Any]) -> str:
    return model["model"]


@pytest.mark.parametrize("model", MAPPED, ids=name_of)
def test_a_mapped_model_has_the_parameters_that_are_published(model):
    spec = spec_of(model["config"], Path())
    parameters = sum(entry.numel for entry in entries(spec, Layout()))
    assert parameters == pytest.approx(model["billions"] * 1e9, rel=0.03)
    assert missing_parts(model["config"]) == []


@pytest.mark.parametrize("model", REFUSED, ids=name_of)
def test_a_model_that_is_not_mapped_is_refused_with_everything_that_is_missing(model):
    assert missing_parts(model["config"]) == model["missing"]
    with pytest.raises(UnsupportedModel) as refusal:
        spec_of(model["config"], Path())
    message = str(refusal.value)
    if model["config"]["model_type"] not in FAMILIES:
        assert all(part in message for part in model["missing"])
        # A module of the user's helps only where nothing else is missing.
        assert ("model.families" in message) == (model["missing"] == [])


def test_every_family_is_among_the_models():
    # The language models of Qwen3.5 have no checkpoints of their own.
    assert {model["config"]["model_type"] for model in MAPPED} == FAMILIES.keys() - {
        "qwen3_5_text",
        "qwen3_5_moe_text",
    }


def test_no_structure_is_listed_for_a_mapped_family():
    assert not STRUCTURE.keys() & FAMILIES.keys()


def test_of_a_type_that_was_not_examined_nothing_is_said_to_be_there():
    llama = next(model["config"] for model in MAPPED if model["model"] == "Llama-2-7B")
    for text in (llama | {"model_type": "unheard_of"}, {"model_type": "unheard_of", "text_config": llama}):
        with pytest.raises(UnsupportedModel, match="'unheard_of' is not mapped, and was not examined: it is"):
            spec_of(text, Path())
    with pytest.raises(UnsupportedModel, match=r"not examined: .*\(its settings show a bias of the att"):
        spec_of(llama | {"model_type": "unheard_of", "attention_bias": True}, Path())


def test_the_examined_types_are_those_of_the_page_and_of_the_list():
    of_page = {model["config"]["model_type"] for model in REFUSED} - FAMILIES.keys()
    assert of_page | STRUCTURE.keys() == EXAMINED


def test_a_model_is_not_taken_for_another_one_with_the_same_tensors():
    """Gemma 2 has the tensors of Gemma 3 without norms of queries and keys, and softcaps beside them."""
    gemma2 = next(model["config"] for model in REFUSED if model["config"]["model_type"] == "gemma2")
    with pytest.raises(UnsupportedModel, match=r"softcapping of attention scores"):
        spec_of(gemma2, Path())


def test_a_mapped_family_names_all_settings_at_once_that_it_does_not_cover():
    llama = next(model["config"] for model in MAPPED if model["model"] == "Llama-2-7B")
    changes = {
        "attention_bias": True,
        "hidden_act": "gelu",
        "final_logit_softcapping": 30.0,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    }
    with pytest.raises(UnsupportedModel) as refusal:
        spec_of(llama | changes, Path())
    for part in (
        "rotary embeddings of type dynamic",
        "softcapping of logits (final_logit_softcapping=30.0)",
        "activation gelu",
        "a bias of the attention output (attention_bias)",
    ):
        assert part in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("attention_multiplier", 0.1),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.2),
        ("logits_scaling", 8.0),
        ("clip_qkv", 8.0),
    ],
)
def test_a_constant_that_no_family_covers_is_refused_in_a_mapped_family(name, value):
    [qwen3] = [model["config"] for model in MAPPED if model["model"] == "Qwen3-8B"]
    with pytest.raises(UnsupportedModel, match=f"{name}={value}"):
        spec_of(qwen3 | {name: value}, Path())


def test_the_page_has_a_row_for_each_model():
    missing = [line for line in table() if line not in PAGE.read_text().splitlines()]
    assert not missing, "docs/families.md needs these rows:\n" + "\n".join(table())


def test_the_page_has_no_other_rows():
    lines = PAGE.read_text().partition("## Public models")[2].splitlines()
    assert [line for line in lines if line.startswith("| ")][1:] == table()


def table() -> list[str]:
    """Return the rows of the page's table."""
    return [
        f"| {name_of(model)} | `{model['config']['model_type']}` | {_verdict(model)} |" for model in MODELS
    ]


def _verdict(model: dict[str, Any]) -> str:
    if "billions" in model:
        return "yes"
    return "; ".join(model["missing"]) or "not mapped, and nothing is missing: a module of yours can map it"


if __name__ == "__main__":
    print("\n".join(table()))
