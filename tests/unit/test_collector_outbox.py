"""The outbox: everything arrives once and in order, in few frames of bounded size."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.backend.simulate import clock
from slipstream.rollout.collection.collector import outbox as module
from slipstream.rollout.collection.collector.outbox import (
    FLUSH_S,
    PIECES_S,
    STATUS_EVERY_S,
    UNSENT_BYTES,
    Outbox,
)
from slipstream.rollout.collection.messages import ANSWERED, FAILED, JUDGED, PIECE, TRAIN, Up
from slipstream.rollout.tokens.record import PieceHeader, decode_header
from slipstream.rollout.tokens.trajectory import Finish, TrajectoryHeader
from tests.tries import tries
from tests.unit.collecting import STATUS

HEADER = TrajectoryHeader(((0, True, 3),), Finish.STOP)
JUDGED_HEADER = TrajectoryHeader(((0, True, 3),), Finish.STOP, reward=0.5)
PIECE_HEADER = PieceHeader(0, b"", ((0, 1),))


class Connection:
    """Takes messages, each ``takes_s`` seconds long."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.takes_s = takes_s
        self.messages: list[tuple[float, Up, list[bytes]]] = []

    async def send(self, message: Up, chunks: Sequence[bytes]) -> None:
        self.messages.append((asyncio.get_running_loop().time(), message, list(chunks)))
        await asyncio.sleep(self.takes_s)


def sent(act, connection: Connection, for_s: float = 10.0) -> list[tuple[float, Up, list[bytes]]]:
    """Let ``act`` use an outbox, and return what it has sent."""

    async def main() -> None:
        outbox = Outbox()
        sending = asyncio.create_task(outbox.run(connection.send, lambda: STATUS))
        await act(outbox)
        await asyncio.sleep(for_s)
        sending.cancel()
        await asyncio.wait({sending})
        assert outbox._bytes == 0

    clock.run(main())
    return connection.messages


def test_what_happens_within_two_milliseconds_is_one_message():
    async def act(outbox: Outbox) -> None:
        for sample in range(3):
            outbox.piece(1, 2, sample, 0, PIECE_HEADER, b"abc")
            await asyncio.sleep(FLUSH_S / 4)
        outbox.ended(1, 2, FAILED, "why")
        await asyncio.sleep(FLUSH_S * 2)
        outbox.released()

    (_, first, chunks), (_, second, _), *_ = sent(act, Connection())
    assert [event.sample for event in first.events] == [0, 1, 2]
    assert b"".join(chunks) == b"abcabcabc"
    assert [(verdict.verdict, verdict.note) for verdict in first.verdicts] == [(FAILED, "why")]
    assert (second.released, second.events) == (1, [])


def test_pieces_wait_for_others_but_never_for_long():
    async def act(outbox: Outbox) -> None:
        for base in range(12):
            outbox.piece(1, 2, 0, base, PIECE_HEADER, b"a")
            await asyncio.sleep(PIECES_S / 4)

    messages = [(at, len(message.events)) for at, message, _ in sent(act, Connection()) if message.events]
    assert [events for _, events in messages] == [5, 5, 2]
    assert messages[0][0] == pytest.approx(PIECES_S + FLUSH_S)


def test_what_somebody_waits_for_takes_the_pieces_before_it_along_at_once():
    async def act(outbox: Outbox) -> None:
        outbox.piece(1, 2, 0, 0, PIECE_HEADER, b"a")
        outbox.answered(1, 2, 0, 1, HEADER, b"b")

    at, message, _ = sent(act, Connection())[0]
    assert (at, [event.kind for event in message.events]) == (pytest.approx(FLUSH_S), [PIECE, ANSWERED])


def test_the_driver_hears_of_a_collector_every_second():
    async def nothing(outbox: Outbox) -> None:
        pass

    messages = sent(nothing, Connection(), for_s=10.5)
    assert [at for at, _, _ in messages] == pytest.approx([STATUS_EVERY_S * n for n in range(1, 11)])
    assert all(message.status == STATUS for _, message, _ in messages)


def test_a_reward_that_comes_at_once_makes_one_event_with_its_trajectory():
    async def act(outbox: Outbox) -> None:
        outbox.answered(1, 2, 0, 0, HEADER, b"a")
        outbox.answered(1, 2, 1, 0, HEADER, b"b")
        outbox.judged(1, 2, 0, JUDGED_HEADER)
        await asyncio.sleep(FLUSH_S * 2)
        outbox.judged(1, 2, 1, JUDGED_HEADER)

    messages = sent(act, Connection())
    events = [event for _, message, _ in messages for event in message.events]
    assert [(event.sample, event.kind) for event in events] == [(0, JUDGED), (1, ANSWERED), (1, JUDGED)]
    assert [decode_header(event.header).reward for event in events] == [0.5, None, 0.5]
    assert [event.size for event in events] == [1, 1, 0]


