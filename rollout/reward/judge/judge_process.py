"""One judge process as its pool sees it: started, asked, and ended with everything that it has started."""

import asyncio
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from slipstream.rollout.reward.judge.judge_errors import NO_CONNECTION, Ending, JudgeStartFailed
from slipstream.rollout.reward.judge.wire import (
    LONGEST_REPLY,
    REPLY,
    JudgeReady,
    JudgeSetup,
    Reply,
    StartFailure,
    framed,
)
from slipstream.rollout.system.bounded_log import TAIL
from slipstream.rollout.system.child import KILL_S, Child, outlast
from slipstream.rollout.system.linux import kill_users_of
from slipstream.rollout.system.programs.keeper import REPORT
from slipstream.rollout.system.programs.start import python_calling
from slipstream.rollout.system.temporary import OwnedFolder

GRACE_S = 2.0
"""Seconds that a process gets to end by itself, or to be ended by its own watchdog, before the pool acts."""


class JudgeProcess:
    """A keeper and the judge in it. ``start`` returns one that can be asked; ``end`` leaves nothing of it."""

    def __init__(self, log: Path, on_reply: Callable[[Reply], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._log = log
        self._on_reply = on_reply
        self._first_reply: asyncio.Future[JudgeReady | StartFailure] = self._loop.create_future()
        self._child = Child(self._received, self._on_garbage, LONGEST_REPLY)
        self._scratch: OwnedFolder | None = None
        self._killed_because: str | None = None
        self._end: asyncio.Task[Ending] | None = None
        self.concurrent = False
        """True if questions may overlap."""
        self.of_groups = False
        """True if the reward judges all episodes of a group at once."""

    @classmethod
    async def start(cls, setup: JudgeSetup, log: Path, on_reply: Callable[[Reply], None]) -> "JudgeProcess":
        """Start a process and construct the reward in it. Raises JudgeStartFailed, with the traceback."""
        process = cls(log, on_reply)
        try:
            await process._start(setup)
        except BaseException:
            process.kill("its start has failed")
            await process.end()
            raise
        return process

    async def _start(self, setup: JudgeSetup) -> None:
        limit = f"{setup.start_timeout_s:g} s to start ({setup.section}.start_timeout_s)"
        try:
            frame = framed(setup)
        except (TypeError, OverflowError, UnicodeEncodeError) as error:
            raise _start_failed(setup, f"its args {setup.args} are no plain data: {error}") from error
        try:
            await self._spawn()
        except OSError as error:
            raise _start_failed(setup, f"no process can be started: {error}") from error
        self._end = self._loop.create_task(self._wait_for_end())
        self._child.send(frame)
        await asyncio.wait(
            {self._first_reply, self._end},
            timeout=setup.start_timeout_s + GRACE_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not self._first_reply.done():
            if not self._end.done():
                self.kill(f"it took longer than {limit}")
            raise _start_failed(setup, (await self.end()).cause(limit))
        reply = self._first_reply.result()
        if isinstance(reply, StartFailure):
            raise _start_failed(setup, reply.reason)
        self._child.kept, self.concurrent, self.of_groups = reply.pid, reply.concurrent, reply.of_groups

    async def _spawn(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = OwnedFolder(Path(tempfile.gettempdir()), "judge")
        scratch = str(self._scratch.path)
        work, log = "slipstream.rollout.reward.judge.worker.work", str(self._log.absolute())

        def command(lifeline: int, connection: int) -> list[str]:
            keep = "slipstream.rollout.system.programs.keeper.keep_function"
            return python_calling(keep, lifeline, connection, os.getpid(), work, "judge", scratch, log)

        with self._log.open("ab") as errors:
            await self._child.start(command, stderr=errors, environment={**os.environ, "TMPDIR": scratch})

    # -- Asking

    def ask(self, frame: bytes) -> None:
        """Send a frame, together with all others of this turn of the loop."""
        self._child.send(frame)

    def _received(self, content: bytes) -> None:
        try:
            reply = REPLY.decode(content)
        except msgspec.MsgspecError as error:
            self._on_garbage(error)
            return
        if isinstance(reply, JudgeReady | StartFailure):
            if not self._first_reply.done():
                self._first_reply.set_result(reply)
        elif self._killed_because is None:
            self._on_reply(reply)

    def _on_garbage(self, error: Exception) -> None:
        self.kill(f"it has written into the connection of its judge process: {error}")

    # -- Ending

    def kill(self, reason: str) -> None:
        """Ask the keeper to kill the judge and all processes that it has started."""
        if self._killed_because is not None:
            return
        self._killed_because = reason
        self._child.kill()

    def close(self) -> None:
        """Let an idle judge end by itself. It is killed if it does not within GRACE_S."""
        self._child.hang_up()

    async def ended(self) -> Ending:
        """Wait until nothing of the process is left, and return how it has ended. It need not be told to."""
        assert self._end is not None, "a process is waited for that was never started"
        return await asyncio.shield(self._end)

    async def end(self) -> Ending:
        """Wait for a process that was killed or closed, for a bounded time.

        A cancelled caller waits nevertheless: otherwise the process would go on running.
        """
        if self._end is None:  # it has not been started as a whole
            self._child.kill_keeper()
            self._drop()
            return Ending(None, killed_because=self._killed_because)
        await outlast({self._end}, 2 * GRACE_S + 3 * KILL_S)
        return self._end.result() if self._end.done() else Ending(None, killed_because="nothing can end it")

    async def _wait_for_end(self) -> Ending:
        child = self._child
        await asyncio.wait({child.lost, child.hung_up}, return_when=asyncio.FIRST_COMPLETED)
        if not child.lost.done():
            # A keeper reports at once. If it does not, its judge goes on without a connection.
            await asyncio.wait({child.lost}, timeout=GRACE_S)
            if not child.lost.done():
                self.kill(NO_CONNECTION)
                await asyncio.wait({child.lost}, timeout=2 * KILL_S)
        if not child.report:
            child.kill_keeper()
        await asyncio.wait({child.hung_up}, timeout=GRACE_S)  # for replies from before the end
        await asyncio.to_thread(self._drop)
        return self._ending()

    def _ending(self) -> Ending:
        report = bytes(self._child.report)
        if len(report) < REPORT.size:
            return Ending(None, "", _tail(self._log), self._killed_because)
        status, crash, output = REPORT.unpack_from(report)
        texts = report[REPORT.size :]
        return Ending(
            status,
            texts[:crash].decode(errors="replace"),
            texts[crash : crash + output].decode(errors="replace"),
            self._killed_because,
        )

    def _drop(self) -> None:
        """Take the keeper's exit status, close the connections and remove what the keeper has left."""
        self._child.drop()
        if self._scratch is not None:
            if self._scratch.path.exists():  # its keeper was killed
                kill_users_of(str(self._scratch.path))
            self._scratch.remove()


def _start_failed(setup: JudgeSetup, reason: str) -> JudgeStartFailed:
    return JudgeStartFailed(f"the reward {setup.path} cannot be started: {reason}")


def _tail(log: Path) -> str:
    """Return the end of a log: a keeper that cannot start has nobody else to tell."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        return file.read().decode(errors="replace")
    return ""
