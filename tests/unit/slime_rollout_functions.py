"""Rollout functions as users of slime write them, for ``test_slime_rollout_calls``."""

import asyncio
import copy
import threading

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.utils.async_utils import run
from slime.utils.types import Sample

CALLS: list[dict] = []
RELEASE = threading.Event()
ASK = {}
"""The scripted endpoint's way to ask, by address."""


def ask(args, ids):
    return ASK[args.sglang_router_ip, args.sglang_router_port](ids)


def finished(args, sample, number=0):
    sample.tokens = [1, 2, number]
    tokens, logprobs = ask(args, sample.tokens)
    sample.tokens = sample.tokens + tokens
    sample.response_length = len(tokens)
    sample.rollout_log_probs = logprobs
    sample.loss_mask = [1] * len(tokens)
    sample.status = Sample.Status.COMPLETED
    sample.reward = float(sample.index)
    return sample


def note(args, rollout_id, groups, **more):
    CALLS.append(
        {
            "rollout_id": rollout_id,
            "size": args.rollout_batch_size,
            "groups": [group[0].group_index for group in groups],
            **more,
        }
    )


def plain(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(args.rollout_batch_size)
    note(args, rollout_id, groups, thread=threading.current_thread().name)
    return [[finished(args, sample) for sample in group] for group in groups]


def on_its_loop(args, rollout_id, data_source, evaluation=False):
    async def collect():
        await asyncio.sleep(0)
        return plain(args, rollout_id, data_source)

    return RolloutFnTrainOutput(run(collect()), {"my": 1.0})


def with_metrics(args, rollout_id, data_source, evaluation=False):
    groups = plain(args, rollout_id, data_source)
    metrics = {"rollout/drops": len(CALLS), "time": 0.5, "what": "a text", "none": float("nan")}
    return RolloutFnTrainOutput(groups, metrics)


def with_a_list_of_metrics(args, rollout_id, data_source, evaluation=False):
    return RolloutFnTrainOutput(plain(args, rollout_id, data_source), [1.0])


def drops_odd_ones(args, rollout_id, data_source, evaluation=False):
    groups = plain(args, rollout_id, data_source)
    return [group for group in groups if group[0].group_index % 2 == 0]


def gives_back_first(args, rollout_id, data_source, evaluation=False):
    groups = plain(args, rollout_id, data_source)
    if len(CALLS) == 1:
        data_source.add_samples(groups[:1])
        return groups[1:]
    return groups


def renumbers(args, rollout_id, data_source, evaluation=False):
    groups = plain(args, rollout_id, data_source)
    for group in groups:
        for sample in group:
            sample.group_index = 0
    return groups[::-1]


def returns_copies(args, rollout_id, data_source, evaluation=False):
    groups = plain(args, rollout_id, data_source)
    copies = copy.deepcopy(groups[0])
    for sample in copies:
        del sample.leased_group
        sample.group_index = None
    return [groups[0], copies]


def fans_out(args, rollout_id, data_source, evaluation=False):
    groups = plain(args, rollout_id, data_source)
    return [[[sample, copy.deepcopy(sample)] for sample in group] for group in groups]


def uneven(args, rollout_id, data_source, evaluation=False):
    return [group[:1] for group in plain(args, rollout_id, data_source)]


def raises(args, rollout_id, data_source, evaluation=False):
    groups = plain(args, rollout_id, data_source)
    if len(CALLS) == 1:
        raise KeyError("answer_idx")
    return groups


def no_lists(args, rollout_id, data_source, evaluation=False):
    return [sample for group in plain(args, rollout_id, data_source) for sample in group]


def hangs(args, rollout_id, data_source, evaluation=False):
    data_source.get_samples(1)
    RELEASE.wait(60)
    return []


def asks_for_more(args, rollout_id, data_source, evaluation=False):
    plain(args, rollout_id, data_source)
    data_source.get_samples(1)
    return []


def brings_its_own(args, rollout_id, data_source, evaluation=False):
    """Samples of somebody else's policy, which say of which versions they are."""
    groups = data_source.get_samples(args.rollout_batch_size)
    note(args, rollout_id, groups)
    return [
        [
            Sample(
                tokens=[1, 2, 9, 9],
                response_length=2,
                rollout_log_probs=[-0.5, -0.25],
                weight_versions=args.their_versions,
                reward=1.0,
                status=Sample.Status.COMPLETED,
            )
            for _ in group
        ]
        for group in groups
    ]


def evaluates(args, rollout_id, data_source, evaluation=False):
    assert evaluation
    sample = finished(args, Sample(index=1))
    data = {
        "first set": {
            "rewards": [1.0, {"score": 0.0}],
            "truncated": [False, True],
            "samples": [sample, sample],
        },
        "second": {"rewards": [0.5]},
    }
    return RolloutFnEvalOutput(data, {"mine": 2}) if args.as_output else data


def evaluates_nothing(args, rollout_id, data_source, evaluation=False):
    return {}


def lifo(args, rollout_id, buffer, num_samples):
    CALLS.append({"filtered": [group[0].group_index for group in buffer], "rollout_id": rollout_id})
    return [buffer.pop() for _ in range(min(len(buffer), num_samples))]
