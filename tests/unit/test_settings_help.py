"""`slipstream train --help` ends with every setting that a recipe may have."""

import re

import pytest
from typer.testing import CliRunner

from slipstream.backend.cli import app
from slipstream.backend.commands.settings import settings
from slipstream.configs.schema import PluginConfig, RunConfig
from slipstream.configs.schema.paths import schema_fields, sections_of
from slipstream.configs.schema.supervised import SupervisedConfig


@pytest.mark.parametrize(("command", "root"), [("train", RunConfig), ("sft", SupervisedConfig)])
def test_the_help_has_every_setting_with_its_kind_default_and_meaning(command, root):
    said = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "100"})
    assert said.exit_code == 0
    text = " ".join(said.stdout.split())
    for path, section, field in schema_fields(root):
        if section is PluginConfig or not set(sections_of(field).values()) <= {PluginConfig}:
            continue
        assert re.search(rf" {re.escape('.'.join(path))} [^\[]+\[", text), path
        assert " ".join((field.description or "").split()) in text, path


def test_a_setting_reads_as_a_recipe_writes_it():
    known = {each.path: each for each in settings(RunConfig)}
    assert (known["run.name"].kind, known["run.name"].default) == ("text", "required")
    assert (known["run.steps"].kind, known["run.steps"].default) == ("integer >= 1 or null", "null")
    assert (known["run.root"].kind, known["run.root"].default) == ("path", "runs")
    assert known["eval.max_prompts"].kind == "integer >= 1 or null"
    assert known["actor.optimizer.decay.type"].kind == "constant | linear | cosine"
    assert known["actor.optimizer.decay.min_lr"].types == ("linear", "cosine")
    assert known["rollout.reward"].kind == "import path, or {path, args} or null"