def test_texts_of_user_code_can_be_sent():
    async def act(outbox: Outbox) -> None:
        outbox.attempt_failed(1, 1, "\ud800" * 9999)
        outbox.ended(1, 2, FAILED, "\ud800")
        outbox.evaluation_failed(3, "\ud800")
        outbox.cannot_go_on("\ud800")

    (_, message, _), *_ = sent(act, Connection())
    texts = message.failed[0].error, message.verdicts[0].note, message.evaluated[0].note, message.fatal
    assert all(text.encode() for text in texts)


def test_new_episodes_wait_while_too_much_waits_for_the_connection():
    waited: list[float] = []

    async def act(outbox: Outbox) -> None:
        began = asyncio.get_running_loop().time()
        await outbox.room()
        outbox.answered(1, 2, 0, 0, HEADER, bytes(UNSENT_BYTES))
        await outbox.room()
        outbox.piece(1, 2, 1, 0, PIECE_HEADER, b"a")
        await outbox.room()
        waited.append(asyncio.get_running_loop().time() - began)

    sent(act, Connection(takes_s=7.0), for_s=60)
    assert waited == pytest.approx([7.0 + FLUSH_S])


def test_a_connection_that_is_gone_ends_the_sending():
    class Gone(Connection):
        async def send(self, message, chunks):
            raise ConnectionResetError("gone")

    async def main() -> None:
        outbox = Outbox()
        outbox.released()
        with pytest.raises(ConnectionResetError):
            await outbox.run(Gone().send, lambda: STATUS)

    clock.run(main())


ACTS = st.lists(
    st.tuples(st.sampled_from(["piece", "answered", "judged", "ended", "wait"]), st.integers(1, 40)),
    max_size=40,
)


@tries(33)
@given(ACTS, st.sampled_from([0.0, 0.5]))
def test_everything_arrives_once_in_order_and_in_frames_of_bounded_size(acts, takes_s):
    expected: list[tuple[str, int, bytes]] = []
    """What is said of each sample: ("piece" or "answered", its number, its chunk), and ("ended", ...)."""
    rewarded: set[int] = set()

    async def act(outbox: Outbox) -> None:
        unjudged: list[int] = []
        for number, (kind, size) in enumerate(acts):
            chunk = bytes([number]) * size
            if kind == "piece":
                outbox.piece(1, 2, number, 0, PIECE_HEADER, chunk)
            elif kind == "answered":
                outbox.answered(1, 2, number, 0, HEADER, chunk)
                unjudged.append(number)
            elif kind == "ended":
                outbox.ended(number, 2, TRAIN)
                chunk = b""
            elif kind == "judged" and unjudged:
                rewarded.add(unjudged[-1])
                outbox.judged(1, 2, unjudged.pop(), JUDGED_HEADER)
                continue
            else:
                await asyncio.sleep(size / 1000)
                continue
            expected.append((kind, number, chunk))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FRAME_BYTES", 50)
        messages = sent(act, Connection(takes_s), for_s=60)
    arrived: list[tuple[str, int, bytes]] = []
    rewards: list[int] = []
    for _, message, chunks in messages:
        payload = b"".join(chunks)
        assert len(payload) < 50 + 40
        for event in message.events:
            chunk, payload = payload[: event.size], payload[event.size :]
            if chunk:
                arrived.append(("piece" if event.kind == PIECE else "answered", event.sample, chunk))
            if event.kind == JUDGED:
                rewards.append(event.sample)
        assert not payload
        arrived += [("ended", verdict.group, b"") for verdict in message.verdicts]
    # A frame's verdicts stand behind its events: they may have come before some of these, but never after.
    assert [each for each in arrived if each[0] != "ended"] == [e for e in expected if e[0] != "ended"]
    assert [each for each in arrived if each[0] == "ended"] == [e for e in expected if e[0] == "ended"]
    for number, each in enumerate(expected):
        if each[0] == "ended":
            behind = arrived[arrived.index(each) :]
            assert not [e for e in expected[:number] if e[0] != "ended" and e in behind]
    assert sorted(rewards) == sorted(rewarded)
