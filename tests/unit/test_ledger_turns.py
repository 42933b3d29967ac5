"""The ledger of live users: each entry counts once, each turn ends once, and what is forgotten is gone."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from slipstream.rollout.control.core import Ticket
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.control.live_door import TurnEnd
from slipstream.rollout.ledger.audit.account import audit_ledger
from slipstream.rollout.ledger.reading.history import history_of
from slipstream.rollout.ledger.reading.turn_hints import StoredHint, hints_of
from slipstream.rollout.ledger.recovery import LEDGER, Recovered, open_ledger
from slipstream.rollout.ledger.rows.stored_turns import (
    CLIENT,
    JUDGE,
    NOT_NEEDED,
    KnownTurn,
    RecoveredTurns,
    Stage,
    TurnHead,
    VerdictRow,
    entry_of,
    gateway_of,
    named,
    session_of,
    turn_id,
)
from slipstream.rollout.ledger.storage.segments import FOLDER
from slipstream.rollout.ledger.writing.writer import Ledger, Training
from slipstream.rollout.tokens.record import encode_chunk, encode_scores
from slipstream.rollout.tokens.teacher import TeacherScores
from slipstream.rollout.tokens.trajectory import Finish
from tests.unit.test_ledger import nothing, query, ready_group, training
from tests.unit.test_ledger_audit import findings

SETTINGS = {"batch_size": 1, "n_samples": 2, "bound": 2}
KEY = named("key")
ALICE, BOB = (session_of(KEY, named(name)) for name in ("alice's session", "bob's session"))
SECRET = b'["my secret diary"]'
TOKENS = range(70_000, 70_004)


def in_ledger(folder: Path, act: Callable[[Ledger], Awaitable[None]], **state) -> Recovered:
    """Open, run ``act`` on the ledger, flush, close. Return what opening recovered."""
    ledger, recovered = open_ledger(folder, **(SETTINGS | state))

    async def run():
        await act(ledger)
        await ledger.flushed()

    try:
        asyncio.run(run())
    finally:
        ledger.close()
    return recovered


def number(entry: int, gateway: int = 1) -> int:
    return turn_id(gateway, entry)


NO_TOKENS = TurnHead(0, 0, (), Finish.STOP, 0.0)


def known(
    id_: int, session: int = ALICE, parent: KnownTurn | None = None, head: TurnHead = NO_TOKENS
) -> KnownTurn:
    return KnownTurn(id_, session, KEY, parent, head)


def add(
    ledger: Ledger,
    entry: int,
    *spans: tuple[int, int],
    session: int = ALICE,
    parent: int | None = None,
    end: TurnEnd | None = None,
    said: bytes = SECRET,
) -> int:
    """Record a turn with four tokens of context, and its entry."""
    spans = spans or ((0, 2),)
    sampled = sum(tokens for _, tokens in spans)
    head = TurnHead(0, len(TOKENS), spans, Finish.STOP, 12.5)
    chunk = encode_chunk(TOKENS, [7] * sampled, [-0.5] * sampled)
    id_ = number(entry)
    before = None if parent is None else known(number(parent), session)
    ledger.turns.turn(known(id_, session, before, head), chunk, said, end=end)
    ledger.turns.taken("gateway", entry)
    return id_


def add_ready(ledger: Ledger, entry: int, *spans: tuple[int, int], score: float = 1.0, **more) -> int:
    id_ = add(ledger, entry, *spans, **more)
    ledger.turns.followed(known(id_), b'["thanks"]')
    ledger.turns.judged(known(id_), VerdictRow(score, JUDGE))
    return id_


def trained_turn(id_: int, version: int = 0, tokens: int = 2, lag: int = 0) -> Training:
    return Training(id_, lag, tokens, 0, tokens, ((version, tokens),))


def states(folder: Path) -> dict[int, str]:
    return dict(query(folder, "SELECT id, state FROM turns"))


def read_states(folder: Path, live: RecoveredTurns) -> dict[int, str]:
    """The states of the turns that a restart has read, which agrees on those that have not ended."""
    found = {id_: state for id_, state in states(folder).items() if id_ in {turn.id for turn in live.turns}}
    assert {id_ for id_, state in found.items() if state in set(Stage)} == live.open
    return found


def payload_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((folder / FOLDER).iterdir()))


# ---- entries


def test_a_number_of_a_turn_names_its_entry_and_no_group():
    id_ = turn_id(3, 77)
    assert id_ < 0
    assert (gateway_of(id_), entry_of(id_)) == (3, 77)


def test_a_turn_and_the_number_of_its_entry_are_read_again(tmp_path):
    async def act(ledger):
        first = add(ledger, 1, (0, 2), (1, 3))
        ledger.turns.followed(known(first), b'["next"]')
        add(ledger, 3, parent=1)
        second = add(ledger, 4, session=BOB)
        ledger.turns.judged(known(second), VerdictRow(-0.5, CLIENT), hint="be kind")
        ledger.turns.session_ended(BOB)

    in_ledger(tmp_path, act)
    live = in_ledger(tmp_path, nothing).live
    assert [tuple(gateway) for gateway in live.gateways] == [(1, "gateway", 4)]
    first, second, third = live.turns
    assert read_states(tmp_path, live) == {first.id: "unjudged", second.id: "waiting", third.id: "ready"}
    assert first.head == TurnHead(0, 4, ((0, 2), (1, 3)), Finish.STOP, 12.5)
    assert (second.parent, second.session, second.key) == (first, ALICE, KEY)
    assert third.verdict == VerdictRow(-0.5, CLIENT)
    assert (first.has_followed, second.has_followed) == (True, False)
    assert live.ended_sessions == {BOB}
    assert live.counts == {"unjudged": 1, "waiting": 1, "ready": 1}


def test_hints_are_read_with_the_scores_that_they_explain_until_they_are_forgotten(tmp_path):
    async def act(ledger):
        add(ledger, 1)
        for entry, session, hint in [(2, ALICE, "shorter"), (3, BOB, "be kind"), (4, ALICE, None)]:
            ledger.turns.judged(
                known(add(ledger, entry, session=session)), VerdictRow(entry / 10, JUDGE), hint
            )

    in_ledger(tmp_path, act)
    alices = StoredHint("gateway", 2, "ready", 0.2, "shorter")
    assert list(hints_of(tmp_path)) == [alices, StoredHint("gateway", 3, "ready", 0.3, "be kind")]

    async def forget(ledger):
        ledger.turns.forget(named("bob's session"), None, number(5))
        ledger.turns.may_erase()

    in_ledger(tmp_path, forget)
    assert list(hints_of(tmp_path)) == [alices]


def test_gateways_keep_their_numbers(tmp_path):
    async def act(ledger):
        assert [ledger.turns.gateway(name) for name in ("a", "b", "a")] == [1, 2, 1]
        ledger.turns.taken("a", 3)
        ledger.turns.taken("b", 1)

    async def again(ledger):
        assert [ledger.turns.gateway(name) for name in ("b", "c", "a")] == [2, 3, 1]

    in_ledger(tmp_path, act)
    in_ledger(tmp_path, again)


def test_payload_is_read_before_and_after_it_is_on_disk(tmp_path):
    async def act(ledger):
        head = TurnHead(0, 4, ((0, 1),), Finish.STOP, 0.0)
        turn = known(number(1), head=head)
        ledger.turns.turn(turn, b"chunk", b"said")
        ledger.turns.taken("gateway", 1)
        assert (ledger.read(turn.chunk), ledger.read(turn.said)) == (b"chunk", b"said")
        await ledger.flushed()
        assert (ledger.read(turn.chunk), ledger.read(turn.said)) == (b"chunk", b"said")

    in_ledger(tmp_path, act)


def test_a_score_of_the_client_takes_the_place_of_the_judges(tmp_path):
    async def act(ledger):
        id_ = add_ready(ledger, 1, score=1.0)
        ledger.turns.judged(known(id_), VerdictRow(-1.0, CLIENT))

    in_ledger(tmp_path, act)
    [turn] = in_ledger(tmp_path, nothing).live.turns
    assert turn.verdict == VerdictRow(-1.0, CLIENT)


# ---- training


async def two_steps(ledger: Ledger) -> None:
    """Train a group and a turn in each of two steps."""
    for version, parent in ((1, 0), (2, 1)):
        id_ = add_ready(ledger, version, (parent, 2))
        ready_group(ledger, parent, [parent], parent)
        ledger.step_begins(version, parent, [parent, id_])
        ledger.published(version, [training(parent, [parent], 0), trained_turn(id_, parent)])


def test_a_turn_that_is_trained_by_a_step_which_is_lost_is_ready_again(tmp_path):
    in_ledger(tmp_path, two_steps)
    assert set(states(tmp_path).values()) == {"trained"}
    recovered = in_ledger(tmp_path, nothing, restored=1)
    assert read_states(tmp_path, recovered.live) == {
        number(1): "trained",
        number(2): "ready",
    }
    assert recovered.live.trained == [(KEY, 1.0)]
    assert not findings(tmp_path)


def test_watermarks_count_turns(tmp_path):
    marks = []

    async def act(ledger):
        await two_steps(ledger)
        marks.append(ledger.watermark())

    async def again(ledger):
        marks.append(ledger.watermark())

    in_ledger(tmp_path, act)
    in_ledger(tmp_path, again, restored=2)
    assert [mark.trained for mark in marks] == [4, 4]
    assert history_of(tmp_path).trained_by(2) == 4


def test_scores_of_trained_turns_are_read_again_in_the_order_of_their_training(tmp_path):
    async def act(ledger):
        for version, entries in ((1, (3, 2)), (2, (1,))):
            ids = [add_ready(ledger, entry, (0, 2), score=float(entry)) for entry in sorted(entries)]
            ledger.step_begins(version, version - 1, ids)
            ledger.published(version, [trained_turn(id_, 0, lag=version - 1) for id_ in ids])

    in_ledger(tmp_path, act, batch_size=0)
    assert [score for _, score in in_ledger(tmp_path, nothing, restored=2).live.trained] == [2.0, 3.0, 1.0]


def test_a_step_that_failed_names_its_turns_until_they_are_trained(tmp_path):
    async def act(ledger):
        ids = [add_ready(ledger, entry) for entry in (1, 2)]
        ledger.step_begins(1, 0, ids)
        ledger.step_failed(1, "killed")
        ledger.step_begins(2, 0, ids[1:])
        ledger.published(2, [trained_turn(ids[1])])

    async def quarantined(ledger):
        ledger.turns.ended(number(1), TurnEnd.FAILED, Loss.QUARANTINED, note="kills the trainer")

    in_ledger(tmp_path, act, batch_size=0)
    assert in_ledger(tmp_path, quarantined, restored=2, batch_size=0).failures == [(number(1),)]
    assert in_ledger(tmp_path, nothing, restored=2, batch_size=0).failures == []
    assert not findings(tmp_path)


# ---- what is forgotten, and what nobody needs


def test_a_forgotten_turn_leaves_nothing_and_never_comes_back(tmp_path):
    async def act(ledger):
        kept = add_ready(ledger, 1, session=BOB, said=b"kept")
        gone = add_ready(ledger, 2)
        ledger.step_begins(1, 0, [gone])
        ledger.published(1, [trained_turn(gone)])
        add(ledger, 3, parent=2)
        ledger.turns.forget(named("alice's session"), None, number(4))
        add(ledger, 5, said=b"anew")
        ledger.turns.may_erase()
        assert kept

    in_ledger(tmp_path, act, batch_size=0)
    data = payload_of(tmp_path)
    assert b"diary" not in data
    assert data.count(encode_chunk(TOKENS, [], [])[8:24]) == 2, "only those of turns that are kept"
    assert b"kept" in data
    assert b"anew" in data
    assert not findings(tmp_path)
    recovered = in_ledger(tmp_path, nothing, batch_size=0)
    assert read_states(tmp_path, recovered.live) == {
        number(1): "ready",
        number(2): "forgotten",
        number(3): "forgotten",
        number(5): "waiting",
    }, "its training is lost, and it is not trained again"


def test_a_turn_that_is_forgotten_in_training_is_trained_and_gone(tmp_path):
    async def act(ledger):
        id_ = add_ready(ledger, 1)
        ledger.step_begins(1, 0, [id_])
        ledger.turns.forget(None, KEY, number(2))
        await ledger.flushed()
        ledger.turns.taken("gateway", 2)
        await ledger.flushed()  # the thread tidies up between two commits
        assert b"diary" in payload_of(tmp_path), "the step may still read it"
        ledger.published(1, [trained_turn(id_)])
        ledger.turns.may_erase()

    in_ledger(tmp_path, act, batch_size=0)
    assert states(tmp_path) == {number(1): "trained"}
    assert b"diary" not in payload_of(tmp_path)
    assert not findings(tmp_path)


def test_a_restart_erases_what_was_forgotten_just_before_the_end(tmp_path, monkeypatch):
    async def act(ledger):
        add(ledger, 1)
        await ledger.flushed()
        ledger.turns.forget(named("alice's session"), KEY, number(2))

    in_ledger(tmp_path, act)
    assert b"diary" in payload_of(tmp_path)

    async def later(ledger):
        ledger.turns.taken("gateway", 2)

    in_ledger(tmp_path, later)
    assert b"diary" not in payload_of(tmp_path)
    assert not findings(tmp_path)


def test_the_payload_of_a_session_goes_when_nobody_needs_it(tmp_path):
    async def act(ledger):
        first = add_ready(ledger, 1)
        add(ledger, 2, parent=1, end=TurnEnd.SIDE)
        ledger.step_begins(1, 0, [first])
        ledger.published(1, [trained_turn(first)])
        ledger.turns.session_ended(ALICE)
        await ledger.flushed()
        kept.extend(query_open(ledger, "SELECT count(*) FROM sessions"))
        ledger.release(1)

    def query_open(ledger, sql):
        return ledger._store._connection.execute(sql).fetchone()

    kept: list[int] = []
    in_ledger(tmp_path, act, batch_size=0)
    assert kept == [1], "a restart may undo the training"
    assert query(tmp_path, "SELECT count(*) FROM sessions") == [(0,)]
    assert query(tmp_path, "SELECT gone FROM turns") == [(NOT_NEEDED,)] * 2
    assert in_ledger(tmp_path, nothing, restored=1, batch_size=0).live.turns == []
    assert not findings(tmp_path)


def test_a_closed_session_can_still_be_forgotten(tmp_path):
    async def act(ledger):
        add(ledger, 1, end=TurnEnd.SIDE)
        add(ledger, 2, session=BOB, said=b"kept")
        ledger.turns.session_ended(ALICE)
        await ledger.flushed()
        ledger.turns.forget(named("alice's session"), named("another key"), number(3))
        ledger.turns.may_erase()
        await ledger.flushed()
        assert b"diary" in payload_of(tmp_path), "it is a session of another key"
        ledger.turns.forget(named("alice's session"), KEY, number(4))
        ledger.turns.may_erase()

    in_ledger(tmp_path, act)
    assert b"diary" not in payload_of(tmp_path)
    assert states(tmp_path) == {number(1): "side", number(2): "waiting"}
    assert not findings(tmp_path)


def test_a_session_whose_name_is_used_again_is_open_again(tmp_path):
    async def act(ledger):
        ledger.turns.session_ended(ALICE)
        add(ledger, 1)
        await ledger.flushed()
        ledger.turns.session_ended(BOB)
        add(ledger, 2, session=BOB)

    in_ledger(tmp_path, act)
    assert in_ledger(tmp_path, nothing).live.ended_sessions == set()


def test_segments_are_dropped_behind_sessions_and_copied_around_the_open_ones(tmp_path):
    payloads = {}

    async def act(ledger):
        for entry in range(1, 200):
            session = named(f"session {entry}")
            head = TurnHead(0, 4, ((0, 1),), Finish.STOP, 0.0)
            chunk = encode_chunk(TOKENS, [entry], [-0.5]) * 20
            turn = known(number(entry), session, head=head)
            ledger.turns.turn(turn, chunk, b"said")
            ledger.turns.taken("gateway", entry)
            if entry % 20:
                ledger.turns.ended(number(entry), TurnEnd.FILTERED, Loss.FILTERED)
                ledger.turns.session_ended(session)
            else:
                payloads[entry] = turn, chunk
            await ledger.flushed()
        for turn, chunk in payloads.values():
            assert ledger.read(turn.chunk) == chunk
            assert ledger.read(turn.said) == b"said"

    in_ledger(tmp_path, act, segment_bytes=4096)
    assert len(list((tmp_path / FOLDER).iterdir())) < 12
    recovered = in_ledger(tmp_path, nothing, segment_bytes=4096)
    assert {entry_of(turn.id) for turn in recovered.live.turns if not turn.is_lost} == set(payloads)
    assert recovered.notes == []


# ---- damage


def test_a_turn_whose_tokens_are_damaged_fails_with_those_that_continue_it(tmp_path):
    async def act(ledger):
        add_ready(ledger, 1, said=b"one")
        add_ready(ledger, 2, parent=1, said=b"two")
        add_ready(ledger, 3, session=BOB, said=b"three")

    in_ledger(tmp_path, act)
    [path] = (tmp_path / FOLDER).iterdir()
    data = bytearray(path.read_bytes())
    data[data.index(encode_chunk(TOKENS, [7] * 2, [-0.5] * 2)) + 10] ^= 1
    path.write_bytes(data)
    recovered = in_ledger(tmp_path, nothing)
    assert read_states(tmp_path, recovered.live) == {
        number(1): "failed",
        number(2): "failed",
        number(3): "ready",
    }
    assert any("its bytes are damaged: 1 turns of live users are lost" in note for note in recovered.notes)
    assert not findings(tmp_path)


def test_a_turn_whose_teachers_scores_are_damaged_is_not_trained_without_them(tmp_path):
    encoded = encode_scores(TeacherScores(np.float32([-0.125, -0.25])))

    async def act(ledger):
        for entry in (1, 2):
            id_ = add(ledger, entry, session=entry)
            ledger.turns.judged(
                known(id_), VerdictRow(1.0, JUDGE, entry == 1), None, encoded if entry == 1 else b""
            )

    in_ledger(tmp_path, act)
    [path] = (tmp_path / FOLDER).iterdir()
    data = bytearray(path.read_bytes())
    data[data.index(encoded) + 17] ^= 1
    path.write_bytes(data)
    recovered = in_ledger(tmp_path, nothing)
    assert read_states(tmp_path, recovered.live) == {number(1): "failed", number(2): "ready"}
    assert not findings(tmp_path)


# ---- audit


@pytest.fixture
def folder(tmp_path):
    """A run without prompts, with a turn in each state, and one restart."""

    async def first_life(ledger):
        turns = [add_ready(ledger, entry, (0, 2)) for entry in (1, 2)]
        add(ledger, 3, parent=1)
        ledger.turns.followed(known(add(ledger, 4, session=BOB)), b"[]")
        for entry, end in enumerate((TurnEnd.SIDE, TurnEnd.CANCELLED), start=5):
            add(ledger, entry, session=BOB, end=end)
        ledger.step_begins(1, 0, turns[:1])
        ledger.published(1, [trained_turn(turns[0])])
        ledger.step_begins(2, 1, turns[1:])
        ledger.published(2, [trained_turn(turns[1], lag=1)])

    async def second_life(ledger):
        add_ready(ledger, 7, (2, 2))
        ledger.step_begins(3, 1, [number(2), number(7)])
        ledger.published(3, [trained_turn(number(2), lag=1), trained_turn(number(7), 2, lag=1)])
        old = add(ledger, 8, (0, 2))
        ledger.step_begins(4, 3, [add_ready(ledger, 9, (3, 2))])
        ledger.published(4, [trained_turn(number(9), 3)])
        ledger.turns.ended(old, TurnEnd.EXPIRED, Loss.STALE, version=4, lag=3)

    in_ledger(tmp_path, first_life, batch_size=0)
    in_ledger(tmp_path, second_life, restored=1, batch_size=0)
    return tmp_path


def test_the_audit_of_live_users_is_clean(folder):
    audit, lineage = audit_ledger(folder)
    assert audit.discrepancies == []
    assert audit.turns == {
        "cancelled": 1,
        "expired": 1,
        "side": 1,
        "trained": 4,
        "unjudged": 1,
        "waiting": 1,
    }
    assert lineage.trained_by(4) == 0, "groups only"


@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        (f"UPDATE turns SET state = 'ready', step = NULL WHERE id = {number(1)}", "not counted as trained"),
        (f"DELETE FROM trainings WHERE group_id = {number(7)}", "did not train the groups of their batch"),
        (f"UPDATE turns SET step = 4 WHERE id = {number(1)}", "by no step that led to the weights"),
        (
            f"UPDATE turns SET state = 'side', step = NULL WHERE id = {number(7)}",
            "never trained were trained",
        ),
        (f"UPDATE turns SET lag = 2 WHERE id = {number(8)}", "expired with a lag of 2, the tree has 3"),
        (f"UPDATE turns SET version = 1, lag = 1 WHERE id = {number(8)}", "within the bound of 2"),
        (f"UPDATE turns SET lag = NULL WHERE id = {number(8)}", "nothing says how old"),
        (f"UPDATE turns SET verdict = NULL WHERE id = {number(7)}", "without a score"),
        ("UPDATE gateways SET durable = 8", "no acknowledged entries"),
        (
            f"UPDATE turns SET parent = {number(4)} WHERE id = {number(3)}",
            "continue a turn of another session",
        ),
        ("DELETE FROM sessions", "in no session"),
        (f"DELETE FROM turns WHERE id = {number(3)}", "as turns, but it has 8"),
        (f"UPDATE turns SET sampled = 9 WHERE id = {number(3)}", "9 sampled tokens are recorded"),
        (f"UPDATE turns SET head = x'0102030405' WHERE id = {number(3)}", "cannot be read"),
        (f"UPDATE turns SET chunk = said WHERE id = {number(3)}", "cannot be read"),
        (f"UPDATE turns SET state = 'gone' WHERE id = {number(3)}", "a state that does not exist"),
    ],
)
def test_the_audit_finds_what_is_wrong(folder, statement, finding):
    connection = sqlite3.connect(folder / LEDGER)
    connection.execute(statement)
    connection.commit()
    connection.close()
    found = findings(folder)
    assert any(finding in each for each in found), found


def test_the_audit_finds_a_turn_that_was_trained_twice(tmp_path):
    async def act(ledger):
        id_ = add_ready(ledger, 1)
        for version in (1, 2):
            ledger.step_begins(version, version - 1, [id_])
            ledger.published(version, [trained_turn(id_, lag=version - 1)])

    in_ledger(tmp_path, act, batch_size=0)
    assert any("1 turns were trained twice" in each for each in findings(tmp_path))


def test_a_step_of_a_group_that_is_not_there_beside_turns_is_found(tmp_path):
    async def act(ledger):
        id_ = add_ready(ledger, 1)
        ledger.admitted(Ticket(0, 0), 0)
        ledger.step_begins(1, 0, [id_])
        ledger.published(1, [trained_turn(id_)])

    in_ledger(tmp_path, act)
    assert any("did not train 1 groups" in each for each in findings(tmp_path))
