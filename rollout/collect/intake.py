"""The prompt that a ticket stands for: a fresh one, one to generate again, or one from before a restart."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from slipstream.rollout.control.core import Ticket
from slipstream.rollout.ledger.recovery import OpenGroup
from slipstream.rollout.trajectory import Prompt


class PromptSource(Protocol):
    """An endless sequence of prompts: ``rollout.prompts.PromptStream``."""

    position: int
    """Where the next fresh prompt is."""

    def at(self, position: int) -> Prompt: ...


@dataclass(frozen=True)
class Assignment:
    """One group to generate."""

    ticket: Ticket
    prompt: Prompt
    prior: OpenGroup | None = None
    """What was generated of it before a restart."""


class Intake:
    """Finds the prompt of a ticket. Remembers the positions of the groups that have not ended."""

    def __init__(self, stream: PromptSource, open_groups: Iterable[OpenGroup] = ()) -> None:
        """``open_groups``: every group that a restart has found unfinished."""
        self._stream = stream
        self._positions = {group.id: group.position for group in open_groups}
        self.resumed: deque[Assignment] = deque()
        """Groups from before a restart that hold a slot already and are to be continued."""

    @property
    def position(self) -> int:
        """Number of prompts drawn from the stream so far."""
        return self._stream.position

    def resume(self, ticket: Ticket, group: OpenGroup) -> None:
        """Queue a group from before a restart."""
        self.resumed.append(Assignment(ticket, self._stream.at(group.position), group))

    def assign(self, ticket: Ticket) -> tuple[Assignment, int]:
        """Return the work that a new ticket stands for, and the position of its prompt in the stream."""
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
        """Return the prompt of a group that has not ended."""
        return self._stream.at(self._positions[id_])

    def ended(self, id_: int) -> None:
        """Forget the position of a group that needs its prompt no more."""
        self._positions.pop(id_, None)
