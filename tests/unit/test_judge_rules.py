"""Rules about the section ``judge``: each mistake names its setting."""

import json

import pytest
import yaml

from slipstream.backend.driver.start.inputs import judge_model_problems
from slipstream.backend.driver.start.plugin_checks import plugin_problems
from slipstream.backend.quickstart.tokenizer import build_tokenizer
from slipstream.configs.load import load_recipe
from slipstream.configs.schema import CodeJudge, RunConfig
from slipstream.rollout.reward.judge.named_model import TURN_VOTES, judge_of_turns, named_model
from tests.unit.test_config_rules import base, violations

__all__ = ["base"]

LIVE = ["gateway={}", "live={}"]
POLICY = {"type": "policy"}
ENGINES = {"type": "engines", "path": "MODEL"}
OF_JUDGE = {"teacher": {"type": "judge"}}
TEACHER = "actor.advantage=[{type: reward}, {type: teacher}]"


def model(**settings: object) -> str:
    return "judge=" + json.dumps({"type": "model", "endpoint": POLICY, **settings})


@pytest.mark.parametrize(
    ("overrides", "path", "part"),
    [
        ([*LIVE, model()], None, ""),
        ([model(), "rollout.reward=slipstream.rollout.reward.ModelVotes"], None, ""),
        ([*LIVE, "judge={type: code, code: my.Judge}"], "judge.code", "there is no Python package 'my'"),
        (["judge={type: code, code: yaml.safe_load}"], "judge.code", "none are trained"),
        (["judge={type: code, give_up_s: 5}"], "judge.give_up_s", "none are trained"),
        ([model(ask_again_s=5)], "judge.ask_again_s", "none are trained"),
        ([model(hint={})], "judge.hint", "none are trained"),
        (["gateway={}", "live={train: false}", model(hint={})], "judge.hint", "none are trained"),
        ([*LIVE, model(min_votes=4)], "judge.min_votes", "at most 3, the number of votes"),
        ([*LIVE, model(votes=65)], "judge.votes", "at most 64"),
        ([*LIVE, model(score=None)], "judge.score", "nothing to ask"),
        ([*LIVE, model(score=None, hint={})], "judge.hint.teacher", "trained by its teacher alone"),
        (
            [*LIVE, TEACHER, model(score=None, hint={"question": None, "teacher": POLICY})],
            "judge.hint.question",
            "no other votes",
        ),
        ([*LIVE, model(hint={"choose": {"type": "overlap"}})], "judge.hint.teacher", "likeliest tokens"),
        ([*LIVE, TEACHER, model(hint={"teacher": POLICY})], None, ""),
        ([*LIVE, model(hint={"teacher": POLICY})], "judge.hint.teacher", "have no effect"),
        ([*LIVE, TEACHER, model(hint={"teacher": POLICY | {"top_k": 4}})], "judge.hint.teacher.top_k", "0"),
        (
            [*LIVE, "actor.advantage=[{type: teacher_topk}]", model(hint={"teacher": POLICY})],
            "judge.hint.teacher.top_k",
            "at least 1",
        ),
        (
            [*LIVE, TEACHER, model(hint={"teacher": POLICY}), "rollout.sampling.temperature=0.7"],
            "rollout.sampling.temperature",
            "expected 1",
        ),
        ([*LIVE, model(request_timeout_s=120)], "judge.request_timeout_s", "less than 120 (live.judging"),
        ([*LIVE, model(), "live.judging.timeout_s=50"], "judge.request_timeout_s", "less than 50"),
        ([*LIVE, "judge.endpoint.type=url"], "judge.type", "missing"),
        ([*LIVE, model(endpoint={"type": "url", "url": "host", "model": "m"})], "judge.endpoint.url", "http"),
        ([*LIVE, model(endpoint={"type": "url", "model": "m"})], "judge.endpoint.url", "required"),
        (
            [*LIVE, TEACHER, model(hint={"teacher": {"type": "url", "url": "ftp://host"}})],
            "judge.hint.teacher.url",
            "http",
        ),
    ],
)
def test_a_rule_reports_its_own_setting_and_only_that(base, overrides, path, part):
    found = violations(base, *overrides)
    assert set(found) == ({path} if path else set())
    if path:
        assert part in found[path]


