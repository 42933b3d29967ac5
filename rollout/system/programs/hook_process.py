"""A process beside the driver in which code of the user's runs: started when it is asked first, with a time
limit for each question.

driver's loop ──question──► HookProcess ──frames──► a module's ``serve`` ──► the hook
                               │ too late, ended: the process and all that it has started are killed,
                               └─ and the next question starts another one
"""

import asyncio
import json
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from slipstream.rollout.system.child import Child
from slipstream.rollout.system.programs.start import kept, python_calling
from slipstream.rollout.system.stream import FrameTooLong, framed, receive

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
        self._child: Child | None = None
        self._reply: asyncio.Future[bytes] | None = None

    async def ask(self, hook: str, request: bytes, timeout_s: float, limit: str) -> object:
        """Return what a hook says. Raises HookProcessFailed; the process is ended if it does not answer.

        ``hook`` and ``limit``: names of the hook and of the setting that gives ``timeout_s``, for messages.
        """
        async with self._turn:
            if self._child is None:
                await self._start(hook)
            reply = await self._exchanged(hook, request, timeout_s, limit)
        if "error" in reply:
            raise HookProcessFailed(f"{hook} {reply['error']}; {self._log} has what it has printed")
        return reply["value"]

    async def _start(self, hook: str) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        child = Child(self._answered, self._answered_garbage)
        with self._log.open("ab") as output:
            await child.start(self._command, stdout=output, stderr=output)
        self._child = child
        reply = await self._exchanged(hook, self._setup, START_TIMEOUT_S, "for the start of its process")
        if "error" in reply:
            await self.close()
            raise HookProcessFailed(f"{hook} or another hook of its process {reply['error']}")

    async def _exchanged(self, hook: str, request: bytes, timeout_s: float, limit: str) -> dict[str, object]:
        is_answered = False
        try:
            async with asyncio.timeout(timeout_s):
                reply: dict[str, object] = json.loads(await self._answer(framed(request)))
            is_answered = True
            return reply
        except TimeoutError:
            raise HookProcessFailed(f"{hook} has not returned within {timeout_s:g} s ({limit})") from None
        except _ProcessGone as error:
            raise HookProcessFailed(f"{hook}: {error}; {self._log} has what it has printed") from None
        finally:
            if not is_answered:  # also when the caller gives up: a late reply would be taken for the next one
                await asyncio.shield(self.close())

    def _command(self, lifeline: int, connection: int) -> Sequence[str]:
        return kept(python_calling(self._serve, connection), lifeline)

    async def _answer(self, frame: bytes) -> bytes:
        """Return the reply to a request. Raises _ProcessGone."""
        child = self._child
        assert child is not None
        reply = self._reply = asyncio.get_running_loop().create_future()
        child.send(frame)
        await asyncio.wait({reply, child.hung_up, child.lost}, return_when=asyncio.FIRST_COMPLETED)
        if not reply.done():
            raise _ProcessGone("its process has ended")
        return reply.result()

    def _answered(self, reply: bytes) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(reply)

    def _answered_garbage(self, error: FrameTooLong) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(_ProcessGone(f"it has announced {error}"))

    async def close(self) -> None:
        """End the process, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            await child.end()


class _ProcessGone(RuntimeError):
    """A process has ended, or has answered with what is no frame."""


class WrongAnswer(ValueError):
    """A hook has returned what cannot be used."""


def serve_answers(descriptor: int, make: Callable[[bytes], Callable[[bytes], object]]) -> None:
    """Run the process: answer the owner's requests until it closes the connection.

    ``make``: returns from the first request what answers the others, as plain data. Replies are JSON: nothing
    that a hook returns is unpickled anywhere.
    """
    os.set_inheritable(descriptor, False)
    # What the code prints does not mix with the replies: they have a socket of their own.
    connection = socket.socket(fileno=descriptor)

    def reply(value: object) -> None:
        with suppress(BrokenPipeError):
            connection.sendall(framed(json.dumps(value).encode()))

    request = receive(connection)
    if request is None:
        return
    try:
        answer = make(request)
    except BaseException as error:  # user code is imported
        traceback.print_exc()
        reply({"error": f"cannot be imported: {error}"})
        return
    reply({"ready": True})
    while (request := receive(connection)) is not None:
        try:
            reply({"value": answer(request)})
        except WrongAnswer as error:
            reply({"error": str(error)})
        except Exception as error:
            traceback.print_exc()
            reply({"error": f"has raised {type(error).__name__}: {error}"})
