"""Calls of slime's functions for whole batches and evaluations, in a thread, one at a time; what they say.

function ──► output: metrics ──► numbers of episodes
               └───► data of an evaluation ──► EvaluatedSets
"""

import asyncio
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from types import SimpleNamespace
from typing import Any, cast

from slipstream.rollout.compat.hooks import CallSurroundings
from slipstream.rollout.compat.slime.arguments import SlimeArguments, address, prepare_requests
from slipstream.rollout.compat.slime.episode_samples import WrongReturn, judgement_of_reward
from slipstream.rollout.compat.slime.leased_groups import LeasedGroups
from slipstream.rollout.reward.value import MOST_PARTS, number_of
from slipstream.rollout.system.plugins import PluginError, resolve
from slipstream.rollout.tokens.evaluated_set import EvaluatedSet
from slipstream.rollout.tokens.named_numbers import NamedNumbers
from slipstream.rollout.workflow.endpoint import EndedEpisode, OpenEndpoint

LONGEST_NAME = 64
"""Characters of the name of a metric, or of a set, which is a part of the name of a metric."""

_NO_NAME = re.compile(r"[^\w.-]")


class FunctionFailed(RuntimeError):
    """A function has raised something."""


class FunctionCalls:
    """Calls functions. Single event loop. ``close`` it.

    All calls have one namespace and one address, as in slime's own process: what slime's functions share is
    made with those of the first call.
    """

    def __init__(
        self, arguments: SlimeArguments, groups: LeasedGroups, surroundings: CallSurroundings
    ) -> None:
        """``groups``: the data source of the functions. Raises PluginError."""
        self.args = arguments
        self.around = surroundings
        self.turn = asyncio.Lock()
        """Held around a call and all that belongs to it."""
        self._groups = groups
        self._call_function: Callable[..., Any] = resolve("slime.rollout.base_types.call_rollout_fn")
        self._stack = AsyncExitStack()
        self._opened: OpenEndpoint | None = None

    async def call(self, path: str, rollout_id: int, *, evaluation: bool) -> tuple[Any, EndedEpisode]:
        """Return slime's output of the function at ``path``, and what the engines have sampled meanwhile.

        The caller has the turn. Raises FunctionFailed, PluginError and NoEngine. Ends the process if the
        function takes longer than an episode may.
        """
        function, opened = resolve(path), await self._open()
        opened.renew(self.around.greedy if evaluation else self.around.endpoint)
        running = _InThread(
            lambda: self._call_function(function, self.args, rollout_id, self._groups, evaluation=evaluation),
            path,
        )
        try:
            with self.around.limit():
                output = await opened.run(running.result)
        except TimeoutError:
            if not running.has_ended:
                self.around.give_up(
                    f"{path} has not returned within rollout.episode_timeout_s:\n{running.traceback()}"
                )
            raise
        finally:
            ended = opened.renew(self.around.endpoint)
        return output, ended

    async def close(self) -> None:
        """Refuse all further requests of functions."""
        self._groups.close()
        await self._stack.aclose()

    async def _open(self) -> OpenEndpoint:
        if self._opened is None:
            prepare_requests(self.args)
            self._opened = await self._stack.enter_async_context(self.around.endpoint.open())
            address(self.args, self._opened)
        return self._opened


class _InThread:
    """A call of user code in a thread of its own, which ends with the process at the latest."""

    def __init__(self, call: Callable[[], object], path: str) -> None:
        self._call = call
        self._path = path
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[object] = self._loop.create_future()
        self.has_ended = False
        self._thread = threading.Thread(target=self._run, name="rollout function", daemon=True)
        self._thread.start()

    def traceback(self) -> str:
        """Return where the code is now, and the tracebacks of all other threads of hooks."""
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        here = threading.get_ident()
        return "".join(
            f"thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
            for thread in threading.enumerate()
            if thread.ident in frames and thread.ident != here
        )

    def _run(self) -> None:
        try:
            value, failure = self._call(), None
        except BaseException as error:  # user code
            traceback.print_exc()
            value, failure = None, FunctionFailed(f"{self._path} raised {type(error).__name__}: {error}")
        self.has_ended = True
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._set, value, failure)

    def _set(self, value: object, failure: Exception | None) -> None:
        if self.result.done():
            return
        if failure is None:
            self.result.set_result(value)
        else:
            self.result.set_exception(failure)


class OutputMetrics:
    """Reads the metrics of the outputs of one function."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._left_out: set[str] = set()

    def read(self, output: object) -> NamedNumbers:
        """Return the numbers of an output. Names are joined by `.`: ``mine/drops`` becomes ``mine.drops``.

        What is no number, and what there is beyond MOST_PARTS names, is left out, and said once in the log of
        the process. Raises WrongReturn.
        """
        given: object = getattr(output, "metrics", None)
        if given is None:
            return ()
        if not isinstance(given, Mapping):
            kind = type(given).__name__
            raise WrongReturn(f"{self._path} returned metrics of type {kind}, expected numbers by name")
        numbers: dict[str, float] = {}
        for name, value in cast("Mapping[Any, Any]", given).items():
            shown = _NO_NAME.sub(".", str(name))[:LONGEST_NAME]
            try:
                number = number_of(value)
            except Exception:  # a value of any type
                self._leave_out(shown, f"{type(value).__name__}, which is no finite number")
                continue
            if not shown or (shown not in numbers and len(numbers) >= MOST_PARTS):
                self._leave_out(shown, f"number {MOST_PARTS + 1} or later")
            else:
                numbers[shown] = number
        return tuple(numbers.items())

    def _leave_out(self, name: str, reason: str) -> None:
        if name not in self._left_out and len(self._left_out) < MOST_PARTS:
            self._left_out.add(name)
            print(f"{self._path}: the metric {name!r} is not logged: {reason}", file=sys.stderr, flush=True)


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


def datasets(args: SlimeArguments) -> list[object]:
    """Return the sets of an evaluation in slime's form."""
    words = cast("list[str]", args.eval_prompt_data or [])
    return [_dataset(args, name, path) for name, path in zip(words[::2], words[1::2], strict=True)]


def _dataset(args: SlimeArguments, name: str, path: str) -> object:
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
