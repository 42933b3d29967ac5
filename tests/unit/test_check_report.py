"""What ``slipstream check`` says of a recipe that nothing is wrong with; all that is wrong in one round."""

import asyncio
import json
from pathlib import Path
from textwrap import dedent
from typing import cast

import pytest
from typer.testing import CliRunner

from slipstream.backend.cli.app import app
from slipstream.backend.commands.check import check, planned, read_recipe, shipped_model
from slipstream.backend.commands.outcome import WrongInput
from slipstream.backend.quickstart.tokenizer import build_tokenizer
from slipstream.backend.simulate.advice import advise
from slipstream.backend.simulate.derived import busy_seconds
from slipstream.backend.simulate.gpu_split import layout_of
from slipstream.configs.load import load_recipe
from slipstream.rollout.reward import Exact
from slipstream.rollout.tokens.trajectory import Prompt, Trajectory
from tests.environment import ROOT
from tests.models import make_checkpoint

ROWS = [{"prompt": f"a{n}b{n % 7}", "label": str(n % 10)} for n in range(40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = build_tokenizer()
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return folder


def written(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def overrides(
    folder: Path, model: Path, training: list[dict], held_out: list[dict] | None = None
) -> list[str]:
    given = [f"model.path={model}", "prepare=null", f"run.root={folder}", "rollout.sampling.max_new_tokens=8"]
    given.append(f"data.path={written(folder / 'train.jsonl', training)}")
    if held_out is None:
        return [*given, "eval=null"]
    return [*given, f"eval.path={written(folder / 'held_out.jsonl', held_out)}"]


def warnings(folder: Path, model: Path, *rows: list[dict], more: tuple[str, ...] = ()) -> list[str]:
    config = load_recipe(Path("quickstart"), [*overrides(folder, model, *rows), *more])
    return check(config).warnings


def changed(number: int, **columns: object) -> list[dict]:
    return [{**row, **columns} if each == number else row for each, row in enumerate(ROWS)]


def test_the_report_tells_the_model_its_layout_and_the_prompts(tmp_path: Path, model: Path):
    held_out = [{"prompt": "z1", "label": "1"}]
    config = load_recipe(Path("quickstart"), overrides(tmp_path, model, ROWS, held_out))
    findings = check(config)
    tokenizer = build_tokenizer()
    lengths = sorted(
        len(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, return_dict=False
            )
        )
        for row in ROWS
    )
    report = "\n".join(findings.report)
    assert "1 trainer rank, 1 engine of 1 rank" in report
    expected = f"data.path: 40 prompts of {lengths[0]} to {lengths[-1]} tokens (median {lengths[20]})"
    assert expected in findings.report
    assert "eval.path: 1 prompt of" in report
    assert "length: 70 steps of 16 prompts are 28.00 passes" in findings.report
    assert not findings.warnings


UNINTENDED = {
    "equal prompts": (
        changed(30, prompt=ROWS[4]["prompt"]),
        "1 of 40 prompts are equal to an earlier one",
        "line 31 to line 5",
    ),
    "a character without a token": (changed(3, prompt="a1€2"), "the tokenizer has no tokens for €", "line 4"),
    "a number compared as a text": (changed(6, label=7.5), "compares with the text '7.5'", "line 7"),
    "an empty label": (changed(8, label=" "), "it is an empty text", "line 9"),
    "labels of two kinds": (changed(8, label=3), "39 texts, 1 numbers", "several kinds"),
    "few prompts": (ROWS[:3], "3 prompts for batches of 16", "more than once"),
}
"""By what is odd: rows, and parts of the only warning."""


@pytest.mark.parametrize("what", UNINTENDED)
def test_what_is_probably_not_meant_is_a_warning_with_its_place(what: str, tmp_path: Path, model: Path):
    rows, *parts = UNINTENDED[what]
    told = warnings(tmp_path, model, rows)
    assert any(all(part in line for part in parts) for line in told), told
    assert all(line.startswith("data") for line in told)
    assert len(told) <= 2  # a label of another type is of another kind as well


def test_held_out_prompts_that_are_trained_on_are_told_with_both_places(tmp_path: Path, model: Path):
    held_out = [{"prompt": "z1", "label": "1"}, ROWS[8], ROWS[9]]
    (told,) = warnings(tmp_path, model, ROWS, held_out)
    assert told.startswith("eval.path: 2 of 3 held-out prompts are trained on")
    assert f"{tmp_path}/held_out.jsonl, line 2" in told
    assert f"{tmp_path}/train.jsonl, line 9" in told


def test_a_label_that_is_not_a_number_is_an_error_where_a_reward_compares_it(tmp_path: Path, model: Path):
    with pytest.raises(WrongInput, match="line 7: `label`: it has the label nan, expected a value"):
        warnings(tmp_path, model, changed(6, label=float("nan")))


def test_a_whole_number_with_a_point_is_no_warning_as_rewards_take_it_with_and_without_one(
    tmp_path: Path, model: Path
):
    """Pandas writes whole numbers so, in a column with a null."""
    assert not warnings(tmp_path, model, [{**row, "label": float(row["label"])} for row in ROWS])
    answered = asyncio.run(Exact().score(Prompt(0, "?", 7.0), "7", cast("Trajectory", None)))
    assert answered == 1


def test_numbers_as_labels_are_a_warning_for_a_reward_of_the_users(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    code = """
        class Compared:
            def score(self, prompt, response, trajectory):
                return response == prompt.label
    """
    (tmp_path / "compared.py").write_text(dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rows = [{**row, "label": int(row["label"])} for row in ROWS]
    (told,) = warnings(tmp_path, model, rows, more=("rollout.reward={path: compared.Compared}",))
    assert (
        "line 1: the label is 0: a response is a text, and never equals it unless compared.Compared" in told
    )
    rows = changed(6, label=float("nan"))
    told = warnings(tmp_path, model, rows, more=("rollout.reward={path: compared.Compared}",))
    assert any("line 7" in line and "no answer equals it" in line for line in told)


def test_a_recipe_for_gpus_tells_the_time_of_a_step():
    folder = ROOT / "configs/models/Qwen3-8B"
    done = CliRunner().invoke(
        app, ["check", "grpo-qwen3-8b-1n8g-tp2dp4", "--model-config", str(folder)], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert "model: qwen3, 8,190,735,360 parameters, bfloat16" in done.stdout
    assert "a step, estimated: its tokens keep the trainer busy for " in done.stdout


def test_no_side_is_busy_for_longer_than_a_simulated_step():
    """Lengths are drawn at random in a simulation, which has few steps."""
    name = "grpo-qwen3-8b-3n8g-tp2dp4-async4"
    config = read_recipe(name, [], model_config=shipped_model(name, []))
    plan = planned(config)
    assert plan.engine is not None
    busy = busy_seconds(config, plan.export, plan.engine, layout_of(config))
    advice = advise(config, plan.export, plan.engine, alone=True)
    assert advice is not None
    outcome = advice.runs[0].outcome
    assert outcome is not None
    step_s = outcome.makespan_s / outcome.steps
    assert 0.5 * step_s < max(busy) < 1.2 * step_s


def test_everything_wrong_is_told_in_one_round(tmp_path: Path, model: Path):
    """A value of a wrong type, settings that contradict each other, code, a tracker, and a row."""
    rows = [*ROWS, {"prompt": 3, "label": "1"}]
    wrong = [
        "actor.optimizer.lr=abc",
        "rollout.n_samples_per_prompt=1",
        "rollout.workflow=no.such.Workflow",
        "log.wandb.project=x",
    ]
    done = CliRunner().invoke(app, ["check", "quickstart", *overrides(tmp_path, model, rows), *wrong])
    assert done.exit_code == 2
    for part in (
        "actor.optimizer.lr = 'abc'",
        "rollout.n_samples_per_prompt = 1",
        "no.such.Workflow",
        "log.wandb: the package wandb is not installed",
        "train.jsonl, line 41",
    ):
        assert part in done.stderr


@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo", "reinforce++"])
def test_an_algorithm_that_is_no_objective_here_is_told_what_it_is(name: str):
    done = CliRunner().invoke(app, ["check", "quickstart", f"actor.objective.type={name}"])
    assert done.exit_code == 2
    assert f"{name} is 'ppo' here, with " in done.stderr


def test_a_recipe_of_the_other_command_is_told_so():
    done = CliRunner().invoke(app, ["check", "sft-qwen3-4b-1n8g-dp8"])
    assert done.exit_code == 2
    assert done.stderr.count("\n  ") == 1
    assert "`--sft`" in done.stderr
    done = CliRunner().invoke(app, ["check", "--sft", "quickstart"])
    assert done.exit_code == 2
    assert "leave out --sft" in done.stderr


def test_a_model_that_is_still_to_be_made_is_said_to_be_unchecked(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "train.jsonl", ROWS)
    config = load_recipe(Path("quickstart"), ["data.path=train.jsonl", "eval=null"])
    notes = check(config).notes
    assert any(str(config.model.path) in note and "after `slipstream try`" in note for note in notes)
