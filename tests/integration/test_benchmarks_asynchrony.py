"""The accuracy of a run's checkpoints, as the benchmark of asynchrony finds it."""

import pytest

from benchmarks.asynchrony.run import accuracies_of
from slipstream.backend.cluster.local_ranks import run_ranks
from slipstream.backend.commands.convert import LayoutOptions, hf_to_megatron
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.quickstart import write_policy

pytestmark = pytest.mark.slow  # of a benchmark; no run needs what it holds


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    policy = tmp_path_factory.mktemp("start") / "policy"
    write_policy(policy, 0, steps=120, say=print, hidden=64)
    return policy


def test_loading_a_policy_writes_no_progress_bar(start, capfd):
    rank = RankSpec(0, 1, "127.0.0.1", 0)  # nothing is converted
    [accuracy] = accuracies_of(rank, start, [], 0, 4)
    written = capfd.readouterr()
    assert 0 <= accuracy <= 1
    assert "Loading weights" not in written.out + written.err


def test_a_checkpoint_of_the_start_policy_is_as_accurate_as_that(start, tmp_path):
    hf_to_megatron(start, tmp_path / "checkpoint", LayoutOptions(), None)
    checkpoints = [tmp_path / "checkpoint"] * 2
    [accuracies] = run_ranks(1, accuracies_of, start, checkpoints, 0, 100, timeout_s=120)
    assert len(set(accuracies)) == 1 and len(accuracies) == 3
    assert accuracies[0] > 0
