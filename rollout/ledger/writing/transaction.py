"""The events that one transaction of the ledger commits together."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from slipstream.rollout.ledger.rows.samples import SampleRow
from slipstream.rollout.ledger.rows.stored_turns import TurnRow
from slipstream.rollout.ledger.storage.segments import Part

if TYPE_CHECKING:
    from slipstream.rollout.ledger.reading.restart import Recovered


class Training(NamedTuple):
    """The training of one group or turn, as the step that has trained it accounts for it."""

    group_id: int
    """Below 0: of a turn."""
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


class Forget(NamedTuple):
    """Everything that was recorded before an entry, of a session, of a key, or of a session of a key."""

    session: int | None
    """Number that stands for its name alone."""
    key: int | None
    entry: int
    """Number of the entry as if it were a turn. Later entries of its gateway are not meant."""


@dataclass(slots=True)
class TurnEvents:
    """Events of live users. They are written kind by kind, in the order of the fields."""

    gateways: dict[int, tuple[str, int]] = field(default_factory=dict[int, tuple[str, int]])
    """Name, and number of the last entry, by the gateway's number."""
    rows: list[TurnRow] = field(default_factory=list[TurnRow])
    next: list[tuple[bytes | None, int]] = field(default_factory=list[tuple[bytes | None, int]])
    """Ref of what came next, and the turn."""
    verdicts: list[tuple[bytes, bytes | None, bytes | None, int]] = field(
        default_factory=list[tuple[bytes, bytes | None, bytes | None, int]]
    )
    """Sealed verdict, refs of the hint and of a teacher's scores, and the turn."""
    ended: list[tuple[str, str | None, int | None, int | None, str | None, int]] = field(
        default_factory=list[tuple[str, str | None, int | None, int | None, str | None, int]]
    )
    """End, loss, version, lag, note, and the turn."""
    forget: list[Forget] = field(default_factory=list[Forget])
    may_erase: bool = False
    """True if nobody reads what is forgotten, so that it can be written over."""
    sessions: dict[int, bool] = field(default_factory=dict[int, bool])
    """True if a session has ended, of those of which anything was heard."""

    def __bool__(self) -> bool:
        return bool(
            self.gateways
            or self.next
            or self.verdicts
            or self.ended
            or self.forget
            or self.sessions
            or self.may_erase
        )


@dataclass
class RestartRequest:
    """Asks the writer thread of an open ledger to go on from an older version."""

    restored: int
    """Version that the trainer is restored from."""
    bound: int
    """``rollout.max_head_offpolicyness``."""
    n_samples: int
    """Trajectories of a group."""
    recovered: "Recovered | None" = None
    """The result, once the transaction is on disk."""


@dataclass(slots=True)
class LostRead:
    """Chunks to be read before the transaction that forgets them."""

    refs: Sequence[bytes]
    then: Callable[[Sequence[bytes | None]], None]
    chunks: Sequence[bytes | None] = ()


class Transaction:
    """Events in the order of their arrival, by kind. ``Store.commit`` decides the order of the kinds."""

    __slots__ = (
        "begun",
        "checkpoints",
        "discards",
        "ended",
        "failures",
        "frame_bytes",
        "groups",
        "parts",
        "published",
        "reads",
        "released",
        "restart",
        "samples",
        "sequence",
        "states",
        "then",
        "turns",
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
        self.begun: list[tuple[int, int, Sequence[int] | None]] = []
        """version, parent, group ids; None: the version is a copy of its parent"""
        self.failures: list[tuple[int, str]] = []
        """version, reason"""
        self.published: list[tuple[int, Sequence[Training]]] = []
        self.released: int | None = None
        self.checkpoints: list[tuple[int, str]] = []
        """version, digest"""
        self.restart: RestartRequest | None = None
        """Executed after all events of the transaction."""
        self.turns = TurnEvents()
        self.reads: list[LostRead] = []
        self.then: list[Callable[[], None]] = []
        self.waiters: list[asyncio.Future[None]] = []
