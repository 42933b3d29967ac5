"""Tokens of weights in doubt reach nobody before the verdict, and tokens that were told are kept."""

import asyncio
import random
from itertools import pairwise

import pytest

from slipstream.backend.simulate import clock
from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.engine.client import Aborted, EngineError, EngineLost, Silent
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.tokens.trajectory import Finish
from tests.unit.driven_pool import (
    SAMPLING,
    Driver,
    FakeEngine,
    asked,
    mixed,
    part,
    settle,
    start,
    watched,
    whole,
)


def test_a_completion_with_tokens_of_a_version_in_doubt_waits_for_the_verdict():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine)
        [task] = start(driver)
        await settle()
        driver.doubt(5)
        engine.end(mixed(4, 5))
        await settle()
        assert not task.done()
        assert driver.pool.status().running == 0, "who drains the engines does not wait for it"
        driver.trust(engine)
        assert await task == mixed(4, 5)

    clock.run(main())


def test_a_completion_of_older_versions_waits_for_nothing():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine)
        [task] = start(driver)
        await settle()
        driver.doubt(5)
        engine.end(mixed(3, 4))
        assert await task == mixed(3, 4)

    clock.run(main())


def test_a_verdict_may_come_with_the_doubt_about_the_next_version():
    """The record that says that 5 is trusted may be missed, and the next one says that 6 is in doubt."""

    async def main():
        engine = FakeEngine()
        driver = Driver(engine, max_concurrent=2)
        driver.doubt(5)
        older, newer = start(driver, 2)
        await settle()
        engine.end(mixed(4, 5))
        engine.end(mixed(5, 6))
        await settle()
        assert not older.done()
        driver.doubt(6)
        assert await older == mixed(4, 5)
        await settle()
        assert not newer.done()
        driver.trust(engine)
        assert await newer == mixed(5, 6)

    clock.run(main())


def test_tokens_of_an_engine_that_is_trusted_are_not_in_doubt_because_of_the_next_engine():
    async def main():
        first, second = FakeEngine("first"), FakeEngine("second")
        driver = Driver(first)
        [task] = start(driver)
        await settle()
        driver.add(second)
        driver.doubt(5)
        driver.trust(first)
        first.end(Aborted("stop", attested=True), mixed(5, 5, finish=Finish.PARTIAL))
        driver.remove(first)
        await settle()
        assert second.asked == [asked([7, 1, 2], 2)]
        second.end(whole(9, version=4))
        assert (await task).tokens == (1, 2, 9)

    clock.run(main())


def test_tokens_of_a_condemned_engine_from_the_version_in_doubt_are_sampled_again_elsewhere():
    async def main():
        bad, good = FakeEngine("bad"), FakeEngine("good")
        driver = Driver(bad)
        [task] = start(driver)
        await settle()
        driver.add(good)
        driver.doubt(5)
        bad.end(mixed(4, 4, 5))
        await settle()
        driver.trust(good)
        driver.remove(bad)
        await settle()
        assert driver.lost == []
        assert good.asked == [asked([7, 1, 2], 2)], "the two tokens of version 4 are kept"
        good.end(whole(9, version=5))
        completion = await task
        assert completion.tokens == (1, 2, 9)
        assert [span.version for span in completion.spans] == [4, 5]
        assert driver.pool.tokens_generated == 3

    clock.run(main())


def test_a_request_that_was_only_sampled_in_doubt_begins_again():
    async def main():
        bad, good = FakeEngine("bad"), FakeEngine("good")
        driver = Driver(bad)
        driver.doubt(5)
        [task] = start(driver)
        await settle()
        bad.end(mixed(5, 5))
        await settle()
        driver.remove(bad)
        driver.add(good)
        await settle()
        assert good.asked == [asked([7], 4)]
        good.end(whole(3, version=5))
        assert (await task).tokens == (3,)

    clock.run(main())


