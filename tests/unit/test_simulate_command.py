"""``slipstream simulate`` as a user calls it: what it prints and writes, and what it says of wrong input."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from slipstream.backend.batch.flops import forward_flops
from slipstream.backend.batch.packing import split_minibatches
from slipstream.backend.cli.app import app
from slipstream.backend.simulate import only_simulated
from slipstream.backend.simulate.derived import saved_flops
from slipstream.backend.simulate.inputs import Options, read, read_lengths
from slipstream.backend.simulate.schedules import BOUNDS, INTERRUPTS
from slipstream.bridge.families import model_spec
from slipstream.configs.load import load_recipe
from slipstream.configs.published import MODELS
from slipstream.configs.schema import RunConfig
from slipstream.configs.violations import RecipeError
from tests.unit.test_simulate_fit import Written
from tests.unit.test_simulate_fit import recipe as traced
from tests.unit.test_simulate_world import config


def call(*words: str):
    return CliRunner().invoke(app, ["simulate", *map(str, words)])


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe whose model and prompts do not exist."""

    def write(**changes) -> str:
        data = config(steps=3).model_dump(mode="json") | changes
        path = tmp_path / "small.yaml"
        path.write_text(yaml.safe_dump(data))
        return str(path)

    return write


@pytest.mark.parametrize(("minibatches", "samples"), [(1, 8), (2, 8), (4, 4), (4, 8)])
def test_the_flops_that_shared_prompts_save_are_those_of_drawn_mini_batches(minibatches: int, samples: int):
    geometry = model_spec(MODELS / "Qwen3-1.7B").geometry
    settings = config(steps=1).model_dump(mode="json")
    settings["rollout"] |= {"batch_size": 50, "n_samples_per_prompt": samples, "sampling": {}}
    settings["actor"] = {"share_prefixes": "auto", "minibatches": minibatches}
    settings["simulate"] = {"prompts": {"median": 900}, "responses": {"median": 600, "sigma": 0}}
    group_N = np.repeat(np.arange(50), samples)
    drawn = split_minibatches(np.arange(len(group_N)), minibatches, np.random.default_rng(0))
    prompts = sum(len(np.unique(group_N[places])) for places in drawn)
    whole, prompt = forward_flops(geometry, np.array([1500, 900]))
    expected = (len(group_N) - prompts) * prompt / (len(group_N) * whole)
    saved = saved_flops(RunConfig.model_validate(settings), geometry)
    assert saved == pytest.approx(expected, abs=0.02) and saved > 0.1
    settings["actor"]["share_prefixes"] = "off"
    assert saved_flops(RunConfig.model_validate(settings), geometry) == 0


ALONE = "simulate.compare=false"
CLUSTER = "simulate.layout={type: cluster, gpus_per_node: 4, trainer_share: 0.5}"


def test_the_tables_show_the_run_the_schedules_and_the_cost_model(recipe):
    ended = call(recipe())
    assert ended.exit_code == 0, ended.output
    for told in (
        "trained tokens/s",
        "trained trajectories by head lag",
        "synchronous, shared GPUs",
        "one step off",
        "volume gate",
        "windowed 0.25",
        "ready_first requeue",
        "recommended",
        "Cost model of these figures",
        "decode step 20 ms + 1 ms per running request",
    ):
        assert told in ended.stdout, told
    matrix = ended.stdout.split("speed-up of ready_first over")[1]
    for bound in BOUNDS:
        assert re.search(rf"^\s+{bound}(\s+\d+\.\d\dx){{{len(INTERRUPTS)}}}\s*$", matrix, re.M), bound