@pytest.mark.parametrize(
    ("settings", "path", "part"),
    [
        ({}, None, ""),
        ({"hint": OF_JUDGE}, None, ""),
        ({"endpoint": POLICY, "hint": OF_JUDGE}, "judge.hint.teacher.type", "no engines of its own"),
        ({"endpoint": {"type": "engines", "path": "/nowhere"}}, "judge.endpoint.path", "no config.json"),
        ({"endpoint": {"type": "engines"}}, "judge.endpoint.path", "required"),
        ({"endpoint": ENGINES | {"args": {"dtype": "half"}}}, "judge.endpoint.args.dtype", "endpoint.dtype"),
        (
            {"endpoint": ENGINES | {"args": {"mem_fraction": 1}}},
            "judge.endpoint.args.mem_fraction",
            "no such field",
        ),
        ({"endpoint": ENGINES | {"args": {"log_level": "info"}}}, None, ""),
        ({"max_new_tokens": 512, "endpoint": ENGINES}, "judge.max_new_tokens", "less than 512"),
    ],
)
def test_a_judge_with_engines_of_its_own(base, tmp_path, settings, path, part):
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge/config.json").write_text('{"max_position_embeddings": 512}')
    section = model(**{"endpoint": ENGINES, "max_new_tokens": 100, **settings})
    terms = [TEACHER] if "hint" in settings else []
    found = violations(base, *LIVE, *terms, section.replace("MODEL", str(tmp_path / "judge")))
    assert set(found) == ({path} if path else set())
    if path:
        assert part in found[path]


def test_a_judge_that_scores_the_policys_tokens_has_its_vocabulary(base, tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/config.json").write_text('{"vocab_size": 8}')
    section = model(endpoint=ENGINES | {"path": str(tmp_path)}, hint=OF_JUDGE)
    found = violations(base, *LIVE, TEACHER, section, f"model.path={tmp_path / 'policy'}")
    assert "7 tokens; expected 8" in found["judge.endpoint.path"]


def test_the_model_of_a_judge_with_engines_is_looked_at(base, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = recipe(base, *LIVE, model(endpoint=ENGINES | {"path": str(tmp_path)}))
    [problem] = judge_model_problems(config)
    assert problem.startswith("judge.endpoint.path: ") and "no tokenizer" in problem
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    [problem] = judge_model_problems(config)
    assert "config.json" in problem
    (tmp_path / "config.json").write_text(
        '{"text_config": {"vocab_size": 4, "max_position_embeddings": 512}}'
    )
    problems = judge_model_problems(config)
    assert ["no chat template" in each for each in problems] == [True, False]
    assert "the tokenizer has 48 tokens, the model 4" in problems[1]


def recipe(base, *overrides: str) -> RunConfig:
    return load_recipe(base, overrides)


def test_the_code_that_the_section_names_is_checked_all_at_once(base, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    score = {"prompt": "tests.unit.test_judge_model.nothing_of_a_turn", "parser": "json.nothing"}
    [problem] = plugin_problems(recipe(base, *LIVE, model(score=score)))
    assert problem.startswith("judge: judge.score.prompt: ") and "judge.score.parser: json.nothing" in problem
    url = {"type": "url", "url": "http://host", "model": "m", "key_env": "NO_SUCH_KEY"}
    [problem] = plugin_problems(recipe(base, *LIVE, model(endpoint=url)))
    assert "NO_SUCH_KEY has no key" in problem
    assert not plugin_problems(recipe(base, *LIVE, model(hint={})))


def test_a_model_that_nobody_asks_is_reported(base):
    [problem] = plugin_problems(recipe(base, model()))
    assert "nobody asks the language model" in problem
    asked = ["rollout.reward=slipstream.rollout.reward.ModelVotes"]
    assert not plugin_problems(recipe(base, model(), *asked))
    [problem] = plugin_problems(recipe(base, *asked))
    assert "expected a section `judge` of type model" in problem


def test_judge_processes_are_given_the_section_as_plain_data(base):
    config = recipe(base, *LIVE, model(votes=5))
    setup = named_model(config.judge, config.model)
    assert setup is not None and setup.settings["votes"] == 5
    assert yaml.safe_load(yaml.safe_dump(setup.settings)) == setup.settings
    assert judge_of_turns(config.judge) == TURN_VOTES
    assert judge_of_turns(CodeJudge()).path == "slipstream.rollout.reward.live.RuleJudge"
    assert named_model(recipe(base).judge, recipe(base).model) is None
