"""Frames of a stream: how a process of ours and its owner say something to each other over a socket.

    u64 length of the content, little-endian | content

Both sides know what the content is. Nothing in it is unpickled, so that code of others cannot make an owner
run code. Children import this module: keep it light.
"""

import socket
import struct

LENGTH = struct.Struct("<Q")

LONGEST_CONTENT = 1 << 32
"""Bytes of the longest content. A process that announces a longer one is not answering in frames."""


class FrameTooLong(ValueError):
    """Bytes that no process of ours sends by itself: code of others has written into its connection."""


def framed(content: bytes) -> bytes:
    """Return the frame of a content."""
    return LENGTH.pack(len(content)) + content


def receive(connection: socket.socket) -> bytes | None:
    """Wait for the content of the next frame. None: the connection has ended."""
    head = _receive(connection, LENGTH.size)
    return None if head is None else _receive(connection, LENGTH.unpack(head)[0])


def _receive(connection: socket.socket, length: int) -> bytes | None:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return bytes(data)


class FrameReader:
    """Splits a stream of bytes into the contents of frames."""

    def __init__(self, longest: int = LONGEST_CONTENT) -> None:
        """``longest``: bytes that a content may have."""
        self._longest = longest
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the contents that ``data`` completes. Raises FrameTooLong."""
        buffer = self._buffer
        buffer += data
        contents: list[bytes] = []
        start = 0
        while len(buffer) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(buffer, start)
            if length > self._longest:
                raise FrameTooLong(f"a frame of {length} bytes, expected at most {self._longest}")
            end = start + LENGTH.size + length
            if len(buffer) < end:
                break
            contents.append(bytes(buffer[start + LENGTH.size : end]))
            start = end
        if start:
            del buffer[:start]
        return contents
