"""Agents talk to the endpoint as to any provider; what the engines sampled is what is trained."""

import sys

import pytest
import yaml

from slipstream.configs.schema import EndpointConfig
from tests.agents.conftest import example
from tests.agents.process import OWN_KEYS

AGENT = "slipstream.rollout.workflow.Agent"


def agent(name: str, **args: object) -> dict:
    return {"path": AGENT, "args": {"run": f"tests.agents.scripted.{name}", **args}}


@pytest.mark.parametrize(
    ("name", "trained", "reward"),
    [
        ("talk", [[0, 1, 2]], 0.5),
        ("stream", [[0, 1]], 1.0),
        ("use_tools", [[0, 1]], 3.0),
        ("talk_to_claude", [[0, 1]], None),
        ("ask_native", [[0]], 1.0),
        ("rewrite", [[0, 1, 2], [3]], 1.0),
        ("block", [[0]], 0.25),
    ],
)
def test_what_the_engines_sampled_is_what_is_trained(collector, name, trained, reward):
    episode = collector.episode(agent(name), metadata={"level": 3})
    assert episode.error is None, episode.failures
    assert episode.trained() == trained
    assert episode.rewards == [reward] * len(trained)
    assert episode.open == 0
    for request in episode.sampled:
        assert "priority" not in request["fields"]


@pytest.mark.parametrize(
    ("name", "trained"),
    [("delegate", [[1], [2], [0, 3]]), ("sample_twice", [[0], [1], [2, 3]])],
)
def test_sub_agents_and_several_answers_are_trajectories_of_their_own(collector, name, trained):
    episode = collector.episode(agent(name))
    assert episode.error is None, episode.failures
    assert sorted(map(sorted, episode.trained())) == sorted(trained)
    assert episode.trained()[-1] == trained[-1], "the conversation that has ended last is the last one"
    assert episode.rewards == [1.0] * len(trained)


def test_what_the_trainer_cannot_reproduce_is_context(collector):
    episode = collector.episode(agent("sample_otherwise"))
    assert episode.trained() == [[0, 2]]
    greedy = episode.sampled[1]
    assert greedy["fields"]["sampling_params"]["temperature"] == 0
    assert greedy["tokens"] in [
        episode.trajectories[0]["tokens"][start : start + len(greedy["tokens"])]
        for start in range(len(episode.trajectories[0]["tokens"]))
    ]


def test_an_agent_without_anything_to_train_has_failed(collector):
    episode = collector.episode(agent("be_greedy"), attempts=2)
    assert episode.attempts == 2
    assert "can be trained, because of: temperature" in episode.error
    assert "has got no completion" in collector.episode(agent("ask_nothing")).error


@pytest.mark.parametrize(
    ("name", "prompt", "why"),
    [
        ("raise_error", "", "RuntimeError: the environment is broken"),
        ("return_nonsense", "nan", "expected a finite number"),
        ("return_nonsense", "text", "expected a finite number"),
        ("return_nonsense", "", "expected 'reward' among them"),
    ],
)
def test_what_fails_outside_the_policy_is_failed(collector, name, prompt, why):
    episode = collector.episode(agent(name), prompt)
    assert why in episode.error
    assert episode.trajectories == [] and episode.open == 0


def test_requests_that_are_left_behind_end_with_the_episode_and_its_key_is_void(collector):
    episode = collector.episode(agent("leave_requests"))
    assert episode.error is None, episode.failures
    assert episode.trained() == [[0]]
    later = collector.episode(agent("look_back"))
    assert later.error is None, later.failures
    assert later.trained() == [[0]]


def test_an_agent_that_ignores_errors_and_retries_trains_what_it_has_got(collector):
    episode = collector.episode(agent("retry"))
    assert episode.error is None, episode.failures
    assert [collected["tokens"] for collected in episode.sampled if "tokens" in collected]
    assert episode.trained() == [[0, 1]]


