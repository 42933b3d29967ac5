"""Agents talk to the endpoint as to any provider; what the engines sampled is what is trained."""

import pytest

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
