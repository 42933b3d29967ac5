"""Settings and metrics are explained by commands, by ``--help`` and on the site, from one source."""

import re

import pytest
from typer.testing import CliRunner

from slipstream.backend.cli.app import app
from slipstream.backend.commands.reference import COMMON, Explanation, metric_chapters, setting_chapters
from slipstream.backend.monitor.tags import GROUPS, TAGS
from slipstream.configs.explain import OTHER_NAMES
from slipstream.configs.schema import PluginConfig, RunConfig
from slipstream.configs.schema.paths import schema_fields, schema_paths, sections_of
from slipstream.configs.schema.supervised import SupervisedConfig

ROOTS = [RunConfig, SupervisedConfig]


def said(*words: str) -> str:
    result = CliRunner().invoke(app, words, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def entries(root) -> dict[str, Explanation]:
    return {entry.name: entry for chapter in setting_chapters(root) for entry in chapter.entries}


def setting_fields(root):
    """The fields of every setting: neither those of sections nor those inside a plugin."""
    for path, section, field in schema_fields(root):
        if section is not PluginConfig and set(sections_of(field).values()) <= {PluginConfig}:
            yield ".".join(path), section, field


@pytest.mark.parametrize(
    ("words", "root"),
    [
        (("settings",), RunConfig),
        (("settings", "--sft"), SupervisedConfig),
    ],
)
def test_every_setting_is_printed_with_its_type_default_and_meaning(words, root):
    text = said(*words)
    for name, section, field in setting_fields(root):
        assert re.search(rf"(?<!\S){re.escape(name)} [^\[]+\[", text), name
        meaning = section.__doc__ if name.endswith(".type") else field.description
        assert meaning and " ".join(meaning.replace("``", "`").split()) in text, name


@pytest.mark.parametrize(("command", "root"), [("train", RunConfig), ("sft", SupervisedConfig)])
@pytest.mark.parametrize("width", [80, 120, 200])
def test_help_fits_a_screen_and_has_the_settings_that_most_people_change(command, root, width):
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": str(width)})
    lines = result.stdout.splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= width
    common = [name for name in COMMON if name in entries(root)]
    assert [line.split()[0] for line in lines if line.split() and line.split()[0] in common] == common
    assert f"All {len(entries(root))}, or those about a word: slipstream settings" in result.stdout


def test_most_common_settings_exist():
    known = entries(RunConfig) | entries(SupervisedConfig)
    assert not set(COMMON) - known.keys()


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["train", "quickstart", "--run.steps=3"], "dashes: run.steps=3"),
        (["train", "quickstart", "--lr", "3"], "actor.optimizer.lr=... or critic.optimizer.lr=..."),
        (["check", "quickstart", "--max-head-offpolicyness=0"], "rollout.max_head_offpolicyness=0"),
        (["submit", "quickstart", "--actor.parallel.tensor=2"], "actor.parallel.tensor=2"),
        (["check", "quickstart", "-run.steps=3"], "dashes: run.steps=3"),
        (["check", "quickstart", "--learning-rate", "3"], "dashes: actor.optimizer.lr=..."),
        (["check", "quickstart", "--set", "run.steps=3"], "--set: leave it out, and write run.steps=3 alone"),
        (["train", "-o", "run.steps=3", "quickstart"], "-o: leave it out"),
        (["check", "--config=my.yaml"], "--config: leave it out, and write my.yaml alone"),
    ],
)
def test_a_setting_that_is_written_as_an_option_gets_a_hint(words, meant):
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 2 and meant in " ".join(result.output.split())


