"""The process in which a recipe's hooks see whole batches and evaluations. Started by the driver.

first request   HookSetup ──► {"ready": true}
the others      BatchQuestion ──► {"value": ...} or {"error": what the hook has done wrong}
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from slipstream.configs.schema import RunConfig
from slipstream.rollout.compat.hooks import BatchQuestion, HookSetup, RecordedEpisode
from slipstream.rollout.compat.slime import make_slime_importable
from slipstream.rollout.compat.slime.arguments import SlimeArguments, slime_arguments
from slipstream.rollout.compat.slime.episode_samples import SampleLike
from slipstream.rollout.compat.slime.group_hooks import SampleRebuilder
from slipstream.rollout.system.plugins import resolve
from slipstream.rollout.system.programs.hook_process import WrongAnswer, serve_answers
from slipstream.rollout.tokens.evaluated_set import EvaluatedSet
from slipstream.rollout.tokens.record import decode_trajectory
from slipstream.rollout.tokens.tokenizer import load_tokenizer
from slipstream.rollout.tokens.trajectory import Group


class BatchHooksProcess:
    """Calls the hooks. ``args`` is the same in every call, as in slime's rollout process."""

    def __init__(self, setup: HookSetup) -> None:
        """Raises whatever the import of user code raises."""
        make_slime_importable()
        config = RunConfig.model_validate_json(setup.config)
        self._args: SlimeArguments = slime_arguments(config)
        self._rebuilder = SampleRebuilder(self._args, load_tokenizer(Path(self._args.hf_checkpoint)))
        self._hooks: dict[str, Callable[..., object]] = {
            setting: resolve(path) for setting, path in setup.hooks.items()
        }

    def answer(self, question: BatchQuestion) -> object:
        """Call the hook that the question names, and return what it says as plain data."""
        hook = self._hooks[question.setting]
        if question.setting == "custom_eval_rollout_log_function":
            data = {each.name: self._evaluation(each) for each in question.sets}
            return bool(hook(question.rollout_id, self._args, data, dict(question.metrics)))
        samples = self._samples(question.episodes)
        if question.setting == "custom_rollout_log_function":
            metrics = dict(question.metrics)
            return bool(hook(question.rollout_id, self._args, samples, metrics, question.seconds))
        if question.setting == "custom_reward_post_process":
            return {"rewards": rewards_of(hook(self._args, samples), len(samples))}
        sampled = [_sampled(sample) for sample in samples]
        return train_data_of(hook(self._args, samples), sampled)

    def _samples(self, episodes: Sequence[RecordedEpisode]) -> list[SampleLike]:
        """Return the samples of all trajectories, group by group."""
        samples: list[SampleLike] = []
        for number, records in itertools.groupby(episodes, key=lambda episode: episode.group):
            members = list(records)
            trajectories = tuple(decode_trajectory(each.chunks, each.header) for each in members)
            group = Group(number, members[0].prompt, 0, trajectories)
            samples += itertools.chain.from_iterable(self._rebuilder.of_group(group))
        return samples

    def _evaluation(self, evaluated: EvaluatedSet) -> dict[str, object]:
        return {
            "rewards": evaluated.rewards,
            "truncated": evaluated.truncated,
            "samples": self._rebuilder.of_set(evaluated),
        }


def rewards_of(value: object, count: int) -> list[float]:
    """Return the rewards that (raw rewards, rewards) of ``count`` samples hold. Raises WrongAnswer."""
    parts = list(cast("Sequence[object]", value)) if isinstance(value, tuple | list) else []
    if len(parts) != 2:
        raise WrongAnswer(
            f"returns a {type(cast('object', value)).__name__}, expected (raw rewards, rewards)"
        )
    raw, rewards = parts
    _numbers("the raw rewards", raw, count)
    return _numbers("the rewards", rewards, count)


def train_data_of(value: object, sampled: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return rewards and loss masks of training data, one for each sample in order. Raises WrongAnswer.

    ``sampled``: the tokens, response length, loss mask and log-probs of each sample, which the data must
    repeat. A hook may take loss away; it may give none to tokens without it.
    """
    if not isinstance(value, Mapping):
        raise WrongAnswer(f"returns a {type(value).__name__}, expected the training data as a mapping")
    data = cast("Mapping[str, Any]", value)
    missing = [name for name in ("tokens", "response_lengths", "rewards", "loss_masks") if name not in data]
    if missing:
        raise WrongAnswer(f"returns training data without {', '.join(missing)}")
    count = len(sampled)
    for name in ("tokens", "response_lengths", "loss_masks", "rollout_log_probs"):
        if name in data and len(data[name]) != count:
            raise WrongAnswer(f"gives {name} of {len(data[name])} samples, expected {count} in order")
    masks: list[list[int]] = []
    for number, expected in enumerate(sampled):
        for name in ("tokens", "response_lengths", "rollout_log_probs"):
            if name in data and _plain(data[name][number]) != expected[name]:
                raise WrongAnswer(f"changes {name}[{number}], which is what the engines have sampled")
        mask = [int(each) for each in _plain(data["loss_masks"][number])]
        if len(mask) != len(expected["loss_mask"]) or set(mask) - {0, 1}:
            length = len(expected["loss_mask"])
            raise WrongAnswer(f"gives loss_masks[{number}] as {mask[:3]}..., expected {length} of 0 and 1")
        masks.append([own & allowed for own, allowed in zip(mask, expected["loss_mask"], strict=True)])
    if sampled and not any(map(any, masks)):
        raise WrongAnswer("takes the loss of every token away: nothing would be trained")
    return {"rewards": _numbers("rewards", data["rewards"], count), "masks": masks}


def _sampled(sample: Any) -> dict[str, Any]:
    """Return what a hook must leave as it is, before it is called."""
    return {
        "tokens": list(sample.tokens),
        "response_lengths": sample.response_length,
        "loss_mask": list(sample.loss_mask),
        "rollout_log_probs": list(sample.rollout_log_probs),
    }


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _numbers(name: str, values: object, count: int) -> list[float]:
    try:
        numbers = [float(value) for value in _plain(values)]
    except (TypeError, ValueError):
        raise WrongAnswer(f"gives {name} as a {type(values).__name__}, expected a list of numbers") from None
    if len(numbers) != count:
        raise WrongAnswer(f"gives {name} of {len(numbers)} samples, expected those of {count}")
    if not all(map(math.isfinite, numbers)):
        raise WrongAnswer(f"gives {name} that are not finite")
    return numbers


def serve(descriptor: int) -> None:
    """Run the process: answer the owner's requests until it closes the connection."""

    def make(request: bytes) -> Callable[[bytes], object]:
        process = BatchHooksProcess(msgspec.msgpack.decode(request, type=HookSetup))
        return lambda request: process.answer(msgspec.msgpack.decode(request, type=BatchQuestion))

    serve_answers(descriptor, make)
