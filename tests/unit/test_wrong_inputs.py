"""What is wrong is told before anything starts, and a failed episode names its culprit: some of each kind.

All of them: ``python -m tests.wrong_inputs``.
"""

import pytest

from slipstream.backend.driver.start.plugin_process import imported_plugin_problems
from slipstream.configs.schema import RunConfig
from tests.unit.test_rollout_gpu_environment import VALID
from tests.wrong_inputs import (
    data,
    failing_episodes,
    logs,
    machine,
    models,
    plugins,
    recipes,
    spellings,
    supervised,
)
from tests.wrong_inputs.episodes import let_fail
from tests.wrong_inputs.inputs import hand_in
from tests.wrong_inputs.world import make_model

OWN_CODE = (
    "an objective with other parameters",
    "an objective that corrects for staleness, in a recipe that does so too",
    "a transform that is async, behind one that is sound",
    "a family that raises",
    "a data source of slime's beside several prompt sets",
)
INPUTS = [
    *recipes.CASES[:4],
    *data.CASES,
    *models.CASES,
    *plugins.CASES[2:4],
    *[case for case in plugins.CASES if case.name in OWN_CODE],
    *supervised.CASES,
    *machine.CASES,
    *logs.CASES,
    *spellings.CASES,
]
EPISODES = failing_episodes.CASES[::3]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    make_model(folder)
    return folder


@pytest.mark.parametrize("case", INPUTS, ids=lambda case: case.name)
def test_a_wrong_input_is_told_before_anything_starts(case, tmp_path, model):
    told = hand_in(case, tmp_path / "case", model)
    assert not told.problems, told.message


def test_a_sound_input_is_not_refused(tmp_path, model):
    case = recipes.CASES[0]
    sound = type(case)(
        "sound", (), arguments=("check", "FOLDER/recipe.yaml", "rollout.reward=my_sound_plugins.Reward")
    )
    assert hand_in(sound, tmp_path / "run", model).problems[0] == "exit code 0"
    sound = type(case)("sound", (), arguments=("check", "FOLDER/sft.yaml", "--sft"))
    assert hand_in(sound, tmp_path / "sft", model).problems[0] == "exit code 0"


def test_an_import_that_does_not_end_is_told_with_everything_else(tmp_path, monkeypatch):
    (tmp_path / "my_hanging.py").write_text("import time\ntime.sleep(1e6)\n")
    monkeypatch.syspath_prepend(tmp_path)
    rollout = {**VALID["rollout"], "reward": "my_hanging.Reward", "workflow": "my_nothing.Flow"}
    config = RunConfig.model_validate({**VALID, "rollout": rollout})
    problems = imported_plugin_problems(config, timeout_s=5.0)
    assert "rollout.reward: my_hanging.Reward: it is not imported within 5 s" in problems[0]
    assert "rollout.workflow: my_nothing.Flow: cannot import my_nothing" in problems[-1]


@pytest.mark.parametrize("case", EPISODES, ids=lambda case: case.name)
def test_a_failing_episode_names_its_culprit(case, tmp_path):
    told = let_fail(case, tmp_path / "case")
    assert not told.problems, told.message
