"""Every bundled recipe on a machine that has neither its model nor its prompts: check, plan and name.

The plans are compared with files, which show what a change of a recipe or of the estimate does to all:

    UPDATE_PLANS=1 pytest tests/unit/test_recipes.py     # writes them anew
"""

import os
import re
import time
from functools import cache

import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from slipstream.backend.cli.app import app
from slipstream.backend.commands.check import planned, read_recipe, read_supervised, shipped_model
from slipstream.backend.driver.modes.sft import checked_examples
from slipstream.backend.memory.verdict import GIB, trainers_part
from slipstream.backend.simulate.advice import advise
from slipstream.configs.published import MODELS, repositories
from slipstream.configs.schema import PromptFile, is_on_hub
from slipstream.rollout.prompts import read_prompts
from tests.environment import ROOT

RECIPES = ROOT / "configs/recipes"
PLANS = ROOT / "tests/unit/plans"

NAME = re.compile(
    r"[a-z]+-(?P<model>.+)-(?P<nodes>\d+)n(?P<gpus>\d+)g-(?P<layout>colocated|(?:(?:tp|pp|dp|ep)\d+)+)"
    r"(?:-async(?P<eta>\d+))?"
)
OTHERS = {"quickstart", "simulate-areal"}
"""Recipes that are no runs on a cluster, and are named for what they do."""

ON_GSM8K = {
    "grpo-qwen2.5-1.5b-1n8g-dp4-async2",
    "grpo-qwen3-0.6b-1n1g-colocated-async2",
    "grpo-smollm2-135m-1n1g-colocated-async2",
}
"""Recipes whose prompts docs/gsm8k.md makes."""

MAKES_PROMPTS = "grpo-smollm2-135m-1n0g-dp1-async2"
"""The recipe whose first lines make its prompts."""

NAMES = sorted(file.stem for file in RECIPES.glob("*.yaml") if file.stem not in OTHERS)
PARAMETERS = {
    "deepseek-v3": 671_026_404_352,
    "llama-3.1-70b": 70_553_706_496,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
}
"""Parameters of the published checkpoints, without layers for multi-token prediction and without the biases
that choose experts."""


def match_of(name: str) -> re.Match[str]:
    match = NAME.fullmatch(name)
    assert match is not None, f"{name} is not named <algo>-<model>-<N>n<G>g-<layout>[-async<eta>]"
    return match


def options_of(name: str) -> list[str]:
    return ["--sft"] if name.startswith("sft-") else []


def without_its_model(name: str) -> list[str]:
    """The options with which ``check`` judges a recipe whose model is elsewhere."""
    return ["--model-config", str(shipped_model(name, [])), *options_of(name)]


@cache
def config_of(name: str, *overrides: str):
    return read_recipe(
        name, overrides, model_config=shipped_model(name, []), supervised=name.startswith("sft-")
    )


@cache
def plan_of(name: str):
    return planned(config_of(name), supervised=name.startswith("sft-"))


