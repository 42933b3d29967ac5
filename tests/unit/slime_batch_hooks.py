"""Hooks of slime's signatures that see whole batches, as a user would write them."""

import os
import subprocess
import time

from slime.utils.types import Sample

CALLS = []


def halves(args, samples):
    """Rewards without any baseline, and a half for samples that were cut off."""
    assert all(isinstance(sample, Sample) for sample in samples)
    raw = [sample.get_reward_value(args) for sample in samples]
    cut = [sample.status is Sample.Status.TRUNCATED for sample in samples]
    return raw, [reward * (0.5 if is_cut else 1.0) for reward, is_cut in zip(raw, cut, strict=True)]


def train_data(args, samples):
    """slime's default conversion, but every second sample trains only its first token."""
    masks = [list(sample.loss_mask) for sample in samples]
    for mask in masks[1::2]:
        mask[1:] = [0] * (len(mask) - 1)
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [float(sample.index) for sample in samples],
        "raw_reward": [sample.reward for sample in samples],
        "truncated": [0 for _ in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": masks,
    }


def logs(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    """Says that it has logged every second batch, counting calls in a global of its own."""
    assert round(rollout_extra_metrics["drops"], 9) == round((1 + 2 + 4) / 3, 9)  # the third has none
    CALLS.append((rollout_id, len(samples), samples[0].response, samples[0].label))
    args.counted = len(CALLS)
    print("logged", CALLS[-1], flush=True)
    return len(CALLS) % 2 == 1


def logs_evaluation(rollout_id, args, data, extra_metrics):
    [(name, of_set)] = data.items()
    assert name == "held_out" and extra_metrics["eval/reward"] == 0.5
    return of_set["rewards"] == [1.0, 0.0] and of_set["truncated"] == [False, True]


def hangs(*args):
    subprocess.Popen(["sleep", "3600"])  # must not outlive it either
    time.sleep(3600)


def exits(*args):
    os._exit(3)


def raises(*args):
    raise KeyError("no such key")


def too_few(args, samples):
    return [0.0] * len(samples), [0.0]


def not_numbers(args, samples):
    return [0.0] * len(samples), [float("nan")] * len(samples)


def one_list(args, samples):
    return [0.0] * len(samples)


def other_tokens(args, samples):
    for sample in samples:
        sample.tokens[0] += 1
    return train_data(args, samples)


def nothing_trained(args, samples):
    return {**train_data(args, samples), "loss_masks": [[0] * sample.response_length for sample in samples]}


def without_rewards(args, samples):
    data = train_data(args, samples)
    del data["rewards"]
    return data


def named_by_label(args, samples):
    """Does what the label of the prompt names."""
    return globals()[samples[0].label](args, samples)
