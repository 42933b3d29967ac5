"""The events that one transaction of the ledger commits together."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from slipstream.rollout.ledger.samples import SampleRow
from slipstream.rollout.ledger.segments import Part


class Training(NamedTuple):
    """The training of one group, as the step that has trained it accounts for it."""

    group_id: int
    head_lag: int
    """-1 if no token carried loss."""
    tokens: int
    """Number of tokens that carried loss."""
    masked: int
    """Number of sampled tokens that did not."""
    sampled: int
    """Number of sampled tokens."""
    versions: tuple[tuple[int, int], ...]
    """(policy version, number of its tokens that carried loss)."""


GroupRow = tuple[int, int, int | None, int, int]
"""id, position, requeued_from, version, epoch"""
StateRow = tuple[int, str, str | None, int | None, int | None, str | None]
"""id, state, loss, step, tokens, note"""


class Transaction:
    """Events in the order of their arrival, by kind. ``Store.commit`` decides the order of the kinds."""

    __slots__ = (
        "checkpoints",
        "discards",
        "ended",
        "failures",
        "frame_bytes",
        "groups",
        "parts",
        "published",
        "released",
        "samples",
        "sequence",
        "states",
        "steps",
        "then",
        "waiters",
    )

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        """Its number over the life of the run."""
        self.parts: list[Part] = []
        self.frame_bytes = 0
        self.groups: list[GroupRow] = []
        self.samples: list[SampleRow] = []
        self.states: dict[int, StateRow] = {}
        """The last state of each group, by group id."""
        self.ended: list[int] = []
        """Ids of groups that are lost."""
        self.discards: list[tuple[int, int, int]] = []
        """Group id, tokens given up, and the number of events in ``samples`` before."""
        self.steps: list[tuple[int, int, Sequence[int]]] = []
        """version, parent, group ids"""
        self.failures: list[tuple[int, str]] = []
        """version, reason"""
        self.published: list[tuple[int, Sequence[Training]]] = []
        self.released: int | None = None
        self.checkpoints: list[tuple[int, str]] = []
        """version, digest"""
        self.then: list[Callable[[], None]] = []
        self.waiters: list[asyncio.Future[None]] = []
