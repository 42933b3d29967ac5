"""A trainer that dies is restored while others go on: the order of steps, and what ends the run instead."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError
from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.backend.driver.weights import revival
from slipstream.backend.driver.weights.revival import Revival, TrainerGone
from slipstream.backend.driver.weights.served_weights import TrainerLife
from slipstream.backend.simulate import clock
from slipstream.rollout.system.restarts import RestartLimit, Restarts


@dataclass
class World:
    """A trainer, its checkpoints and the way back, which write down what is asked of them."""

    did: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    life: TrainerLife = field(default_factory=TrainerLife)
    checkpoints: list[Any] = field(default_factory=list)
    """What each look for the newest one finds: a version, None or an error. The last one stays."""
    connections: list[Exception | None] = field(default_factory=list)
    """What becomes of each start. Later ones succeed."""
    restores: list[Exception | None] = field(default_factory=list)
    responses: list[Exception | None] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    """New numbers that restored weights need, one for each time that the way back was gone."""
    publications: list[Exception | None] = field(default_factory=list)
    places: list[Exception | None] = field(default_factory=list)
    nodes: dict[int, Any] = field(default_factory=dict)
    """Versions that were begun on the disks of nodes: whether they are whole, or an error of the ranks."""
    impossible: set[int] = field(default_factory=set)
    """Versions that the present weights do not descend from."""
    step = 0
    """Number of training steps that led to the present weights."""

    # trainer

    def kill(self) -> None:
        self.did.append("kill")

    def create(self) -> None:
        self.did.append("create")

    async def connect(self) -> None:
        await asyncio.sleep(0)
        self._fate("connect", self.connections)

    async def restore(self, folder: Path) -> int:
        self._fate(f"restore {folder}", self.restores)
        return 0

    async def restore_from_nodes(self, tokens: dict[int, str]) -> tuple[int | None, list[str]]:
        self.did.append(f"nodes {tokens}")
        sound = None
        for version in sorted(tokens, reverse=True):
            if isinstance(found := self.nodes[version], Exception):
                raise found
            sound = sound or (version if found else None)
        return sound, [f"version {version} is passed over" for version in tokens if not self.nodes[version]]

    async def respond(self) -> None:
        if self.responses and (error := self.responses.pop(0)) is not None:
            raise error

    # weights

    @asynccontextmanager
    async def starting(self):
        self.did.append("turn")
        yield

    async def publish_copy(self, version: int) -> None:
        assert not self.life.is_alive, "nobody trains before"
        self._fate(f"publish {version}", self.publications)

    # checkpoints

    async def settled(self) -> None:
        self.did.append("settle")

    async def newest(self, is_behind: Any) -> Any:
        found = self.checkpoints.pop(0) if len(self.checkpoints) > 1 else self.checkpoints[0]
        if isinstance(found, Exception):
            raise found
        if found is None:
            return None
        return SimpleNamespace(path=f"v{found}", record=SimpleNamespace(version=found), warnings=())

    def on_nodes(self) -> dict[int, str]:
        return {version: f"token {version}" for version in self.nodes}

    def forget_on_nodes(self) -> None:
        self.did.append("forget nodes")
        self.nodes = {}

    def restored(self, step: int) -> None:
        """The next checkpoint is counted from here."""

    # the way back

    def is_possible(self, version: int) -> bool:
        return version not in self.impossible

    async def to(self, version: int) -> None:
        self.did.append(f"back to {version}")
        self.step = version

    async def copy_begins(self) -> int | None:
        return self.copies.pop(0) if self.copies else None

    def _fate(self, what: str, fates: list[Exception | None]) -> None:
        self.did.append(what)
        if fates and (error := fates.pop(0)) is not None:
            raise error

    def revival(self, restarts: int = 3) -> Revival:
        this: Any = self
        limit = RestartLimit("run.trainer_restarts", restarts, 86400.0, "no training step was committed")
        return Revival(
            this,
            this,
            this,
            this,
            step=lambda: self.step,
            restarts=Restarts(limit),
            note=self.notes.append,
            place=self.place,
        )

    async def place(self) -> None:
        self._fate("place", self.places)


async def until_restored(
    world: World, times: int, restarts: int = 3, errors: list[TrainerFailed] | None = None, trained: int = 1
) -> Revival:
    """Let the trainer fail so many times, each time after it was restored and has ``trained`` steps.

    ``errors``: how it fails, the last one again and again.
    """
    made = world.revival(restarts)
    running = asyncio.create_task(made.run())
    try:
        for number in range(times):
            world.step += trained
            error = errors[min(number, len(errors) - 1)] if errors else TrainerFailed(f"failure {number}")
            world.life.fail(error)
            await next_done({running, asyncio.create_task(world.life.alive())})
            if running.done():
                break
    finally:
        running.cancel()
        await asyncio.wait({running})
    if not running.cancelled() and (error := running.exception()):
        raise error
    return made


async def next_done(tasks: set[asyncio.Task]) -> None:
    async with asyncio.timeout(60):
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def leaf(error: BaseException) -> BaseException:
    return leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def test_the_ranks_are_killed_before_anything_is_read_and_restored_behind_the_way_back():
    world = World(checkpoints=[4])
    made = clock.run(until_restored(world, 1))
    assert world.did == ["kill", "settle", "place", "turn", "create", "back to 4", "connect", "restore v4"]
    assert world.life.is_alive and world.life.incarnation == 1
    assert made.restarts == 1
    assert world.notes == ["the trainer is started again from version 4: failure 0"]


def test_without_a_checkpoint_the_trainer_begins_with_the_initial_weights():
    world = World(checkpoints=[None])
    clock.run(until_restored(world, 1))
    assert world.did[-2:] == ["back to 0", "connect"]
    assert "from the initial weights" in world.notes[0]


def test_restored_weights_are_published_before_anybody_trains_if_the_engines_have_to_get_them():
    world = World(checkpoints=[4], copies=[9])
    clock.run(until_restored(world, 1))
    assert world.did[-3:] == ["connect", "restore v4", "publish 9"]
    assert world.life.is_alive


def test_a_trainer_that_dies_while_it_publishes_its_restored_weights_is_started_again():
    world = World(checkpoints=[4], copies=[9, 10], publications=[TrainerFailed("killed in publish 9"), None])
    made = clock.run(until_restored(world, 1))
    assert made.restarts == 2
    assert [what for what in world.did if what.startswith(("kill", "publish"))] == [
        "kill",
        "publish 9",
        "kill",
        "publish 10",
    ]
    assert world.notes[-1].endswith("killed in publish 9")


def test_a_start_that_fails_is_tried_again():
    world = World(
        checkpoints=[4],
        connections=[TrainerFailed("no GPU"), None],
        restores=[CheckpointError("a file cannot be read")],
    )
    made = clock.run(until_restored(world, 1))
    assert made.restarts == 3
    assert world.did.count("kill") == 3, "ranks that have not come far are ended as well"
    assert [note.rpartition(": ")[2] for note in world.notes] == [
        "failure 0",
        "no GPU",
        "a file cannot be read",
    ]


def test_more_failures_than_allowed_end_the_run_with_the_last_reason():
    world = World(checkpoints=[4])
    with pytest.raises(ExceptionGroup) as raised:
        clock.run(until_restored(world, 3, restarts=2))
    error = leaf(raised.value)
    assert isinstance(error, TrainerGone)
    assert "the trainer has failed 3 times within 24 h (run.restart_window_s)" in str(error)
    assert "run.trainer_restarts allows 2 restarts" in str(error)
    assert str(error).endswith("the last time: failure 2")
    assert world.did[-2:] == ["kill", "settle"], "no trainer is started again"


def on_rank(rank: int, error: str = "RuntimeError: no kernel") -> TrainerFailed:
    traceback = f'Traceback (most recent call last):\n  File "/venv/objective.py", line 3, in loss\n{error}'
    return TrainerFailed(f"the training step from version 0 failed on rank {rank}: {error}", traceback)


@pytest.mark.parametrize("checkpoint", [None, 4])
def test_the_same_failure_without_a_step_in_between_ends_the_run_at_the_second_one(checkpoint: int | None):
    world = World(checkpoints=[checkpoint])
    with pytest.raises(ExceptionGroup) as raised:
        clock.run(until_restored(world, 12, restarts=10, errors=[on_rank(1)], trained=0))
    error = leaf(raised.value)
    assert isinstance(error, TrainerGone)
    assert "failed twice in the same way, and no training step was committed in between" in str(error)
    assert str(error).endswith(on_rank(1).described), "with the traceback"
    assert world.did.count("create") == 1


def test_the_first_traceback_is_shown_though_the_second_failure_is_that_of_another_rank():
    world = World(checkpoints=[None])
    with pytest.raises(ExceptionGroup) as raised:
        clock.run(until_restored(world, 2, errors=[on_rank(1), on_rank(0)], trained=0))
    assert "failed on rank 1" in str(leaf(raised.value)) and "on rank 0" not in str(leaf(raised.value))


def test_the_same_failure_is_no_reason_to_end_the_run_when_steps_were_trained_in_between():
    world = World(checkpoints=[4])
    made = clock.run(until_restored(world, 5, restarts=10, errors=[on_rank(0)], trained=1))
    assert made.restarts == 5


def test_other_failures_each_time_are_counted_only():
    world = World(checkpoints=[None])
    errors = [on_rank(0, f"{name}Error: wrong") for name in ("Value", "Key", "Index", "Type")]
    made = clock.run(until_restored(world, 4, restarts=10, errors=errors, trained=0))
    assert made.restarts == 4


def test_a_start_that_fails_in_the_same_way_twice_ends_the_run():
    world = World(checkpoints=[4], connections=[TrainerFailed("no GPU 0"), TrainerFailed("no GPU 1")])
    with pytest.raises(ExceptionGroup) as raised:
        clock.run(until_restored(world, 1, restarts=10))
    assert "no training step was committed in between" in str(leaf(raised.value))
    assert world.did.count("connect") == 2


def test_no_restart_may_be_allowed():
    with pytest.raises(ExceptionGroup) as raised:
        clock.run(until_restored(World(checkpoints=[4]), 1, restarts=0))
    assert "failure 0" in str(leaf(raised.value))


def test_damage_that_leaves_no_checkpoint_ends_the_run():
    with pytest.raises(ExceptionGroup) as raised:
        clock.run(until_restored(World(checkpoints=[CheckpointError("all are damaged")]), 1))
    error = leaf(raised.value)
    assert isinstance(error, TrainerGone)
    assert "all are damaged" in str(error) and "failure 0" in str(error)


def test_a_way_back_that_fails_ends_the_run_and_leaves_no_start_behind():
    """A ledger that cannot be written ends a run in any case."""

    class Broken(World):
        async def to(self, version: int) -> None:
            raise OSError("the disk is full")

        async def connect(self) -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.did.append("start called off")
                raise

    world = Broken(checkpoints=[4])
    with pytest.raises(ExceptionGroup) as raised:
        clock.run(until_restored(world, 1))
    assert isinstance(leaf(raised.value), OSError)
    assert "restore v4" not in world.did


def test_a_trainer_that_nobody_calls_is_watched(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(revival, "WATCH_S", 0.001)
    world = World(checkpoints=[4], responses=[None, None, TrainerFailed("killed while it had nothing to do")])

    async def main() -> None:
        running = asyncio.create_task(world.revival().run())
        async with asyncio.timeout(60):
            while not world.life.incarnation:
                await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.wait({running})

    clock.run(main())
    assert world.notes == ["the trainer is started again from version 4: killed while it had nothing to do"]


def test_a_trainer_without_a_node_is_not_started_and_ends_the_run_when_none_is_found_again():
    world = World(checkpoints=[4])
    missing = TrainerFailed("the trainer has lost 10.0.0.2, and no other node can have 8 ranks")
    world.places = [missing, None]
    clock.run(until_restored(world, 1))
    assert world.did[:6] == ["kill", "settle", "place", "kill", "settle", "place"]
    assert world.did.count("create") == 1
    world.places = [missing, missing, missing]
    with pytest.raises(ExceptionGroup) as found:
        clock.run(until_restored(world, 1))
    assert isinstance(leaf(found.value), TrainerGone)
    assert "no other node can have 8 ranks" in str(leaf(found.value))


def test_the_newest_version_that_is_whole_on_the_disks_of_nodes_is_taken_and_the_run_folder_not_read():
    world = World(checkpoints=[AssertionError("read")], nodes={6: True, 8: False, 9: True}, impossible={9})
    clock.run(until_restored(world, 1))
    assert world.did[4:] == ["create", "connect", "nodes {6: 'token 6', 8: 'token 8'}", "back to 6"]
    assert world.notes == [
        "the trainer is started again from what its nodes hold: failure 0",
        "version 8 is passed over",
    ]
    assert world.life.is_alive


def test_without_a_whole_version_on_the_disks_of_nodes_the_run_folders_is_taken():
    world = World(checkpoints=[4], nodes={6: False})
    clock.run(until_restored(world, 1))
    assert world.did[-2:] == ["back to 4", "restore v4"]


@pytest.mark.parametrize("error", [CheckpointError("a disk is full"), TrainerFailed("killed meanwhile")])
def test_after_a_failure_of_the_disks_of_nodes_the_next_attempt_takes_the_run_folders(error: Exception):
    world = World(checkpoints=[4], nodes={6: error})
    clock.run(until_restored(world, 1))
    assert world.did[-3:] == ["back to 4", "connect", "restore v4"] and "forget nodes" in world.did
    assert world.life.is_alive
