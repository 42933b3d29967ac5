"""The examples of docs/episodes.md do what the page says."""

import asyncio
import re

import pytest
import yaml

from slipstream.configs.schema import TurnsConfig
from slipstream.rollout.tokens.trajectory import Finish, Prompt
from slipstream.rollout.workflow.environment import Action, ToolEnvironment
from tests.environment import ROOT
from tests.pages import blocks

PAGE = ROOT / "docs/episodes.md"
CODE = [block.code for block in blocks(PAGE) if block.language == "python"]


def test_the_ways_to_give_credit_are_settings():
    ways = [
        yaml.safe_load(text)
        for text in re.findall(r"\| `(\{\w*(?:discount|coefficient).*?\})` \|", PAGE.read_text())
    ]
    assert len(ways) == 3
    for way in ways:
        TurnsConfig.model_validate(way)


def test_the_tool_is_one(monkeypatch):
    monkeypatch.setitem(globals(), "search", names(CODE[0])["search"])
    monkeypatch.setattr("slipstream.rollout.workflow.environment.tools.call_parser", lambda name, tools: str)
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
    defined: dict = {}
    exec(code, defined)
    return defined
