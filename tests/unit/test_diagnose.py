"""``slipstream diagnose``: each cause is named by the evidence of a real run, and healthy runs have none."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.backend.cli.app import app
from slipstream.backend.commands.diagnose import NOTHING, WIDTH, described, diagnose
from slipstream.backend.commands.outcome import WrongInput
from slipstream.backend.monitor.diagnosis.causes import CAUSES, likely_causes
from slipstream.backend.monitor.diagnosis.evidence import Evidence, read_evidence
from slipstream.backend.monitor.diagnosis.signs import rises
from slipstream.backend.monitor.tags import TAGS
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.paths import schema_paths
from slipstream.rollout.control.core import Ticket
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.ledger.writing.writer import Ledger
from tests.diagnoses.__main__ import problem_of
from tests.diagnoses.cases import BROKEN, HEALTHY
from tests.diagnoses.saved import read_saved
from tests.unit.run_folders import make_run, recipe, start_line, write_lines
from tests.unit.test_ledger import in_ledger

SAVED = read_saved()
CASES = {case.name: case for case in (*BROKEN, *HEALTHY)}


def names(evidence: Evidence) -> list[str]:
    return [likely.cause.name for likely in likely_causes(evidence)]


def test_there_is_evidence_of_every_case_and_of_nothing_else():
    assert list(SAVED) == list(CASES) and len(BROKEN) >= 12 and len(HEALTHY) >= 5


@pytest.mark.parametrize("name", CASES)
def test_a_broken_run_has_its_cause_among_the_first_two_and_a_healthy_one_has_none(name):
    assert problem_of(CASES[name], names(SAVED[name])) is None


def test_every_cause_is_that_of_a_case_and_names_metrics_and_settings_that_exist():
    expected = {cause for case in BROKEN for cause in case.causes}
    assert expected == {cause.name for cause in CAUSES} and len(expected) == len(CAUSES)
    assert not [cause.name for cause in CAUSES if cause.metric not in TAGS]
    advice = " ".join(cause.advice for cause in CAUSES)
    named = set(re.findall(r"\b(?:rollout|actor|model)\.[\w.]*\w", advice))
    known = {".".join(path.split(".")[:n]) for path in schema_paths(RunConfig) for n in range(1, 9)}
    assert named and not named - known


@pytest.mark.parametrize("name", CASES)
def test_the_text_fits_eighty_columns_and_names_figures_metric_and_what_to_do(name):
    text = described(CASES[name].name, SAVED[name], None)
    assert max(map(len, text.splitlines())) <= WIDTH
    if not CASES[name].causes:
        assert text.splitlines()[-1] == NOTHING
        return
    found = likely_causes(SAVED[name])
    assert text.count("   metric: ") == text.count("   what to do: ") == len(found)
    assert re.search(r"^1\. .*\d", text, re.MULTILINE), "a figure"


def test_a_run_that_has_learned_may_have_little_left_to_learn():
    rising = [0.1, 0.2, 0.3, 0.6, 0.8, 0.9, 1.0, 1.0, 1.0]
    solved = {"reward/mean": rising, "reward/std": [0.0] * 9, "train/zero_advantage_fraction": [1.0] * 9}
    assert names(Evidence(steps=9, series=solved)) == []
    assert names(Evidence(steps=9, series=solved | {"reward/mean": [1.0] * 9}))[0] == "all-right"


def test_few_prompts_are_no_cause_while_held_out_prompts_follow():
    held_out = {"reward/mean": [0.5] * 9, "eval/reward": [0.3, 0.4]}
    evidence = Evidence(steps=9, series=held_out, logged_groups=500, prompts=8)
    assert names(evidence) == []
    assert names(replace(evidence, series=held_out | {"eval/reward": [0.4, 0.3]})) == ["few-prompts"]


def test_turns_of_live_users_that_expire_are_named_and_some_of_them_are_no_sign():
    def with_expired(turns: int) -> list[str]:
        return names(Evidence(steps=9, series={"live/trained": [400.0] * 9, "live/expired": [turns] * 9}))

    assert with_expired(9000) == ["stale"]
    assert with_expired(100) == []


def test_a_step_of_one_update_is_no_sign_of_a_low_rate():
    still = {
        "train/approx_kl": [0.0] * 9,
        "train/lr": [1e-6] * 9,
        "staleness/kl": [0.0] * 9,
        "staleness/token_mean": [0.0] * 9,
    }
    one = Evidence(steps=9, series=still, recipe={"actor": {"minibatches": 1}})
    assert names(one) == [], "the ratio is 1, and no token is older"
    assert names(replace(one, recipe={"actor": {"minibatches": 2}})) == ["rate-too-low"]


def test_a_rate_is_judged_when_its_warm_up_is_over():
    series = {
        "train/lr": [1e-8 * n for n in range(1, 10)],
        "train/approx_kl": [1e-12] * 9,
        "staleness/kl": [1e-12] * 9,
    }
    drift = {"kl": 0.01, "slows": "learning_rate"}

    def after(warmup: int) -> list[str]:
        optimizer = {"lr": 1e-6, "warmup_steps": warmup}
        recipe = {"actor": {"minibatches": 4, "optimizer": optimizer, "drift": drift}}
        return names(Evidence(steps=9, series=series, recipe=recipe))

    assert after(100) == after(6) == []
    assert after(5) == ["drift-limit", "rate-too-low"]


@pytest.mark.parametrize(("kl", "causes"), [(0.001, []), (0.02, ["drift-limit"])])
def test_few_groups_in_flight_are_due_to_drift_only_near_its_limit(kl, causes):
    series = {"rollout/groups_in_flight": [6.0] * 9, "staleness/kl": [kl] * 9, "train/ess": [0.99] * 9}
    rollout = {"max_head_offpolicyness": 4, "batch_size": 8}
    drift = {"kl": 0.01, "ess": None, "slows": "admission"}
    evidence = Evidence(steps=9, series=series, recipe={"rollout": rollout, "actor": {"drift": drift}})
    assert names(evidence) == causes


def test_noise_is_no_rise_and_a_rise_is_one():
    noise = [0.45, 0.55, 0.5, 0.4, 0.6, 0.5, 0.55, 0.5]
    assert not rises(Evidence(steps=8, series={"reward/mean": noise}))
    assert not rises(Evidence(steps=4, series={"reward/mean": [0.1, 0.2, 0.8, 0.9]})), "too few steps"
    assert rises(Evidence(steps=8, series={"reward/mean": [x + 0.05 * n for n, x in enumerate(noise)]}))


def test_values_that_are_not_finite_and_metrics_that_are_missing_are_no_signs():
    nan = float("nan")
    assert names(Evidence(steps=0)) == names(Evidence(steps=3)) == []
    every = {tag: [nan] * 5 for tag in TAGS} | {"train/skipped_updates": [0.0] * 5}
    assert names(Evidence(steps=5, series=every)) == []


def fail_most(folder: Path, look=lambda: None) -> None:
    """Leave a ledger of groups that have failed, and look at it while it is open for writing."""

    async def act(ledger: Ledger) -> None:
        for id_ in range(4):
            ledger.admitted(Ticket(id_, 0), id_)
        for id_ in range(3):
            ledger.lost(id_, Loss.FAILED, note="it took longer than 1 s (rollout.judging.timeout_s)")
        await ledger.flushed()
        look()

    in_ledger(folder, act)


def test_a_run_without_a_step_is_diagnosed_from_its_ledger_once_that_is_free(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [start_line(recipe())], unfinished='{"step": 1, "ti')
    while_running: list[Evidence] = []
    fail_most(tmp_path, look=lambda: while_running.append(read_evidence(tmp_path)))
    assert while_running == [Evidence(steps=0, recipe=recipe())], "the ledger was in use"
    text = diagnose(tmp_path)
    assert "no step is finished yet" in text
    assert "1. the reward takes too long: 100% of the groups have failed; it took" in text


def test_a_running_run_is_diagnosed_from_its_last_metrics_and_its_episode_log(tmp_path):
    run = make_run(tmp_path, steps=8)
    counts = {"rollout/groups_trained": 30, "rollout/groups_failed": 70}
    line = {"step": 9, "time": 2e9, "train/step": 9, **counts}
    write_lines(run / "metrics.jsonl", [line])
    row = {"step": 9, "end": "failed", "group": 99, "episode": 0, "reason": "KeyError: 'level'"}
    write_lines(run / "episodes/c0-0.jsonl", [row, row | {"episode": 1}])
    evidence = read_evidence(run)
    assert evidence.groups == {"trained": 30, "failed": 70} and evidence.failures == {row["reason"]: 1}
    assert evidence.logged_groups == 32 and evidence.prompts == 1
    assert names(evidence) == ["failing-groups"], "held-out prompts follow"


def test_a_folder_that_is_not_that_of_a_run_is_exit_code_2(tmp_path):
    with pytest.raises(WrongInput, match=r"no metrics\.jsonl in it; expected the folder of a run"):
        diagnose(tmp_path)
    ended = CliRunner().invoke(app, ["diagnose", str(tmp_path / "nowhere")])
    assert ended.exit_code == 2 and "nowhere" in ended.stderr
