"""A saved batch that is trained twice, each time from the same weights, gives the same metrics to the bit."""

from pathlib import Path

from slipstream.backend.batch.saved import read_batch
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.configs.schema import RunConfig
from tests.integration.test_megatron_parity import config_for, make_batch
from tests.integration.test_trainer_checkpoint import trainer_of
from tests.models import make_checkpoint
from tests.ranks import Job, run_jobs
from tests.unit.test_batch_saved import encoded, save

VOCAB = 101


def trained(rank: RankSpec, config: RunConfig, path: Path) -> tuple[dict[str, float], int]:
    with trainer_of(rank, config) as trainer:
        metrics = trainer.train_encoded(read_batch(path))
        trainer.flush()
    return metrics


def test_a_saved_batch_gives_bit_equal_metrics_each_time_it_is_trained(tmp_path):
    make_checkpoint(tmp_path / "model", vocab=VOCAB)
    config = config_for(tmp_path / "model", {}, minibatches=2, optimizer={"lr": 1e-3})
    run = config.run.model_copy(update={"root": tmp_path / "runs"})
    config = config.model_copy(update={"run": run})
    batch = encoded(make_batch(VOCAB, n=8, version=2))
    plain = {"turn_advantages": {}, "given_rewards": None, "response_masks": None}
    path = save(tmp_path, 1, type(batch)(**{**vars(batch), **plain}))
    results = run_jobs({number: Job(1, trained, (config, path)) for number in range(2)})
    first, second = results[0][0], results[1][0]
    assert first["train/tokens"] > 0 and "train/loss" in first and "mismatch/logprob_abs_mean" in first
    assert first == second
