"""A loop of the user's own, from another thread: the verbs in their order, and every end."""

import asyncio
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import slipstream
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.backend.commands import own_run
from slipstream.backend.commands.outcome import Failed, WrongInput
from slipstream.backend.commands.own_run import OwnRun, StepsDone
from slipstream.backend.driver.loops.own_loop import OwnLoop
from slipstream.backend.driver.loops.training import BatchTaken, StepLost, StepPublished, StepTrained
from tests.unit.test_rollout_gpu_environment import VALID
from tests.wrong_inputs.failing_plugins import batch

STEPS = 2


class Batches:
    version = 0
    is_ended = False

    @property
    def core(self) -> "Batches":
        return self

    @property
    def step(self) -> int:
        return self.version

    def end(self) -> None:
        self.is_ended = True


class Evaluation:
    async def run(self, version: int) -> float:
        return 0.25 * version


class FakeRun:
    """In the place of ``attended``: a run of which nothing is real but the loop."""

    def __init__(self, events: Any = None) -> None:
        self.batches, self.events, self.sent, self.stopped, self.closed = Batches(), events, [], 0, False

    async def steps(self):
        try:
            while self.batches.version < STEPS:
                for event in self.events or (StepTrained({"train/loss": 1.5}), None):
                    if isinstance(event, Exception):
                        raise event
                    if isinstance(event, StepLost):
                        yield event
                        break
                    if event is None:
                        self.batches.version += 1
                        yield StepPublished(self.batches.version, {})
                        continue
                    encoded: Any = SimpleNamespace(decoded=batch)
                    self.sent.append((yield BatchTaken(encoded)))
                    yield event
        finally:
            self.closed = True

    def __call__(self, config: Any, start: Any) -> str:
        loop: OwnLoop = start.keywords["own"]

        async def main() -> str:
            task = asyncio.current_task()

            def stop() -> None:
                self.stopped += 1
                if self.stopped > 1:
                    task.cancel()

            loop.can_be_stopped_by(stop)
            steps: Any = self.steps()
            async with aclosing(steps):
                await loop.run(steps, self.batches, Evaluation())
            return "summary"

        try:
            return asyncio.run(main())
        except asyncio.CancelledError:
            raise Failed("stopped") from None
        except ValueError as error:
            raise Failed(f"failed: {error}") from error


@pytest.fixture
def run_of(monkeypatch):
    def made(fake: FakeRun, **changes: Any) -> OwnRun:
        from slipstream.configs.schema import RunConfig

        monkeypatch.setattr(own_run, "attended", fake)
        monkeypatch.setattr(own_run, "check_recipe", lambda config: None)
        monkeypatch.setattr(own_run, "check_start", lambda config: None)
        return OwnRun(RunConfig.model_validate({**VALID, "eval": {"path": "heldout.jsonl"}, **changes}))

    return made


def test_steps_are_taken_one_after_the_other_and_the_summary_comes_at_the_end(run_of):
    fake = FakeRun()
    with run_of(fake) as run:
        for version in (1, 2):
            taken = run.batch()
            assert isinstance(taken, TrainBatch) and len(taken.trajectories) == 4
            assert run.step(taken) == {"train/loss": 1.5}
            assert run.publish() == run.version == run.steps_done == version
        assert run.evaluate() == 0.5
        with pytest.raises(StepsDone, match=r"run\.steps"):
            run.batch()
    assert run.summary == "summary"
    assert fake.sent == [None, None], "batches that are not changed are not sent again"
    assert fake.closed


def test_a_changed_batch_is_trained_in_the_place_of_the_one_that_was_taken(run_of):
    fake = FakeRun()
    with run_of(fake) as run:
        run.step(run.batch().keeping([0, 1]))
        run.publish()
    assert [sent.group_N.tolist() for sent in fake.sent] == [[0, 0]]
    assert isinstance(fake.sent[0].group_N, np.ndarray)


def test_a_step_that_was_not_published_is_published_at_the_end(run_of):
    fake = FakeRun()
    with run_of(fake) as run:
        run.step(run.batch())
    assert fake.batches.version == 1


def test_verbs_out_of_order_and_things_that_are_no_batch_are_refused(run_of):
    with run_of(FakeRun()) as run:
        with pytest.raises(RuntimeError, match="step: found a call out of order, expected `batch`"):
            run.step(batch())
        run.batch()
        with pytest.raises(TypeError, match="found a list, expected the batch"):
            run.step([])


def test_a_trainer_that_dies_costs_the_step_and_the_loop_goes_on(run_of):
    lost = StepLost(TrainerFailed("killed"))
    fake = FakeRun((StepTrained({}), lost))
    with run_of(fake) as run:
        run.step(run.batch())
        with pytest.raises(slipstream.TrainerFailed, match="killed; it is started again"):
            run.publish()
        fake.events = None
        assert len(run.batch().trajectories) == 4
        run.step(batch())
    assert fake.batches.version == 1


def test_an_error_in_the_block_ends_the_run_at_once(run_of):
    fake, run = FakeRun(), None

    def fail() -> None:
        nonlocal run
        with run_of(fake) as run:
            run.batch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert fake.stopped >= 2 and fake.closed
    assert run is not None and run.summary is None


def test_a_run_that_fails_says_so_in_the_call_that_waits(run_of):
    fake = FakeRun((StepTrained({}), ValueError("a bad batch")))

    def train() -> None:
        with run_of(fake) as run:
            run.step(run.batch())
            run.publish()

    with pytest.raises(Failed, match="failed: a bad batch"):
        train()


def test_an_evaluation_needs_held_out_prompts(run_of):
    with run_of(FakeRun(), eval=None) as run, pytest.raises(WrongInput, match="eval: expected held-out"):
        run.evaluate()
