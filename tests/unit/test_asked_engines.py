"""The engines that a judge process asks, the policy's and the judge's own: those that a question names."""

import asyncio

import pytest

from slipstream.rollout.engine.asked_engines import ModelEngines, ProcessEngines, ServingAddresses, encoded
from slipstream.rollout.engine.client import EngineAddress, EngineLost
from slipstream.rollout.engine.routing import Routing, ServingEngine
from slipstream.rollout.system.key import Key


def address(name: str, start: int = 1) -> EngineAddress:
    return EngineAddress(name, f"http://{name}:{start}", 1, 100, 100, 5.0, key=Key(f"key of {name} {start}"))


class Client:
    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


def test_policy_and_judge_are_told_apart_and_keep_their_keys():
    engines = ProcessEngines()
    policy, judge = (address("engine-0"), address("engine-1")), (address("judge-engine-0"),)
    engines.follow(encoded(policy, judge))
    assert (engines.policy.addresses, engines.judge.addresses) == (policy, judge)
    assert engines.judge.addresses[0].key == Key("key of judge-engine-0 1")
    engines.follow(encoded((), ()))
    assert engines.policy.addresses == engines.judge.addresses == ()


@pytest.mark.parametrize("asks_policy", [False, True])
def test_questions_name_the_engines_of_the_newest_routing_record(asks_policy):
    serving, engines = ServingAddresses(asks_policy=asks_policy), ProcessEngines()
    of_policy = (ServingEngine(address("engine-0"), 1),)
    serving.follow(Routing(2, 0, False, 1, of_policy, (address("judge-engine-0", 2),)))
    serving.follow(Routing(1, 0, False, 1, (), ()))
    engines.follow(serving.encoded)
    assert engines.judge.addresses == (address("judge-engine-0", 2),)
    assert engines.policy.addresses == ((address("engine-0"),) if asks_policy else ())


def test_an_engine_that_was_started_again_is_asked_under_its_new_address():
    async def main():
        made: list[Client] = []

        def connect(to: EngineAddress) -> Client:
            made.append(Client(to))
            return made[-1]

        engines = ModelEngines("the judge", connect)  # type: ignore[arg-type]
        with pytest.raises(EngineLost, match="no engine of the judge serves"):
            async with engines.least_loaded():
                pass
        engines.follow((address("a"), address("b")))
        async with engines.least_loaded(), engines.least_loaded():
            assert {client.address.name for client in made} == {"a", "b"}
            engines.follow((address("a", 2),))
        async with engines.least_loaded() as client:
            assert client.address == address("a", 2)
        await asyncio.sleep(0)
        assert [client.is_closed for client in made] == [True, True, False]

    asyncio.run(main())