def test_json_is_one_document_and_the_same_in_the_folder(recipe, tmp_path):
    ended = call(recipe(), "--json", "--out", tmp_path / "out")
    assert ended.exit_code == 0, ended.output
    assert (tmp_path / "out/simulation.json").read_text() == ended.stdout
    assert (tmp_path / "out/timeline.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(ended.stdout)
    (cluster,) = found["clusters"]
    assert cluster["run"]["steps"] == 3
    assert len(cluster["run"]["step_s"]) == 3
    assert cluster["recommended"]["gpus"] == 3
    assert {one["schedule"] for one in cluster["schedules"]} >= {"volume gate", "fifo", "one step off"}
    assert found["cost_model"]["engine"]["step_s"] == 0.02
    assert call(recipe(), "--json").stdout == ended.stdout
    assert call(recipe(), "--json", "--seed", "5").stdout != ended.stdout


def test_sizes_of_the_cluster_are_simulated_one_by_one(recipe, tmp_path):
    ended = call(recipe(), ALONE, CLUSTER, "--nodes", "1", "2", "4", "--json", "--out", tmp_path / "out")
    assert ended.exit_code == 0, ended.output
    assert [one["layout"]["gpus"] for one in json.loads(ended.stdout)["clusters"]] == [4, 8, 16]
    assert len(list((tmp_path / "out").glob("timeline-*-gpus.png"))) == 3
    assert call(recipe(), ALONE, CLUSTER, "--nodes", "1,2,4", "--json").stdout == ended.stdout
    table = call(recipe(), ALONE, CLUSTER, "--nodes", "1", "2")
    assert "sizes of the cluster" in table.stdout
    assert "Cost model" in table.stdout


@pytest.mark.parametrize(
    "text",
    ["3\n70\n\n12\n", "[3, 70, 12]", '{"length": 3}\n{"length": 70, "id": 1}\n{"length": 12}\n'],
    ids=["lines", "list", "jsonl"],
)
def test_lengths_are_read_from_a_file(text, recipe, tmp_path):
    path = tmp_path / "lengths"
    path.write_text(text)
    assert read_lengths(path).tolist() == [3, 70, 12]
    ended = call(recipe(), ALONE, "--lengths", path, "--json")
    assert ended.exit_code == 0, ended.output
    assert "of 3 given lengths: mean 28, longest 70" in ended.stdout


def test_everything_wrong_is_told_at_once_with_exit_code_2(recipe, tmp_path):
    lengths = tmp_path / "lengths"
    lengths.write_text("1\n0\n-3\n2.5\nmany\n{}\n[]\nnull\n")
    file = tmp_path / "file"
    file.write_text("")
    ended = call(
        recipe(), "rollout.batch_sise=3", "--lengths", lengths, "--nodes", "0", "--out", file / "out",
        "--fit", tmp_path / "nowhere",
    )  # fmt: skip
    assert ended.exit_code == 2
    assert ended.stdout == ""
    told = ended.stderr
    for line in (2, 3, 4, 5, 6):
        assert f"line {line} = " in told
    for part in ("rollout.batch_sise", "'2 more'", "--nodes = '0'", "is not a directory", "nowhere"):
        assert part in told, part
    assert "Traceback" not in told


def test_what_cannot_be_simulated_is_refused(recipe, tmp_path):
    told = call(recipe(), "--nodes", "2").stderr
    assert "set simulate.layout.type to cluster" in told
    told = call(recipe(), "simulate.engine.kv_tokens=100").stderr
    assert "simulate.engine.kv_tokens = 100" in told
    told = call(recipe(), "simulate.layout={type: cluster, gpus_per_node: 1}").stderr
    assert "expected at least 2" in told
    assert "cannot be read" in call(recipe(), "--lengths", tmp_path / "none").stderr
    (tmp_path / "empty").write_text("\n")
    assert "holds no lengths" in call(recipe(), "--lengths", tmp_path / "empty").stderr
    (tmp_path / "broken").write_text("[1, 2")
    assert "not a JSON list" in call(recipe(), "--lengths", tmp_path / "broken").stderr


def test_a_run_that_stalls_ends_with_exit_code_1_and_says_who_waits(recipe):
    ended = call(recipe(), ALONE, "simulate.failures.episode=1")
    assert ended.exit_code == 1
    assert "groups in a row have failed" in ended.stderr
    assert "tasks wait" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_schedule_that_stalls_is_shown_beside_the_others(recipe):
    """Synchronous batches take longest, as they start from idle engines."""
    ended = call(recipe(), "run.batch_timeout_s=3.9", "--json")
    assert ended.exit_code == 0, ended.output
    (cluster,) = json.loads(ended.stdout)["clusters"]
    stalled = [one for one in cluster["schedules"] if one["stalled"]]
    assert stalled
    assert len(stalled) < len(cluster["schedules"])
    assert all(
        "no batch of 4 groups within 4 s" in one["stalled"] and one["speedup"] is None for one in stalled
    )


def test_a_fitted_simulation_uses_the_run_s_constants_and_lengths(monkeypatch, tmp_path):
    made, run = traced(), tmp_path / "run"
    run.mkdir()
    Written(monkeypatch).run(made, run)
    (run / "recipe.yaml").write_text(yaml.safe_dump(made.model_dump(mode="json")))
    works, fitted = read(Options(str(run / "recipe.yaml"), (ALONE,), fit=run), lambda config: None)
    (work,) = works
    assert work.config.simulate == fitted.model.model_copy(update={"compare": False})
    assert np.array_equal(work.lengths, fitted.lengths)
    ended = call(run / "recipe.yaml", ALONE, "--fit", run)
    assert ended.exit_code == 0, ended.output
    assert "fitted to the run's trace" in ended.stdout
    assert "rms residual" in ended.stdout
    assert "group by group" in ended.stdout


def test_fit_and_lengths_exclude_each_other(tmp_path, recipe):
    (tmp_path / "lengths").write_text("1")
    with pytest.raises(RecipeError, match="give one of both"):
        read(Options(recipe(), lengths=tmp_path / "lengths", fit=tmp_path), lambda config: None)


def test_the_bundled_recipe_passes_every_check_and_cannot_be_trained():
    found = load_recipe(Path("simulate-areal"))
    assert found.simulate is not None
    assert found.prepare is not None
    with pytest.raises(SystemExit, match="slipstream simulate"):
        only_simulated()
