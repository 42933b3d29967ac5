"""The port through which collection writes events down, so that a restart knows them."""

from collections.abc import Callable, Sequence
from typing import Protocol

from slipstream.rollout.control.core import Ticket
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.ledger.writing.transaction import Training


class GroupLedger(Protocol):
    """Takes events. ``ledger.writing.writer.Ledger`` says what each one means. Only ``flushed`` waits.

    ``key``: number of an episode, ``group * SAMPLES + sample``.
    """

    @property
    def backlog(self) -> int: ...
    def append(self, payload: memoryview) -> tuple[int, int]: ...
    def read(self, refs: bytes) -> bytes: ...
    def admitted(self, ticket: Ticket, position: int) -> None: ...
    def piece(self, key: int, base: int, ref: bytes, header: bytes) -> None: ...
    def answered(self, key: int, refs: bytes, header: bytes) -> None: ...
    def judged(self, key: int, refs: bytes | None, header: bytes) -> None: ...
    def ready(self, id_: int, tokens: int) -> None: ...
    def read_lost(self, refs: Sequence[bytes], then: Callable[[Sequence[bytes | None]], None]) -> None: ...
    def lost(self, id_: int, loss: Loss, tokens: int = 0, note: str = "") -> None: ...
    def step_begins(self, version: int, parent: int, groups: Sequence[int]) -> None: ...
    def copy_begins(self, version: int, parent: int) -> None: ...
    def step_failed(self, version: int, reason: str) -> None: ...
    def published(self, version: int, trainings: Sequence[Training]) -> None: ...
    def when_durable(self, then: Callable[[], None]) -> None: ...
    async def flushed(self) -> None: ...


class NoLedger:
    """Forgets everything: for simulations and tests of pure logic."""

    backlog = 0

    def append(self, payload: memoryview) -> tuple[int, int]:
        return 0, 0

    def read(self, refs: bytes) -> bytes:
        return b""

    def admitted(self, ticket: Ticket, position: int) -> None:
        pass

    def piece(self, key: int, base: int, ref: bytes, header: bytes) -> None:
        pass

    def answered(self, key: int, refs: bytes, header: bytes) -> None:
        pass

    def judged(self, key: int, refs: bytes | None, header: bytes) -> None:
        pass

    def ready(self, id_: int, tokens: int) -> None:
        pass

    def read_lost(self, refs: Sequence[bytes], then: Callable[[Sequence[bytes | None]], None]) -> None:
        pass

    def lost(self, id_: int, loss: Loss, tokens: int = 0, note: str = "") -> None:
        pass

    def step_begins(self, version: int, parent: int, groups: Sequence[int]) -> None:
        pass

    def copy_begins(self, version: int, parent: int) -> None:
        pass

    def step_failed(self, version: int, reason: str) -> None:
        pass

    def published(self, version: int, trainings: Sequence[Training]) -> None:
        pass

    def when_durable(self, then: Callable[[], None]) -> None:
        then()

    async def flushed(self) -> None:
        pass
