"""Which prompt a ticket stands for: a fresh one, one that is generated again, or one of before a restart."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.rollout.control.core import Ticket
from slipstream.rollout.ledger.recovery import OpenGroup
from slipstream.rollout.prompts import PromptStream
from slipstream.rollout.trajectory import Prompt


@dataclass(frozen=True)
class Assignment:
    """One group to generate."""

    ticket: Ticket
    prompt: Prompt
    prior: OpenGroup | None = None
    """What an earlier life of the run has generated of it."""


class Intake:
    """Prompts by ticket. Remembers the positions of groups that have not ended."""

    def __init__(self, stream: PromptStream, open_groups: Iterable[OpenGroup] = ()) -> None:
        """``open_groups``: all that a restart has found."""
        self._stream = stream
        self._positions = {group.id: group.position for group in open_groups}
        self.resumed: deque[Assignment] = deque()
        """Groups of before a restart that hold a slot already, to be gone on with."""

    @property
    def position(self) -> int:
        """Prompts drawn from the stream so far."""
        return self._stream.position

    def resume(self, ticket: Ticket, group: OpenGroup) -> None:
        self.resumed.append(Assignment(ticket, self._stream.at(group.position), group))

    def assign(self, ticket: Ticket) -> tuple[Assignment, int]:
        """The prompt of a ticket that was just given, and its position in the stream."""
        if ticket.id in self._positions:
            position = self._positions[ticket.id]
        elif ticket.requeued_from is not None:
            position = self._positions.pop(ticket.requeued_from)
        else:
            position = self._stream.position
            self._stream.position += 1
        self._positions[ticket.id] = position
        return Assignment(ticket, self._stream.at(position)), position

    def prompt(self, id_: int) -> Prompt:
        """Of a group that has not ended."""
        return self._stream.at(self._positions[id_])

    def ended(self, id_: int) -> None:
        """The group needs its prompt no more."""
        self._positions.pop(id_, None)
