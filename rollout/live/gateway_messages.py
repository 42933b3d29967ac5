"""Messages between a gateway and the driver.

    gateway ──► driver    GatewayUp: who it is, the entries of its journal in their order, its status
    driver ──► gateway    GatewayDown: which entries it has, which of them are durable, the engines

Messages travel over one WebSocket, in the frames of ``system.frames``; the payload are the chunks of all
entries, in their order. Unlike a collector, a gateway goes on without the connection, and comes back:

    hello: entries up to 90 ─────►
                                  ◄───── welcome: up to 70 are here, up to 65 are durable
    71 ... 90 ───────────────────►
                                  ◄───── up to 84 are durable

An entry is sent until it is acknowledged, in every connection at most once, and acknowledged when the ledger
has it on disk. The driver takes numbers in their order only, so that each counts exactly once.
"""

import zlib

import msgspec

from slipstream.rollout.engine.routing import PoolStatus, Routing
from slipstream.rollout.ledger.storage.database import crc_of
from slipstream.rollout.system.frames import U32, Natural, decode_key

STATUS_EVERY_S = 1.0
"""Longest time between two messages of a gateway."""

FRAME_BYTES = 512 * 2**10
"""Bytes of entries in a frame, about. The driver decodes a frame at one go, in a few milliseconds."""

WINDOW_BYTES = 16 * 2**20
"""Bytes of entries that a gateway may have sent without acknowledgement. More wait in its journal."""


class Hello(msgspec.Struct, array_like=True):
    """The first words of a gateway."""

    identity: str
    """Name of its journal, which no other journal ever has."""
    last: Natural
    """Number of the journal's last durable entry."""
    acknowledged: Natural
    """Entries up to this number may be gone from the journal."""


class EntryHeader(msgspec.Struct, array_like=True, gc=False):
    """One entry of a journal."""

    kind: Natural
    """Place in ``turn_entries.KINDS``."""
    data: bytes
    """The encoded entry."""
    size: U32
    """Bytes of its chunk in the payload of the frame; 0: none."""
    crc: U32
    """CRC-32 from the journal."""


class GatewayStatus(msgspec.Struct, array_like=True):
    """State of a gateway."""

    pool: PoolStatus
    last: Natural = 0
    """Number of the journal's last entry."""
    acknowledged: Natural = 0


class GatewayUp(msgspec.Struct, array_like=True, gc=False):
    """A message of a gateway."""

    hello: Hello | None = None
    """In the first message only."""
    first: Natural = 0
    """Number of the first of the entries."""
    entries: list[EntryHeader] = []
    status: GatewayStatus | None = None


class GatewayDown(msgspec.Struct, array_like=True, gc=False):
    """A message of the driver."""

    welcome: Natural | None = None
    """In the first message only: entries up to this number are here."""
    durable: Natural = 0
    """Entries up to this number are acknowledged."""
    routing: Routing | None = None
    rewards: list[tuple[Natural, str]] = []
    """Numbers of rewards that were taken, and what has become of each (``live_turns``)."""


GATEWAY_UP = msgspec.msgpack.Decoder(GatewayUp)
GATEWAY_DOWN = msgspec.msgpack.Decoder(GatewayDown, dec_hook=decode_key)


def crc_of_entry(number: int, kind: int, data: bytes | memoryview, chunk: bytes | memoryview) -> int:
    """Return the checksum that an entry carries in its journal and on its way."""
    return zlib.crc32(chunk, zlib.crc32(data, crc_of(number, kind)))
