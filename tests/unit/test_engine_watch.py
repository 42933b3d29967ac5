"""A server is watched: what counts as its silence, and what does not."""

import asyncio

from slipstream.backend.simulate import clock
from slipstream.rollout.engine.client import EngineAddress, EngineLost
from slipstream.rollout.engine.supervisor import unwell

TIMEOUT_S = 8.0


class Server:
    """Answers with each of ``answers`` in turn, after so many seconds; then it is well for good."""

    address = EngineAddress("engine", "", 1, 1, 1, timeout_s=600, answer_timeout_s=TIMEOUT_S)

    def __init__(self, *answers: tuple[bool, float], schedulers: tuple[float, ...] = ()) -> None:
        """``schedulers``: seconds after which they answer each question, or 600: never."""
        self._answers = list(answers)
        self._schedulers = list(schedulers)
        self.asked: list[float] = []

    async def healthy(self) -> bool:
        self.asked.append(asyncio.get_running_loop().time())
        is_well, seconds = self._answers.pop(0) if self._answers else (True, 0.0)
        await asyncio.sleep(seconds)
        return is_well

    async def respond(self) -> None:
        seconds = self._schedulers.pop(0) if self._schedulers else 0.0
        await asyncio.sleep(seconds)
        if seconds >= self.address.timeout_s:
            raise EngineLost("no reply")


def watched(server: Server, seconds: float, busy_s: float = 0.0) -> str | None:
    """Watch a server for some time. Return why it is not well; None: it is."""

    async def watch() -> str | None:
        try:
            async with asyncio.timeout(seconds):
                return await unwell(server, busy_s=busy_s)
        except TimeoutError:
            return None

    return clock.run(watch())


def test_a_server_that_is_well_is_asked_again_and_again():
    server = Server()
    assert watched(server, 9) is None
    assert server.asked == [2, 4, 6, 8]


def test_a_server_that_stands_still_is_noticed_when_its_time_is_over():
    server = Server((True, 1), (False, TIMEOUT_S))
    said = watched(server, 100)
    assert said is not None
    assert said.startswith("it does not say within 8 s that it is well (asked at ")
    assert server.asked == [2, 5]


def test_a_server_that_refuses_is_noticed_at_once():
    assert watched(Server((False, 0)), 3) is not None


def test_a_process_that_has_stood_still_itself_asks_again():
    """It was stopped for a minute: its time-outs are over before it has read the answer."""
    server = Server((False, 60))
    assert watched(server, 65) is None
    assert server.asked == [2, 64]


def test_schedulers_that_hang_behind_a_server_that_is_well_are_noticed():
    server = Server(schedulers=(3.0, 600.0))
    assert watched(server, 700) is None
    said = watched(Server(schedulers=(3.0, 600.0)), 800)
    assert said is not None
    assert said.startswith("its schedulers have not answered for 600 s, since ")


def test_an_update_may_keep_schedulers_from_answering_for_its_own_time():
    assert watched(Server(schedulers=(600.0, 100.0)), 5000, busy_s=1000) is None
    said = watched(Server(schedulers=(600.0, 600.0)), 5000, busy_s=1000)
    assert said is not None
    assert said.startswith("its schedulers have not answered for 1000 s, since ")


def test_a_process_that_has_stood_still_itself_knows_nothing_of_schedulers():
    assert watched(Server(schedulers=(4000.0,)), 9000) is None
