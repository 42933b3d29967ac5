"""A running run goes back to an older version: nothing lost, trained twice or trained beyond the bound."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from slipstream.backend.driver.start.resume import RestoredCollection, RunState, begin, restore_collection
from slipstream.backend.driver.weights.rewind import Rewind
from slipstream.configs.schema import RunConfig
from slipstream.rollout.collection.driver.assignments import Assignments
from slipstream.rollout.collection.driver.batches import Batches
from slipstream.rollout.collection.driver.gate import AdmissionGate
from slipstream.rollout.collection.messages import JUDGED, TRAIN, Assignment, Event, GroupVerdict, Up
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.ledger.audit.account import audit_ledger
from slipstream.rollout.ledger.recovery import Recovered
from slipstream.rollout.ledger.rows.stored_turns import RecoveredTurns
from slipstream.rollout.prompts import PromptSet
from slipstream.rollout.tokens.record import checksum, encode, encode_chunk
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Prompt, TrajectoryHeader
from tests.unit.doubles import Listener

B, BOUND = 2, 2
PROMPTS = [Prompt(i, f"prompt {i}") for i in range(50)]


class Collector:
    """Finishes each assignment with tokens of the version that is served, when it is told to."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.assignments: list[Assignment] = []
        self.cancelled: list[int] = []

    def assign(self, assignment: Assignment, chunks: Any) -> None:
        self.assignments.append(assignment)

    def cancel(self, group: int, assignment: int) -> None:
        self.cancelled.append(group)
        taken = [each for each in self.assignments if (each.group, each.number) == (group, assignment)]
        self.assignments = [each for each in self.assignments if each not in taken]
        asyncio.get_running_loop().call_soon(
            self.world.assignments.received, "collector", Up(released=len(taken)), memoryview(b"")
        )

    def finish(self, most: int = 1000) -> None:
        """Finish what is assigned, the oldest first."""
        assignments, self.assignments = self.assignments[:most], self.assignments[most:]
        for assignment in assignments:
            chunk = encode_chunk((1,), (2, 3), [-0.5, -0.5])
            version = self.world.gate.core.sampled_version
            header = TrajectoryHeader(((UNSAMPLED, False, 1), (version, True, 3)), Finish.STOP, 0, 1.0)
            raw = msgspec.Raw(encode(header))
            event = Event(assignment.group, assignment.number, 0, JUDGED, raw, 0, len(chunk), checksum(chunk))
            verdict = GroupVerdict(assignment.group, assignment.number, TRAIN)
            up = Up(events=[event], verdicts=[verdict], released=1)
            self.world.assignments.received("collector", up, memoryview(chunk))


class World:
    """A run without engines and trainer."""

    def __init__(self, config: RunConfig, state: RunState) -> None:
        self.listener = Listener()
        listener: Any = self.listener
        self.ledger = state.ledger
        self.gate = AdmissionGate(state.control, state.intake, state.ledger, listener)
        self.batches = Batches(self.gate, state.ledger, listener.note)
        self.assignments = Assignments(self.gate, state.ledger, listener, lambda _: 100, samples=1)
        self.collector = Collector(self)
        inputs: Any = SimpleNamespace(prompts=PromptSet.of(PROMPTS))

        def restore(recovered: Recovered, served: int) -> RestoredCollection:
            ledger, feedback = state.ledger, state.feedback
            return restore_collection(config, inputs, ledger, recovered, feedback, served=served)

        parts = self.gate, self.batches, self.assignments
        self.rewind = Rewind(config.rollout, restore, state.ledger, *parts, listener.note)
        self.assignments.joined("collector", self.collector)
        self.assignments.open()

    async def step(self, most: int = 1000) -> int:
        """Collect ``most`` groups and train one batch. Return its version."""
        self.assignments.grant()
        self.collector.finish(most)
        await self.ledger.flushed()
        batch = await self.batches.next(5)
        for group in batch:
            assert max(map(self.gate.core.lag, group.trained_tokens)) <= BOUND
        await self.batches.step_begins()
        version = self.batches.next_version
        self.batches.published(version)
        return version


def run(tmp_path: Path, main: Callable[[World], Awaitable[None]], **rollout: object) -> None:
    """Run ``main``, and audit what it leaves."""
    config = RunConfig.model_validate(
        {
            "run": {"name": "run", "root": str(tmp_path), "steps": 100},
            "model": {"path": "model"},
            "data": {"path": "train.jsonl", "shuffle": False},
            "rollout": {
                "max_head_offpolicyness": BOUND,
                "batch_size": B,
                "n_samples_per_prompt": 1,
                "reward": "slipstream.rollout.reward.FinalAnswer",
                **rollout,
            },
        }
    )
    config.run.folder.mkdir()

    async def life() -> None:
        assignment: Any = SimpleNamespace(check=lambda: None)
        inputs: Any = SimpleNamespace(prompts=PromptSet.of(PROMPTS))
        state = begin(config, inputs, None, assignment)
        try:
            async with asyncio.timeout(60):
                await main(World(config, state))
            await state.ledger.flushed()
        finally:
            state.ledger.close()

    asyncio.run(life())
    assert audit_ledger(config.run.folder)[0].discrepancies == []


CONSUMPTION = [{"type": "fifo"}, {"type": "ready_first", "on_stale": "mask"}]


