"""The settings of environments of verifiers, and a Python without it. tests/verifiers runs episodes."""

import asyncio
import os
import sys

import pytest

from slipstream.configs.schema import PluginConfig
from slipstream.rollout.system import plugins
from slipstream.rollout.system.plugins import PluginError
from slipstream.rollout.workflow.agent_episodes import AgentFailed
from slipstream.rollout.workflow.verifiers import Host, numbers_of

ENVIRONMENT = {"taskset": {"id": "spelling"}}


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"environment": {}}, "environment: expected {taskset: {id: ...}}"),
        ({"environment": {"taskset": "spelling"}}, "environment: expected {taskset: {id: ...}}"),
        ({"environment": ENVIRONMENT, "python": "/nowhere/python"}, "python: /nowhere/python is no program"),
        ({"environment": ENVIRONMENT, "max_turns": 0}, "max_turns: expected a whole number from 1, found 0"),
        ({"environment": ENVIRONMENT, "on_limit": "keep"}, "on_limit: expected one of train, mask, drop"),
    ],
)
def test_wrong_settings_are_named(args: dict, why: str):
    with pytest.raises(PluginError) as refused:
        plugins.build(PluginConfig(path="slipstream.rollout.workflow.Verifiers", args=args))
    assert why in str(refused.value)


def test_names_of_rewards_become_names_that_parts_may_have():
    numbers = numbers_of({"reward": 1.0, "judge: style": 0.5, "mean": 3.0, "turns": 2.0})
    assert numbers == {"reward": 1.0, "judge__style": 0.5, "turns": 2.0}


def test_a_python_without_the_library_is_said_and_another_episode_tries_again():
    async def ask_twice() -> None:
        host = Host(sys.executable, ENVIRONMENT, 60)
        for _ in range(2):
            with pytest.raises(AgentFailed, match="No module named 'verifiers'"):
                await host.episode(0, "http://127.0.0.1:9/v1", "key", os.environ)
        await host.close()

    asyncio.run(ask_twice())
