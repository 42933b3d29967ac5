"""The Ray cluster of a run is the one that its recipe means."""

import pytest

from slipstream.backend.cluster.ray_cluster import ClusterError, ray_cluster
from slipstream.configs.schema import RunConfig


def config(cluster: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "run", "steps": 20},
            "model": {"path": "model"},
            "data": {"path": "train.jsonl"},
            "cluster": {"type": cluster},
            "rollout": {
                "max_head_offpolicyness": 2,
                "batch_size": 1,
                "n_samples_per_prompt": 1,
                "reward": "slipstream.rollout.reward.FinalAnswer",
            },
        }
    )


def enter(cluster: str) -> None:
    with ray_cluster(config(cluster), batch_bytes=1, note=print):
        pytest.fail("a cluster was started")


def test_a_job_without_a_cluster_is_an_error_that_says_how_to_launch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ClusterError, match=r"RAY_ADDRESS is not set: launch with `sbatch"):
        enter("slurm")
    with pytest.raises(ClusterError, match=r"RAY_ADDRESS is not set: set it to the head's HOST:PORT"):
        enter("ray")


def test_a_local_run_does_not_start_a_cluster_that_asks_for_no_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ClusterError, match=r"RAY_ADDRESS is set to 10\.0\.0\.1:6379: unset it"):
        enter("local")