def call(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_recipe_says_what_it_needs(name):
    match, config = match_of(name), config_of(name)
    parallel, engine = config.actor.parallel, config.rollout.engine
    sizes = {kind: int(size) for kind, size in re.findall(r"(tp|pp|dp|ep)(\d+)", match["layout"])}
    assert config.run.name == name
    assert [parallel.tensor, parallel.pipeline, parallel.data, parallel.expert] == [
        sizes.get(kind, 1) for kind in ("tp", "pp", "dp", "ep")
    ]
    if name.startswith("sft-"):
        engines, eta = 0, 0
    else:
        engines = 0 if engine.colocated else engine.count * engine.ranks
        eta = config.rollout.max_head_offpolicyness
    assert eta == int(match["eta"] or 0)
    if config.cluster.device == "gpu":
        assert int(match["nodes"]) * int(match["gpus"]) == parallel.world_size + engines
    if config.cluster.type == "slurm":
        assert parallel.world_size == config.cluster.trainer_nodes * int(match["gpus"]), "whole nodes train"
        assert int(match["gpus"]) % engine.ranks_per_node == 0, "no GPU is left over"


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_is_checked_without_its_model_in_under_three_seconds_of_cpu(name):
    began = time.process_time()
    ended = call("check", name, *without_its_model(name))
    assert time.process_time() - began < 3
    assert ended.exit_code == 0, ended.output


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_of_every_recipe_is_the_one_in_its_file(name):
    ended = call("plan", name, "--no-split", *options_of(name))
    assert ended.exit_code == 0, ended.output
    lines = [line.rstrip().replace(f"{ROOT}/", "") for line in ended.stdout.splitlines()]
    text = "\n".join(lines) + "\n"
    file = PLANS / f"{name}.txt"
    if os.environ.get("UPDATE_PLANS"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def test_no_plan_is_left_of_a_recipe_that_is_gone():
    assert {file.stem for file in PLANS.glob("*.txt")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_fits_its_gpus(name):
    plan = plan_of(name)
    gpu = plan.gpu_memory
    if gpu is None:
        assert plan.config.cluster.device == "cpu"
        return
    assert max(stage.peak for stage in plan.stages) < 0.95 * gpu
    if plan.engine is None:
        return
    assert plan.engine.pool is not None
    assert plan.engine.pool > 2 * GIB
    assert plan.engine.tokens > 2 * plan.config.rollout.sampling.max_new_tokens


ONE_GPU = [name for name in NAMES if "-1n1g-" in name]
BY_TURNS = (
    "rollout.engine.gpu_share=null",
    "rollout.engine.args.mem_fraction_static=0.6",
    "rollout.max_head_offpolicyness=0",
)
FOR_24_GB = (
    "cluster.gpu_memory_gib=22.5",
    "actor.microbatch_tokens=4096",
    "actor.recompute=full",
    "rollout.engine.gpu_share=0.3",
)
SIZES = {
    "24": ("cluster.gpu_memory_gib=22.5",),
    "48": ("cluster.gpu_memory_gib=45",),
    "80": ("cluster.gpu_memory_gib=79",),
}
BESIDE = 3 * GIB
"""Memory that an engine takes beside weights and KV cache: CUDA graphs, activations, CUDA itself."""


def settings_of(name: str, size: str, mode: str) -> tuple[str, ...]:
    given = FOR_24_GB if size == "24" and "qwen3" in name else SIZES[size]
    return given + (BY_TURNS if mode == "turns" else ())


@pytest.mark.parametrize("name", ONE_GPU)
def test_a_recipe_of_one_gpu_says_its_settings_for_other_gpus_and_for_turns(name):
    told = " ".join((RECIPES / f"{name}.yaml").read_text(encoding="utf-8").replace("#", "").split())
    assert " ".join(BY_TURNS) in told
    if "qwen3" in name:
        assert " ".join(FOR_24_GB) in told and " ".join(SIZES["48"]) in told
    else:
        assert "With more memory only `cluster.gpu_memory_gib` changes" in told


@pytest.mark.parametrize("mode", ["turns", "at one time"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ONE_GPU)
def test_a_recipe_of_one_gpu_fits_24_48_and_80_gb_in_both_modes(name, size, mode):
    settings = settings_of(name, size, mode)
    plan = planned(config_of(name, *settings))
    assert plan.engine is not None and plan.engine.pool is not None and plan.gpu_memory is not None
    peak, engine = max(stage.peak for stage in plan.stages), plan.config.rollout.engine
    assert engine.colocated and engine.takes_turns == (mode == "turns")
    left = trainers_part(engine, plan.gpu_memory)
    assert peak + (0 if engine.takes_turns else BESIDE) < left
    needed = plan.config.rollout.sampling.max_new_tokens + 512
    assert plan.engine.tokens is not None and plan.engine.tokens > 32 * needed
    ended = call("check", name, *settings, *without_its_model(name))
    assert ended.exit_code == 0, ended.output
    shown = call("plan", name, "--no-split", *settings).stdout
    assert f"of {left / GIB:.1f} GiB, fits" in shown and "DO NOT FIT" not in shown
    assert ("take turns" if mode == "turns" else "work at the same time") in shown
    if not engine.takes_turns:
        [trainer], [beside] = (
            re.findall(each, shown, re.MULTILINE)
            for each in (r"trainer: (\S+ of \S+) GiB", r"^ +engine .* (\S+) *$")
        )
        assert f"{trainer}; {beside}" in (ROOT / "docs/recipes.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_the_parameters_of_its_published_checkpoint(name):
    model = match_of(name)["model"]
    plan = plan_of(name)
    counted = sum(bucket.numel for bucket in plan.export.buckets if not bucket.float32)
    if model in PARAMETERS:
        assert counted == PARAMETERS[model]
    else:
        assert model == "glm-4.5-air"
        assert 104e9 < counted < 108e9


SHARES_ITS_GPUS = {"grpo-qwen3-8b-1n8g-tp2dp4", *ONE_GPU}
"""Recipes whose trainer idles while the same GPUs generate, as their first lines say."""


SIMULATED_LONG = re.compile("dapo-|gspo-|grpo-qwen3-4b-")
"""Recipes whose simulation takes more than two seconds."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if SIMULATED_LONG.match(name) else ())
        for name in NAMES
        if not name.startswith("sft-")
    ],
)
def test_the_trainer_of_every_recipe_is_idle_for_at_most_15_percent_of_the_time(name):
    plan = plan_of(name)
    assert plan.engine is not None
    advice = advise(plan.config, plan.export, plan.engine, alone=True)
    if advice is None:
        assert plan.config.cluster.device == "cpu"
        return
    [run] = advice.runs
    assert run.outcome is not None, run.stalled
    if name in SHARES_ITS_GPUS:
        assert "The trainer idles" in (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    else:
        assert run.outcome.trainer_idle <= 0.15
    step_s = run.outcome.makespan_s / run.outcome.steps
    assert 2 * plan.checkpoint.steps(step_s) <= plan.config.checkpoint.every, (
        "it is written well before the next"
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_every_recipe_has_twice_the_time_that_it_needs(name):
    plan = plan_of(name)
    assert 2 * plan.checkpoint.seconds <= plan.checkpoint.settings.timeout_s
    large = plan.checkpoint.bytes > 200e9
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    assert not large or "\ncheckpoint:" in text


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {*ON_GSM8K, MAKES_PROMPTS}])
def test_a_recipe_lacks_nothing_but_its_model_and_check_says_where_that_comes_from(name):
    ended = call("check", name, *options_of(name))
    assert ended.exit_code == 2
    assert f"1 violation in {name}" in ended.output
    model = config_of(name).model.path
    assert "model.path" in ended.output
    if name.startswith("grpo-qwen3-4b"):
        assert "the run sft-qwen3-4b-1n8g-dp8 writes it" in ended.output
    else:
        command = f"hf download {repositories()[model.name]} --local-dir models/{model.name}"
        assert command in " ".join(ended.output.split())


def test_every_config_that_ships_has_its_source_and_belongs_to_a_recipe():
    folders = {folder.name for folder in MODELS.iterdir() if folder.is_dir()}
    assert set(repositories()) == folders == {config_of(name).model.path.name for name in NAMES}
    assert all(repository.endswith(f"/{name}") for name, repository in repositories().items())


def test_the_config_that_ships_stands_in_for_a_model_of_its_name_in_anyones_recipe(tmp_path):
    file = tmp_path / "own.yaml"
    text = (RECIPES / "grpo-qwen3-1.7b-1n8g-dp2-async4.yaml").read_text(encoding="utf-8")
    file.write_text(text.replace("models/Qwen3-1.7B", "/elsewhere/Qwen3-8B"), encoding="utf-8")
    ended = call("plan", str(file), "--no-split", "actor.parallel.tensor=2")
    assert ended.exit_code == 0, ended.output
    assert "8,190,735,360 parameters" in ended.stdout
    assert "the model is not on this machine: planned with the config.json of Qwen/Qwen3-8B" in ended.stdout
    unknown = call("plan", str(file), "model.path=/elsewhere/Own-8B")
    assert unknown.exit_code == 2
    assert "hf download OWNER/NAME --local-dir /elsewhere/Own-8B" in " ".join(unknown.output.split())


def test_simulate_takes_the_costs_of_the_recipes_own_model():
    name = "grpo-qwen3-1.7b-1n8g-dp2-async4"
    small = ("run.steps=2", "rollout.batch_size=4", "simulate.compare=false", "simulate.transfer.pause_s=2")
    ended = call("simulate", name, *small)
    assert ended.exit_code == 0, ended.output
    assert "publication by shards: 0 s, then a pause of 2.23 s: 2 s + 10.3 GB at 45 GB/s" in ended.stdout


def test_a_trainer_that_cannot_hold_the_model_is_refused():
    name = "grpo-qwen3-32b-8n8g-tp8dp3-async4"
    layout = ("tensor=1", "data=24", "sequence=false")
    ended = call("check", name, *without_its_model(name), *(f"actor.parallel.{each}" for each in layout))
    assert ended.exit_code == 2
    assert "weights, gradients and optimizer take" in ended.output


def test_without_its_model_a_recipe_is_refused_as_such():
    ended = call("check", "grpo-qwen3-8b-3n8g-tp2dp4-async4")
    assert ended.exit_code == 2
    assert "model.path" in ended.output
    wrong = call("check", "grpo-qwen3-8b-3n8g-tp2dp4-async4", "--model-config", "README.md")
    assert wrong.exit_code == 2
    assert "expected a config.json" in wrong.output


def test_the_simulator_compares_the_split_with_its_neighbours_among_whole_nodes():
    name = "grpo-qwen3-32b-8n8g-tp8dp3-async4"
    small = ("rollout.batch_size=16", "rollout.n_samples_per_prompt=2", "rollout.max_concurrent=64")
    ended = call("plan", name, *options_of(name), *small)
    assert ended.exit_code == 0, ended.output
    rows = [line.split() for line in ended.stdout.partition("split of 64 GPUs")[2].splitlines()]
    splits = [row[:2] for row in rows if len(row) > 3 and row[0].isdigit()]
    assert splits == [["16", "48"], ["24", "40"], ["32", "32"]]
    assert "the recipe's" in ended.stdout
    assert "decode step" in ended.stdout, "without its cost model a comparison means nothing"


ON_THE_HUB: dict[str, tuple[str, dict[str, object]]] = {
    "BytedTsinghua-SIA/DAPO-Math-17k": (
        "data/dapo-math-17k.parquet",
        {
            "data_source": "math_dapo",
            "prompt": [{"content": "Solve it. The last line is Answer: $Answer.", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4"},
        },
    ),
    "BytedTsinghua-SIA/AIME-2024": (
        "data/aime-2024.parquet",
        {
            "data_source": "math_dapo",
            "prompt": [{"content": "Solve it. The last line is Answer: $Answer.", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": 0, "raw_problem": "Solve it.", "split": None},
        },
    ),
    "open-r1/OpenR1-Math-220k": (
        "data/train-00000-of-00010.parquet",
        {
            "problem": "Solve it.",
            "solution": "By 34.",
            "answer": "34",
            "messages": [
                {"content": "Solve it.", "role": "user"},
                {"content": "<think>\nEasy.\n</think>\n34", "role": "assistant"},
            ],
        },
    ),
}
"""A file of each data set that recipes name, and a row as it is published there."""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Local copies of the data sets, each with one row and a file that no recipe means."""

    def snapshot(repository: str, **_: object) -> str:
        name, row = ON_THE_HUB[repository]
        folder = tmp_path / repository
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
        (folder / "other.jsonl").write_text('{"other": 1}\n')
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("sft-")])
def test_the_prompts_that_a_recipe_names_have_the_columns_that_it_reads(name, hub):
    config = config_of(name)
    for file in (*config.training_files, *config.held_out_files):
        if is_on_hub(file.path):
            [prompt] = read_prompts(file)
            assert prompt.label == "34"
            assert prompt.messages()[0]["role"] == "user"
            assert config.rollout.reward is not None
            assert config.rollout.reward.args["marker"] in prompt.messages()[0]["content"]


def test_the_demonstrations_of_the_supervised_recipe_are_chats_that_end_with_an_answer(hub):
    name = "sft-qwen3-4b-1n8g-dp8"
    supervised = read_supervised(name, [], model_config=shipped_model(name, []))
    [example] = checked_examples(supervised, None, None)
    assert example.prompt.messages() == [{"content": "Solve it.", "role": "user"}]
    assert example.targets == ("<think>\nEasy.\n</think>\n34",)


def test_the_conversion_of_gsm8k_gives_prompts_that_the_reward_can_judge(tmp_path, monkeypatch):
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/gsm8k.md").read_text(encoding="utf-8"), re.S)
    source = tmp_path / "data/gsm8k/source/main"
    source.mkdir(parents=True)
    rows = [
        {"question": "How many?", "answer": "She has 1,024.\n#### 1,024"},
        {"question": "And?", "answer": "#### 7"},
    ]
    for split in ("train", "test"):
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, source / f"{split}-00000-of-00001.parquet")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/gsm8k.md", "exec"), {})
    prompts = read_prompts(PromptFile(tmp_path / "data/gsm8k/train.jsonl"))
    assert [prompt.label for prompt in prompts] == ["1024", "7"]
    assert "####" in prompts[0].messages()[0]["content"]
    assert read_prompts(PromptFile(tmp_path / "data/gsm8k/test.jsonl"))
