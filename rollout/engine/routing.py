"""Messages about the engines: from the driver to every collector, and from a collector's pool back.

    driver    EngineRoster ── Routing 7 ──► EnginePool    collector
                           ◄── PoolStatus ─               number 7 is in force

A routing record is the whole truth, not a change: a pool that has missed some records knows everything from
the last one. Records are numbered, and the last number wins in whatever order they arrive.
"""

import msgspec

from slipstream.rollout.engine.connection import EngineAddress


class ServingEngine(msgspec.Struct, array_like=True, frozen=True):
    """One engine that serves."""

    address: EngineAddress
    life: int
    """Number that tells the starts of this server apart: a later start has a larger one. A late report of
    the loss of one start does not condemn the next."""
    doubted: int | None = None
    """First version whose weights are not verified yet on this engine; None: they all are."""


class Routing(msgspec.Struct, array_like=True, frozen=True):
    """A routing record."""

    number: int
    """From 1; a larger number is newer, also across restarts of the driver."""
    version: int
    """Policy version that every engine of the record holds."""
    held: bool
    """Send no request: the engines are to be idle, or stand still."""
    limit: int
    """Largest number of ``generate`` calls that this collector runs at one time."""
    engines: tuple[ServingEngine, ...] = ()
    """In the order in which this collector prefers them when they are equally loaded."""
    judge: tuple[EngineAddress, ...] = ()
    """The judge's own engines that serve, for the judge processes of a collector."""


class LostEngine(msgspec.Struct, array_like=True, frozen=True):
    """An engine that a pool has put out of use."""

    name: str
    life: int
    reason: str


class Suspect(msgspec.Struct, array_like=True, frozen=True):
    """A request of a client that ran on an engine when that was lost: it may have been the reason."""

    name: str
    life: int
    request: str
    """The id of the request, and the name of its key."""


class PoolStatus(msgspec.Struct, array_like=True, frozen=True):
    """State of one pool. Numbers of tokens and of requests count from the start of its process."""

    number: int = 0
    """Number of the routing record that is in force; 0 before the first one."""
    in_use: int = 0
    """Number of ``generate`` calls that run."""
    running: int = 0
    """Number of requests that engines of the record run."""
    tokens_generated: int = 0
    tokens_continued: int = 0
    requests_resent: int = 0
    lost: tuple[LostEngine, ...] = ()
    """Engines of the record that are out of use. Repeated until a record shows that the driver knows."""
    suspects: tuple[Suspect, ...] = ()
    """The latest of them, in their order."""
