"""The order in which the two sides of an engine's group work through their messages.

Message ``i`` of a sender to a receiver comes before message ``i + 1``; among messages of the same number, the
lower receiver and then the lower sender comes first. Both sides take the messages of their queues in this
order, some at a time. The first message that is not yet transferred is therefore always in the hands of both
its sender and its receiver, so they cannot wait for each other in a circle.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TypeVar

T = TypeVar("T")

WINDOW = 8
"""Number of messages that a rank has in flight."""


def windows(queues: Sequence[Sequence[T]]) -> Iterator[list[T]]:
    """Yield the messages to or from all peers in order, ``WINDOW`` at a time. ``queues``: by peer."""
    ordered = [
        message for same_number in zip_longest(*queues) for message in same_number if message is not None
    ]
    for first in range(0, len(ordered), WINDOW):
        yield ordered[first : first + WINDOW]
