"""What engines hold after a publication that its trainer has not survived."""

import asyncio
from typing import Any

from slipstream.backend.driver.weights.interrupted import InterruptedUpdates, Stock
from slipstream.backend.simulate import clock
from slipstream.rollout.engine.client import EngineAddress, EngineError, EngineLost, Malformed


class Engine:
    """A server with or without an update under way."""

    def __init__(self, *, begun: bool = False, version: int = 3, error: Exception | None = None) -> None:
        self.begun, self.version, self.error = begun, version, error
        self.is_paused = True

    async def __aenter__(self) -> "Engine":
        return self

    async def __aexit__(self, *exc: object) -> None: ...

    async def end_update(self) -> None:
        if self.error is not None:
            raise self.error
        if not self.begun:
            raise EngineError("no weight-update session is open")
        self.begun = False

    async def weight_version(self) -> int:
        return self.version

    async def resume(self) -> None:
        self.is_paused = False


def ended(engines: dict[str, Engine], *, resumes: bool = True) -> Stock:
    def connect(address: EngineAddress) -> Any:
        return engines[address.name]

    updates = InterruptedUpdates(resumes=resumes, timeout_s=0.2, connect=connect)
    addresses = [EngineAddress(name, "", 1, 100, 100, 5) for name in engines]
    return clock.run(updates.ended(3, addresses))


def test_an_engine_that_nothing_has_reached_goes_on():
    engines = {"a": Engine()}
    assert ended(engines) == Stock()
    assert not engines["a"].is_paused


def test_an_engine_that_stands_still_for_the_trainers_turn_is_not_resumed_here():
    engines = {"a": Engine()}
    assert ended(engines, resumes=False) == Stock()
    assert engines["a"].is_paused


def test_an_engine_with_a_part_or_all_of_the_new_weights_does_not():
    engines = {"part": Engine(begun=True), "whole": Engine(version=4)}
    stock = ended(engines)
    assert stock.outdated.keys() == engines.keys()
    assert "version 4" in stock.outdated["whole"]
    assert all(engine.is_paused for engine in engines.values())
    assert not engines["part"].begun, "else the next update could not begin"


def test_an_engine_that_does_not_answer_well_has_failed():
    class Stuck(Engine):
        async def end_update(self) -> None:
            await asyncio.sleep(60)

    engines = {
        "stuck": Stuck(),
        "gone": Engine(error=EngineLost("no reply")),
        "broken": Engine(error=Malformed("HTTP 500")),
    }
    stock = ended(engines)
    assert stock.failed.keys() == engines.keys() and not stock.outdated
    assert "no answer in 0.2 s" in stock.failed["stuck"]
