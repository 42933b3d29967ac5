"""Loading recipes: every violation is in one report, and nothing but ``RecipeError`` comes out."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from slipstream.configs import explain
from slipstream.configs.document import RECIPES, read_document
from slipstream.configs.load import load_recipe, load_supervised
from slipstream.configs.schema import PluginConfig, RunConfig
from slipstream.configs.schema.judge import OwnEngines
from slipstream.configs.schema.paths import schema_fields, schema_paths, sections_of
from slipstream.configs.schema.supervised import SupervisedConfig
from slipstream.configs.violations import ABSENT, RecipeError, Violation
from tests.tries import tries

VALID = {
    "run": {"name": "valid", "steps": 2},
    "prepare": "slipstream.backend.simulate.only_simulated",
    "model": {"path": "nowhere"},
    "data": {"path": "nowhere.jsonl"},
    "rollout": {
        "max_head_offpolicyness": 4,
        "batch_size": 4,
        "n_samples_per_prompt": 4,
        "reward": "slipstream.rollout.reward.FinalAnswer",
    },
}


@pytest.fixture
def recipe(tmp_path):
    """Writes recipes: text as it is, anything else as YAML."""

    def write(content) -> Path:
        file = tmp_path / "recipe.yaml"
        text = content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
        file.write_text(text, encoding="utf-8")
        return file

    return write


def changed(path: str, value: object, base: dict = VALID) -> dict:
    """``base`` with the value at one dotted path replaced."""
    data = copy.deepcopy(base)
    *outer, last = path.split(".")
    section = data
    for key in outer:
        if not isinstance(section.get(key), dict):
            section[key] = {"path": section[key]} if isinstance(section.get(key), str) else {}
        section = section[key]
    section[last] = value
    return data


def violations(file: Path, overrides: tuple[str, ...] = ()) -> dict[str, Violation]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(file, overrides)
    assert caught.value.violations
    return {violation.path: violation for violation in caught.value.violations}


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_bundled_recipe_loads_by_file_and_by_name(file):
    load = load_supervised if file.stem.startswith("sft-") else load_recipe
    try:
        assert load(Path(file.stem)) == load(file)
    except RecipeError as error:  # recipes for a cluster name files that only exist there
        reasons = {violation.reason.partition(",")[0] for violation in error.violations}
        assert reasons <= {"there is no such file", "it has no config.json"}, error


def test_five_mistakes_are_all_named(recipe):
    data = copy.deepcopy(VALID)
    data["rollout"]["lr"] = 3e-4
    data["actor"] = {
        "minibatches": "four",
        "use_decoupled_loss": True,
        "recompute_logprobs": False,
        "megatron": {"recompute_methodd": "block"},
    }
    data["rollout"]["engine"] = {"args": {"max_running_request": 3}}
    reported = violations(recipe(data))
    assert set(reported) == {
        "rollout.lr",
        "actor.minibatches",
        "actor.recompute_logprobs",
        "actor.megatron.recompute_methodd",
        "rollout.engine.args.max_running_request",
    }
    assert "did you mean actor.optimizer.lr or critic.optimizer.lr?" in reported["rollout.lr"].reason
    assert reported["actor.minibatches"].value == "four"
    assert reported["actor.minibatches"].reason == "expected a whole number"
    for way_out in ("actor.recompute_logprobs to true", "actor.use_decoupled_loss to false"):
        assert way_out in reported["actor.recompute_logprobs"].reason
    assert "did you mean recompute_method?" in reported["actor.megatron.recompute_methodd"].reason
    assert "did you mean max_running_requests?" in reported["rollout.engine.args.max_running_request"].reason


def test_the_report_counts_and_lists_every_violation(recipe):
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe(VALID), ("run.steps=0", "actor.optimizer.lr=-1"))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("2 violations in ")
    assert lines[1:] == [
        "  run.steps = 0: expected at least 1 or null",
        "  actor.optimizer.lr = -1: expected more than 0",
    ]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("rollout.n_sample_per_prompt", "did you mean rollout.n_samples_per_prompt?"),
        ("rollout.max-concurrent", "did you mean rollout.max_concurrent?"),
        ("rollout.temperature", "did you mean rollout.sampling.temperature?"),
        ("optimizer", "did you mean actor.optimizer or critic.optimizer?"),
        ("rollout.engine.mem_fraction_static", "did you mean rollout.engine.args.mem_fraction_static?"),
        ("actor.cp_comm_type", "did you mean actor.megatron.cp_comm_type?"),
        ("model.frobnicate", "the keys here are path (required), dtype, families, template_args"),
    ],
)
def test_an_unknown_key_comes_with_the_nearest_valid_one(recipe, key, hint):
    assert hint in violations(recipe(changed(key, 1)))[key].reason


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("run.steps", "40", "expected a whole number"),
        ("run.steps", True, "expected a whole number"),
        ("run.steps", 1.5, "expected a whole number"),
        ("run.seed", None, "expected a whole number"),
        ("run.epochs", 0, "expected more than 0"),
        ("run.name", 3, "expected text"),
        ("run.name", "a/b", "expected letters, digits, "),
        ("actor.optimizer.lr", "fast", "expected a number"),
        ("actor.optimizer.lr", float("inf"), "expected a finite number"),
        ("actor.optimizer.beta1", 1, "expected less than 1"),
        ("actor.optimizer.lr", 0, "expected more than 0"),
        ("rollout.over_sampling", 5, "expected at most 4"),
        ("actor.parallel.expert_tensor", 0, "expected at least 1 or null"),
        ("weights.verify", 3, "expected a mapping whose `type` is 'always', 'every_n', 'digests' or 'off'"),
        ("actor.use_decoupled_loss", "yes", "expected true or false"),
        ("actor.use_decoupled_loss", 1, "expected true or false"),
        (
            "actor.advantage",
            "grpo",
            "expected a list of at least one item, each a mapping whose `type` is 'reward', 'teacher', "
            "'teacher_topk' or 'plugin'",
        ),
        ("actor.advantage", [], "expected a list of at least one item, each a mapping"),
        ("actor.advantage", [{"type": "reward"}, 3], "expected a list of at least one item"),
        ("actor.megatron", [1], "expected a mapping"),
        ("actor.parallel.layers", 3, "expected a list of whole numbers or null"),
        ("rollout.sampling.stop", 5, "expected a list of texts"),
        ("actor.untested", 5, "expected a list of texts"),
        ("model.dtype", "float16", "expected 'bfloat16' or 'float32'"),
        ("model.path", 3, "expected a path"),
        ("model", "somewhere", "expected a mapping with path (required), dtype, families, template_args"),
        (
            "eval",
            3,
            "expected a mapping with path, max_prompt_tokens, sets, columns, prompt_template,",
        ),
        (
            "data.sources",
            {"math": "a.jsonl"},
            "expected a list of at least one item, each a mapping",
        ),
        ("rollout.reward", 3, "expected an import path or a mapping with path (required), args"),
        (
            "rollout.reward.path",
            "Name",
            "expected a dotted import path such as my_code.score, for `score` in my_code.py",
        ),
        ("cluster.type", "slrum", "expected 'local', 'slurm' or 'ray'"),
    ],
)
def test_a_wrong_value_is_shown_with_what_was_expected(recipe, path, value, expected):
    reported = violations(recipe(changed(path, value)))
    assert list(reported) == [path]
    assert reported[path].value == value
    assert reported[path].reason.startswith(expected)


@pytest.mark.parametrize(
    ("targets", "start"),
    [
        (["linear_qkv", "q_proj", "k_proj"], "expected a list of "),
        ([], "expected a list of at least 1 of "),
        ("linear_qkv", "expected a list of "),
    ],
)
def test_adapters_of_unknown_layers_are_refused_with_the_names_of_all(recipe, targets, start):
    reported = violations(recipe(changed("actor.lora", {"rank": 8, "alpha": 16, "targets": targets})))
    assert list(reported) == ["actor.lora.targets"]
    reason = reported["actor.lora.targets"].reason
    assert reason.startswith(f"{start}'linear_qkv', 'linear_proj', 'linear_fc1', ")
    assert reason.endswith(", 'in_proj', 'out_proj' or null")
    assert reported["actor.lora.targets"].value == targets


def test_a_missing_setting_is_named_and_does_not_hide_others(recipe):
    data = changed("run.steps", 0)
    del data["rollout"]["reward"], data["model"]
    reported = violations(recipe(data))
    assert set(reported) == {"run.steps", "rollout.reward", "model"}
    assert reported["model"].value is ABSENT
    assert reported["rollout.reward"].reason.startswith("missing, but required: Import path of a class with ")
    assert reported["model"].reason == (
        "missing, but required: a mapping with path (required), dtype, families, template_args"
    )


def test_every_required_setting_that_is_missing_is_named_at_once(recipe):
    sections = {"model": {}, "data": {}, "eval": {}, "rollout": {"workflow": {}}}
    terms = [{"type": "reward"}, {"type": "teacher", "scores": {"type": "model"}}]
    data = {**sections, "actor": {"lora": {}, "advantage": terms, "overlong": {}}}
    assert set(violations(recipe(data))) == {
        "run",
        "model.path",
        "data.path",
        "eval.path",
        "actor.lora.rank",
        "actor.lora.alpha",
        "actor.advantage.1.scores.path",
        "actor.overlong.start",
        "actor.overlong.end",
        "rollout.max_head_offpolicyness",
        "rollout.batch_size",
        "rollout.n_samples_per_prompt",
        "rollout.workflow.path",
    }
    told = set(violations(recipe({**data, "rollout": {}})))
    assert "rollout.reward" in told, "no unknown workflow could give the reward"


def test_a_wrong_cluster_type_does_not_hide_the_settings_below_it(recipe):
    data = {**VALID, "cluster": {"type": "slrum", "trainer_nodes": 0}}
    assert set(violations(recipe(data))) == {"cluster.type", "cluster.trainer_nodes"}
    reported = violations(recipe({**VALID, "cluster": {"device": "cpu"}}))
    assert reported["cluster.type"].reason == "missing; expected 'local', 'slurm' or 'ray'"


def test_a_misspelt_setting_silences_the_rules_that_read_it(recipe):
    data = {**VALID, "actor": {"recompute_logprobs": False, "use_decoupled_los": False}}
    assert set(violations(recipe(data))) == {"actor.use_decoupled_los"}


def test_both_spellings_of_recompute_logprobs_are_read_but_not_at_once(recipe):
    other = {"recompute_logprob": False, "use_decoupled_loss": False}
    assert load_recipe(recipe({**VALID, "actor": other})).actor.recompute_logprobs is False
    file = recipe({**VALID, "actor": {"recompute_logprob": True, "recompute_logprobs": True}})
    assert "given twice, on lines" in violations(file)["actor.recompute_logprobs"].reason


@pytest.mark.parametrize("spelling", ["recompute_logprob", "recompute_logprobs"])
def test_an_override_wins_over_the_other_spelling_in_the_file(recipe, spelling):
    file = recipe({**VALID, "actor": {"recompute_logprob": False, "use_decoupled_loss": True}})
    assert load_recipe(file, (f"actor.{spelling}=true",)).actor.recompute_logprobs is True


def test_an_import_path_stands_for_a_plugin_without_arguments(recipe):
    config = load_recipe(recipe(VALID))
    assert config.rollout.reward.path == "slipstream.rollout.reward.FinalAnswer"
    assert config.rollout.workflow.path == "slipstream.rollout.workflow.SingleTurn"
    assert config.rollout.reward.args == {}


def test_a_recipe_without_violations_is_what_the_schema_itself_makes_of_it(recipe):
    assert load_recipe(recipe(VALID)) == RunConfig.model_validate(VALID)


LISTS_OF_SECTIONS = (
    ("actor", "advantage"),
    ("actor", "transforms"),
    ("actor", "metrics"),
    ("data", "sources"),
    ("eval", "sets"),
    ("gateway", "turns"),
)
LEAVES = sorted(
    {
        ".".join(path)
        for path, _, field in schema_fields()
        if not sections_of(field) and path[:2] not in LISTS_OF_SECTIONS
    }
)
PLUGIN_ARGS = {
    ".".join(path) for path, section, _ in schema_fields() if section is PluginConfig and path[-1] == "args"
}


TYPE_THAT_HAS = {
    "live.baseline.": "running",
    "actor.kl.reference.decay": "average",
    "actor.kl.reference.": "checkpoint",
    "actor.correction.sequence.max": "kl",
    "actor.correction.sequence.": "product",
    "actor.correction.token.cap": "cap",
    "actor.correction.token.": "mask",
    "actor.objective.bound": "dual_clip",
    "actor.objective.cap": "aipo",
    "actor.objective.decay": "decayed_clip",
    "actor.objective.floor": "decayed_clip",
    "actor.objective.kl": "dppo",
    "actor.objective.mask_": "dppo",
    "actor.objective.tau_": "sapo",
    "actor.objective.threshold": "m2po",
    "actor.objective.": "ppo",
    "actor.optimizer.decay.": "cosine",
    "critic.optimizer.decay.": "cosine",
    "cluster.": "slurm",
    "live.credit.": "discount",
    "rollout.consumption.fraction": "windowed",
    "rollout.consumption.on_stale": "ready_first",
    "simulate.layout.": "cluster",
    "weights.transport.path": "disk",
    "weights.transport.memory": "delta",
    "weights.transport.": "shards",
    "weights.verify.n": "every_n",
    "weights.verify.": "always",
}
"""A type of the section that has the setting; the first prefix that matches counts."""


BESIDES = {
    "eval": {"path": "heldout.jsonl"},
    "actor.lora": {"rank": 8, "alpha": 16},
    "actor.overlong": {"start": 10, "end": 20},
    "cluster.container": {"runtime": "apptainer", "image": "image.sif"},
    "gateway.traces": {"endpoint": "http://localhost:4318"},
    "log.wandb": {"project": "thing"},
    "log.mlflow": {"tracking_uri": "http://localhost:5000"},
}
"""The required settings of optional sections."""


JUDGES = {
    "judge.code.": {"type": "code"},
    **{
        f"judge.endpoint.{name}": {"type": "model", "endpoint": {"type": "engines", "path": "nowhere"}}
        for name in OwnEngines.model_fields.keys() - {"type"}
    },
    "judge.": {
        "type": "model",
        "endpoint": {"type": "url", "url": "https://host/v1", "model": "judge"},
        "hint": {"choose": {"type": "overlap"}, "teacher": {"type": "url", "url": "http://host:30000"}},
    },
}
"""A judge with all settings that begin so: its unions are within one another."""
TAUGHT = [{"type": "reward"}, {"type": "teacher"}]


@pytest.mark.parametrize("path", LEAVES)
def test_junk_in_any_setting_is_reported_at_that_setting(recipe, path):
    judge = next((settings for start, settings in JUDGES.items() if path.startswith(start)), None)
    data = VALID if judge is None else changed("judge", judge, changed("actor.advantage", TAUGHT))
    section = path.rpartition(".")[0]
    if type_ := next((type_ for start, type_ in TYPE_THAT_HAS.items() if path.startswith(start)), None):
        data = changed(f"{section}.type", type_, data)
    if section == "cluster.container":
        data = changed("cluster.type", "slurm", data)
    for optional, others in BESIDES.items():
        if path.startswith(f"{optional}."):
            data = changed(optional, others, data)
    data = changed(path, [{"junk": 1}], data)
    if path in PLUGIN_ARGS:
        data = changed(path.removesuffix(".args"), {"path": "rollout.Thing", "args": [{"junk": 1}]}, data)
    assert list(violations(recipe(data))) == [path]


def test_a_wrong_plug_in_of_a_list_is_named_by_its_place(recipe):
    plugins = ["rollout.Thing", "Thing", {"path": "rollout.Thing", "arg": {}}, {"args": {}}, 3]
    reported = violations(recipe(changed("actor.transforms", plugins[:4])))
    assert set(reported) == {f"actor.transforms.{place}" for place in ("1.path", "2.arg", "3.path")}
    assert "expected a dotted import path" in reported["actor.transforms.1.path"].reason
    assert list(violations(recipe(changed("actor.transforms", plugins[4:])))) == ["actor.transforms"]


def test_a_wrong_setting_of_one_of_several_sources_is_named_with_its_place(recipe):
    sources = [
        {"name": "a", "path": "a.jsonl", "weight": 1},
        {"name": "b c", "path": 3, "weight": 0, "columns": {"prompt": "", "typo": 1}},
        {"path": "c.jsonl"},
    ]
    reported = violations(recipe(changed("data", {"sources": sources}, VALID)))
    assert set(reported) == {
        *(f"data.sources.1.{name}" for name in ("name", "path", "weight", "columns.prompt", "columns.typo")),
        "data.sources.2.name",
    }
    assert reported["data.sources.1.columns.typo"].reason.startswith("unknown key")


TERMS = {
    "reward": {"weight": 0, "estimator": "ppo", "typo": 1},
    "teacher": {"weight": "1", "clip": -1, "estimator": "grpo", "scores": {"type": "modle"}},
    "teacher_topk": {"weight": None, "clip": 1},
}
"""Wrong settings of each type of term."""


def test_every_wrong_setting_of_every_term_is_reported_at_its_place_in_the_list(recipe):
    terms = [{"type": type_, **settings} for type_, settings in TERMS.items()]
    reported = violations(recipe(changed("actor.advantage", [*terms, {"type": "techer"}, {"weight": 1}])))
    wrong = {
        f"actor.advantage.{place}.{name}{'.type' if name == 'scores' else ''}"
        for place, settings in enumerate(TERMS.values())
        for name in settings
    }
    assert set(reported) == wrong | {"actor.advantage.3.type", "actor.advantage.4.type"}
    assert reported["actor.advantage.0.estimator"].reason.startswith("expected 'grpo', 'dr_grpo'")
    assert "another type has it" in reported["actor.advantage.1.estimator"].reason
    assert reported["actor.advantage.3.type"].value == "techer"


def test_terms_are_read_with_their_defaults(recipe):
    terms = [{"type": "reward", "weight": 2.0}, {"type": "teacher", "scores": {"type": "trajectory"}}]
    actor = load_recipe(recipe(changed("actor.advantage", terms))).actor
    assert (actor.reward_term.weight, actor.estimator, actor.teacher_term.clip) == (2.0, "grpo", 5.0)
    assert actor.teacher_model is None and actor.top_tokens_term is None


def test_a_setting_of_another_type_is_refused_with_those_of_the_type_that_is_chosen(recipe):
    data = changed("actor.objective", {"type": "gspo", "bound": 3.0}, VALID)
    reason = violations(recipe(data))["actor.objective.bound"].reason
    assert reason == "unknown key; another type has it; the keys here are type, clip_low, clip_high"


def test_nothing_heavy_is_imported():
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from slipstream.configs.load import load_recipe\n"
        "overrides = ['actor.megatron.deterministic_mode=true', 'run.steps=3']\n"
        "load_recipe(Path('quickstart'), overrides)\n"
        "ours = {f'slipstream.{name}' for name in ('rollout', 'backend', 'bridge')}\n"
        "heavy = ours | {'torch', 'sglang', 'megatron', 'ray', 'transformers'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        ["slipstream.rollout.reward.FinalAnswer", "local", "slurm", "../x", "a.jsonl", "\0", "x" * 300]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)
PATHS = st.one_of(
    st.sampled_from(schema_paths()),
    st.builds(
        lambda path, extra: f"{path}.{extra}",
        st.sampled_from(schema_paths()),
        st.text(alphabet="abcxyz_-. é\n", min_size=1, max_size=8),
    ),
)
QUIET = tries(25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def corrupt(data: dict, path: str, value: object) -> None:
    *outer, last = path.split(".")
    for key in outer:
        inner = data.get(key)
        if not isinstance(inner, dict):
            inner = data[key] = {}
        data = inner
    data[last] = value


@QUIET
@given(st.lists(st.tuples(PATHS, VALUES), min_size=1, max_size=4), st.sets(st.sampled_from(schema_paths())))
def test_random_corruption_raises_recipe_errors_only(recipe, changes, removed):
    data = copy.deepcopy(VALID)
    for path, value in changes:
        corrupt(data, path, value)
    for path in list(removed)[:2]:
        *outer, last = path.split(".")
        section = data
        for key in outer:
            section = section.get(key, {}) if isinstance(section, dict) else {}
        if isinstance(section, dict):
            section.pop(last, None)
    file = recipe(yaml.safe_dump(data, allow_unicode=True))
    try:
        config = load_recipe(file)
    except RecipeError as error:
        assert error.violations
        assert not any("Input should" in violation.reason for violation in error.violations)
        str(error).encode()
    else:
        assert config == RunConfig.model_validate(read_document(file, ()).data)


@QUIET
@given(
    st.lists(
        st.one_of(st.text(max_size=30), st.builds("{}={}".format, PATHS, st.text(max_size=20))), max_size=3
    )
)
def test_random_overrides_raise_recipe_errors_only(recipe, overrides):
    try:
        load_recipe(recipe(VALID), overrides)
    except RecipeError as error:
        assert error.violations


def test_a_link_to_a_recipe_that_is_not_there_is_told(tmp_path):
    (tmp_path / "link.yaml").symlink_to("absent.yaml")
    with pytest.raises(RecipeError, match=r"this is a link to absent\.yaml, which is not there"):
        load_recipe(tmp_path / "link.yaml")


@pytest.mark.parametrize(
    ("text", "whole", "meant"),
    [
        ("10k", True, "10000"),
        ("1.5m", True, "1500000"),
        ("1,000,000", True, "1000000"),
        ("1,5", False, "1.5"),
        ("-0,25", False, "-0.25"),
        ("50 %", False, "0.5"),
        ("2.5", True, None),
        ("1,00,0", True, None),
        ("k", True, None),
        ("", False, None),
        ("10^-6", False, None),
    ],
)
def test_numbers_are_understood_as_people_write_them(text, whole, meant):
    assert explain.number_in(text, whole=whole) == meant


def test_every_pattern_of_the_schema_is_told_in_words():
    for root in (RunConfig, SupervisedConfig):
        for path, _, about in schema_fields(root):
            for part in about.metadata:
                if pattern := getattr(part, "pattern", None):
                    assert pattern in explain._PATTERNS, path
