"""The account of a run that was killed while users talked finds what is lost, doubled and trained twice."""

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from benchmarks.live_users import Answered
from slipstream.rollout.gateway.journal import TurnJournal
from slipstream.rollout.ledger.storage.database import LEDGER
from slipstream.rollout.tokens.turn_entries import SessionEnd
from tests.crash.live import Account, account
from tests.unit.test_live_turns import Run, Talk, number, raw

SPANS = ((0, 9),)


class Lives:
    """A run whose users have talked, and what they say that they have got."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = TurnJournal.open(folder / "gateway" / "gateway-0.sqlite", "gateway-0")
        self.talk = Talk(self.journal.identity)
        self.answers: list[Answered] = []

    def says(self, session: str, said: str, text: str, score: float | None = None) -> None:
        turn = self.talk.say(session=session, spans=SPANS, score=score)
        self.talk.entries[turn - 1] = msgspec.structs.replace(
            self.talk.entries[turn - 1],
            messages=raw(json.dumps([{"role": "user", "content": said}])),
            answer=raw(json.dumps({"role": "assistant", "content": text})),
        )
        self.got(session, said, text)

    def got(self, session: str, said: str, text: str, tokens: int = 9) -> None:
        self.answers.append(Answered(session, said, text, tokens, 0.0, 0.0, 0.0))

    def ends(self, heard: int | None = None, steps: int = 0) -> None:
        """Write everything down, of which the driver hears the first ``heard`` entries, and train."""

        async def end() -> None:
            await self.journal.durable(self.journal.append(self.talk.entries)[-1])
            run = Run(self.folder, bound=9)
            run.live.take(self.journal.identity, 1, self.talk.entries[:heard])
            await run.ledger.flushed()
            await asyncio.sleep(0)
            for _ in range(steps):
                await run.step()
            self.journal.acknowledge(heard or self.journal.last)
            self.journal.close()
            run.ledger.close()

        asyncio.run(end())

    def account(self) -> Account:
        return account(self.folder, self.answers)


@pytest.fixture
def lives(tmp_path) -> Lives:
    lives = Lives(tmp_path)
    lives.says("a", "one", "first")
    lives.says("a", "two", "second")
    lives.says("b", "one", "first")
    return lives


def test_what_was_acknowledged_is_found(lives):
    lives.ends()
    found = lives.account()
    assert found.is_clean, found
    assert (found.acknowledged, found.recorded, found.trained) == (3, 3, 0)


@pytest.mark.parametrize(
    ("session", "said", "text", "tokens"),
    [
        ("c", "one", "first", 9),
        ("a", "three", "third", 9),
        ("a", "two", "another", 9),
        ("a", "two", "second", 8),
        ("a", "one", "first", 9),
    ],
    ids=["session", "turn", "answer", "tokens", "number"],
)
def test_what_is_not_there_is_lost(lives, session, said, text, tokens):
    lives.ends()
    lives.got(session, said, text, tokens)
    found = lives.account()
    assert found.lost == [f"{session}: {said!r} -> {text!r}"]
    assert not found.is_clean


def test_an_answer_without_content_is_known_by_its_session_and_its_length(lives):
    lives.says("over", "one", "only")
    lives.talk.add(SessionEnd("over", "key"))
    lives.ends()
    with closing(sqlite3.connect(lives.folder / LEDGER)) as ledger, ledger:
        changed = ledger.execute("UPDATE turns SET gone = 1 WHERE id = ?", (number(7),))
        assert changed.rowcount == 1
    with closing(sqlite3.connect(lives.journal.path)) as journal, journal:
        journal.execute("DELETE FROM entries WHERE session = 'over'")
    assert lives.account().is_clean
    lives.got("over", "two", "more")
    assert lives.account().lost == ["over: 'two' -> 'more'"]


def test_what_only_the_journal_has_is_not_lost_but_the_ledger_lacks_it(lives):
    lives.ends(heard=4)
    found = lives.account()
    assert (found.lost, found.recorded) == ([], 2)
    assert found.discrepancies == ["gateway-0.sqlite ends with entry 6, the ledger with 4"]


def test_an_answer_that_is_recorded_twice_is_found(lives):
    lives.says("a", "two", "second")
    lives.answers.pop()
    lives.ends()
    found = lives.account()
    assert len(found.doubled) == 1
    assert "'two', 'second'): 2 times" in found.doubled[0]


def test_a_turn_that_was_trained_twice_is_found(lives):
    lives.says("c", "one", "liked", score=1.0)
    lives.says("d", "one", "liked too", score=1.0)
    lives.ends(steps=1)
    liked = number(7)
    with closing(sqlite3.connect(lives.folder / LEDGER)) as ledger, ledger:
        trained = dict(ledger.execute("SELECT group_id, version FROM trainings"))
        assert set(trained) == {liked, number(10)}
        ledger.execute(
            "INSERT INTO versions (version, parent, epoch, copy, published) VALUES (2, 1, 0, 0, 1)"
        )
        ledger.execute(
            "INSERT INTO trainings SELECT 2, group_id, head_lag, tokens, masked, versions FROM trainings "
            "WHERE group_id = ?",
            (liked,),
        )
    found = lives.account()
    assert found.trained == 2
    assert found.trained_twice == [f"turn {liked}: 2 times"]
