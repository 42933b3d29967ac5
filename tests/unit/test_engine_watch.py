"""A server is watched: what counts as its silence, and what does not."""

import asyncio

from slipstream.backend.simulate import clock
from slipstream.rollout.engine.client import EngineAddress
from slipstream.rollout.engine.supervisor import unwell

TIMEOUT_S = 8.0


class Server:
    """Answers with each of ``answers`` in turn, after so many seconds; then it is well for good."""

    address = EngineAddress("engine", "", 1, 1, 1, timeout_s=600, answer_timeout_s=TIMEOUT_S)

    def __init__(self, *answers: tuple[bool, float]) -> None:
        self._answers = list(answers)
        self.asked: list[float] = []

    async def healthy(self) -> bool:
        self.asked.append(asyncio.get_running_loop().time())
        is_well, seconds = self._answers.pop(0) if self._answers else (True, 0.0)
        await asyncio.sleep(seconds)
        return is_well


def watched(server: Server, seconds: float) -> str | None:
    """Watch a server for some time. Return why it is not well; None: it is."""

    async def watch() -> str | None:
        try:
            async with asyncio.timeout(seconds):
                return await unwell(server)
        except TimeoutError:
            return None

    return clock.run(watch())


def test_a_server_that_is_well_is_asked_again_and_again():
    server = Server()
    assert watched(server, 9) is None
    assert server.asked == [2, 4, 6, 8]


def test_a_server_that_stands_still_is_noticed_when_its_time_is_over():
    server = Server((True, 1), (False, TIMEOUT_S))
    assert watched(server, 100) == "it does not say within 8 s that it is well"
    assert server.asked == [2, 5]


def test_a_server_that_refuses_is_noticed_at_once():
    assert watched(Server((False, 0)), 3) is not None


def test_a_process_that_has_stood_still_itself_asks_again():
    """It was stopped for a minute: its time-outs are over before it has read the answer."""
    server = Server((False, 60))
    assert watched(server, 65) is None
    assert server.asked == [2, 64]
