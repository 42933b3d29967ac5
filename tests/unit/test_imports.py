"""``slipstream import`` of verl, AReaL and prime-rl: files are read, never run, and become recipes."""

import json
import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from slipstream.backend.cli.app import app
from slipstream.configs.load import load_recipe
from slipstream.configs.rules import trainer
from slipstream.configs.schema.paths import schema_paths
from slipstream.rollout.compat.imports.configurations import read_configuration
from slipstream.rollout.compat.imports.importing import SYSTEMS, WITHOUT_INPUTS, table_of
from slipstream.rollout.compat.imports.table import KeyRule, KeyTable

VERL = r"""set -x
LENGTH=$((512 * 2))
common="data.max_prompt_length=512 \
  data.shuffle=False"
ACTOR=(actor_rollout_ref.actor.optim.lr=2e-6 actor_rollout_ref.actor.ppo_mini_batch_size=8
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((LENGTH + 512)) algorithm.adv_estimator=rloo
  actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01
  actor_rollout_ref.actor.kl_loss_type=low_var_kl)
python3 -m verl.trainer.main_ppo "${ACTOR[@]}" $common \
  data.train_files="['${ROOT:-/data}/train.parquet']" data.train_batch_size=32 \
  data.max_response_length=${LENGTH} actor_rollout_ref.model.path=/models/tiny \
  actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.top_p=0.9 trainer.n_gpus_per_node=4 \
  +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32 \
  actor_rollout_ref.rollout.name=vllm trainer.total_training_steps=5 trainer.logger='["console"]' "$@"
"""

AREAL = """
experiment_name: tiny run
trial_name: first
total_train_steps: 7
rollout: {backend: "sglang:d2t2", max_head_offpolicyness: 2, max_concurrent_rollouts: 16}
gconfig: {n_samples: 4, max_new_tokens: 256, temperature: 1.0}
actor:
  backend: "megatron:d1t2p2"
  path: /models/tiny
  eps_clip: 0.3
  use_decoupled_loss: true
  reward_norm: {mean_level: group, std_level: null}
  rejection_sampling: {metric: ratio, upper: 3.0}
  max_new_tokens: ${gconfig.max_new_tokens}
sglang: {mem_fraction_static: 0.7, context_length: null}
train_dataset: {path: openai/gsm8k, batch_size: 16, max_length: "${gconfig.max_new_tokens}"}
"""

PRIME_RL = """
max_steps = 9
[model]
name = "some-lab/tiny"
[orchestrator]
batch_size = 64
group_size = 8
max_off_policy_steps = 3
[[orchestrator.train.source]]
name = "reverse"
[orchestrator.train.source.env.taskset]
id = "reverse-text"
[trainer.optim]
lr = 3e-6
[deployment]
num_train_gpus = 2
num_infer_gpus = 6
[inference.vllm]
tensor_parallel_size = 2
"""

FILES = {"verl": ("run.sh", VERL), "areal": ("gsm8k.yaml", AREAL), "prime-rl": ("rl.toml", PRIME_RL)}


@pytest.fixture(autouse=True)
def transformer_engine(monkeypatch):
    monkeypatch.setattr(trainer, "transformer_engine_is_installed", lambda: True)


def imported(folder: Path, system: str, *words: str, text: str | None = None):
    """Return the result of the command, and the path of its recipe."""
    name, content = FILES[system]
    (folder / name).write_text(content if text is None else text)
    out = folder / "recipe.yaml"
    command = ["import", system, str(folder / name), *words, "-o", str(out), "--json"]
    return CliRunner().invoke(app, command), out


def outcomes_of(result) -> dict[str, tuple[str, str]]:
    flags = json.loads(result.stdout)["flags"]
    return {each["flag"]: (each["outcome"], each["reason"]) for each in flags}


