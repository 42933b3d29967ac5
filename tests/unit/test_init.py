"""``slipstream init``: its files are a run."""

import importlib.util
import json
import shlex

import pytest
import yaml
from typer.testing import CliRunner

from slipstream.backend.cli.app import app
from slipstream.configs.load import load_recipe
from slipstream.configs.schema import PromptFile
from slipstream.rollout.prompts import read_prompts
from slipstream.rollout.tokens.trajectory import Prompt

NAMES = {"recipe.yaml", "my_reward.py", "train.jsonl", "heldout.jsonl"}


def made(folder, *options: str):
    result = CliRunner().invoke(app, ["init", str(folder), *options])
    return result.exit_code, result.output


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model's own"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("has_model", [False, True])
def test_the_recipe_loads_and_its_files_are_there(has_model, model, tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    code, said = made(folder, *(["--model", str(model)] if has_model else []))
    assert code == 0 and {path.name for path in folder.iterdir()} == NAMES
    assert f"cd {folder}" in said
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))  # as the command line does
    config = load_recipe(folder / "recipe.yaml", [])
    assert config.rollout.reward is not None and config.rollout.reward.path == "my_reward.score"
    assert (config.prepare is None) == has_model
    assert not has_model or config.model.path == model
    assert config.data is not None and config.eval is not None
    train, held_out = read_prompts(PromptFile(config.data.path)), read_prompts(PromptFile(config.eval.path))
    assert not {prompt.prompt for prompt in train} & {prompt.prompt for prompt in held_out}
    assert len(train) == 1000 and all(prompt.label for prompt in (*train, *held_out))


def test_the_reward_reads_what_stands_behind_the_last_mark(tmp_path):
    made(tmp_path)
    spec = importlib.util.spec_from_file_location("my_reward", tmp_path / "my_reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    prompt = Prompt(0, "3 + 4", label="7")
    assert module.score(prompt, "3 # 4 # 7 ", None) == {"reward": 1.0, "has_answer": 1.0}
    assert module.score(prompt, "7", None) == {"reward": 0.0, "has_answer": 0.0}


def test_nothing_is_overwritten_and_every_reason_is_told(tmp_path):
    (tmp_path / "train.jsonl").write_text("mine")
    code, said = made(tmp_path, "--model", "nowhere")
    assert code == 2 and {path.name for path in tmp_path.iterdir()} == {"train.jsonl"}
    assert (tmp_path / "train.jsonl").read_text() == "mine"
    assert "train.jsonl: there already" in said.replace("\n", "") and "--model nowhere" in said


def test_the_model_may_be_on_the_hub(tmp_path):
    code, said = made(tmp_path / "bad", "--model", "hf://tiny")
    assert code == 2 and "hf://ORG/NAME" in said
    code, _ = made(tmp_path / "mine", "--model", "hf://some-lab/tiny@v1")
    assert code == 0
    recipe = yaml.safe_load((tmp_path / "mine" / "recipe.yaml").read_text())
    assert recipe["model"]["path"] == "hf://some-lab/tiny@v1"


def test_data_are_objects_in_lines(tmp_path):
    made(tmp_path)
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    assert all(set(json.loads(line)) == {"prompt", "label"} for line in lines)


@pytest.mark.parametrize(
    ("folder", "name"),
    [("json-task", "json-task"), ("a b", "a-b"), (".hidden", "hidden"), ("ü", "my-run"), ("x/y_z", "y_z")],
)
def test_a_run_has_the_name_of_its_folder(folder, name, tmp_path, monkeypatch):
    code, said = made(tmp_path / folder)
    assert code == 0, said
    monkeypatch.chdir(tmp_path / folder)
    monkeypatch.syspath_prepend(str(tmp_path / folder))
    assert load_recipe(tmp_path / folder / "recipe.yaml", []).run.name == name


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    code, said = made(tmp_path / "file" / "deeper")
    assert code == 2 and "Not a directory" in said
    (tmp_path / "loop").symlink_to("loop")
    code, said = made(tmp_path / "loop")
    assert code == 2 and "expected a folder that can be made" in said


def test_what_comes_next_can_be_pasted(tmp_path):
    _, said = made(tmp_path / "two words")
    (line,) = [line for line in said.splitlines() if "cd " in line]
    assert shlex.split(line.removeprefix("next:"))[1:] == [str(tmp_path / "two words")]
