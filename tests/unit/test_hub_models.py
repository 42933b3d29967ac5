"""Models of the hub, downloaded from a hub on this machine over real HTTP."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import yaml

from slipstream.backend.commands.check import check, planned, read_plannable
from slipstream.backend.commands.outcome import WrongInput
from slipstream.backend.driver.start.hub_models import WILL_DOWNLOAD, record_commits, with_local_models
from slipstream.backend.driver.start.inputs import InputError
from slipstream.backend.driver.start.run_folder import recipe_text
from slipstream.configs.load import load_recipe
from slipstream.configs.published import MODELS, shipped_config
from slipstream.configs.rules.models import model_folder
from slipstream.configs.schema.paths import model_settings, schema_fields
from slipstream.configs.violations import RecipeError
from slipstream.rollout.prompts.reading import local_files
from slipstream.rollout.system.hub import HubError, model_files
from tests.hub import local_hub

CONFIG = (MODELS / "Qwen3-0.6B" / "config.json").read_bytes()
FILES = {"config.json": CONFIG, "model.safetensors": b"w" * 2_000_000, "pytorch_model.bin": b"not wanted"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with local_hub() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        # This process has read its variables already.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub" / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.endpoint)
        template = served.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield served


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "label": "b"}\n')

    def load(*overrides: str):
        return load_recipe(
            {
                "run": {"name": "test", "root": str(tmp_path / "runs"), "steps": 1},
                "model": {"path": "hf://a/policy"},
                "data": {"path": str(tmp_path / "data.jsonl")},
                "rollout": {
                    "max_head_offpolicyness": 0,
                    "batch_size": 1,
                    "n_samples_per_prompt": 2,
                    "reward": "slipstream.rollout.reward.FinalAnswer",
                },
            },
            overrides,
        )

    return load


def local(config, *, resume=False):
    said: list[str] = []
    return asyncio.run(with_local_models(config, said.append, resume=resume)), said


def test_every_model_of_a_recipe_becomes_a_folder_and_a_resumed_run_keeps_the_commits(hub, recipe):
    first = hub.put("a/policy", FILES)
    hub.put("b/teacher", FILES, branch="v1")
    named = recipe("actor.advantage=[{type: teacher, scores: {type: model, path: 'hf://b/teacher@v1'}}]")
    config, said = local(named)
    assert config.model.path.name == first
    assert {file.name for file in config.model.path.iterdir()} == {"config.json", "model.safetensors"}
    assert (config.actor.advantage[0].scores.path / "config.json").read_bytes() == CONFIG
    assert any(line.endswith("2.0 MB of 2.0 MB") for line in said)
    assert yaml.safe_load(recipe_text(named))["model"]["path"] == "hf://a/policy"

    config.run.folder.mkdir(parents=True)
    record_commits(named, config)
    second = hub.put("a/policy", {**FILES, "model.safetensors": b"other"})
    hub.asked.clear()
    assert local(named, resume=True)[0] == config
    assert not [each for each in hub.asked if "/resolve/" in each]  # everything is in the cache
    assert local(named)[0].model.path.name == second
    (config.run.folder / "hub.json").write_text("{")
    with pytest.raises(InputError, match=r"hub\.json cannot be read"):
        local(named, resume=True)


def test_a_resumed_run_keeps_the_commit_of_its_data_set(hub, recipe):
    hub.put("a/prompts", {"train.jsonl": b"1\n"}, branch="v1")
    named = recipe("model.path=models/none", "prepare=slipstream.backend.simulate.only_simulated")
    path = Path("hf://datasets/a/prompts@v1/train")
    named = named.model_copy(update={"data": named.data.model_copy(update={"path": path})})
    config, _ = local(named)
    assert [file.read_bytes() for file in local_files(config.data.path)] == [b"1\n"]
    config.run.folder.mkdir(parents=True)
    record_commits(named, config)
    hub.put("a/prompts", {"train.jsonl": b"2\n"}, branch="v1")
    resumed, _ = local(named, resume=True)
    assert [file.read_bytes() for file in local_files(resumed.data.path)] == [b"1\n"]
    assert [file.read_bytes() for file in local_files(named.data.path)] == [b"2\n"]
    record_commits(named, resumed)
    assert local(named, resume=True)[0] == resumed


def test_all_that_cannot_be_downloaded_is_told_at_once_each_with_its_reason(hub, recipe):
    hub.put("a/policy", FILES)
    hub.put("gated/model", FILES)
    hub.gated.add("gated/model")
    teacher = "actor.advantage=[{type: teacher, scores: {type: model, path: 'hf://nobody/has-it'}}]"
    reference = "actor.kl={reference: {type: checkpoint, path: 'hf://a/policy@v9'}}"
    with pytest.raises(InputError) as raised:
        local(recipe(teacher, reference, "model.path=hf://gated/model"))
    gated, *others = str(raised.value).splitlines()
    name, revision = sorted(others)
    assert gated.startswith("model.path: hf://gated/model: the model is gated: accept its terms")
    assert revision.startswith("actor.kl.reference.path: hf://a/policy@v9: the model has no revision 'v9'")
    assert name.startswith("actor.advantage.0.scores.path: hf://nobody/has-it: the hub has no model")


def test_without_a_hub_the_error_has_the_command_and_a_model_in_the_cache_is_used(hub, monkeypatch):
    commit = hub.put("a/policy", FILES, branch="v2")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"cannot be downloaded: .*: hf download a/policy --revision v2$"):
        model_files("hf://a/policy@v2", say=print)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    model_files("hf://a/policy@v2", say=print)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert model_files("hf://a/policy@v2", say=print).name == commit


def test_a_model_that_does_not_fit_on_the_disk_is_not_begun(hub, monkeypatch):
    hub.put("a/policy", FILES)
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(HubError, match=r"has 1.0 MB free, expected 2.0 MB; .* set HF_HOME"):
        model_files("hf://a/policy", say=print)
    assert not [each for each in hub.asked if each.startswith("GET /a/policy/")]


def test_a_disk_that_gets_full_is_told(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(HubError, match="set HF_HOME to a folder on a larger disk"):
        model_files("hf://a/policy", cached=True)


def test_rules_that_read_the_model_are_checked_once_it_is_there(hub, recipe):
    hub.put(
        "a/policy", {**FILES, "config.json": json.dumps({**json.loads(CONFIG), "vocab_size": 9}).encode()}
    )
    hub.put("b/teacher", FILES)
    named = recipe("actor.advantage=[{type: teacher, scores: {type: model, path: 'hf://b/teacher'}}]")
    with pytest.raises(InputError, match="its vocabulary has 151936 tokens; expected 9"):
        local(named)


GIVEN = {
    "model.path": ("model.path={}",),
    "actor.lora.path": ("actor.lora={{rank: 2, alpha: 4, path: {}}}",),
    "actor.advantage.scores.path": (
        "actor.advantage=[{{type: reward}}, {{type: teacher, scores: {{type: model, path: {}}}}}]",
    ),
    "actor.kl.reference.path": ("actor.kl={{reference: {{type: checkpoint, path: {}}}}}",),
    "critic.path": ("actor.advantage=[{{type: reward, estimator: gae}}]", "critic={{path: {}}}"),
    "judge.endpoint.path": (
        "judge={{type: model, endpoint: {{type: engines, path: {}}}}}",
        "rollout.reward=slipstream.rollout.reward.ModelVotes",
    ),
}
"""Overrides for a recipe in which a setting names a model."""

NO_MODEL = {
    "run.root",
    "data.path",
    "data.sources.path",
    "eval.path",
    "eval.sets.path",
    "rollout.hooks.custom_config_path",
    "rollout.endpoint.chat_template",
    "gateway.chat_template",
    "gateway.keys",
    "checkpoint.local_dir",
    "weights.transport.path",
    "weights.transport.memory",
}


def naming(setting, name):
    return [override.format(f"'{name}'") for override in GIVEN[setting]]


def test_every_path_of_a_recipe_is_known_as_one_of_a_model_or_of_something_else():
    paths = {".".join(path) for path, _, field in schema_fields() if "Path" in str(field.annotation)}
    assert paths == {*model_settings(), *NO_MODEL}


@pytest.mark.parametrize("setting", model_settings())
def test_every_setting_of_a_model_takes_a_name_of_the_hub(hub, recipe, setting):
    hub.put("a/policy", FILES)
    commit = hub.put("b/other", FILES, branch="v1")
    named = recipe(*naming(setting, "hf://b/other@v1"))
    note = f"{setting.replace('advantage', 'advantage.1')}: hf://b/other@v1 {WILL_DOWNLOAD}"
    assert [line for line in check(named, weights=False).notes if line.startswith(note)]
    assert model_folder(local(named)[0], setting).name == commit
    with pytest.raises(RecipeError, match="expected hf://ORG/NAME or hf://ORG/NAME@REVISION"):
        recipe(*naming(setting, "hf://other"))


@pytest.mark.parametrize("name", ["hf://policy", "hf://datasets/a/b", "hf://a/b/c", "hf://a/b@"])
def test_names_of_no_model_are_refused_when_the_recipe_is_loaded(name, recipe):
    with pytest.raises(
        RecipeError, match=r"model\.path = .*expected hf://ORG/NAME or hf://ORG/NAME@REVISION"
    ):
        recipe(f"model.path={name}")


def test_check_and_plan_download_nothing_and_use_the_cache(hub, recipe, tmp_path):
    hub.put("a/policy", FILES)
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_text(recipe()))
    note = (
        "model.path: hf://a/policy is not in the cache of this machine: the run downloads it when it starts"
    )
    assert [line for line in check(recipe()).notes if line.startswith(note)]
    with pytest.raises(WrongInput, match=r"hf download a/policy config\.json --local-dir FOLDER"):
        read_plannable(str(file), [], model_config=None, supervised=False)
    overrides = ["model.path=hf://Qwen/Qwen3-0.6B"]
    config, notes = read_plannable(str(file), overrides, model_config=None, supervised=False)
    assert config.model.path == shipped_config(tmp_path / "Qwen3-0.6B")
    assert notes[0].startswith("model.path: hf://Qwen/Qwen3-0.6B is not in the cache of this machine")
    assert hub.asked == []

    model_files("hf://a/policy", say=print)
    config, notes = read_plannable(str(file), [], model_config=None, supervised=False)
    assert planned(config).export.buckets
    assert notes == []
