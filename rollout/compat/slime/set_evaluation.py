"""Evaluations by slime's eval function, which answers whole sets of prompts by itself."""

import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.compat.slime.episode_samples import WrongReturn, judgement_of_reward
from slipstream.rollout.compat.slime.function_calls import FunctionCalls
from slipstream.rollout.compat.slime.output_metrics import OutputMetrics
from slipstream.rollout.system.plugins import PluginError, resolve
from slipstream.rollout.tokens.evaluated_set import EvaluatedSet
from slipstream.rollout.tokens.named_numbers import NamedNumbers

LONGEST_NAME = 64
"""Characters of the name of a set, which is a part of the name of a metric."""

_NO_NAME = re.compile(r"[^\w.-]")


class SetEvaluation:
    """Asks the function of a recipe. The engines answer greedily, whatever it asks for."""

    def __init__(self, path: str, calls: FunctionCalls, reward_key: str) -> None:
        self._path = path
        self._metrics = OutputMetrics(path)
        self._calls = calls
        self._reward_key = reward_key
        calls.args.eval_datasets = datasets(calls.args)

    async def evaluate(self, rollout_id: int) -> tuple[list[EvaluatedSet], NamedNumbers]:
        """Return what the function says of each set, and its metrics.

        Waits for the end of the present call of a rollout function. Raises FunctionFailed, WrongReturn,
        SampleError and NoEngine.
        """
        async with self._calls.turn:
            output, _ = await self._calls.call(self._path, rollout_id, evaluation=True)
        data: object = getattr(output, "data", None)
        if not isinstance(data, Mapping) or not data:
            found = "an empty dictionary" if isinstance(data, Mapping) else type(data).__name__
            raise WrongReturn(f"{self._path} returned {found}, expected data by the name of each set")
        sets = cast("Mapping[str, Any]", data)
        evaluated = [
            evaluated_set(name, values, self._path, self._reward_key) for name, values in sets.items()
        ]
        return evaluated, self._metrics.read(output)


def evaluated_set(name: str, values: object, path: str, reward_key: str) -> EvaluatedSet:
    """Return one set of an evaluation as the driver logs it. Raises WrongReturn and SampleError.

    ``values``: of slime's form, with ``rewards``, and as far as they are there ``truncated`` and ``samples``.
    """
    if not isinstance(values, Mapping) or "rewards" not in values:
        raise WrongReturn(f"{path} returned no rewards for {name}, expected {{'rewards': [...], ...}}")
    fields = cast("Mapping[str, Any]", values)
    rewards = [judgement_of_reward(reward, reward_key).reward for reward in fields["rewards"]]
    samples = cast("Sequence[Any]", fields.get("samples") or ())
    lengths = [int(getattr(sample, "response_length", 0)) for sample in samples]
    truncated = [bool(value) for value in fields.get("truncated") or ()]
    if not rewards:
        raise WrongReturn(f"{path} returned no rewards for {name}, expected one for each sample")
    count = len(rewards)
    return EvaluatedSet(
        _NO_NAME.sub("_", str(name))[:LONGEST_NAME] or "_",
        rewards,
        (lengths + [0] * count)[:count],
        (truncated + [False] * count)[:count],
    )


def datasets(args: SlimeArguments) -> list[Any]:
    """Return the sets of an evaluation in slime's form."""
    words = cast("list[str]", args.eval_prompt_data or [])
    return [_dataset(args, name, path) for name, path in zip(words[::2], words[1::2], strict=True)]


def _dataset(args: SlimeArguments, name: str, path: str) -> Any:
    values = {
        "name": name,
        "path": path,
        "n_samples_per_eval_prompt": args.n_samples_per_eval_prompt,
        "temperature": args.eval_temperature,
        "top_p": args.eval_top_p,
        "top_k": args.eval_top_k,
        "max_response_len": args.eval_max_response_len,
        "input_key": args.input_key,
        "label_key": args.label_key,
        "metadata_key": args.metadata_key,
    }
    try:
        return resolve("slime.utils.eval_config.EvalDatasetConfig")(**values)
    except PluginError:  # the alias
        return SimpleNamespace(**values, custom_rm_path=None)
