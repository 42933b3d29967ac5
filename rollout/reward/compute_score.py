"""The reward that asks a function written for verl."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from slipstream.rollout.reward.value import Judgement, judgement_of
from slipstream.rollout.system.plugins import resolve
from slipstream.rollout.tokens.trajectory import Prompt, Trajectory

SCORE = "score"
"""The number that trains, in a mapping that such a function returns."""


class ComputeScore:
    """Rewards by ``compute_score(data_source, solution_str, ground_truth, extra_info)``. The function returns
    a number, or a mapping with the number ``score``, whose other numbers are metrics.

    ``ground_truth`` is the label; ``data_source`` and ``extra_info`` are columns of the prompt. The function
    may be a coroutine function. One that computes is asked about one episode at a time.
    """

    def __init__(
        self,
        function: str,
        args: Mapping[str, object] | None = None,
        data_source: str = "data_source",
        extra_info: str = "extra_info",
    ) -> None:
        """``function``: import path of the function. ``args``: further keyword arguments of every call.
        ``data_source`` and ``extra_info``: names of the columns.

        Raises PluginError when there is no such function, and ValueError when it cannot be called so.
        """
        self._function = cast("Callable[..., Any]", resolve(function))
        self._args = dict(args or {})
        self._data_source = data_source
        self._extra_info = extra_info
        try:
            inspect.signature(self._function).bind("", "", "", extra_info=None, **self._args)
        except TypeError as error:
            raise ValueError(
                f"function: {function} cannot be called with (data_source, solution_str, ground_truth, "
                f"extra_info{''.join(f', {name}' for name in self._args)}): {error}"
            ) from None

    @property
    def score(self) -> Callable[[Prompt, str, Trajectory], object]:
        """``Reward.score``: a coroutine function if the function is one."""
        return self._waited if inspect.iscoroutinefunction(self._function) else self._called

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ValueError for a prompt without a label."""
        label: object = prompt.label
        if label is None or label != label:  # NaN stands for a missing value in tables
            raise ValueError(
                f"{prompt.reference} has no label, which is the ground truth: name its column, as with "
                "data.columns: {label: reward_model.ground_truth}"
            )

    def _called(self, prompt: Prompt, response: str, trajectory: Trajectory) -> Judgement:
        return _judgement(self._ask(prompt, response))

    async def _waited(self, prompt: Prompt, response: str, trajectory: Trajectory) -> Judgement:
        return _judgement(await self._ask(prompt, response))

    def _ask(self, prompt: Prompt, response: str) -> Any:
        self.check_prompt(prompt)
        data_source = prompt.metadata.get(self._data_source, prompt.source or None)
        extra_info = prompt.metadata.get(self._extra_info)
        return self._function(data_source, response, prompt.label, extra_info=extra_info, **self._args)


def _judgement(value: object) -> Judgement:
    """Return what the function has returned as a reward. Raises NoNumber."""
    if isinstance(value, Mapping):
        numbers = cast("Mapping[str, object]", value)
        value = {name: number for name, number in numbers.items() if number is not None}
    return judgement_of(value, SCORE)
