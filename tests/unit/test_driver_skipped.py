"""Skipped updates reach the user, and one more than ``run.max_skipped_updates`` ends the training loop."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from slipstream.backend.batch.skipped import SHOWN, FaultyTrajectory, SkippedUpdate
from slipstream.backend.driver.loops.training import training_loop, training_steps
from slipstream.backend.driver.ports import RunPosition
from slipstream.backend.driver.processes.devices import Separate
from slipstream.backend.driver.start.feedback import Feedback
from slipstream.backend.driver.weights.served_weights import ServedWeights
from slipstream.backend.driver.weights.skipped import SkippedUpdateLimit, TooManySkippedUpdates
from slipstream.bridge.publish.report import PublishReport
from slipstream.configs.schema.run import RunSection
from slipstream.rollout.collection.driver.collected_group import CollectedGroup
from slipstream.rollout.control.ends import GroupCounts
from slipstream.rollout.tokens.trajectory import Prompt
from tests.unit.doubles import Policy


def skipped(minibatch: int = 1, model: str = "policy") -> SkippedUpdate:
    faulty = FaultyTrajectory(place=3, group=17, numbers=("behaviour log-prob", "loss"))
    return SkippedUpdate(model, minibatch, (faulty,), ())


def test_an_update_is_described_with_its_trajectories_or_its_parameters():
    assert str(skipped(2)) == (
        "the update of the policy for mini-batch 2 was skipped, because these numbers are not finite: "
        "trajectory 3 of the batch (group 17): behaviour log-prob, loss"
    )
    names = tuple(f"rank {rank}: weight" for rank in range(SHOWN + 2))
    described = str(SkippedUpdate("critic", 1, (), names))
    assert "gradients of these parameters are not finite: rank 0: weight, rank 1: weight" in described
    assert described.endswith("and 2 more")
    assert str(SkippedUpdate("critic", 1, (), ())).endswith("the norm of its gradient overflows")


def test_as_many_updates_as_allowed_are_only_noted():
    notes: list[str] = []
    limit = SkippedUpdateLimit(2, notes.append)
    limit.add(1, [])
    limit.add(2, [skipped()])
    limit.add(5, [skipped(4)])
    limit.add(6, [])
    assert [note.partition(":")[0] for note in notes] == ["step 2", "step 5"]
    assert "mini-batch 4" in notes[1]
    with pytest.raises(TooManySkippedUpdates) as raised:
        limit.add(7, [skipped(), skipped(2, "critic")])
    assert len(notes) == 4, "every update is noted before the run ends"
    for part in ("4 optimizer updates", "run.max_skipped_updates allows 2", "step 7", "critic", "group 17"):
        assert part in str(raised.value)


# ---- through the training loop


@dataclass
class Trainer:
    """Skips updates in the steps of ``skips``."""

    skips: dict[int, list[SkippedUpdate]]
    step: int = 0
    asked: list[int] = field(default_factory=list)

    async def train(self, batch: Any) -> dict[str, float]:
        self.step += 1
        of_step = self.skips.get(self.step, [])
        counts = {"train/skipped_updates": "policy", "critic/skipped_updates": "critic"}
        return {tag: float(sum(s.model == model for s in of_step)) for tag, model in counts.items()}

    async def skipped_updates(self) -> list[SkippedUpdate]:
        self.asked.append(self.step)
        return self.skips.get(self.step, [])

    async def publish(self, version: int, engines: Any) -> PublishReport:
        return PublishReport(version, [])


class Roster:
    clients: tuple[Any, ...] = ()

    def announce(self) -> None: ...


@dataclass
class Batches(Policy):
    @property
    def step(self) -> int:
        return self.version

    @property
    def next_version(self) -> int:
        return self.version + 1

    async def next(self, timeout_s: float) -> list[CollectedGroup]:
        return [CollectedGroup(self.version, 0, Prompt(0, "?"), [])]

    async def step_begins(self) -> None: ...

    live = ()
    prompts_drawn = 0
    counts = GroupCounts()

    is_ended = False
    live = ()
    prompts_drawn = 0
    counts = GroupCounts()

    async def ended(self) -> None:
        await asyncio.Event().wait()

    @property
    def core(self) -> Any:
        return self

    def lag(self, version: int) -> int:
        return self.version - version


@dataclass
class Heard:
    """Listens to the loop, and takes checkpoints."""

    steps: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)

    def step(self, step: Any, status: Any) -> None:
        self.steps.append(step.version)

    def note(self, text: str) -> None:
        self.notes.append(text)

    async def step_done(self, run: RunPosition) -> None:
        self.checkpoints.append(run.step)


async def nothing(refs: list[bytes]) -> list[bytes]:
    return []


def run_loop(trainer: Trainer, heard: Heard, **settings: int) -> None:
    async def main() -> None:
        batches = Batches()
        weights = ServedWeights(trainer, Roster(), Separate(), batches)
        run = RunSection(name="test", steps=6, **settings)
        steps = training_steps(run, batches, weights, heard, heard, lambda: None, nothing, Feedback())
        await training_loop(steps, run, batches, None)

    asyncio.run(main())


def test_one_more_skipped_update_than_allowed_ends_the_training_loop():
    trainer, heard = Trainer({1: [skipped()], 3: [skipped(model="critic")], 4: [skipped()]}), Heard()
    with pytest.raises(ExceptionGroup) as raised:
        run_loop(trainer, heard, max_skipped_updates=2)
    [error] = raised.value.exceptions
    assert isinstance(error, TooManySkippedUpdates)
    assert heard.steps == [1, 2, 3, 4], "the step that ends the run is accounted for"
    assert heard.checkpoints == [1, 2, 3]
    assert [note.partition(":")[0] for note in heard.notes] == ["step 1", "step 3", "step 4"]
    assert trainer.asked == [1, 3, 4], "only steps with skipped updates are asked about"


def test_a_run_with_few_skipped_updates_goes_on_to_its_end():
    heard = Heard()
    run_loop(Trainer({2: [skipped(), skipped(2)]}), heard)
    assert heard.steps == heard.checkpoints == [1, 2, 3, 4, 5, 6]
    assert len(heard.notes) == 2


def test_no_skipped_update_need_be_allowed():
    with pytest.raises(ExceptionGroup):
        run_loop(Trainer({2: [skipped()]}), Heard(), max_skipped_updates=0)
