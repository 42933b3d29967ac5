"""Groups that are never trained on their way into the episode log: nothing waits, and what is left out is
said. What they hold, whatever happens, is checked by ``test_collect_assignments``.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from slipstream.backend.simulate import clock
from slipstream.rollout.collection.driver.assignments import Assignments
from slipstream.rollout.collection.driver.batches import Batches
from slipstream.rollout.collection.driver.gate import AdmissionGate
from slipstream.rollout.collection.driver.group_ledger import NoLedger
from slipstream.rollout.collection.driver.intake import Intake
from slipstream.rollout.collection.driver.lost_groups import (
    FLUSH_TIMEOUT_S,
    MOST_READ,
    MOST_WAITING,
    LostGroups,
)
from slipstream.rollout.collection.driver.questions import EvaluationTasks
from slipstream.rollout.collection.driver.server import LOST_BYTES, CollectorConnection
from slipstream.rollout.collection.messages import LostGroup, Question
from slipstream.rollout.control.consumption import OnStale, ReadyFirst
from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.ledger.episode_log.rows import is_chosen
from slipstream.rollout.prompts import PromptSet, PromptStream
from slipstream.rollout.tokens.record import REF
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Prompt, TrajectoryHeader
from tests.unit.collecting import ready_group
from tests.unit.doubles import Listener

REFS = REF.pack(1, 0, 4, 0)


class LostReads(NoLedger):
    """A ledger that has read what it is asked for at once."""

    def read_lost(self, refs, then) -> None:
        then([b"data"] * len(refs))


@dataclass
class Collector:
    takes: bool = True
    groups: list[LostGroup] = field(default_factory=list)
    flushes: list[int] = field(default_factory=list)

    def log_lost(self, group: LostGroup, chunks: Sequence[bytes]) -> bool:
        if self.takes:
            self.groups.append(group)
        return self.takes

    def flush(self, number: int) -> None:
        self.flushes.append(number)


class World:
    def __init__(self, share: float = 1.0, **core) -> None:
        self.core = RolloutControl(1, 1, **core)
        stream = PromptStream(PromptSet.of([Prompt(i, "?") for i in range(5)]), shuffle=False, seed=0)
        listener, journal = Listener(), LostReads()
        self.gate = AdmissionGate(self.core, Intake(stream), journal, listener)
        self.batches = Batches(self.gate, journal, listener.note)
        assignments = Assignments(self.gate, journal, listener, lambda _: 100, 1)
        self.notes: list[str] = []
        self.lost = LostGroups(self.gate, assignments, journal, share, 1, self.notes.append)

    def finish(self, version: int = 0) -> int:
        """Admit a group and make it ready. Return its number."""
        id_ = self.gate.admit()[0].id
        header = TrajectoryHeader(((UNSAMPLED, False, 1), (version, True, 3)), Finish.STOP, reward=1.0)
        self.gate.finished([ready_group(id_, header, refs=REFS)])
        return id_

    def filter(self) -> int:
        id_ = self.gate.admit()[0].id
        self.gate.filtered(id_, [])
        return id_

    async def train(self) -> None:
        await self.batches.next(1)
        await self.batches.step_begins()
        self.batches.published(self.batches.next_version)


def test_groups_that_are_lost_while_no_collector_is_connected_wait_for_one():
    world, collector = World(), Collector()
    ids = [world.filter() for _ in range(MOST_WAITING + 3)]
    world.lost.joined("a", collector)
    assert [group.group for group in collector.groups] == ids[:MOST_WAITING]
    assert world.lost.left_out == 3 and "left out" in world.notes[0]


def test_a_group_that_a_slow_collector_does_not_take_is_left_out_and_said():
    world = World()
    world.lost.joined("a", Collector(takes=False))
    for _ in range(5):
        world.filter()
    assert world.lost.left_out == 5 and len(world.notes) == 3


def test_the_ledger_is_never_asked_for_more_than_training_can_wait_for():
    class Slow(NoLedger):
        def __init__(self) -> None:
            self.asked: list[tuple] = []

        def read_lost(self, refs, then) -> None:
            self.asked.append((refs, then))

    world, slow, collector = World(consumption=ReadyFirst(OnStale.DROP)), Slow(), Collector()
    world.lost._ledger = slow
    world.lost.joined("a", collector)
    large = REF.pack(1, 0, MOST_READ // 2, 0)

    def lose() -> None:
        id_ = world.gate.admit()[0].id
        header = TrajectoryHeader(((UNSAMPLED, False, 3),), Finish.STOP, reward=1.0)  # nothing to train
        world.gate.finished([ready_group(id_, header, refs=large)])

    for _ in range(3):
        lose()
    assert len(slow.asked) == 2 and world.lost.left_out == 1 and "left out" in world.notes[0]
    for refs, then in slow.asked:
        then([b"data"] * len(refs))
    lose()
    assert len(slow.asked) == 3 and len(collector.groups) == 2


def test_only_chosen_groups_are_logged():
    world, collector = World(share=0.4), Collector()
    world.lost.joined("a", collector)
    ids = [world.filter() for _ in range(50)]
    assert [group.group for group in collector.groups] == [id_ for id_ in ids if is_chosen(id_, 0.4)]


def test_a_group_that_has_expired_says_of_which_lags_its_tokens_were():
    async def main() -> None:
        world = World(consumption=ReadyFirst(OnStale.DROP))
        collector = Collector()
        world.lost.joined("a", collector)
        first, second = world.gate.admit(), world.gate.admit()
        for _ in range(2):
            header = TrajectoryHeader(((UNSAMPLED, False, 1), (0, True, 3)), Finish.STOP, reward=1.0)
            world.gate.finished([ready_group(first[0].id, header, refs=REFS)])
            await world.train()
            first = world.gate.admit()
        header = TrajectoryHeader(((UNSAMPLED, False, 1), (0, True, 3)), Finish.STOP, reward=1.0)
        world.gate.finished([ready_group(second[0].id, header, refs=REFS)])
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await world.batches.next(1)
        [group] = collector.groups
        assert (group.group, group.loss, group.step, group.version) == (second[0].id, "stale", 3, 2)
        assert group.lags == [(0, 2)]
        [sample] = group.recorded
        assert (sample.sample, [size for size, _ in sample.pieces]) == (0, [4])

    asyncio.run(main())


def test_a_flush_waits_for_every_collector_but_not_for_one_that_is_gone():
    async def main() -> None:
        world, a, b = World(), Collector(), Collector()
        world.lost.joined("a", a)
        world.lost.joined("b", b)
        flush = asyncio.create_task(world.lost.flush())
        await asyncio.sleep(1)
        assert a.flushes == b.flushes == [1] and not flush.done()
        world.lost.flushed("a", 1)
        await asyncio.sleep(1)
        assert not flush.done()
        world.lost.left("b")
        await asyncio.wait_for(flush, 1)
        assert not world.notes

    clock.run(main())


def test_a_collector_that_never_answers_does_not_hold_up_the_end_of_a_run():
    async def main() -> None:
        world = World()
        world.lost.joined("a", Collector())
        began = asyncio.get_running_loop().time()
        await world.lost.flush()
        assert asyncio.get_running_loop().time() - began == FLUSH_TIMEOUT_S
        assert "not done writing" in world.notes[0]

    clock.run(main())


def test_a_connection_takes_no_more_lost_groups_than_it_can_send():
    connection = CollectorConnection("a", 0.0)
    group = LostGroup(0, "filtered", "", 1, 0, [], (0, "?", None, {}, "", 0, ""), 1, [])
    taken = 0
    while connection.log_lost(group, [bytes(2**20)]):
        taken += 1
    assert taken == LOST_BYTES // 2**20 + 1


class Evaluating:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.questions: list[Question] = []

    def ask(self, question: Question) -> None:
        self.questions.append(question)

    def withdraw(self, task: int) -> None: ...

    def evaluates_from(self, step: int) -> None:
        self.steps.append(step)


def test_collectors_know_which_evaluations_are_still_to_come():
    async def main() -> None:
        tasks, first, second = EvaluationTasks(), Evaluating(), Evaluating()
        tasks.evaluates_from(3)  # resumed from step 2
        tasks.joined("a", first)
        asking = asyncio.create_task(tasks.ask([Prompt(0, "?")], version=9, step=4))
        await asyncio.sleep(0)
        assert [(question.version, question.step) for question in first.questions] == [(9, 4)]
        tasks.joined(
            "b", second
        )  # in the middle of an evaluation, of which it may have written a part before
        tasks.evaluates_from(3)  # the trainer was restored from step 2
        assert (first.steps, second.steps) == ([3, 3], [5, 3])
        asking.cancel()

    asyncio.run(main())
