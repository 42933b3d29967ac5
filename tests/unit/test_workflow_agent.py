"""The settings of an agent: everything that is wrong is said at once. tests/agents runs agents."""

import asyncio
from collections.abc import Mapping
from unittest.mock import Mock

import pytest

from slipstream.backend.driver.start.inputs import InputError, read_inputs
from slipstream.backend.driver.start.plugin_checks import plugin_problems
from slipstream.configs.load import load_recipe
from slipstream.configs.schema import PluginConfig, SamplingConfig
from slipstream.configs.schema.sampling import EvalSamplingConfig
from slipstream.configs.violations import RecipeError
from slipstream.rollout.gateway.conversations import Arrival
from slipstream.rollout.gateway.endpoint.attempt import Attempt, AttemptLimits
from slipstream.rollout.system import plugins
from slipstream.rollout.system.plugins import PluginError
from slipstream.rollout.workflow import Agent
from tests.environment import ROOT

NOT_CALLABLE = 3


async def with_three(base_url: str, api_key: str, prompt: str) -> None: ...


async def with_four(url: str, key: str, prompt: str, more: dict) -> None: ...


def here(name: str) -> str:
    return f"tests.unit.test_workflow_agent.{name}"


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({}, "expected either run, the import path of a function, or command, a list of texts"),
        ({"run": here("with_four"), "command": ["a"]}, "expected either run"),
        ({"run": 3}, "run: expected an import path, found 3"),
        ({"command": "agent --all"}, "command: expected a list of texts, found 'agent --all'"),
        ({"command": []}, "command: expected a list of texts"),
        ({"command": ["a", 3]}, "command: expected a list of texts"),
        ({"run": here("with_three")}, "cannot be called with (base_url, api_key, prompt, metadata)"),
        ({"run": here("NOT_CALLABLE")}, "is no function"),
        ({"run": "nowhere.at.all"}, "cannot import nowhere.at"),
        (
            {"run": here("with_four"), "on_limit": "keep"},
            "expected one of train, mask, drop, found 'keep'",
        ),
        ({"run": here("with_four"), "max_turns": 0}, "max_turns: expected a whole number from 1, found 0"),
        (
            {"run": here("with_four"), "max_tokens": True},
            "expected a whole number from 1, found True",
        ),
        ({"run": here("with_four"), "turns": 3}, "`turns` is unknown: did you mean `max_turns`?"),
    ],
)
def test_wrong_settings_are_named(args, why):
    with pytest.raises(PluginError) as refused:
        plugins.build(PluginConfig(path="slipstream.rollout.workflow.Agent", args=args))
    assert why in str(refused.value)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(PluginError) as refused:
        Agent(run=None, max_turns=-1, max_tokens=0.5, on_limit="x")  # type: ignore[arg-type]
    assert [name in str(refused.value) for name in ("run", "max_turns", "max_tokens", "on_limit")] == [
        True
    ] * 4


def test_an_agent_needs_an_endpoint():
    assert Agent(run=here("with_four")).needs_endpoint


def test_an_endpoint_that_nobody_needs_is_a_problem_of_the_recipe():
    config = load_recipe(ROOT / "configs/recipes/quickstart.yaml", ["rollout.endpoint={}"])
    [problem] = plugin_problems(config)
    assert "rollout.endpoint: neither slipstream.rollout.workflow.SingleTurn nor a hook" in problem
    with pytest.raises(InputError) as refused:
        read_inputs(config)
    assert problem in str(refused.value)
    agent = {"path": "slipstream.rollout.workflow.Agent", "args": {"run": here("with_four")}}
    rollout = config.rollout.model_copy(update={"workflow": PluginConfig(**agent)})
    assert not plugin_problems(config.model_copy(update={"rollout": rollout}))
    lost = config.rollout.model_copy(update={"workflow": PluginConfig(path="nowhere.Agent")})
    [problem] = plugin_problems(config.model_copy(update={"rollout": lost}))
    assert problem.startswith("rollout.workflow: ")


def test_an_environment_of_verifiers_is_no_plug_in_and_rewards_by_itself():
    environment = "{taskset: {id: my-taskset}, agent: {runtime: {type: subprocess}}}"
    workflow = f"{{path: slipstream.rollout.workflow.Verifiers, args: {{environment: {environment}}}}}"
    settings = [f"rollout.workflow={workflow}", "rollout.reward=null", "rollout.endpoint={sampling: recipe}"]
    config = load_recipe(ROOT / "configs/recipes/quickstart.yaml", [*settings, "eval=null"])
    assert plugin_problems(config) == []
    with pytest.raises(RecipeError, match=r"rollout\.reward: missing"):
        load_recipe(ROOT / "configs/recipes/quickstart.yaml", ["rollout.reward=null"])


@pytest.mark.parametrize("asked", [{}, {"temperature": 1.3, "top_p": 0.2, "min_p": 0.4}])
def test_in_an_evaluation_the_recipes_sampling_of_evaluations_holds(asked):
    evaluation = EvalSamplingConfig(temperature=0.6, top_p=0.95, max_new_tokens=7, args={"min_p": 0.05})
    sampling = evaluation.over(SamplingConfig(temperature=0.9, max_new_tokens=100))

    async def begun() -> Mapping[str, object]:
        limits = AttemptLimits(max_turns=None, max_tokens=None, completion=sampling.max_new_tokens)
        attempt = Attempt(
            "a",
            Mock(),
            limits,
            sampling=sampling,
            is_trained=False,
            override=False,
            decode=str,
            mint=str,
        )
        arrival = Arrival(
            user=attempt.user,
            session=None,
            turn_type=None,
            ends_session=False,
            digest=b"",
            retries=0,
            arrived_s=0.0,
            prompt_ids=[1, 2],
            most_tokens=50,
            sampling={"temperature": 0.9, "stop": ["x"], **asked},
        )
        return attempt.begin(arrival).sampling

    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": -1, "min_p": 0.05}
    assert asyncio.run(begun()) == {**expected, "stop": ["x"], "max_new_tokens": 7}
