"""A limit on the number of tasks in a section, which may change while they run."""

import asyncio


class Limit:
    """Limits how many tasks are inside at one time. First come, first served.

        async with limit: ...       # the task is inside
        limit.size = 4

    A smaller size disturbs no task inside; the next task enters when fewer than ``size`` are inside.
    """

    def __init__(self, size: int) -> None:
        self._size = max(1, size)
        self._waiters: dict[asyncio.Future[None], None] = {}
        self.inside = 0
        """Number of tasks inside; larger than ``size`` for a while after ``size`` was lowered."""

    @property
    def size(self) -> int:
        return self._size

    @size.setter
    def size(self, size: int) -> None:
        self._size = max(1, size)
        self._admit()

    async def __aenter__(self) -> None:
        if self.inside < self._size and not self._waiters:
            self.inside += 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self._waiters:
                del self._waiters[waiter]
            else:
                self.leave()  # admitted and cancelled at the same time
            raise

    async def __aexit__(self, *exc: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Let a task inside go out, which need not be the caller."""
        self.inside -= 1
        self._admit()

    def _admit(self) -> None:
        """Let waiting tasks in. A task that is taken off the waiters counts as inside, cancelled or not."""
        while self._waiters and self.inside < self._size:
            waiter = next(iter(self._waiters))
            del self._waiters[waiter]
            self.inside += 1
            if not waiter.done():
                waiter.set_result(None)
