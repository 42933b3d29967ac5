"""Example hooks of a checkout of slime, unmodified, in the real trainer.

``tests.slime_contract`` runs them: it makes the checkout's `examples` importable and names the checkout in
SLIME_CHECKOUT.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.configs.schema import RunConfig
from tests.models import make_checkpoint
from tests.ranks import Job, run_jobs
from tests.unit.test_trainer_slime_hooks import Case, metrics_of, train

MIS = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
FOLDER = Path(os.environ["SLIME_CHECKOUT"]) / "examples" / "train_infer_mismatch_helper"

LIKE_OURS = {
    "use_rs": False,
    "tis_mode": "truncate",
    "tis_upper_bound": 5.0,
    "tis_batch_normalize": False,
}
"""Settings of the example that make it Slipstream's default."""


def mis(model: Path, folder: Path, name: str, changes: dict[str, Any], **case: Any) -> RunConfig:
    """Return a recipe with the example and its own settings, some of them changed."""
    settings = yaml.safe_load((FOLDER / "mis.yaml").read_text())
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(settings | changes))
    recipe = Case(**case).config(model).model_dump()
    recipe["rollout"]["hooks"] = {"custom_tis_function": MIS, "custom_config_path": str(file)}
    return RunConfig.model_validate(recipe)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    model = make_checkpoint(folder / "model", num_hidden_layers=4)
    configs = {
        "default": Case().config(model),
        "as it is": mis(model, folder, "whole", {}),
        "like ours": mis(model, folder, "ours", LIKE_OURS),
        "like ours, two stages": mis(model, folder, "stages", LIKE_OURS, parallel={"pipeline": 2}),
        "like ours, tensor 2": mis(model, folder, "tensor", LIKE_OURS, parallel={"tensor": 2}),
    }
    return run_jobs(
        {name: Job(config.actor.parallel.world_size, train, (config,)) for name, config in configs.items()}
    )


@pytest.mark.parametrize("name", ["like ours", "like ours, two stages", "like ours, tensor 2"])
def test_the_example_with_our_cap_gives_our_loss(outcomes, name):
    hooked, default = metrics_of(outcomes, name), metrics_of(outcomes, "default")
    assert hooked[0]["train/loss"] == pytest.approx(default[0]["train/loss"], abs=1e-6)
    weight = default[0]["train/importance_weight_mean"]
    assert hooked[0]["hook/mis_tis_weight_before_bound"] == pytest.approx(weight, rel=1e-4)


def test_the_example_trains_with_its_own_settings(outcomes):
    for metrics in metrics_of(outcomes, "as it is"):
        assert abs(metrics["train/loss"]) > 1e-4 and metrics["train/grad_norm"] > 0
        assert {"hook/mis_rs_mask_fraction_low", "hook/mis_k3_kl"} <= metrics.keys()
