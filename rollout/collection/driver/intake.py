"""The prompt that a ticket stands for: a fresh one, or that of a group from before."""

from collections.abc import Iterable
from typing import Protocol

from slipstream.rollout.control.core import Ticket
from slipstream.rollout.tokens.trajectory import Prompt


class PromptSource(Protocol):
    """An endless sequence of prompts: ``rollout.prompts.PromptStream``, or those of a data source."""

    @property
    def position(self) -> int:
        """Place of the next fresh prompt in the sequence, from 0."""
        ...

    def draw(self) -> int:
        """Return the place of the next fresh prompt, and move on to the one after it."""
        ...

    @property
    def is_ready(self) -> bool:
        """True if the next fresh prompt is there. None is admitted while it is not."""
        ...

    def at(self, position: int) -> Prompt: ...


class Intake:
    """Finds the prompt of a ticket. Remembers the positions of the groups that have not ended."""

    def __init__(self, stream: PromptSource, positions: Iterable[tuple[int, int]] = ()) -> None:
        """``positions``: number and position of each group whose prompt a restarted run still needs: of
        unfinished groups, and of requeued ones that no group has replaced.
        """
        self._stream = stream
        self._positions = dict(positions)

    @property
    def position(self) -> int:
        """Number of prompts drawn from the stream so far."""
        return self._stream.position

    @property
    def is_ready(self) -> bool:
        """True if there is a prompt for the next ticket."""
        return self._stream.is_ready

    def position_of(self, ticket: Ticket) -> int:
        """Return the position of the prompt that a ticket stands for, in the stream."""
        if ticket.id in self._positions:
            position = self._positions[ticket.id]
        elif ticket.requeued_from is not None:
            position = self._positions.pop(ticket.requeued_from)
        else:
            position = self._stream.draw()
        self._positions[ticket.id] = position
        return position

    def prompt_of(self, id_: int) -> Prompt:
        """Return the prompt of a group that has not ended. Raises KeyError."""
        return self._stream.at(self._positions[id_])

    def ended(self, id_: int) -> None:
        """Forget the position of a group that needs its prompt no more."""
        self._positions.pop(id_, None)
