"""The examples of docs/episodes.md do what the page says."""

import asyncio
import re

import pytest
import yaml

from slipstream.configs.schema import ActorConfig, RolloutConfig, TurnsConfig
from slipstream.rollout.environment import Action, Step, ToolEnvironment
from slipstream.rollout.trajectory import Finish, Messages, Prompt
from tests.environment import ROOT

PAGE = (ROOT / "docs/episodes.md").read_text()
CODE = [code for kind, code in re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL) if kind == "python"]


def test_the_recipes_are_ones():
    fields = {"max_head_offpolicyness": 0, "batch_size": 1, "n_samples_per_prompt": 1, "reward": "my.Reward"}
    recipes = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)]
    rollouts = [
        RolloutConfig.model_validate(fields | each["rollout"]) for each in recipes if "rollout" in each
    ]
    assert [each.workflow.path.rpartition(".")[2] for each in rollouts] == ["ToolUse", "Verifiers"]
    [actor] = [each["actor"] for each in recipes if "actor" in each]
    assert ActorConfig.model_validate(actor).turns is not None


def test_the_ways_to_give_credit_are_settings():
    ways = [
        yaml.safe_load(text) for text in re.findall(r"\| `(\{\w*(?:discount|coefficient).*?\})` \|", PAGE)
    ]
    assert len(ways) == 3
    for way in ways:
        TurnsConfig.model_validate(way)


def test_the_tool_is_one(monkeypatch):
    monkeypatch.setitem(globals(), "search", names(CODE[0])["search"])
    monkeypatch.setattr("slipstream.rollout.environment.tools.call_parser", lambda name, tools: str)
    [schema] = ToolEnvironment([f"{__name__}.search"], parser="qwen25").schemas
    assert schema["function"]["description"] == "Search the catalogue."
    assert schema["function"]["parameters"]["required"] == ["query"]


@pytest.mark.parametrize(("said", "is_done", "reward"), [(" 7", True, 1.0), ("8", False, 0.0)])
def test_the_environment_is_one(said, is_done, reward):
    environment = names(CODE[1])["GuessNumber"]()
    assert asyncio.run(environment.reset(Prompt(0, "Guess.", label="7"))) == Prompt(0, "Guess.").messages()
    step = asyncio.run(environment.step(Action(said, Finish.STOP)))
    assert (step.is_done, step.reward) == (is_done, reward)


def names(code: str) -> dict:
    """The names that an example defines."""
    defined = {"Action": Action, "Messages": Messages, "Prompt": Prompt, "Step": Step}
    exec(code, defined)
    return defined
