"""The adjustable limit: never too many, nobody lost, first come first served."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.backend.simulate import clock
from slipstream.rollout.system.adjustable_limit import Limit
from tests.unit.driven_pool import settle


class Users:
    """Tasks that stay inside until told to leave."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.entered: list[int] = []
        self.tasks: list[asyncio.Task] = []
        self._leave: list[asyncio.Event] = []

    def start(self) -> None:
        number = len(self.tasks)
        self._leave.append(asyncio.Event())

        async def use() -> None:
            async with self.limit:
                self.entered.append(number)
                await self._leave[number].wait()

        self.tasks.append(asyncio.create_task(use()))

    def leave(self, number: int) -> None:
        self._leave[number].set()

    @property
    def inside(self) -> list[int]:
        return [number for number in self.entered if not self.tasks[number].done()]


def test_lowering_disturbs_nobody_and_raising_lets_in_who_waits():
    async def main():
        users = Users(Limit(3))
        for _ in range(6):
            users.start()
        await settle()
        assert users.inside == [0, 1, 2]
        users.limit.size = 1
        await settle()
        assert (users.inside, users.limit.inside) == ([0, 1, 2], 3)
        users.leave(0)
        users.leave(1)
        await settle()
        assert users.inside == [2], "two left, but one is the limit now"
        users.limit.size = 3
        await settle()
        assert users.inside == [2, 3, 4], "in the order in which they came"
        for number in range(6):
            users.leave(number)
        await asyncio.gather(*users.tasks)
        assert users.limit.inside == 0

    clock.run(main())


def test_the_limit_is_never_below_one():
    limit = Limit(0)
    assert limit.size == 1
    limit.size = -5
    assert limit.size == 1


@pytest.mark.parametrize("steps", range(4))
def test_who_is_cancelled_as_it_is_let_in_gives_its_place_to_the_next(steps):
    async def main():
        users = Users(Limit(1))
        for _ in range(3):
            users.start()
        await settle()
        users.leave(0)
        for _ in range(steps):
            await asyncio.sleep(0)
        users.tasks[1].cancel()
        await settle()
        assert (users.inside, users.limit.inside) == ([2], 1)
        users.leave(2)
        await users.tasks[2]
        assert users.limit.inside == 0

    clock.run(main())


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.just(("start",)),
            st.tuples(st.just("size"), st.integers(1, 4)),
            st.tuples(st.sampled_from(["leave", "cancel"]), st.integers(0, 30)),
            st.just(("settle",)),
        ),
        max_size=40,
    )
)
def test_whatever_happens_places_are_neither_lost_nor_given_twice(actions):
    async def main():
        users = Users(Limit(2))
        for action, *argument in actions:
            if action == "start":
                users.start()
            elif action == "size":
                users.limit.size = argument[0]
            elif action == "settle":
                await settle()
            elif users.tasks and action == "leave":
                users.leave(argument[0] % len(users.tasks))
            elif users.tasks:
                users.tasks[argument[0] % len(users.tasks)].cancel()
        await settle()
        waiting = [number for number, task in enumerate(users.tasks) if not task.done()]
        assert users.limit.inside == len(users.inside)
        assert len(users.inside) == len(waiting) or len(users.inside) >= users.limit.size
        for number in range(len(users.tasks)):
            users.leave(number)
        await asyncio.gather(*users.tasks, return_exceptions=True)
        assert users.limit.inside == 0

    clock.run(main())


def test_a_place_is_free_again_after_an_error():
    async def main():
        limit = Limit(1)
        with pytest.raises(KeyError):
            async with limit:
                raise KeyError
        async with asyncio.timeout(60), limit:
            pass

    clock.run(main())
