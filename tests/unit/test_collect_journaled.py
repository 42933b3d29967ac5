"""What an episode's requests leave in the ledger, and what they take from it."""

import asyncio
from dataclasses import dataclass, field

import pytest

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.collect.generator import JOURNAL_EVERY_S, JournaledGenerator
from slipstream.rollout.collect.journal import NoJournal
from slipstream.rollout.ledger.database import LedgerError
from slipstream.rollout.ledger.records import digest
from slipstream.rollout.ledger.recovery import StoredCompletion
from slipstream.rollout.trajectory import Completion, Finish, Span

SAMPLING = SamplingConfig()
ASKED = [7, 8]


def answer(*lengths: int, finish: Finish = Finish.PARTIAL) -> Completion:
    """``lengths[v]`` tokens of version v."""
    spans, at = [], 0
    for version, length in enumerate(lengths):
        spans.append(Span(version, at, at + length))
        at += length
    return Completion((1,) * at, (-1.0,) * at, tuple(spans), finish)


@dataclass
class Pages(NoJournal):
    """A journal that keeps what it was given: (sample, call, tokens, done)."""

    rows: list = field(default_factory=list)
    error: LedgerError | None = None

    def partial(self, group_id, sample, call, asked, answer, *, done):
        if self.error:
            raise self.error
        self.rows.append((sample, call, len(answer.tokens), done))


@dataclass
class Engines:
    """Report ``parts`` one after the other, ``every_s`` apart, then answer with the last, or hang."""

    parts: list
    every_s: float = 0.0
    hangs: bool = False
    now_s: float = 0.0
    prefixes: list = field(default_factory=list)

    async def generate(self, input_ids, sampling, *, prefix=None, progress=None):
        self.prefixes.append(prefix)
        for part in self.parts[: None if self.hangs else -1]:
            self.now_s += self.every_s
            progress(part)
        if self.hangs:
            await asyncio.Event().wait()
        return self.parts[-1]


def generator(engines: Engines, pages: Pages, prior=None, **more) -> JournaledGenerator:
    return JournaledGenerator(engines, pages, 5, 1, prior or {}, clock=lambda: engines.now_s, **more)


async def cancelled(episode: JournaledGenerator) -> None:
    task = asyncio.create_task(episode.generate(ASKED, SAMPLING))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_an_answer_is_written_when_it_is_complete():
    pages, engines = Pages(), Engines([answer(3, finish=Finish.STOP)])
    asyncio.run(generator(engines, pages).generate(ASKED, SAMPLING))
    assert pages.rows == [(1, 0, 3, True)]


def test_a_part_is_written_at_its_first_token_at_each_version_change_and_after_two_seconds():
    parts = [answer(1), answer(2), answer(3), answer(3, 1), answer(3, 2), answer(3, 3)]
    pages, engines = Pages(), Engines(parts, every_s=JOURNAL_EVERY_S / 2)
    asyncio.run(generator(engines, pages).generate(ASKED, SAMPLING))
    assert pages.rows == [(1, 0, 1, False), (1, 0, 3, False), (1, 0, 4, False), (1, 0, 6, True)]


def test_a_cancelled_answer_is_written_as_far_as_it_has_come():
    pages, engines = Pages(), Engines([answer(1), answer(64)], hangs=True)
    asyncio.run(cancelled(generator(engines, pages)))
    assert pages.rows == [(1, 0, 1, False), (1, 0, 64, False)]


def test_a_cancelled_answer_is_not_written_twice():
    pages, engines = Pages(), Engines([answer(1)], hangs=True)
    asyncio.run(cancelled(generator(engines, pages)))
    assert pages.rows == [(1, 0, 1, False)]


def test_nothing_is_written_about_a_group_that_has_ended():
    pages, engines = Pages(), Engines([answer(1), answer(64)], hangs=True)
    asyncio.run(cancelled(generator(engines, pages, is_wanted=lambda: False)))
    assert pages.rows == [(1, 0, 1, False)]


def test_a_cancellation_stays_one_when_the_ledger_cannot_be_written():
    class FailsLater(Pages):
        def partial(self, *args, **more):
            super().partial(*args, **more)
            self.error = LedgerError("disk full")

    asyncio.run(cancelled(generator(Engines([answer(1), answer(64)], hangs=True), FailsLater())))


def test_a_ledger_that_cannot_be_written_ends_the_episode():
    pages = Pages(error=LedgerError("disk full"))
    with pytest.raises(LedgerError, match="disk full"):
        asyncio.run(generator(Engines([answer(3)]), pages).generate(ASKED, SAMPLING))


def test_what_was_answered_before_is_answered_again_and_the_rest_is_continued():
    async def both(episode: JournaledGenerator) -> list[Completion]:
        return [await episode.generate(ASKED, SAMPLING), await episode.generate([9], SAMPLING)]

    first, half = answer(4, finish=Finish.STOP), answer(2)
    prior = {
        0: StoredCompletion(digest(ASKED), first, done=True),
        1: StoredCompletion(digest([9]), half, done=False),
    }
    pages, engines = Pages(), Engines([answer(2, 5, finish=Finish.STOP)])
    assert asyncio.run(both(generator(engines, pages, prior))) == [first, engines.parts[-1]]
    assert engines.prefixes == [half]
    assert pages.rows == [(1, 1, 7, True)]


def test_nothing_is_used_from_the_first_request_on_that_asks_for_something_else():
    async def both(episode: JournaledGenerator) -> None:
        await episode.generate([1, 2, 3], SAMPLING)
        await episode.generate([9], SAMPLING)

    done = answer(4, finish=Finish.STOP)
    prior = {
        0: StoredCompletion(digest(ASKED), done, done=True),
        1: StoredCompletion(digest([9]), done, done=True),
    }
    engines = Engines([done])
    asyncio.run(both(generator(engines, Pages(), prior)))
    assert engines.prefixes == [None, None]