def test_growth_in_doubt_is_told_to_nobody_until_the_verdict_and_then_at_once():
    """Users see an update as a pause: it must not last until after the next update."""

    async def main():
        engine = FakeEngine()
        driver = Driver(engine)
        task, seen = watched(driver)
        await settle()
        engine.grow(part(1, version=4))
        driver.doubt(5)
        engine.grow(part(1, 2, version=4))  # perhaps newer than it says
        assert [len(so_far.tokens) for so_far in seen] == [1]
        driver.trust(engine)
        assert [len(so_far.tokens) for so_far in seen] == [1, 2]
        driver.doubt(6)
        engine.grow(part(1, 2, 3, version=4))
        driver.doubt(7)
        assert [len(so_far.tokens) for so_far in seen] == [1, 2], "7 may be in use already"
        driver.trust(engine)
        engine.grow(part(1, 2, 3, 4, version=4))
        assert [len(so_far.tokens) for so_far in seen] == [1, 2, 3, 4]
        engine.end(mixed(4, 5, 5))
        await task

    clock.run(main())


def test_growth_of_older_versions_than_that_in_doubt_is_told_at_once():
    """From the doubt to the update lies the preparation, or the end of all requests: users do not wait."""

    async def main():
        engine = FakeEngine()
        driver = Driver(engine)
        task, seen = watched(driver)
        await settle()
        engine.grow(part(1, version=4), newest=4)
        driver.doubt(5)
        engine.grow(part(1, 2, version=4), newest=4)
        assert [len(so_far.tokens) for so_far in seen] == [1, 2]
        engine.grow(part(1, 2, 3, version=4), newest=5)
        assert [len(so_far.tokens) for so_far in seen] == [1, 2]
        driver.remove(engine)
        other = FakeEngine("other")
        driver.add(other)
        await settle()
        assert other.asked[0]["ids"] == [7, 1, 2]
        driver.doubt(6)
        other.grow(part(3, version=4))
        assert [len(so_far.tokens) for so_far in seen] == [1, 2], "it is not known how new it is"
        other.end(mixed(5, 6))
        driver.trust(other)
        await task

    clock.run(main())


@pytest.mark.parametrize("cut", [EngineLost, Silent, Aborted])
def test_of_a_reply_that_is_cut_in_doubt_without_its_versions_only_what_was_told_before_is_kept(cut):
    """Until the engine has said the versions of the tokens, any of them may be of the version in doubt."""

    async def main():
        bad, good = FakeEngine("bad"), FakeEngine("good")
        driver = Driver(bad)
        task, _ = watched(driver)
        await settle()
        bad.grow(part(1, version=4))
        driver.doubt(5)
        bad.grow(part(1, 2, version=4))
        driver.add(good)
        bad.end(cut("x"), part(1, 2, 3, version=4))
        await settle()
        assert [asked["ids"] for asked in bad.asked[1:] + good.asked] == [[7, 1]]
        (good if good.running else bad).end(whole(9, version=4))
        assert (await task).tokens == (1, 9)

    clock.run(main())


@pytest.mark.parametrize("end", ["cancelled", "refused", "cancelled before the verdict"])
def test_whoever_gives_a_request_up_in_doubt_is_left_with_what_it_was_told(end):
    """It may be written down, and be continued after a restart."""

    async def main():
        engine = FakeEngine()
        driver = Driver(engine)
        completion = GrowingCompletion()
        task = asyncio.create_task(driver.pool.generate([7], SAMPLING, completion))
        await settle()
        engine.grow(part(1, version=4))
        driver.doubt(5)
        engine.grow(part(1, 2, version=4))
        if end == "refused":
            engine.end(EngineError("no"))
        elif end == "cancelled":
            task.cancel()
        else:
            engine.end(mixed(4, 5, 5))
            await settle()
            task.cancel()
        await asyncio.wait({task})
        assert completion.completion() == part(1, version=4)

    clock.run(main())


def test_a_completion_aborted_in_doubt_keeps_its_tokens_of_older_versions():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine)
        [task] = start(driver)
        await settle()
        driver.doubt(5)
        engine.end(Aborted("paused", attested=True), mixed(4, 4, 5, finish=Finish.PARTIAL))
        await settle()
        assert engine.asked[1]["ids"] == [7, 1, 2]
        driver.trust(engine)
        engine.end(whole(9, version=5))
        assert (await task).tokens == (1, 2, 9)

    clock.run(main())


