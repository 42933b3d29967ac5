"""docs/rewards.md: every example gives the reward that it says, and every reward that ships has one."""

import asyncio
import inspect
import json
import re
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from slipstream.configs.schema import ModelJudge, RolloutConfig
from slipstream.rollout import reward as shipped
from slipstream.rollout.reward.loading import MODEL, check_judge, load_judge
from slipstream.rollout.reward.model.judge_model import JudgeModel
from slipstream.rollout.reward.value import judgement_of
from slipstream.rollout.tokens.trajectory import Prompt
from tests.unit.judging import trajectory

DOCS = (Path(__file__).parents[2] / "docs/rewards.md").read_text()
SECTIONS = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", DOCS, flags=re.MULTILINE | re.DOTALL))
PYTHON = re.findall(r"```python\n(.*?)```", DOCS, flags=re.DOTALL)
PORT = 8400
"""Port in the example of the remote reward, which the test replaces by a free one."""


@pytest.fixture(autouse=True, scope="module")
def my_score(tmp_path_factory):
    """The module with the function of the example of ``ComputeScore``."""
    folder = tmp_path_factory.mktemp("docs")
    [source] = [each for each in PYTHON if each.startswith("# my_score.py")]
    (folder / "my_score.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


def settings(section: str) -> RolloutConfig:
    [recipe] = re.findall(r"```yaml\n(.*?)```", section, flags=re.DOTALL)
    needed = {"max_head_offpolicyness": 0, "batch_size": 1, "n_samples_per_prompt": 1}
    return RolloutConfig.model_validate(needed | yaml.safe_load(recipe))


def examples() -> list[tuple[str, str, str, float]]:
    rows: list[tuple[str, str, str, float]] = []
    for name, section in SECTIONS.items():
        found = re.findall(r"^\| `(.+?)` \| `(.+?)` \| ([-\d.]+) \|$", section, flags=re.MULTILINE)
        assert found, f"{name} has no example"
        rows += [(name, label, response, float(number)) for label, response, number in found]
    return rows


def label_of(text: str) -> Any:
    if text.startswith("["):
        return json.loads(text)
    return int(text) if text.isdecimal() and len(text) == 1 else text


@asynccontextmanager
async def server():
    async def half(request: web.Request) -> web.StreamResponse:
        assert (await request.json()).keys() == {"prompt", "response", "label", "metadata"}
        return web.json_response({"score": 0.5, "format": 1})

    app = web.Application()
    app.router.add_post("/score", half)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


class Scripted:
    """Finds a whole answer right, its first step too, and the others neither."""

    async def complete(self, messages: list[dict[str, str]]) -> str:
        asked = messages[-1]["content"]
        return r"\boxed{1}" if "# Answer" in asked or "(none)" in asked else r"\boxed{0}"


def scripted_model() -> JudgeModel:
    settings = ModelJudge.model_validate({"endpoint": {"type": "policy"}, "votes": 1})
    return JudgeModel(settings, Path("/policy"), Scripted())


def value_of(rollout: RolloutConfig, prompt: Prompt, response: str) -> Any:
    assert rollout.reward is not None
    path, args = rollout.reward.path, dict(rollout.reward.args)
    if path.endswith("ModelVotes"):
        return asyncio.run(load_judge(path, args, model=scripted_model).call(prompt, response, trajectory()))
    if "url" not in args:
        value = load_judge(path, args).call(prompt, response, trajectory())
        return asyncio.run(value) if inspect.isawaitable(value) else value

    async def remote() -> Any:
        async with server() as port:
            judge = load_judge(path, args | {"url": str(args["url"]).replace(str(PORT), str(port))})
            try:
                return await judge.call(prompt, response, trajectory())
            finally:
                await judge.plugin._session[1].close()

    return asyncio.run(remote())


@pytest.mark.parametrize(("name", "label", "response", "number"), examples())
def test_an_example_gives_the_reward_that_it_says(name, label, response, number):
    rollout = settings(SECTIONS[name])
    assert rollout.reward is not None and rollout.reward.path == f"slipstream.rollout.reward.{name}"
    prompt = Prompt(1, "?", label_of(label))
    value = value_of(rollout, prompt, response.replace("\\n", "\n"))
    assert judgement_of(value, rollout.reward_key).reward == pytest.approx(number)


def test_every_reward_that_ships_is_in_the_table_with_its_arguments_and_has_a_section():
    rows = re.findall(r"^\| `(\w+)` \| (`\w+`(?:, `\w+`)*) \| .+ \| .+ \|$", DOCS, flags=re.MULTILINE)
    documented = {name: re.findall(r"`(\w+)`", arguments) for name, arguments in rows}
    declared = {
        name: [each for each in inspect.signature(getattr(shipped, name)).parameters if each != MODEL]
        for name in shipped.__all__
        if hasattr(getattr(shipped, name), "score") and name != "Reward"
    }
    assert documented == declared
    assert SECTIONS.keys() == declared.keys()


def test_the_example_of_a_reward_of_groups_is_one(tmp_path, monkeypatch):
    [source] = [each for each in PYTHON if "class MostFrequent" in each]
    (tmp_path / "my_rewards_in_docs.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    check_judge("my_rewards_in_docs.MostFrequent", {})
    judge = load_judge("my_rewards_in_docs.MostFrequent", {})
    values = judge.call(Prompt(1, "?"), ["4", "5", "4"], [trajectory()] * 3)
    assert [judgement_of(value, "reward").reward for value in values] == [1, 0, 1]
