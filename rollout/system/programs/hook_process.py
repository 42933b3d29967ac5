"""A process beside the driver in which code of the user's runs: started when it is asked first, with a time
limit for each question.

driver's loop ──question──► HookProcess ──frames──► a module's ``serve`` ──► the hook
                               │ too late, ended: the process and all that it has started are killed,
                               └─ and the next question starts another one
"""

import asyncio
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.rollout.system.programs.served import Answering, ProgramGone, ServedProgram
from slipstream.rollout.system.programs.start import python_calling

LOG = "hooks.log"
"""File of what hooks print."""

START_TIMEOUT_S = 120.0
"""Seconds for the start of the process, with the imports of the hooks and the tokenizer."""


class HookProcessFailed(RuntimeError):
    """A hook has raised, has taken too long, has ended its process, or returns what cannot be used."""


class HookProcess:
    """One process. Single event loop; questions wait for one another. ``close`` it."""

    def __init__(self, serve: str, setup: bytes, log: Path) -> None:
        """``serve``: import path of the function that the process runs. ``setup``: its first request."""
        self._serve = serve
        self._setup = setup
        self._log = log
        self._turn = asyncio.Lock()
        self._program: ServedProgram | None = None

    async def ask(self, hook: str, request: bytes, timeout_s: float, limit: str) -> Any:
        """Return what a hook says. Raises HookProcessFailed; the process is ended if it does not answer.

        ``hook``: its name, and ``limit``: that of the setting behind ``timeout_s``, for messages.
        """
        async with self._turn:
            if self._program is None:
                await self._start(hook)
            reply = await self._exchanged(hook, request, timeout_s, limit)
        if "error" in reply:
            raise HookProcessFailed(f"{hook} {reply['error']}; {self._log} has what it has printed")
        return reply["value"]

    async def _start(self, hook: str) -> None:
        self._program = await ServedProgram.start(
            lambda descriptor: python_calling(self._serve, descriptor), self._log
        )
        reply = await self._exchanged(hook, self._setup, START_TIMEOUT_S, "for the start of its process")
        if "error" in reply:
            await self.close()
            raise HookProcessFailed(f"{hook} or another hook of its process {reply['error']}")

    async def _exchanged(self, hook: str, request: bytes, timeout_s: float, limit: str) -> dict[str, Any]:
        assert self._program is not None
        is_answered = False
        try:
            async with asyncio.timeout(timeout_s):
                reply: dict[str, Any] = json.loads(await self._program.ask(request))
            is_answered = True
            return reply
        except TimeoutError:
            raise HookProcessFailed(f"{hook} has not returned within {timeout_s:g} s ({limit})") from None
        except ProgramGone as error:
            raise HookProcessFailed(f"{hook}: {error}; {self._log} has what it has printed") from None
        finally:
            if not is_answered:  # also when the caller gives up: a late reply would be taken for the next one
                await asyncio.shield(self.close())

    async def close(self) -> None:
        """End the process, if there is one."""
        program, self._program = self._program, None
        if program is not None:
            await program.end()


class WrongAnswer(ValueError):
    """A hook has returned what cannot be used."""


def serve_answers(descriptor: int, make: Callable[[bytes], Callable[[bytes], object]]) -> None:
    """Be that process, until its owner has no more questions.

    ``make``: returns from the first request what answers the others, as plain data. Replies are JSON: nothing
    that a hook returns is unpickled anywhere.
    """
    answering = Answering(descriptor)
    request = answering.receive()
    if request is None:
        return
    try:
        answer = make(request)
    except BaseException as error:  # user code is imported
        traceback.print_exc()
        answering.reply(json.dumps({"error": f"cannot be imported: {error}"}).encode())
        return
    answering.reply(b'{"ready": true}')
    while (request := answering.receive()) is not None:
        try:
            reply = json.dumps({"value": answer(request)})
        except WrongAnswer as error:
            reply = json.dumps({"error": str(error)})
        except Exception as error:
            traceback.print_exc()
            reply = json.dumps({"error": f"has raised {type(error).__name__}: {error}"})
        answering.reply(reply.encode())
