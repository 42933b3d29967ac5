"""The tasks of the groups that are being collected."""

import asyncio


class RunningGroups:
    """Finds the task of a group, so that work on an expired group can be cancelled. Single event loop."""

    def __init__(self) -> None:
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def add(self, id_: int, task: asyncio.Task[None]) -> None:
        """Remember ``task`` until it is done."""
        self._tasks[id_] = task
        task.add_done_callback(lambda _: self._tasks.pop(id_))

    def abandon(self, id_: int) -> None:
        """Cancel the work on a group, if there is any."""
        if id_ in self._tasks:
            self._tasks[id_].cancel()
