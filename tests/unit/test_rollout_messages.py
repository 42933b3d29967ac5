"""Messages between driver and collectors: they come back, and other frames are refused by name."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout.collection.messages import (
    DOWN,
    FAILED,
    JUDGED,
    PIECE,
    UP,
    Assignment,
    Down,
    Evaluated,
    Event,
    FailedAttempt,
    GroupVerdict,
    PriorSample,
    Question,
    Status,
    Up,
)
from slipstream.rollout.engine.connection import EngineAddress
from slipstream.rollout.engine.routing import LostEngine, PoolStatus, Routing, ServingEngine
from slipstream.rollout.system.frames import LONGEST_NOTE, MalformedFrame, as_note, pack, split
from slipstream.rollout.system.key import Key
from slipstream.rollout.tokens.record import PieceHeader, encode
from slipstream.rollout.tokens.trajectory import Prompt
from tests.tries import tries

NUMBERS = st.integers(0, 2**40)
TEXTS = st.text(max_size=9)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=5,
)
RAW = st.builds(
    lambda call, end: msgspec.Raw(encode(PieceHeader(call, b"digest", ((0, end),)))), NUMBERS, NUMBERS
)
U32 = st.integers(0, 2**32 - 1)
EVENTS = st.builds(
    Event, NUMBERS, NUMBERS, NUMBERS, st.integers(PIECE, JUDGED), RAW, base=NUMBERS, size=U32, crc=U32
)
LOST = st.builds(LostEngine, TEXTS, NUMBERS, TEXTS)
POOLS = st.builds(PoolStatus, *[NUMBERS] * 6, lost=st.lists(LOST, max_size=2).map(tuple))
UPS = st.builds(
    Up,
    events=st.lists(EVENTS, max_size=3),
    verdicts=st.lists(st.builds(GroupVerdict, NUMBERS, NUMBERS, st.integers(0, FAILED), TEXTS), max_size=2),
    released=NUMBERS,
    failed=st.lists(st.builds(FailedAttempt, NUMBERS, NUMBERS, TEXTS), max_size=2),
    evaluated=st.lists(
        st.builds(Evaluated, NUMBERS, st.none() | st.floats(allow_nan=False), NUMBERS, TEXTS), max_size=2
    ),
    status=st.none() | st.builds(Status, POOLS, NUMBERS, st.floats(0, 1e9)),
    fatal=TEXTS,
)
PROMPTS = st.builds(Prompt, NUMBERS, TEXTS, JSON, st.dictionaries(TEXTS, JSON, max_size=2))
PRIOR = st.builds(
    PriorSample, NUMBERS, st.integers(PIECE, JUDGED), RAW, st.lists(st.tuples(U32, RAW), max_size=3)
)
ADDRESSES = st.builds(
    EngineAddress, TEXTS, TEXTS, *[NUMBERS] * 3, timeout_s=st.floats(0, 99), key=TEXTS.map(Key)
)
ROUTINGS = st.builds(
    Routing,
    NUMBERS,
    NUMBERS,
    st.booleans(),
    NUMBERS,
    st.lists(st.builds(ServingEngine, ADDRESSES, NUMBERS, st.none() | NUMBERS), max_size=2).map(tuple),
)
DOWNS = st.builds(
    Down,
    assignments=st.lists(
        st.builds(Assignment, NUMBERS, NUMBERS, NUMBERS, PROMPTS, st.lists(PRIOR, max_size=2)), max_size=2
    ),
    cancelled=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=2),
    questions=st.lists(st.builds(Question, NUMBERS, PROMPTS), max_size=2),
    withdrawn=st.lists(NUMBERS, max_size=2),
    routing=st.none() | ROUTINGS,
)


def plain(value):
    """Everything as lists and dictionaries, in which ``Raw`` is its bytes, to be compared by value."""
    if isinstance(value, msgspec.Raw):
        return bytes(value)
    if isinstance(value, msgspec.Struct):
        return [plain(each) for each in msgspec.structs.astuple(value)]
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


@given(st.tuples(UPS, st.just(UP)) | st.tuples(DOWNS, st.just(DOWN)), st.lists(st.binary(), max_size=3))
def test_a_message_and_its_chunks_come_back(sent, chunks):
    message, decoder = sent
    received, payload = split(pack(message, chunks), decoder)
    assert plain(received) == plain(message)
    assert payload == b"".join(chunks)


def test_the_keys_of_engines_arrive_as_keys():
    """A key that arrives as a plain text would be shown by the next log or error that holds it."""
    address = EngineAddress("engine", "http://x", 1, 9, 9, 9.0, key=Key("secret"))
    sent = Down(routing=Routing(1, 0, False, 1, (ServingEngine(address, 1),)))
    received, _ = split(pack(sent, ()), DOWN)
    assert received.routing is not None
    key = received.routing.engines[0].address.key
    assert (str(key), type(key)) == ("secret", Key)
    assert "secret" not in repr(received)


def test_messages_do_not_share_their_lists():
    first, second = Up(), Up()
    first.events.append(Event(0, 0, 0, PIECE))
    assert not second.events


# ---- frames that nobody sends

FRAME = pack(
    Up([Event(1, 2, 3, PIECE, msgspec.Raw(b"\x91\x00"), 4, 5, 6)], status=Status(PoolStatus(), 1, 2)),
    [b"12345"],
)


@tries(100)
@given(st.data(), st.sampled_from([UP, DOWN]))
def test_a_damaged_frame_is_refused_or_read_but_raises_nothing_else(data, decoder):
    frame = bytearray(FRAME)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(frame)))
        frame[place : place + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    try:
        message, payload = split(bytes(frame), decoder)
    except MalformedFrame:
        return
    assert isinstance(message, Up | Down)
    assert len(payload) <= len(frame)


def framed(header: bytes) -> bytes:
    return struct.pack("<I", len(header)) + header


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x01\x00",
        struct.pack("<I", 2**32 - 1) + b"\x90",
        framed(b""),
        framed(b"\x91" * 100_000 + b"\xc0"),
        framed(b"\x91\x91" + b"\x95\x01\x02\x03\x00" + b"\x91" * 100_000 + b"\xc0"),
        framed(b"\x91\x91\x94\x01\x02\x00\xa1\xff"),
        framed(b"\x92\x90\x91\x94\x01\x02\x00\xa1\xff"),
        framed(msgspec.msgpack.encode([[[1, 2, 3, PIECE, None, -1]]])),
        framed(msgspec.msgpack.encode([[[1, 2, 3, PIECE, None, 0, -1]]])),
        framed(msgspec.msgpack.encode([[[1, 2, 3, PIECE, None, 0, 2**32]]])),
        framed(msgspec.msgpack.encode([[[1, 2, 3, PIECE, None, 0, 0, 2**32]]])),
        framed(msgspec.msgpack.encode([[[1, 2, -1, PIECE]]])),
        framed(msgspec.msgpack.encode([[[1, 2, 3, JUDGED + 1]]])),
        framed(msgspec.msgpack.encode([[[1, 2, 3, -1]]])),
        framed(msgspec.msgpack.encode([[], [[1, 2, FAILED + 1]]])),
        framed(msgspec.msgpack.encode([[], [[1, 2, -1]]])),
        framed(msgspec.msgpack.encode([[], [], -1])),
    ],
)
def test_frames_that_no_collector_sends_are_refused(frame):
    with pytest.raises(MalformedFrame, match=f"a frame of {len(frame)} bytes"):
        split(frame, UP)


# ---- texts of user code


@given(st.text(st.characters(categories=None), max_size=3 * LONGEST_NOTE))
def test_any_text_becomes_a_note_that_can_be_sent_and_keeps_both_ends(text):
    note = as_note(text)
    received, _ = split(pack(Up(fatal=note), ()), UP)
    assert received.fatal == note
    assert len(note) < 10 * LONGEST_NOTE
    if len(text) <= LONGEST_NOTE and text.isprintable():
        assert note == text


def test_a_long_note_says_how_much_is_left_out():
    note = as_note("a" * LONGEST_NOTE + "b" * LONGEST_NOTE)
    assert note.startswith("a" * 9)
    assert note.endswith("b" * 9)
    assert f"[... {LONGEST_NOTE} characters left out ...]" in note
    assert as_note("a\ud800b") == "a\\ud800b"
