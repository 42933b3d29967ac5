"""The port through which the gate writes events down, so that a restart knows them."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from slipstream.rollout.control.core import Expired, Loss, Ticket
from slipstream.rollout.trajectory import Completion, Group, Trajectory


class Journal(Protocol):
    """Takes events. ``rollout.ledger.writer.Ledger`` says what each one means. Only ``flushed`` waits."""

    def admitted(self, ticket: Ticket, position: int) -> None: ...
    def partial(
        self,
        group_id: int,
        sample: int,
        call: int,
        input_ids: Sequence[int],
        completion: Completion,
        *,
        done: bool,
    ) -> None: ...
    def trajectory(self, group_id: int, sample: int, trajectory: Trajectory) -> None: ...
    def ready(self, group: Group) -> None: ...
    def lost(self, id_: int, loss: Loss, trajectories: Sequence[Trajectory] = ()) -> None: ...
    def expired(self, expired: Expired) -> None: ...
    def step_begins(self, version: int, step: int) -> None: ...
    def published(self, version: int, groups: Iterable[Group]) -> None: ...
    async def flushed(self) -> None: ...


class NoJournal:
    """Forgets everything: for simulations and tests of pure logic."""

    def admitted(self, ticket: Ticket, position: int) -> None:
        pass

    def partial(
        self,
        group_id: int,
        sample: int,
        call: int,
        input_ids: Sequence[int],
        completion: Completion,
        *,
        done: bool,
    ) -> None:
        pass

    def trajectory(self, group_id: int, sample: int, trajectory: Trajectory) -> None:
        pass

    def ready(self, group: Group) -> None:
        pass

    def lost(self, id_: int, loss: Loss, trajectories: Sequence[Trajectory] = ()) -> None:
        pass

    def expired(self, expired: Expired) -> None:
        pass

    def step_begins(self, version: int, step: int) -> None:
        pass

    def published(self, version: int, groups: Iterable[Group]) -> None:
        pass

    async def flushed(self) -> None:
        pass