def test_a_script_of_verl_becomes_a_recipe_that_loads(tmp_path):
    result, out = imported(tmp_path, "verl")
    assert result.exit_code == 0, result.output
    config = load_recipe(out, list(WITHOUT_INPUTS))
    actor, rollout = config.actor, config.rollout
    assert (config.run.steps, str(config.data.path), config.data.shuffle) == (5, "/data/train.parquet", False)
    assert (config.data.max_prompt_tokens, rollout.sampling.max_new_tokens) == (512, 1024)
    assert (rollout.batch_size, rollout.n_samples_per_prompt, actor.minibatches) == (32, 4, 4)
    assert (actor.microbatch_tokens, actor.optimizer.lr, actor.optimizer.beta2) == (1536, 2e-6, 0.999)
    assert (actor.parallel.data, rollout.engine.count, rollout.engine.tensor_parallel) == (4, 2, 2)
    assert rollout.engine.colocated and rollout.max_head_offpolicyness == 0
    assert (actor.objective.type, actor.objective.bound, actor.objective.clip_high) == ("dual_clip", 3.0, 0.2)
    assert (actor.kl.where, actor.kl.coefficient, actor.kl.estimator) == ("loss", 0.01, "k3")
    assert actor.advantage[0].estimator == "rloo" and actor.megatron == {"moe_router_dtype": "fp32"}
    outcomes = outcomes_of(result)
    assert outcomes["actor_rollout_ref.rollout.name"][0] == "ours by default"
    assert outcomes["actor_rollout_ref.rollout.top_p"][0] == "refused"
    assert outcomes["data.train_batch_size"] == ("mapped", "rollout.batch_size")


def test_a_file_of_areal_becomes_a_recipe_that_loads(tmp_path):
    result, out = imported(tmp_path, "areal", "gconfig.temperature=0.8")
    assert result.exit_code == 0, result.output
    config = load_recipe(out, list(WITHOUT_INPUTS))
    actor, rollout = config.actor, config.rollout
    assert (config.run.name, config.run.steps) == ("tiny-run", 7)
    parallel, engine = actor.parallel, rollout.engine
    assert (parallel.data, parallel.tensor, parallel.pipeline) == (1, 2, 2)
    assert (engine.count, engine.tensor_parallel, engine.args) == (2, 2, {"mem_fraction_static": 0.7})
    assert (rollout.max_head_offpolicyness, rollout.max_concurrent, rollout.batch_size) == (2, 64, 16)
    assert (actor.objective.clip_low, actor.objective.clip_high, actor.minibatches) == (0.3, 0.3, 4)
    assert actor.advantage[0].estimator == "dr_grpo" and rollout.sampling.temperature == 0.8
    assert (actor.correction.token.type, actor.correction.token.high) == ("mask", 3.0)
    assert config.data.max_prompt_tokens == 256, "a reference to another key"
    assert outcomes_of(result)["sglang.context_length"] == ("ours by default", "null: it is absent")


def test_a_file_of_prime_rl_becomes_a_recipe_that_loads(tmp_path):
    result, out = imported(tmp_path, "prime-rl")
    assert result.exit_code == 0, result.output
    config = load_recipe(out, list(WITHOUT_INPUTS))
    actor, rollout = config.actor, config.rollout
    assert (rollout.batch_size, rollout.n_samples_per_prompt, rollout.max_head_offpolicyness) == (8, 8, 3)
    assert (actor.parallel.data, rollout.engine.count, rollout.engine.tensor_parallel) == (2, 3, 2)
    assert (actor.objective.type, actor.objective.kl, actor.optimizer.lr) == ("dppo", 0.001, 3e-6)
    assert rollout.workflow.args["environment"] == {"taskset": {"id": "reverse-text"}}
    notes = json.loads(result.stdout)["notes"]
    assert any("data.path" in note for note in notes), "the tasks of an environment are no file"


def test_a_model_with_a_name_of_the_hub_stays_there_unless_a_folder_has_the_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, out = imported(tmp_path, "areal", "actor.path=some-lab/tiny")
    assert yaml.safe_load(out.read_text())["model"]["path"] == "hf://some-lab/tiny"
    (tmp_path / "some-lab/tiny").mkdir(parents=True)
    out.unlink()
    lora = ("lora_rank=8", "lora_alpha=16", "lora_adapter_path=some-lab/adapter")
    _, out = imported(tmp_path, "verl", *(f"actor_rollout_ref.model.{each}" for each in lora))
    assert yaml.safe_load(out.read_text())["actor"]["lora"]["path"] == "hf://some-lab/adapter"
    for system, key in (("verl", "actor_rollout_ref.model.path"), ("prime-rl", "model.name")):
        out.unlink()
        _, out = imported(tmp_path, system, f"{key}=some-lab/tiny")
        assert yaml.safe_load(out.read_text())["model"]["path"] == "some-lab/tiny"


def test_a_later_file_changes_keys_of_an_earlier_one(tmp_path):
    later = tmp_path / "later.toml"
    later.write_text("max_steps = 11\n")
    result, out = imported(tmp_path, "prime-rl", "@", str(later))
    assert result.exit_code == 0 and yaml.safe_load(out.read_text())["run"]["steps"] == 11


