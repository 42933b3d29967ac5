"""``slipstream serve``: which recipe it runs, and what ``train`` refuses."""

from pathlib import Path

import pytest
import yaml

from slipstream.backend.commands.outcome import WrongInput
from slipstream.backend.commands.serve import check_has_prompts, load_serving
from slipstream.configs.load import load_recipe
from slipstream.configs.schema import CodeJudge, ModelJudge
from slipstream.configs.violations import RecipeError

PREPARE = "slipstream.backend.simulate.only_simulated"
"""Excuses missing models and prompts."""


@pytest.fixture
def recipe(tmp_path: Path):
    def write(**sections: object) -> Path:
        content = {
            "run": {"name": "served", "root": str(tmp_path), "steps": 10},
            "model": {"path": "model"},
            "data": {"path": "train.jsonl"},
            "rollout": {
                "max_head_offpolicyness": 2,
                "batch_size": 4,
                "n_samples_per_prompt": 4,
                "reward": "slipstream.rollout.reward.FinalAnswer",
            },
            "prepare": PREPARE,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(content | sections))
        return path

    return write


def test_any_recipe_is_served_without_its_prompts_and_without_training(recipe):
    config = load_serving(recipe(eval={"path": "heldout.jsonl"}), [], {})
    assert (config.data, config.eval, config.live) == (None, None, None)
    assert config.gateway is not None


def test_what_it_trains_on_is_live_users_alone(recipe):
    config = load_serving(recipe(live={"share": 0.25}, gateway={"port": 4000}), [], {})
    assert config.live is not None and config.live.share == 1
    assert config.gateway is not None and config.gateway.port == 4000
    untrained = load_serving(recipe(live={"train": False, "share": 0.25}), [], {})
    assert untrained.live is not None and untrained.live.share == 0.25


def test_the_number_of_votes_is_read_where_there_is_a_judge(recipe):
    model = {"type": "model", "endpoint": {"type": "policy"}}
    judge = load_serving(recipe(live={}, judge=model), [], {"PRM_M": "5"}).judge
    assert isinstance(judge, ModelJudge) and judge.votes == 5
    assert load_serving(recipe(live={}), [], {"PRM_M": "5"}).judge == CodeJudge()
    judge = load_serving(recipe(live={}, judge=model), ["judge.votes=7"], {"PRM_M": "5"}).judge
    assert isinstance(judge, ModelJudge) and judge.votes == 7
    with pytest.raises(RecipeError) as raised:
        load_serving(recipe(live={}, judge=model), [], {"PRM_M": "many"})
    assert "judge.votes" in str(raised.value)


def test_variables_of_other_servers_are_read_and_overrides_win(recipe):
    variables = {"HOST": "0.0.0.0", "PORT": "4000", "SERVED_MODEL_NAME": "claw", "PATH": "/bin"}
    gateway = load_serving(recipe(gateway={"port": 1}), [], variables).gateway
    assert gateway is not None
    assert (gateway.host, gateway.port, gateway.served_model_name) == ("0.0.0.0", 4000, "claw")
    gateway = load_serving(recipe(), ["gateway.port=5000"], variables).gateway
    assert gateway is not None and (gateway.host, gateway.port) == ("0.0.0.0", 5000)


def test_a_bad_value_is_refused_with_its_setting(recipe):
    with pytest.raises(RecipeError) as raised:
        load_serving(recipe(), [], {"PORT": "http"})
    assert [violation.path for violation in raised.value.violations] == ["gateway.port"]


def test_only_users_can_take_the_place_of_prompts(recipe):
    def missing(**sections: object) -> list[str]:
        try:
            load_recipe(recipe(data=None, **sections))
        except RecipeError as error:
            return [violation.path for violation in error.violations]
        return []

    assert missing() == ["data"]
    assert missing(gateway={}, live={}) == ["data"]
    assert missing(gateway={}, live={"share": 1}) == []
    assert missing(gateway={}, live={"train": False}) == []


def test_train_refuses_a_recipe_with_nothing_to_train_on(recipe):
    with pytest.raises(WrongInput, match="slipstream serve"):
        check_has_prompts(load_recipe(recipe(data=None, gateway={})))
    check_has_prompts(load_recipe(recipe()))
    check_has_prompts(load_recipe(recipe(data=None, gateway={}, live={"share": 1})))