def test_episodes_do_not_know_of_one_another(collector):
    episode = collector.episode(agent("spy"))
    assert (episode.error, episode.rewards) == (None, [1.0])
    assert episode.trained() == [[0]]


# ---- limits


@pytest.mark.parametrize("prompt", ["raise", "stop"])
@pytest.mark.parametrize(("limit", "number"), [("max_turns", 3), ("max_tokens", 24)])
def test_a_limit_refuses_further_requests_and_ends_the_episode(collector, limit, number, prompt):
    """An answer has nine tokens."""
    episode = collector.episode(agent("go_on", **{limit: number}), prompt)
    assert episode.error is None, episode.failures
    assert episode.trained() == [[0, 1, 2]]
    assert [len(request["tokens"]) for request in episode.sampled] == [9, 9, 9 if limit == "max_turns" else 6]
    assert episode.rewards == [None if prompt == "raise" else 1.0]


def test_a_truncated_episode_is_masked_or_dropped(collector):
    masked = collector.episode(agent("go_on", max_turns=2, on_limit="mask"))
    assert masked.error is None, masked.failures
    [trajectory] = masked.trajectories
    assert (set(trajectory["mask"]), trajectory["reward"]) == ({False}, 1.0)
    dropped = collector.episode(agent("go_on", max_turns=2, on_limit="drop"), attempts=2)
    assert (dropped.error, dropped.attempts) == (None, 1), dropped.failures
    [trajectory] = dropped.trajectories
    assert (set(trajectory["mask"]), trajectory["dropped"]) == ({False}, True)
    within = collector.episode(agent("talk", max_turns=3, on_limit="drop"))
    assert within.trained() == [[0, 1, 2]]


def test_a_full_context_is_a_limit_unless_the_agent_goes_on(collector):
    episode = collector.episode(agent("fill_context", on_limit="drop"))
    assert [trajectory["dropped"] for trajectory in episode.trajectories] == [True], episode.failures
    episode = collector.episode(agent("fill_context", on_limit="drop"), "compact")
    assert episode.error is None, episode.failures
    assert episode.trained() == [[0], [1]]
    assert not any(trajectory["dropped"] for trajectory in episode.trajectories)


# ---- rewards


@pytest.mark.parametrize(
    ("key", "reward", "parts"), [("reward", 3.0, {"length": 5.0}), ("length", 5.0, {"reward": 3.0})]
)
def test_the_recipe_names_the_number_that_trains_and_the_others_are_parts(collector, key, reward, parts):
    episode = collector.episode(agent("use_tools"), metadata={"level": 3}, reward_key=key)
    assert episode.error is None, episode.failures
    assert {trajectory["reward"] for trajectory in episode.trajectories} == {reward}
    assert [trajectory["parts"] for trajectory in episode.trajectories] == [parts] * len(episode.trajectories)


# ---- time


def test_a_limit_of_time_ends_the_attempt(collector):
    episode = collector.episode(agent("ask_slowly"), delay_s=0.2, timeout_s=0.5)
    assert "TimeoutError" in episode.error
    assert episode.open == 0


def test_an_agent_ends_when_the_run_cannot_go_on(collector):
    episode = collector.episode(agent("retry"), lost=True)
    assert "NoEngine: no engine has served" in episode.error
    assert episode.failures == []


@pytest.mark.parametrize("stop_after", [1, 10, 22, 35])
def test_a_collector_that_ends_in_the_middle_loses_nothing(collector, stop_after):
    """The four completions come in 9, 9, 10 and 10 parts or so."""
    name = f"slow {stop_after}"
    first = collector.episode(agent("ask_slowly"), name=name, stop_after=stop_after)
    assert first.error == "stopped"
    second = collector.episode(agent("ask_slowly"), name=name)
    assert second.error is None, second.failures
    again = [request["ids"] for request in second.sampled if not request["start"]]
    assert not [request for request in first.sampled if request["ids"] in again]
    assert len(second.trajectories) == 2
    second.sampled = [request for request in first.sampled if request not in second.sampled] + second.sampled
    assert sorted(map(len, second.trained())) == [2, 2]


