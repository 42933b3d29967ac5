"""Asked to end: the gentle way first, then at once, then nothing more."""

import asyncio
import os
import signal
import threading

import pytest

from slipstream.backend.driver.stop import Stop


class Silent:
    def __init__(self) -> None:
        self.phases: list[str] = []

    def phase(self, text: str) -> None:
        self.phases.append(text)


def stop() -> tuple[Stop, list[str]]:
    progress = Silent()
    return Stop(progress), progress.phases  # type: ignore[arg-type]


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
