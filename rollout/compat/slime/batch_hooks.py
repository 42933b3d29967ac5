"""Hooks that see whole batches and evaluations: asked in a process of their own, with a time limit.

driver's loop ──question──► BatchHooks ──frames──► batch_process ──► the hook
                               │ too late, ended: the process and all that it has started are killed,
                               └─ and the next question starts another one
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slipstream.configs.schema import RunConfig
from slipstream.rollout.compat.slime.batch_process import (
    BatchQuestion,
    EvaluatedPrompt,
    HookSetup,
    RecordedEpisode,
)
from slipstream.rollout.programs.served import ProgramGone, ServedProgram
from slipstream.rollout.programs.start import python_calling

BESIDE_DRIVER = (
    "custom_reward_post_process",
    "custom_convert_samples_to_train_data",
    "custom_rollout_log_function",
    "custom_eval_rollout_log_function",
)
"""Settings of ``rollout.hooks`` whose code runs in this process."""

LOG = "hooks.log"
"""File of what hooks print."""

SERVE = "slipstream.rollout.compat.slime.batch_process.serve"
"""The function that the process runs."""

START_TIMEOUT_S = 120.0
"""Seconds for the start of the process, with the imports of the hooks and the tokenizer."""


class BatchHookFailed(RuntimeError):
    """A hook has raised, has taken too long, has ended its process, or returns what cannot be used."""


class TrainingData(msgspec.Struct, frozen=True):
    """What hooks make of a batch; the lists are over all of its trajectories."""

    rewards: list[float]
    masks: list[list[int]] | None = None
    """1 where a response token keeps its loss; None: all do."""


class BatchHooks:
    """The hooks of one recipe. Single event loop; questions wait for one another. ``close`` it."""

    def __init__(self, config: RunConfig, logs: Path, note: Callable[[str], None]) -> None:
        assert config.rollout.hooks is not None
        self._config = config
        named = config.rollout.hooks.named()
        self._paths = {setting: named[setting][0] for setting in BESIDE_DRIVER if setting in named}
        self._timeout_s = config.rollout.hooks.batch_timeout_s
        self._log = logs / LOG
        self._note = note
        self._turn = asyncio.Lock()
        self._program: ServedProgram | None = None

    def names(self, setting: str) -> bool:
        """Return whether the recipe names a hook for ``setting``."""
        return setting in self._paths

    async def training_data(
        self, rollout_id: int, episodes: Sequence[RecordedEpisode]
    ) -> TrainingData | None:
        """Return what the hooks make of a batch; None: the recipe names none. Raises BatchHookFailed."""
        for setting in ("custom_convert_samples_to_train_data", "custom_reward_post_process"):
            if setting in self._paths:
                value = await self._ask(BatchQuestion(setting, rollout_id, tuple(episodes)))
                return msgspec.convert(value, TrainingData)
        return None

    async def log_batch(
        self, rollout_id: int, episodes: Sequence[RecordedEpisode], metrics: dict[str, float], seconds: float
    ) -> bool:
        """Return whether ``custom_rollout_log_function`` says that it has logged the batch itself."""
        setting = "custom_rollout_log_function"
        return await self._logged(
            BatchQuestion(setting, rollout_id, tuple(episodes), metrics=metrics, seconds=seconds)
        )

    async def log_evaluation(
        self, rollout_id: int, prompts: Sequence[EvaluatedPrompt], metrics: dict[str, float]
    ) -> bool:
        """Return whether ``custom_eval_rollout_log_function`` says that it has logged the evaluation."""
        setting = "custom_eval_rollout_log_function"
        return await self._logged(BatchQuestion(setting, rollout_id, prompts=tuple(prompts), metrics=metrics))

    async def _logged(self, question: BatchQuestion) -> bool:
        if question.setting not in self._paths:
            return False
        try:
            return bool(await self._ask(question))
        except BatchHookFailed as error:
            self._note(f"{error}; Slipstream logs its own metrics")
            return False

    async def _ask(self, question: BatchQuestion) -> Any:
        """Return what a hook says. Raises BatchHookFailed, and the process is ended if it does not answer."""
        hook = f"rollout.hooks.{question.setting} ({self._paths[question.setting]})"
        request = await asyncio.to_thread(msgspec.msgpack.encode, question)
        async with self._turn:
            if self._program is None:
                await self._start(hook)
            reply = await self._exchanged(hook, request, self._timeout_s, "rollout.hooks.batch_timeout_s")
        if "error" in reply:
            raise BatchHookFailed(f"{hook} {reply['error']}; {self._log} has what it has printed")
        return reply["value"]

    async def _start(self, hook: str) -> None:
        self._program = await ServedProgram.start(
            lambda descriptor: python_calling(SERVE, descriptor),
            self._log,
        )
        config = self._config.model_dump_json().encode()
        setup = msgspec.msgpack.encode(HookSetup(config, self._paths))
        reply = await self._exchanged(hook, setup, START_TIMEOUT_S, "for the start of its process")
        if "error" in reply:
            await self.close()
            raise BatchHookFailed(f"{hook} or another hook of its process {reply['error']}")

    async def _exchanged(self, hook: str, request: bytes, timeout_s: float, limit: str) -> dict[str, Any]:
        assert self._program is not None
        is_answered = False
        try:
            async with asyncio.timeout(timeout_s):
                reply: dict[str, Any] = json.loads(await self._program.ask(request))
            is_answered = True
            return reply
        except TimeoutError:
            raise BatchHookFailed(f"{hook} has not returned within {timeout_s:g} s ({limit})") from None
        except ProgramGone as error:
            raise BatchHookFailed(f"{hook}: {error}; {self._log} has what it has printed") from None
        finally:
            if not is_answered:  # also when the caller gives up: a late reply would be taken for the next one
                await asyncio.shield(self.close())

    async def close(self) -> None:
        """End the process, if there is one."""
        program, self._program = self._program, None
        if program is not None:
            await program.end()


def batch_hooks(config: RunConfig, logs: Path, note: Callable[[str], None]) -> BatchHooks | None:
    """Return the hooks of a recipe that see whole batches; None: it names none."""
    hooks = config.rollout.hooks
    if hooks is None or not any(setting in hooks.named() for setting in BESIDE_DRIVER):
        return None
    return BatchHooks(config, logs, note)