def test_evaluation_is_greedy_whatever_the_agent_asks_for(collector):
    episode = collector.episode(agent("sample_otherwise"), evaluation=True)
    assert episode.error is None, episode.failures
    assert episode.trained() == [[0, 1, 2]]
    assert {request["fields"]["sampling_params"]["temperature"] for request in episode.sampled} == {0.0}


# ---- the documentation


def test_the_example_of_the_documentation_is_an_agent(collector):
    rollout = yaml.safe_load(example("yaml"))["rollout"]
    EndpointConfig.model_validate(rollout["endpoint"])
    right = collector.episode(rollout["workflow"], "#say 4", label="4")
    assert (right.error, right.rewards, right.trained()) == (None, [1.0], [[0]]), right.failures
    wrong = collector.episode(rollout["workflow"], "#say 5", label="4")
    assert (wrong.error, wrong.rewards, wrong.trained()) == (None, [0.0], [[0, 1]]), wrong.failures


# ---- programs


ASK = """
import json, os, sys, openai
given = json.load(sys.stdin)
assert given == json.load(open(os.environ["SLIPSTREAM_PROMPT"])), given
assert given["metadata"] == {"level": 3, "label": "4"}
with openai.OpenAI() as policy:
    reply = policy.chat.completions.create(model="m", messages=[{"role": "user", "content": given["prompt"]}])
    print(reply.choices[0].message.content)
"""
ASK_CLAUDE = """
import anthropic
with anthropic.Anthropic() as policy:
    messages = [{"role": "user", "content": "#say hi"}]
    policy.messages.create(model="m", max_tokens=50, messages=messages)
"""


def program(text: str, **args: object) -> dict:
    return {"path": AGENT, "args": {"command": [sys.executable, "-c", text], **args}}


@pytest.mark.parametrize(
    ("text", "prompt", "reward"),
    [
        (ASK, "#say 0.75", 0.75),
        (ASK, '#say {"reward": 2, "steps": 9}', 2.0),
        (ASK, "#say no number", None),
        (ASK_CLAUDE, "", None),
    ],
)
def test_a_program_finds_the_policy_in_its_environment(collector, text, prompt, reward):
    episode = collector.episode(program(text), prompt, label="4", metadata={"level": 3})
    assert episode.error is None, episode.failures
    assert episode.trained() == [[0]]
    assert episode.rewards == [reward]


REPORT_VARIABLES = (
    ASK_CLAUDE
    + """
import json, os
print(json.dumps({"reward": float("USERS_OWN" in os.environ), "keys": len(%r & os.environ.keys())}))
"""
)


def test_a_program_gets_the_users_variables_without_the_keys_of_the_run(collector):
    episode = collector.episode(program(REPORT_VARIABLES % set(OWN_KEYS)))
    assert (episode.error, episode.rewards) == (None, [1.0]), episode.failures
    assert episode.trajectories[0]["parts"] == {"keys": 0.0}


def test_a_program_that_fails_or_takes_too_long_is_a_failed_attempt(collector):
    episode = collector.episode(program(ASK_CLAUDE + "\nraise SystemExit('out of order')"))
    assert "has ended with exit code 1" in episode.error and "out of order" in episode.error
    episode = collector.episode(program(ASK_CLAUDE + "\nimport time; time.sleep(60)"), timeout_s=2)
    assert "TimeoutError" in episode.error
    episode = collector.episode({"path": AGENT, "args": {"command": ["/nowhere/at-all"]}})
    assert "/nowhere/at-all cannot be started" in episode.error


def test_a_program_that_a_limit_has_stopped_is_truncated(collector):
    twice = ASK_CLAUDE + "\n    policy.messages.create(model='m', max_tokens=50, messages=messages)"
    episode = collector.episode(program(twice, max_turns=1))
    assert episode.error is None, episode.failures
    assert (episode.trained(), episode.rewards) == ([[0]], [None])
