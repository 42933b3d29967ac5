"""The registry of adapters of ``rollout.hooks``, where their folder is not there."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from slipstream.backend.cli.app import app
from slipstream.backend.trainer import hooks as rank_points
from slipstream.backend.trainer.hooks import RankHooks, rank_hooks
from slipstream.configs.schema import HooksConfig, RunConfig
from slipstream.rollout.compat import hooks
from slipstream.rollout.system.plugins import PluginError
from tests.unit.test_rollout_gpu_environment import VALID

MISSING = "slipstream.rollout.compat.gone.checking.hook_problems"
REASON = "nothing that runs code written for slime"


def recipe(**named: str) -> RunConfig:
    config = RunConfig.model_validate(VALID)
    if not named:
        return config
    rollout = config.rollout.model_copy(update={"hooks": HooksConfig(**named)})
    return config.model_copy(update={"rollout": rollout})


def test_a_recipe_with_hooks_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(hooks, "PROBLEMS", MISSING)
    [problem] = hooks.hook_problems(recipe(custom_rm="my.rm"))
    assert problem.startswith("rollout.hooks: ") and REASON in problem
    assert hooks.hook_problems(recipe()) == []


def test_a_rank_has_hooks_only_where_the_recipe_names_them(monkeypatch):
    monkeypatch.setattr(rank_points, "ADAPTER", MISSING)
    assert type(rank_hooks(recipe(), torch.device("cpu"))) is RankHooks
    with pytest.raises(PluginError, match=REASON):
        rank_hooks(recipe(custom_loss_function="my.loss"), torch.device("cpu"))


def test_a_launch_script_is_not_imported_and_the_user_hears_why(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(hooks, "SLIME_RECIPE", MISSING)
    script = tmp_path / "a.sh"
    script.touch()
    result = CliRunner().invoke(app, ["import", "slime", str(script), "-o", str(tmp_path / "a.yaml")])
    assert result.exit_code == 2
    assert REASON in " ".join(result.output.split())
