"""The accuracy of a run's checkpoints, as the benchmark of asynchrony finds it."""

from benchmarks.asynchrony.run import accuracies_of
from slipstream.backend.cluster.local_ranks import run_ranks
from slipstream.backend.commands.convert import LayoutOptions, hf_to_megatron
from slipstream.backend.quickstart import write_policy


def test_a_checkpoint_of_the_start_policy_is_as_accurate_as_that(tmp_path):
    start = tmp_path / "policy"
    write_policy(start, 0, steps=120, say=print, hidden=64)
    hf_to_megatron(start, tmp_path / "checkpoint", LayoutOptions(), None)
    checkpoints = [tmp_path / "checkpoint"] * 2
    [accuracies] = run_ranks(1, accuracies_of, start, checkpoints, 0, 100, timeout_s=120)
    assert len(set(accuracies)) == 1 and len(accuracies) == 3
    assert accuracies[0] > 0
