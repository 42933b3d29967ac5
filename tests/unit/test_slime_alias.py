"""The package ``slime`` that hooks import where no checkout of slime is."""

import asyncio
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from slipstream.rollout.compat.slime import ALIAS, make_slime_importable

MOST_LINES = 1700
"""Lines of all of its modules, with everything that hooks may import from it."""


@pytest.fixture(autouse=True)
def _slime():
    make_slime_importable()


def appended(**kwargs):
    from slime.utils.types import Sample

    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(Namespace(), **kwargs)
    return sample


def test_the_alias_is_small():
    assert sum(len(path.read_text().splitlines()) for path in ALIAS.rglob("*.py")) <= MOST_LINES


def test_a_checkout_of_slime_goes_before_the_alias(tmp_path: Path):
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").write_text("IS_CHECKOUT = True\n")
    script = (
        "from slipstream.rollout.compat.slime import make_slime_importable\n"
        "print(make_slime_importable())\nimport slime\nprint(slime.IS_CHECKOUT)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{script}"],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert ended.stdout.split() == ["False", "True"]


def test_an_import_of_types_and_tools_loads_no_torch():
    script = (
        f"import sys; sys.path.append({str(ALIAS)!r})\n"
        "import slime.utils.types, slime.utils.misc, slime.rollout.sample_hooks, slime.rollout.base_types\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", script], timeout=240, check=True)


def test_sampled_and_other_tokens_cover_the_response():
    sample = appended(tokens=[3, 4], log_probs=[-0.1, -0.2], text="ab")
    sample.append_response_tokens(None, tokens=[9], trainable=False, text="tool")
    assert sample.tokens == [1, 2, 3, 4, 9] and sample.response_length == 3 and sample.response == "abtool"
    assert sample.loss_mask == [1, 1, 0] and sample.rollout_log_probs == [-0.1, -0.2, 0.0]
    assert sample.effective_response_length == 2


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tokens": [3], "log_probs": [-0.1, -0.2]}, "log_probs length 2 != tokens length 1"),
        ({"tokens": [3]}, "require rollout log probabilities"),
        ({"tokens": [3], "log_probs": [-0.1], "trainable": False}, "should not pass"),
    ],
)
def test_tokens_and_log_probs_that_do_not_belong_together_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        appended(**kwargs)


def test_sampled_tokens_cannot_follow_on_tokens_without_log_probs():
    from slime.utils.types import Sample

    sample = Sample(tokens=[1, 5], response_length=1)
    with pytest.raises(ValueError, match="missing"):
        sample.append_response_tokens(None, tokens=[3], log_probs=[-0.1])


def test_a_mask_that_does_not_cover_the_response_is_refused():
    from slime.utils.types import Sample

    sample = Sample(response_length=2, loss_mask=[1], rollout_log_probs=[0.0, 0.0])
    with pytest.raises(ValueError, match="loss_mask length 2 != response_length 3"):
        sample.append_response_tokens(None, tokens=[3], log_probs=[-0.1])


def test_attributes_beyond_the_fields_survive_a_round_trip():
    from slime.utils.types import Sample

    sample = Sample(status=Sample.Status.FAILED)
    sample.turns = 3
    restored = Sample.from_dict(sample.to_dict())
    assert restored.turns == 3 and restored.status is Sample.Status.FAILED
    assert restored.to_dict() == sample.to_dict()


def test_a_reward_may_be_one_of_several():
    from slime.utils.types import Sample

    assert Sample(reward={"acc": 1.0, "format": 0.5}).get_reward_value(Namespace(reward_key="format")) == 0.5
    assert Sample(reward=0.25).get_reward_value(Namespace(reward_key=None)) == 0.25


def test_the_lists_of_a_sample_grow_in_place_because_hooks_hold_them():
    from slime.utils.types import Sample

    sample = Sample(tokens=[1], loss_mask=[], rollout_log_probs=[])
    tokens, mask, log_probs = sample.tokens, sample.loss_mask, sample.rollout_log_probs
    sample.append_response_tokens(tokens=[2], log_probs=[-0.5])
    sample.append_response_tokens(tokens=[3], trainable=False)
    assert (tokens, mask, log_probs) == ([1, 2, 3], [1, 0], [-0.5, 0.0])


def test_singletons_are_made_once_and_again_when_they_are_cleared():
    from slime.utils.misc import SingletonMeta

    class Once(metaclass=SingletonMeta):
        pass

    first = Once()
    assert Once() is first
    Once.clear_instances()
    assert Once() is not first


