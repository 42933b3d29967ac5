"""Orders of the head to the ranks of one engine by request, and their answers in the head's store."""

import asyncio
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

from slipstream.bridge.engine import orders
from slipstream.bridge.engine.orders import TAKE, Meeting, Order, RankAnswer
from slipstream.bridge.engine.take import ORDER, encoded_order
from slipstream.bridge.group.store import join_store, take_out
from slipstream.bridge.publish.endpoint import EngineEndpoint

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


class TransferFailed(RuntimeError):
    """A rank of the trainer or of an engine did not carry out its part of a step."""


class Ordering:
    """The line to one engine."""

    def __init__(self, meeting: Meeting, engine: str, name: str) -> None:
        """``name``: of the engine in orders, which no other engine of this head has."""
        self.name, self.engine = name, engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"answers-{engine}")
        """Waits in the store for this engine."""
        # A connection of its own: one that waits lets no one else in.
        self._store: TCPStore = join_store(meeting.address, meeting.port, 1, meeting.timeout_s, wait=False)

    async def send(self, engine: EngineEndpoint, ordered: Sequence[Order]) -> None:
        """Send each rank of the engine its order. Returns when all have carried them out or failed."""
        handles = [pickle.dumps([(ORDER, encoded_order(order))]) for order in ordered]  # of SGLang's route
        await engine.take(handles, load_format=TAKE, version=None)

    async def carried_out(
        self, engine: EngineEndpoint, ordered: Sequence[Order], timeout_s: float
    ) -> list[RankAnswer]:
        """Send each rank its order, and return the answers. Raises TransferFailed if one is an error."""
        await self.send(engine, ordered)
        return await self.answers(ordered, timeout_s)

    async def answers(self, ordered: Sequence[Order], timeout_s: float) -> list[RankAnswer]:
        """Return the answers of the engine's ranks. Raises TransferFailed if one is an error."""
        return await self.read([orders.answer_key(o, rank) for rank, o in enumerate(ordered)], timeout_s)

    async def read(self, keys: Sequence[str], timeout_s: float) -> list[RankAnswer]:
        """Return the answers under ``keys``. Raises TransferFailed if one is an error."""

        def read() -> list[RankAnswer]:
            self._store.wait(list(keys), timedelta(seconds=timeout_s))
            return [take_out(self._store, key, RankAnswer) for key in keys]

        answers = await asyncio.get_running_loop().run_in_executor(self._thread, read)
        errors = [answer.error for answer in answers if answer.error is not None]
        if errors:
            raise TransferFailed("; ".join(errors[:3]))
        return answers

    def close(self) -> None:
        self._thread.shutdown(wait=False)
