"""The commands of the trainer's head to the trainer's ranks in shard-to-shard publishing.

Commands are numbered from the first publication on and lie in the head's store, where each rank reads one
after another. Imports no torch.
"""

import msgspec

from slipstream.bridge.shards.sends import EngineSeat


class Compile(msgspec.Struct, tag="compile", frozen=True):
    """Find out what to send to an engine, and leave each of its ranks the list of its messages."""

    engine: str
    tables: tuple[str, ...]
    """Digest of the table of each rank of the engine."""
    seat: EngineSeat


class Connect(msgspec.Struct, tag="connect", frozen=True):
    """Join the engine's process group, unless this rank is none of its senders."""

    engine: str
    senders: tuple[int, ...]
    ranks: int


class Send(msgspec.Struct, tag="send", frozen=True):
    """Send the present weights to an engine."""

    engine: str
    number: int
    """Number of the transfer."""
    digests: bool


class Drop(msgspec.Struct, tag="drop", frozen=True):
    """Leave the engine's group, if need be in the middle of a transfer. The engine does not come back."""

    engine: str


class End(msgspec.Struct, tag="end", frozen=True):
    """The publication has ended. The head waits for the answers: its store may close afterwards."""


Command = Compile | Connect | Send | Drop | End


def command_key(number: int) -> str:
    return f"command/{number}"


def done_key(number: int, rank: int) -> str:
    """Return the key of a rank's answer to a command."""
    return f"done/{number}/{rank}"