def test_run_waits_for_a_coroutine_from_plain_code():
    from slime.utils.async_utils import run

    async def double(number):
        await asyncio.sleep(0)
        return 2 * number

    assert run(double(21)) == 42


def test_a_data_source_gives_groups_of_the_recipes_order_and_goes_on_after_a_restart(tmp_path: Path):
    from slime.rollout.data_source import RolloutDataSourceWithBuffer

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{number}", "label": "{number}"}}\n' for number in range(3)))
    args = Namespace(
        rollout_global_dataset=True,
        prompt_data=str(prompts),
        prompt_columns={},
        prompt_template=None,
        rollout_seed=0,
        rollout_shuffle=False,
        n_samples_per_prompt=2,
        buffer_filter_path=None,
        apply_chat_template=False,
        save=str(tmp_path),
        load=str(tmp_path),
    )
    source = RolloutDataSourceWithBuffer(args)
    groups = source.get_samples(4)
    assert [[sample.prompt for sample in group] for group in groups] == [
        ["0"] * 2,
        ["1"] * 2,
        ["2"] * 2,
        ["0"] * 2,
    ]
    assert [sample.index for group in groups for sample in group] == list(range(8))
    source.save(7)
    restarted = RolloutDataSourceWithBuffer(args)
    restarted.load(7)
    restarted.add_samples([groups[1]])
    assert [group[0].prompt for group in restarted.get_samples(2)] == ["1", "1"]
    assert restarted.get_samples(1)[0][0].index == 10 and len(restarted) == 3


def test_a_data_source_takes_whole_groups_only():
    from slime.rollout.data_source import RolloutDataSourceWithBuffer

    args = Namespace(rollout_global_dataset=False, n_samples_per_prompt=2, buffer_filter_path=None)
    source = RolloutDataSourceWithBuffer(args)
    with pytest.raises(AssertionError, match="2 samples"):
        source.add_samples([["only one"]])


def test_filters_reject_equal_rewards_and_may_return_booleans():
    from slime.rollout.filter_hub.base_types import MetricGatherer, call_dynamic_filter
    from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
    from slime.utils.types import Sample

    args = Namespace(reward_key=None)
    rejected = call_dynamic_filter(check_reward_nonzero_std, args, [Sample(reward=1.0), Sample(reward=1)])
    assert not rejected.keep and rejected.reason == "zero_std_1.0"
    assert call_dynamic_filter(lambda args, samples: False, args, []).keep is False
    metrics = MetricGatherer()
    metrics.on_dynamic_filter_drop(rejected.reason)
    assert metrics.collect() == {"rollout/dynamic_filter/drop_zero_std_1.0": 1}


def test_gathered_values_of_context_parallel_ranks_are_those_of_one_rank(monkeypatch):
    import torch
    import torch.distributed.nn
    from megatron.core import mpu
    from slime.backends.megatron_utils import cp_utils

    values = torch.arange(1.0, 8.0)
    monkeypatch.setattr(mpu, "get_context_parallel_world_size", lambda: 2)
    monkeypatch.setattr(mpu, "get_context_parallel_group", lambda: None)
    monkeypatch.setattr(torch.distributed.nn, "all_reduce", lambda tensor, group: tensor)
    whole = torch.zeros(7)
    for rank in range(2):
        monkeypatch.setattr(mpu, "get_context_parallel_rank", lambda rank=rank: rank)
        share = cp_utils.slice_log_prob_with_cp(values, 12, 7)
        assert len(share) < 7
        assert share.tolist() == cp_utils.slice_log_prob_with_cp(values.tolist(), 12, 7)
        whole += cp_utils.all_gather_with_cp(share, 12, 7)
    assert whole.tolist() == values.tolist()


def test_slices_of_context_parallel_ranks_pair_the_first_chunk_with_the_last(monkeypatch):
    import torch
    from megatron.core import mpu
    from slime.backends.megatron_utils.cp_utils import slice_with_cp

    monkeypatch.setattr(mpu, "get_context_parallel_world_size", lambda: 2)
    monkeypatch.setattr(mpu, "get_context_parallel_rank", lambda: 0)
    assert slice_with_cp(torch.arange(7), -1).tolist() == [0, 1, 6, -1]
    monkeypatch.setattr(mpu, "get_context_parallel_rank", lambda: 1)
    assert slice_with_cp(torch.arange(7), -1).tolist() == [2, 3, 4, 5]
