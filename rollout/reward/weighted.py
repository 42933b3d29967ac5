"""The reward that is a sum of others."""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import cast

from slipstream.rollout.reward.loading import EPISODES, is_concurrent, load_judge
from slipstream.rollout.reward.value import is_part_name, judgement_of
from slipstream.rollout.system.plugins import PluginError
from slipstream.rollout.tokens.trajectory import Prompt, Trajectory

SETTINGS = frozenset({"path", "args", "weight", "key"})


@dataclass(frozen=True)
class _Part:
    plugin: object
    call: Callable[..., object]
    weight: float
    key: str
    """Name of the number that counts, where the part returns a mapping."""

    @property
    def is_concurrent(self) -> bool:
        return is_concurrent(self.call)


class Weighted:
    """The sum of other rewards, each times its weight. Every part is a metric too.

        rollout:
          reward:
            path: slipstream.rollout.reward.Weighted
            args:
              parts:
                correct: {path: slipstream.rollout.reward.MathVerify, weight: 0.9}
                boxed: {path: slipstream.rollout.reward.Regex, args: {pattern: '\\\\boxed'}, weight: 0.1}

    A part names a reward of single episodes as ``rollout.reward`` does. If it returns a mapping, its number
    ``key`` counts (``reward`` if nothing else is said), and its other numbers are metrics ``PART.NAME``. If a
    part fails, the sum does. If all parts are coroutine functions they run side by side, as do episodes;
    otherwise one episode is judged at a time, the plain functions first.
    """

    def __init__(self, parts: Mapping[str, object], judge_model: object = None) -> None:
        """``judge_model``: for the parts that ask a language model."""
        problems: list[str] = []
        self._parts: dict[str, _Part] = {}
        for name, settings in parts.items():
            try:
                self._parts[name] = _part(name, settings, judge_model)
            except (ValueError, PluginError) as error:
                problems.append(f"parts.{name}: {error}")
        if not parts:
            problems.append("parts: empty, expected at least one part")
        if problems:
            raise ValueError("\n".join(problems))
        self._overlap = all(part.is_concurrent for part in self._parts.values())

    @property
    def score(self) -> Callable[[Prompt, str, Trajectory], object]:
        """``Reward.score``: a coroutine function if all parts have one."""
        return self._side_by_side if self._overlap else self._one_by_one

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ValueError for a prompt that a part which says so cannot judge."""
        for part in self._parts.values():
            if (check := getattr(part.plugin, "check_prompt", None)) is not None:
                check(prompt)

    async def _side_by_side(self, prompt: Prompt, response: str, trajectory: Trajectory) -> dict[str, float]:
        return await self._finished(self._called(prompt, response, trajectory, concurrent=True))

    def _one_by_one(
        self, prompt: Prompt, response: str, trajectory: Trajectory
    ) -> dict[str, float] | Awaitable[dict[str, float]]:
        """Return the sum, or an awaitable for it: plain parts run outside of any event loop."""
        values = self._called(prompt, response, trajectory, concurrent=False)
        if len(values) == len(self._parts) and not any(map(inspect.isawaitable, values.values())):
            return self._sum(values)
        return self._rest(values, prompt, response, trajectory)

    async def _rest(
        self, values: dict[str, object], prompt: Prompt, response: str, trajectory: Trajectory
    ) -> dict[str, float]:
        return await self._finished(values | self._called(prompt, response, trajectory, concurrent=True))

    def _called(
        self, prompt: Prompt, response: str, trajectory: Trajectory, *, concurrent: bool
    ) -> dict[str, object]:
        """Return what the parts return that are coroutine functions, or those that are not."""
        return {
            name: part.call(prompt, response, trajectory)
            for name, part in self._parts.items()
            if part.is_concurrent is concurrent
        }

    async def _finished(self, values: dict[str, object]) -> dict[str, float]:
        """Return the sum when every part has its value. Raises what the first failed part has raised."""
        waiting = {name: value for name, value in values.items() if inspect.isawaitable(value)}
        results = await asyncio.gather(*waiting.values(), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return self._sum(values | dict(zip(waiting, results, strict=True)))

    def _sum(self, values: Mapping[str, object]) -> dict[str, float]:
        total, numbers = 0.0, dict[str, float]()
        for name, part in self._parts.items():
            try:
                judgement = judgement_of(values[name], part.key)
            except ValueError as error:
                raise ValueError(f"the part {name}: {error}") from error
            total += part.weight * judgement.reward
            numbers[name] = judgement.reward
            numbers |= {f"{name}.{further}": value for further, value in judgement.parts}
        return {"reward": total, **numbers}


def _part(name: str, settings: object, judge_model: object) -> _Part:
    """Return a part of the recipe. Raises ValueError and PluginError."""
    if not is_part_name(name) or name == "reward":
        raise ValueError(
            "expected a name of at most 64 letters, digits, `_`, `-` and `.` that no metric of the reward has"
        )
    if not isinstance(settings, Mapping):
        raise ValueError(f"found {settings!r}, expected {{path: ..., args: {{...}}, weight: ...}}")
    given = dict(cast("Mapping[str, object]", settings))
    if unknown := sorted(given.keys() - SETTINGS):
        raise ValueError(f"{', '.join(unknown)} is unknown, expected {', '.join(sorted(SETTINGS))}")
    path, args, weight, key = (
        given.get("path"),
        given.get("args", {}),
        given.get("weight"),
        given.get("key", "reward"),
    )
    if not isinstance(path, str) or "." not in path:
        raise ValueError(f"path: found {path!r}, expected an import path")
    if not isinstance(args, Mapping):
        raise ValueError(f"args: found {args!r}, expected names and values")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ValueError(f"weight: found {weight!r}, expected a finite number")
    if not isinstance(key, str):
        raise ValueError(f"key: found {key!r}, expected the name of a number")
    model = None if judge_model is None else lambda: judge_model
    judge = load_judge(path, cast("Mapping[str, object]", args), (EPISODES,), model)
    return _Part(judge.plugin, judge.call, float(weight), key)
