"""Reads the output of a command on one of its streams, up to a limit."""

import os

_PART = 1 << 16
_MOST_READS = 64
"""Reads of what is left in a pipe behind the end of a command, in case something still writes into it."""


class Output:
    """The pipe of a stream, and what has come through it."""

    def __init__(self, longest: int) -> None:
        """``longest``: bytes that are kept."""
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._longest = longest
        self._text = bytearray()
        self.is_full = False
        """True if more has come than is kept."""

    def read(self) -> bool:
        """Take what has come. Return True if the stream goes on."""
        try:
            data = os.read(self.reader, _PART)
        except BlockingIOError:
            return True
        self.is_full = self.is_full or len(self._text) + len(data) > self._longest
        self._text += data[: self._longest - len(self._text)]
        return bool(data)

    def finish(self) -> bool:
        """Take the rest, and close the pipe. Return True if anything was cut."""
        for _ in range(_MOST_READS):
            before = len(self._text)
            if self.is_full or not self.read() or len(self._text) == before:
                break
        os.close(self.reader)
        return self.is_full

    def text(self) -> str:
        """Return the text. What is no UTF-8 is replaced, and a cut is said."""
        text = self._text.decode(errors="replace")
        return f"{text}\n[cut after {self._longest} bytes]" if self.is_full else text
