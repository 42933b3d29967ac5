"""Frames: how two of our processes say something to each other over one connection.

    u32 length of the header | header, msgpack | payload: bytes that the header describes, in its order

A frame is one message of a WebSocket. Each side says something at least every KEEPALIVE_S seconds, so that
the other side notices when a node or a network is gone; the end of a process closes the connection at once.
(Pings of the WebSocket would not do: they are not read while a side reads nothing, and a side slows the other
one down by reading nothing.)
"""

import struct
from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec

from slipstream.rollout.system.key import Key

SILENCE_S = 120.0
"""Seconds after which a connection has ended on which nothing was heard. A side whose event loop is busy for
seconds must not be taken for dead."""

KEEPALIVE_S = 10.0
"""Longest time between two messages of a side that listens."""

LONGEST_FRAME = 2**31
"""Largest number of bytes of a frame."""

LONGEST_NOTE = 4000
"""Characters of a text about an error. The middle of a longer one is left out."""

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of a decoder that is given bytes which are no message of its type."""

Natural = Annotated[int, msgspec.Meta(ge=0)]
U32 = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]

Message = TypeVar("Message", bound=msgspec.Struct)

_LENGTH = struct.Struct("<I")


class MalformedFrame(ValueError):
    """A frame that no process of this version sends."""


def _encode_key(value: object) -> str:
    if isinstance(value, Key):
        return str(value)
    raise NotImplementedError(f"a message cannot hold {type(value).__name__}")


def decode_key(kind: type, value: object) -> object:
    """Turn the text of an engine's key into a ``Key``: the ``dec_hook`` of messages with routing records."""
    return Key(value) if kind is Key else value


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_key)


def pack(message: msgspec.Struct, payload: Sequence[bytes]) -> bytes:
    """Return the frame of a message and of its payload."""
    header = _encoder.encode(message)
    return b"".join((_LENGTH.pack(len(header)), header, *payload))


def split(frame: bytes, decoder: msgspec.msgpack.Decoder[Message]) -> tuple[Message, memoryview]:
    """Return the message of a frame, and its payload. Raises MalformedFrame."""
    view = memoryview(frame)
    try:
        (length,) = _LENGTH.unpack_from(frame)
        end = _LENGTH.size + length
        if end > len(frame):
            raise MalformedFrame(f"a frame of {len(frame)} bytes, whose header ends at byte {end}")
        return decoder.decode(view[_LENGTH.size : end]), view[end:]
    except (struct.error, *UNREADABLE) as error:
        raise MalformedFrame(f"a frame of {len(frame)} bytes: {error}") from error


def as_note(text: str) -> str:
    """Return a text of user code as a message may hold it: of bounded length, and without lone surrogates,
    which UTF-8 does not have.
    """
    if len(text) > LONGEST_NOTE:
        head = LONGEST_NOTE // 2
        text = f"{text[:head]}\n[... {len(text) - 2 * head} characters left out ...]\n{text[-head:]}"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