def test_what_belongs_to_an_option_is_no_setting():
    words = ["submit", "nowhere.yaml", "--sbatch", "--export=a=b", "--print", "run.steps=3"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 2 and "there is no such recipe file" in result.output
    assert CliRunner().invoke(app, ["try", "--help", "my.yaml"]).exit_code == 0


def test_another_systems_name_finds_our_setting():
    assert "actor.optimizer.lr" in said("settings", "learning_rate")
    known = {*schema_paths(RunConfig), *schema_paths(SupervisedConfig)}
    assert set(OTHER_NAMES.values()) <= known and not OTHER_NAMES.keys() & known


def test_a_word_finds_the_settings_that_it_occurs_in():
    found = said("settings", "Staleness")
    assert "actor.drift.kl" in found and "run.steps" not in found


@pytest.mark.parametrize("root", ROOTS)
def test_every_section_says_what_it_is_for(root):
    chapters = {chapter.name: chapter for chapter in setting_chapters(root)}
    sections = {
        ".".join(path[:-1]) for path, section, _ in schema_fields(root) if section is not PluginConfig
    }
    assert sections - {""} <= chapters.keys()
    assert not [name for name, chapter in chapters.items() if "." in name and not chapter.text]


@pytest.mark.parametrize("root", ROOTS)
def test_every_setting_is_described(root):
    assert not [
        name
        for name, _, field in setting_fields(root)
        if not field.description and not name.endswith(".type")
    ]


def test_a_setting_reads_as_a_recipe_writes_it():
    known = {name: entry.facts for name, entry in entries(RunConfig).items()}
    assert known["run.name"] == ("text", "required")
    assert known["run.steps"] == ("integer >= 1, <= 1e+09 or null", "null")
    assert known["run.root"] == ("path", "runs")
    assert known["eval.max_prompts"] == ("integer >= 1 or null", "null")
    assert known["rollout.reward"] == ("import path, or {path, args} or null", "null")
    assert known["rollout.workflow"][1] == "slipstream.rollout.workflow.SingleTurn"
    assert known["actor.optimizer.decay.type"] == ("`constant`, `linear` or `cosine`", "constant")


def test_a_type_without_a_default_is_required():
    known = entries(RunConfig)
    assert known["judge.endpoint.type"].facts[1] == "required"
    assert known["actor.correction.token.type"].facts[1] == "required", "the section itself is null"
    assert known["rollout.consumption.type"].facts[1] == "ready_first"


def test_a_setting_of_some_types_says_which_and_what_their_defaults_are():
    known = entries(RunConfig)
    assert known["actor.optimizer.decay.min_lr"].meaning.startswith("`linear`, `cosine`: Learning rate")
    assert known["actor.objective.clip_low"].facts[1] == "0.2"
    assert known["actor.objective.clip_low"].meaning.endswith("Default in `gspo`: `0.0003`.")
    assert not known["judge.ask_again_s"].meaning.startswith("`"), "both types have it"


def test_a_section_of_some_types_says_which():
    texts = {chapter.name: chapter.text for chapter in setting_chapters(RunConfig)}
    assert texts["cluster.container"].endswith("Only with `cluster.type: slurm`.")
    assert "Only with" not in texts["actor.optimizer"]


def test_one_section_or_setting_is_printed_alone():
    assert "actor.optimizer.decay.type" in said("settings", "actor.optimizer")
    one = said("settings", "actor.optimizer.lr")
    assert one.startswith("actor.optimizer.lr number > 0, <= 1 [1e-06]")
    assert "actor.optimizer.eps" not in one
    assert said("metrics", "train/ess").startswith("train/ess [fraction]")


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (("settings", "rollout.consumtion"), "rollout.consumption"),
        (("metrics", "train/es"), "train/ess"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(words, near):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert f"{words[1]} is unknown; did you mean {near}?" in result.output


def test_every_metric_is_printed_with_its_unit_and_meaning_below_its_group():
    assert [chapter.name for chapter in metric_chapters()] == list(GROUPS)
    assert [entry.name for chapter in metric_chapters() for entry in chapter.entries] == list(TAGS)
    text = said("metrics")
    for name, tag in TAGS.items():
        assert f" {name} [{tag.unit}] {tag.meaning}" in text
    assert all(meaning in text for meaning in GROUPS.values())