@pytest.mark.parametrize("consumption", CONSUMPTION, ids=["fifo", "mask"])
@pytest.mark.parametrize("lost", [0, 1, 2, 3, 5])
def test_the_run_goes_on_from_any_distance_with_the_next_number(tmp_path: Path, lost: int, consumption: dict):
    async def main(world: World) -> None:
        for _ in range(6):
            await world.step()
        await world.rewind.to(6 - lost)
        assert (world.gate.core.version, world.gate.core.sampled_version) == (6 - lost, 6)
        assert world.gate.core.counts.trained == (6 - lost) * B
        copy = await world.rewind.copy_begins()
        assert copy == (7 if lost else None)
        if copy is not None:
            if lost > BOUND:
                assert not world.collector.assignments, "what an engine samples now could never be trained"
            core = world.gate.core
            assert (core.version, core.sampled_version) == (6 - lost, 6), "until every engine has it"
            world.batches.published(copy)
        first = 7 if copy is None else 8
        assert [await world.step() for _ in range(4)] == [first, first + 1, first + 2, first + 3]
        assert (world.gate.core.step, world.gate.core.sampled_version) == (10 - lost, first + 3)

    run(tmp_path, main, consumption=consumption)


def test_the_batches_behind_the_checkpoint_are_ready_again_and_trained_without_an_engine(tmp_path: Path):
    async def main(world: World) -> None:
        for _ in range(6):
            await world.step()
        await world.rewind.to(2)
        copy = await world.rewind.copy_begins()
        assert copy == 7
        world.batches.published(copy)
        batch = await world.batches.next(1)
        assert [group.id for group in batch] == [4, 5], "the batch that was trained from version 2 before"

    run(tmp_path, main)


def test_within_the_bound_work_goes_on_with_what_was_recorded(tmp_path: Path):
    async def main(world: World) -> None:
        for _ in range(2):
            await world.step(most=B)
        world.assignments.grant()
        running = {assignment.group for assignment in world.collector.assignments}
        assert running
        await world.rewind.to(1)
        assert set(world.collector.cancelled) == running
        assert world.collector.assignments, "the engines' version lags by one update: it can be trained"
        assert {assignment.version for assignment in world.collector.assignments} == {2}

    run(tmp_path, main)


def test_a_late_event_of_before_counts_for_nothing(tmp_path: Path):
    async def main(world: World) -> None:
        await world.step()
        world.assignments.grant()
        before = list(world.collector.assignments)
        await world.rewind.to(0)
        world.collector.assignments = before
        void = world.assignments.void_events
        world.collector.finish()
        assert world.assignments.void_events == void + len(before)

    run(tmp_path, main)


def test_a_batch_that_kills_the_trainer_is_bisected_with_steps_of_other_groups_in_between(tmp_path: Path):
    """So that the same failure never comes twice without a training step, which would end the run."""

    async def main(world: World) -> None:
        await world.step()
        taken: list[set[int]] = []
        for dies in (True, False, True, False, False):
            world.assignments.grant()
            world.collector.finish()
            await world.ledger.flushed()
            taken.append({group.id for group in await world.batches.next(5)})
            await world.batches.step_begins()
            if dies:
                await world.batches.step_failed("rank 0 was killed")
                await world.rewind.to(world.gate.core.version)
            else:
                world.batches.published(world.batches.next_version)
        first, other, again, another, half = taken
        assert first == again and first.isdisjoint(other) and first.isdisjoint(another)
        assert len(first & half) == 1

    run(tmp_path, main, max_head_offpolicyness=8)


def test_a_run_of_which_nothing_is_left_to_train_collects_from_the_restored_weights(tmp_path: Path):
    async def main(world: World) -> None:
        for _ in range(6):
            await world.step()
        await world.rewind.to(1)
        for group in list(world.gate._ready):
            world.gate.core.quarantine(group)
            del world.gate._ready[group]
            world.ledger.lost(group, Loss.QUARANTINED)
        copy = await world.rewind.copy_begins()
        assert copy is not None
        world.batches.published(copy)
        world.assignments.grant()
        assert {assignment.version for assignment in world.collector.assignments} == {copy}
        assert await world.step() == 8

    run(tmp_path, main)


def test_a_trainer_that_dies_while_its_restored_weights_are_published_goes_back_again(tmp_path: Path):
    async def main(world: World) -> None:
        for _ in range(6):
            await world.step()
        await world.rewind.to(2)
        assert await world.rewind.copy_begins() == 7
        await world.rewind.to(2)
        copy = await world.rewind.copy_begins()
        assert copy == 8 and world.gate.core.lag(7) == world.gate.core.lag(8) == 0
        world.batches.published(copy)
        assert await world.step() == 9
        await world.rewind.to(2)
        assert world.gate.core.lag(9) == 1, "one update behind the copy"
        copy = await world.rewind.copy_begins()
        assert copy == 10
        world.batches.published(copy)
        assert [await world.step() for _ in range(3)] == [11, 12, 13]

    run(tmp_path, main)


def test_a_run_that_is_not_collecting_yet_does_not_begin_to(tmp_path: Path):
    async def main(world: World) -> None:
        await world.assignments.close()
        await world.rewind.to(0)
        assert not world.assignments.is_open and not world.collector.assignments

    run(tmp_path, main)


class Turns:
    """Turns of live users, which hear of the way back."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def hold(self) -> None:
        self.heard.append("held")

    def restored(self, core: Any, recovered: RecoveredTurns) -> None:
        self.heard.append(f"{len(recovered.turns)} turns, core at {core.version}")


def test_turns_of_live_users_go_back_too(tmp_path: Path):
    async def main(world: World) -> None:
        await world.step()
        turns = Turns()
        world.rewind._turns = turns
        await world.rewind.to(0)
        assert turns.heard == ["held", "0 turns, core at 0"]

    run(tmp_path, main)