def test_a_completion_of_an_engine_that_was_given_up_without_a_verdict_is_not_believed():
    """It missed a version: what it says of its tokens may be as wrong as its weights."""

    async def main():
        bad, good = FakeEngine("bad"), FakeEngine("good")
        bad.ignores_close = True
        driver = Driver(bad)
        [task] = start(driver)
        await settle()
        driver.doubt(5)
        driver.remove(bad)
        driver.add(good)
        bad.end(mixed(4, 5))
        await settle()
        assert good.asked == [asked([7, 1], 3)]
        good.end(whole(9, version=5))
        await task

    clock.run(main())


def test_without_a_verdict_in_time_the_engine_is_given_up():
    async def main():
        bad, good = FakeEngine("bad"), FakeEngine("good")
        driver = Driver(bad, wait_timeout_s=0.1)
        [task] = start(driver)
        await settle()
        driver.doubt(5)
        bad.end(mixed(5))
        driver.add(good)
        await asyncio.sleep(0.2)
        assert driver.lost == [("bad", "no verdict on its weights in 0.1 s")]
        good.end(whole(9, version=5))
        assert (await task).tokens == (9,)

    clock.run(main())


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_no_token_that_was_told_is_taken_back_and_none_of_wrong_weights_is_told(seed):
    """Tokens name the version, and whether its weights were right: wrong ones are odd."""
    chance = random.Random(seed)

    async def main():
        driver = Driver(max_concurrent=1)
        task, seen = watched(driver, sampling=SamplingConfig(max_new_tokens=60))
        version, engine, held, wrong, history = 0, None, 0, False, []
        for _ in range(400):
            await settle()
            if task.done():
                break
            if engine is None:
                engine, held, wrong, history = FakeEngine(f"engine-{version}"), version, False, []
                driver.add(engine)
                await settle()
            doubted = driver._serving[engine].doubted
            event = chance.choice(
                ["grow", "grow", "grow", "end", "abort", "silence", "lose", "doubt", "update", "judge"]
            )
            if event in ("grow", "end", "abort") and engine.running:
                history += [(2 * held + wrong, held)] * chance.randint(1, 3)
            exact = GrowingCompletion()
            for token, v in history:
                exact.add(v, [token], [-float(token)])
            bounds = part(*(token for token, _ in history), version=history[0][1] if history else 0)
            if event == "doubt" and doubted is None:
                version += 1
                driver.doubt(version)
            elif event == "update" and held < version:
                held, wrong = version, chance.random() < 0.5
            elif ((event == "judge" and held == version) or event == "lose") and doubted is not None:
                driver.remove(engine) if wrong or event == "lose" else driver.trust(engine)
                engine = None if wrong or event == "lose" else engine
            elif not engine.running:
                continue
            elif event == "grow":
                engine.grow(bounds, newest=chance.choice([None, held]))
            elif event == "end":
                exact.finish = Finish.STOP if chance.random() < 0.2 else Finish.LENGTH
                engine.end(exact.completion())
            elif event in ("abort", "silence"):
                attested = event == "abort" and chance.random() < 0.7
                error = Silent("x") if event == "silence" else Aborted("x", attested=attested)
                engine.end(error, exact.completion() if attested else bounds)
            if engine is not None and not engine.running:
                history = []
        task.cancel()
        await asyncio.wait({task})
        told = [so_far.tokens for so_far in seen]
        final = () if task.cancelled() or task.exception() else task.result().tokens
        assert all(token % 2 == 0 for tokens in [*told, final] for token in tokens)
        for before, after in pairwise([*told, *([final] if final else [])]):
            assert after[: len(before)] == before

    clock.run(main())


def test_out_of_touch_with_the_driver_tokens_of_versions_that_no_record_has_told_of_are_held_back():
    async def main():
        engine = FakeEngine()
        driver = Driver(engine, max_concurrent=2)
        older, seen = watched(driver)
        newer, _ = watched(driver)
        await settle()
        engine.grow(part(1))
        assert [each.tokens for each in seen] == [(1,)]
        driver.pool.lose_touch()
        engine.grow(mixed(0, 0, finish=Finish.PARTIAL))
        assert len(seen) == 1, "while it grows, versions are lower bounds"
        engine.end(mixed(0, 0, 0))
        assert await older == mixed(0, 0, 0)
        engine.end(mixed(0, 1))
        await settle()
        assert not newer.done()
        driver.send()
        assert await newer == mixed(0, 1)

    clock.run(main())
