"""Server-sent events: found however the bytes arrive."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout.engine.connection import events


def read(*pieces: bytes) -> list:
    async def feed():
        for piece in pieces:
            yield piece

    async def collect() -> list:
        return [event async for event in events(feed())]

    return asyncio.run(collect())


@given(
    st.lists(st.dictionaries(st.text(max_size=3), st.integers(-(2**63), 2**63 - 1)), max_size=5), st.data()
)
def test_events_are_found_however_the_bytes_arrive(sent, data):
    stream = (
        b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in sent) + b"data: [DONE]\n\n"
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert read(*pieces) == sent


@pytest.mark.parametrize("text", [b"<html>", b"data: {\n\n", b'{"a": 1', b"HTTP\n\n"])
def test_what_is_no_event_is_an_error(text):
    with pytest.raises(ValueError, match="not JSON"):
        read(text)