def test_a_key_with_different_values_in_two_environments_is_refused(tmp_path):
    source = "orchestrator.train.source"
    second = f'[[{source}]]\nname = "other"\n[{source}.env.taskset]\nid = "b"\n'
    text = PRIME_RL.replace("[trainer.optim]", second + "[trainer.optim]")
    outcome, reason = outcomes_of(imported(tmp_path, "prime-rl", text=text)[0])[
        "orchestrator.train.source.env.taskset.id"
    ]
    assert outcome == "refused" and "reverse-text, b" in reason


@pytest.mark.parametrize(
    ("system", "key", "nearest"),
    [
        ("verl", "trainer.save_frequ=3", "trainer.save_freq"),
        ("areal", "actor.eps_clipp=0.1", "actor.eps_clip"),
        ("prime-rl", "orchestrator.batchsize=3", "orchestrator.batch_size"),
    ],
)
def test_every_unknown_key_is_an_error_that_names_the_nearest(tmp_path, system, key, nearest):
    result, out = imported(tmp_path, system, key, "zzz=1")
    said = " ".join(result.stderr.split())
    assert result.exit_code == 2 and not out.exists()
    assert f"{key}: no such setting of {system} is known; did you mean {nearest}?" in said
    assert "zzz=1: no such setting" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nemo", "a.yaml"], "slime, verl, areal, prime-rl"),
        (["verl", "run.sh", "not-an-override"], "not-an-override"),
        (["areal", "sft.yaml"], "expected reinforcement learning"),
        (["areal", "broken.yaml"], "cannot be read"),
        (["verl", "a=1"], "expected a file"),
    ],
)
def test_what_is_no_configuration_is_an_error(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    for name, text in (
        ("run.sh", VERL),
        ("a.yaml", AREAL),
        ("sft.yaml", "a: 1\n"),
        ("broken.yaml", "a: [\n"),
    ):
        Path(name).write_text(text)
    result = CliRunner().invoke(app, ["import", *words, "-o", "out.yaml"])
    assert result.exit_code == 2 and said in " ".join(result.stderr.split())
    assert not Path("out.yaml").exists()


TABLES = {system: table_of(system) for system in SYSTEMS}


def settings_of(rule: KeyRule) -> list[str]:
    """Every setting that a rule can set."""
    paths = [rule.path, rule.several, *rule.items, *(rule.parts or {}).values()]
    if not rule.path:
        paths += [path for ours in (rule.values or {}).values() if isinstance(ours, dict) for path in ours]
    return [path for path in paths if path]


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_rule_sets_what_a_recipe_has_and_asks_for_keys_that_are_known(table: KeyTable):
    sections = {path.rpartition(".")[0] for path in schema_paths()} | set(schema_paths())
    free = ("actor.megatron.", "rollout.engine.args.", "rollout.workflow.args.", "rollout.reward.args.")
    free += ("model.template_args.", "actor.objective.", "actor.correction.", "critic.", "weights.", "eval.")
    rules = [rule for row in table.rows for rules in row.rules for rule in rules or ()]
    assert len(rules) > 50
    paths = [path for rule in rules for path in settings_of(rule)] + [*table.always, *table.fallbacks]
    assert not [path for path in paths if path not in sections and not path.startswith(free)]
    names = {field.name for field in fields(KeyRule)} & {"times", "over", "total", "unless"}
    asked = {key for rule in rules for name in names for key in getattr(rule, name)}
    asked |= {key for rule in rules for key in rule.when or {}} | table.theirs.keys()
    asked |= {key for rule in rules for key in (rule.into, rule.taken_from, rule.module) if key}
    assert not [key for key in asked if table.find(key) is None]


NOTHING = re.compile("(?!)")
OVERRIDES = {
    "a table": ("a={b: 1, c: {d: [x, 'y z']}}", {"a.b": 1, "a.c.d": ["x", "y z"]}),
    "a table without blanks": ("a={b:1,c:http://x}", {"a.b": 1, "a.c": "http://x"}),
    "a key that is added": ("+a.b=[1,2]", {"a.b": [1, 2]}),
    "a key that is added or changed": ("++a.b=1e-6", {"a.b": 1e-6}),
    "a table that is taken out": ("~base.table", {"base.one": 1}),
    "a key that is taken out with its value": ("~base.one=1", {"base.table.x": 2, "base.table.y": 3}),
    "nothing in place of a table": ("base.table=null", {"base.one": 1, "base.table": None}),
    "a table in place of a value": ("base.one.x=5", {"base.one.x": 5, "base.table.x": 2, "base.table.y": 3}),
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_an_override_does_what_hydra_does(tmp_path, override):
    word, values = OVERRIDES[override]
    (tmp_path / "a.yaml").write_text("base: {one: 1, table: {x: 2, y: 3}}\n")
    read = read_configuration([tmp_path / "a.yaml"], [word], NOTHING)
    base = {"base.one": 1, "base.table.x": 2, "base.table.y": 3}
    assert read.values == (values if "base" in word else base | values)


def test_files_are_laid_over_those_that_their_defaults_name(tmp_path):
    (tmp_path / "group").mkdir()
    (tmp_path / "group" / "small.yaml").write_text("a: 1\nb: 2\n")
    (tmp_path / "base.yaml").write_text("model: {path: base, sources: [{x: 1, y: 1}]}\nseed: 3\n")
    (tmp_path / "top.yaml").write_text(
        "defaults: [base, group@trainer.optim: small, group: small, ppo_trainer, _self_]\n"
        "model: {path: top, sources: [{x: 2}], copy: '${.path}-${..seed}', or: '${oc.select:model.no,7}'}\n"
        "shared: &s {c: 1}\ngroup: {<<: *s, b: 5}\n"
    )
    read = read_configuration([tmp_path / "top.yaml"], [], NOTHING)
    assert read.values == {
        **{"model.path": "top", "model.sources.x": 2, "model.copy": "top-3", "model.or": 7, "seed": 3},
        **{
            "trainer.optim.a": 1,
            "trainer.optim.b": 2,
            "group.a": 1,
            "group.b": 5,
            "group.c": 1,
            "shared.c": 1,
        },
    }
    assert len(read.notes) == 1 and "ppo_trainer" in read.notes[0]


def test_a_file_that_a_script_names_is_read_before_its_overrides(tmp_path):
    (tmp_path / "recipe" / "config").mkdir(parents=True)
    (tmp_path / "recipe" / "config" / "dapo.yaml").write_text(
        "data: {train_batch_size: 8, val_batch_size: 9}\n"
    )
    script = tmp_path / "recipe" / "run.sh"
    script.write_text(
        "python -m verl_tool.trainer.main_ppo --config-path=recipe/config \\\n"
        "  --config-name dapo data.val_batch_size=1"
    )
    read = read_configuration([script], [], SYSTEMS["verl"])
    assert read.values["data.train_batch_size"] == 8 and read.values["data.val_batch_size"] == 1


VALUES = {
    "a coefficient below 1": ("areal", ["actor.kl_ctl=0.1"], "actor.kl.coefficient", 0.1),
    "a coefficient of 0": ("areal", ["actor.kl_ctl=0.0"], "actor.kl", None),
    "what one of two keys says": (
        "areal",
        ["recover.freq_steps=6", "saver.freq_steps=null"],
        "checkpoint.every",
        6,
    ),
    "GPUs of all replicas": (
        "prime-rl",
        [
            *("deployment.type=multi_node", "deployment.num_train_nodes=1"),
            *("deployment.num_infer_nodes=1", "deployment.num_infer_replicas=3"),
        ],
        "rollout.engine.count",
        12,
    ),
    "a model that a part names": (
        "prime-rl",
        ["~model.name", "orchestrator.model.name=some/thing"],
        "model.path",
        "hf://some/thing",
    ),
    "a group size of the source": (
        "prime-rl",
        ["~orchestrator.group_size", "orchestrator.train.source.group_size=4"],
        "rollout.batch_size",
        16,
    ),
    "an old name": (
        "prime-rl",
        ["~orchestrator.group_size", "orchestrator.rollouts_per_example=4"],
        "rollout.batch_size",
        16,
    ),
    "experts over all GPUs of an engine": (
        "prime-rl",
        ["inference.vllm.enable_expert_parallel=true"],
        "rollout.engine.expert_parallel",
        2,
    ),
    "a tail without the length of answers": (
        "verl",
        ["reward_model.overlong_buffer.enable=True", "reward_model.overlong_buffer.len=24"],
        "actor.overlong",
        {"start": 1000, "end": 1024},
    ),
    "a table that another key refers to": (
        "areal",
        ["critic.path=some/thing", "critic.optimizer=${actor.optimizer}", "actor.optimizer={lr: 3e-6}"],
        "critic.optimizer.lr",
        3e-6,
    ),
    "a ratio beside a number of steps": (
        "verl",
        [f"actor_rollout_ref.actor.optim.lr_warmup_steps{each}" for each in ("=2", "_ratio=0.5")],
        "actor.optimizer.warmup_steps",
        2,
    ),
    "advantages that are normalized, as older files say it": (
        "areal",
        ["actor.adv_norm=true"],
        "actor.advantage_norm.deviation",
        True,
    ),
    "a penalty of 0": (
        "verl",
        ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.0"],
        "actor.kl",
        None,
    ),
    "a temperature of evaluations": (
        "verl",
        ["data.val_files=val.parquet", "actor_rollout_ref.rollout.val_kwargs.temperature=0.7"],
        "eval.sampling.temperature",
        0.7,
    ),
    "a default of the critic": ("verl", ["algorithm.adv_estimator=gae"], "critic.value_clip", 0.5),
    "a default of theirs": (
        "verl",
        ["~actor_rollout_ref.actor.kl_loss_coef"],
        "actor.kl.coefficient",
        0.001,
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_that_of_the_other_system(tmp_path, name):
    system, words, path, expected = VALUES[name]
    result, out = imported(tmp_path, system, *words)
    assert result.exit_code == 0, result.output
    value = yaml.safe_load(out.read_text())
    for part in path.split("."):
        value = (value or {}).get(part)
    assert value == expected


def test_a_number_that_another_key_contradicts_is_noted(tmp_path):
    result, out = imported(tmp_path, "areal", "sglang.context_length=64", "gconfig.max_tokens=32")
    assert yaml.safe_load(out.read_text())["rollout"]["engine"]["args"]["context_length"] == 32
    assert any("sglang.context_length says 64" in note for note in json.loads(result.stdout)["notes"])


def test_a_scale_of_rewards_that_nothing_cancels_is_refused(tmp_path):
    words = ["actor.reward_norm=null", "actor.reward_scaling=10.0", "actor.reward_bias=-0.5"]
    outcomes = outcomes_of(imported(tmp_path, "areal", *words)[0])
    assert outcomes["actor.reward_scaling"][0] == outcomes["actor.reward_bias"][0] == "refused"
    (tmp_path / "recipe.yaml").unlink()
    norm = "actor.adv_norm={mean_level: batch, std_level: batch}"
    outcomes = outcomes_of(imported(tmp_path, "areal", *words, norm)[0])
    assert outcomes["actor.reward_scaling"][0] == outcomes["actor.reward_bias"][0] == "ours by default"


def test_what_is_switched_off_needs_nothing(tmp_path):
    words = ["saver.freq_epochs=null", "actor.adv_norm={}"]
    outcomes = outcomes_of(imported(tmp_path, "areal", *words)[0])
    assert outcomes["saver.freq_epochs"] == ("ours by default", "null: it is absent")
    (tmp_path / "recipe.yaml").unlink()
    words = ["actor_rollout_ref.actor.use_prefix_grouper=False", "trainer.val_before_train=False"]
    outcomes = outcomes_of(imported(tmp_path, "verl", *words)[0])
    assert outcomes["actor_rollout_ref.actor.use_prefix_grouper"] == ("ours by default", "it is off")
    (tmp_path / "recipe.yaml").unlink()
    words = ["slurm={}", "trainer.optim.type=adamw"]
    outcomes = outcomes_of(imported(tmp_path, "prime-rl", *words)[0])
    assert {outcomes[key][0] for key in ("slurm", "trainer.optim.type")} == {"ours by default"}


def test_unknown_keys_of_a_fork_can_be_left_out(tmp_path):
    words = ["trainer.save_frequ=3", "zzz={a: 1}"]
    result, out = imported(tmp_path, "verl", *words)
    assert result.exit_code == 2 and "--without-unknown" in result.stderr and not out.exists()
    result, out = imported(tmp_path, "verl", *words, "--without-unknown")
    outcomes = outcomes_of(result)
    assert result.exit_code == 0 and load_recipe(out, list(WITHOUT_INPUTS))
    assert outcomes["trainer.save_frequ"][0] == outcomes["zzz.a"][0] == "refused"
    assert "did you mean trainer.save_freq?" in outcomes["trainer.save_frequ"][1]


ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefghij")
)


@pytest.mark.parametrize("system", ["verl", "areal"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ALIASES, "has more than 100,000 values"),
        ("a: &a [*a]\n", "has more than 100,000 values"),
        ("a: " + "[" * 5000 + "]" * 5000 + "\n", "nested too deeply"),
    ],
)
def test_a_configuration_that_would_fill_the_memory_is_refused(tmp_path, system, text, expected):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    made = CliRunner().invoke(app, ["import", system, str(path), "-o", str(tmp_path / "recipe.yaml")])
    assert made.exit_code == 2 and expected in " ".join(made.output.split())
