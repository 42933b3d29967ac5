"""Asked to end: the gentle way first, then at once, then nothing more."""

import asyncio
import os
import signal
import threading

import pytest

from slipstream.backend.driver.loops.job_end import CLEAN_UP_S, JobEnd
from slipstream.backend.driver.loops.stop import JobEnds, Stop, Stopped


class Silent:
    def __init__(self) -> None:
        self.phases: list[str] = []

    def phase(self, text: str) -> None:
        self.phases.append(text)


def stop(after_s: float | None = None) -> tuple[Stop, list[str]]:
    progress = Silent()
    job = None if after_s is None else JobEnd(after_s + CLEAN_UP_S, 0.0, 0.0)
    return Stop(progress, job), progress.phases  # type: ignore[arg-type]


def test_the_innermost_way_comes_first_and_each_is_used_once():
    asked, phases = stop()
    done = []
    with asked.by("at once", lambda: done.append("outer")), asked.by("gently", lambda: done.append("inner")):
        assert not asked.asked
        for _ in range(4):
            asked.ask()
    assert done == ["inner", "outer"]
    assert phases == ["gently", "at once"]
    assert asked.asked


def test_a_way_is_gone_behind_its_context():
    asked, _ = stop()
    done = []
    with asked.by("at once", lambda: done.append("outer")):
        with asked.by("gently", lambda: done.append("inner")):
            pass
        asked.ask()
    asked.ask()
    assert done == ["outer"]


def test_signals_ask_only_inside():
    asked, _ = stop()
    before = signal.getsignal(signal.SIGTERM)

    async def main() -> None:
        with asked.on_signals(), asked.by("at once", lambda: None):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)

    asyncio.run(main())
    assert asked.asked
    assert signal.getsignal(signal.SIGTERM) == before


def test_work_that_must_not_go_on_ends_with_the_error_that_another_thread_has_found():
    asked, _ = stop()
    steps = []

    async def work() -> None:
        threading.Thread(target=asked.fail, args=(RuntimeError("fenced"),)).start()
        try:
            await asyncio.sleep(60)
        finally:
            steps.append("cleaned up")

    async def main() -> None:
        await asked.run(work())

    with pytest.raises(RuntimeError, match="fenced"):
        asyncio.run(main())
    assert steps == ["cleaned up"]
    assert not asked.asked
    asked.fail(RuntimeError("too late"))


@pytest.mark.parametrize("after_s", [0.0, 0.02])
def test_a_run_whose_job_ends_soon_asks_itself_to_end_the_gentle_way(after_s):
    asked, phases = stop(after_s)

    async def work() -> str:
        gently = asyncio.Event()
        with asked.by("gently", gently.set):
            await asyncio.wait_for(gently.wait(), 60)
        return "saved"

    assert asyncio.run(asked.run(work())) == "saved"
    assert phases == ["the time limit of the job is near", "gently"]


def test_a_run_that_was_asked_before_is_not_hurried_by_the_end_of_its_job():
    asked, phases = stop(0.02)

    async def work() -> None:
        with asked.by("gently", lambda: None):
            asked.ask()
            await asyncio.sleep(0.1)

    asyncio.run(asked.run(work()))
    assert phases == ["gently"]


def test_the_end_of_a_job_asks_nothing_of_a_run_that_is_over():
    asked, phases = stop(0.02)

    async def main() -> None:
        await asked.run(asyncio.sleep(0))
        await asyncio.sleep(0.1)

    asyncio.run(main())
    assert not phases and not asked.asked


def test_slurms_warning_of_an_end_that_the_run_knows_does_not_cut_the_last_step_short():
    asked, phases = stop(after_s=0.0)

    async def work() -> None:
        with asked.by("gently", lambda: None):
            while not asked.asked:
                await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            assert phases[1:] == ["gently"]
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)

    with pytest.raises(Stopped):
        asyncio.run(asked.run(work()))
    assert phases[1:] == ["gently", "stopping"]


@pytest.mark.parametrize("measured", ["step_done", "checkpoint_done"])
def test_a_step_that_takes_longer_than_expected_brings_the_end_of_a_run_forward(measured: str):
    progress = Silent()
    asked = Stop(progress, JobEnd(1000.0 + CLEAN_UP_S, 900.0, 900.0))  # type: ignore[arg-type]
    ended = asyncio.Event()

    async def work() -> None:
        with asked.by("gently", ended.set):
            await asyncio.sleep(0)
            assert not asked.asked
            getattr(asked, measured)(900.0)
            await asyncio.wait_for(ended.wait(), 60)
        raise Stopped

    with pytest.raises(JobEnds):
        asyncio.run(asked.run(work()))
    assert progress.phases == ["the time limit of the job is near", "gently"]


def test_a_run_that_ends_for_its_job_is_told_apart_from_one_that_its_user_stops():
    async def work(asked: Stop) -> None:
        ended = asyncio.Event()
        with asked.by("gently", ended.set):
            await asyncio.wait_for(ended.wait(), 60)
        raise Stopped

    ends, _ = stop(after_s=0.0)
    with pytest.raises(JobEnds):
        asyncio.run(ends.run(work(ends)))
    stopped, _ = stop(after_s=1000.0)

    async def stopped_by_its_user() -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        await stopped.run(work(stopped))

    with pytest.raises(Stopped) as error:
        asyncio.run(stopped_by_its_user())
    assert not isinstance(error.value, JobEnds)
