"""The drift of the policy is held at its limit, by the learning rate or by admission."""

import json
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import pytest

from slipstream.backend.batch.train_batch import EncodedBatch
from slipstream.backend.driver.start.feedback import Feedback
from slipstream.configs.load import load_recipe
from slipstream.rollout.control.admission import by_slots
from slipstream.rollout.control.drift import DriftController, DriftLimits

RATE = 3e-4


def controller(*, lag: int, kl: float | None = 0.01, ess: float | None = None, floor: float = 0.01):
    return DriftController(DriftLimits(kl, ess), floor, lag)


def course(
    drift: DriftController, *, lag: int, steps: int, sensitivity: float, rate: float = RATE
) -> list[float]:
    """Return the KL divergence of each step where it grows with the square of the way since sampling."""
    rates: list[float] = []
    divergences = []
    for step in range(steps):
        present = min(step, lag)
        way = sum(rates[len(rates) - present :])
        divergences.append(sensitivity * way**2)
        factor = drift.rate_factor
        rates.append(rate * factor)
        drift.observe(rate * factor, factor, {present: 100}, divergences[-1], 1 - divergences[-1])
    return divergences


@pytest.mark.parametrize("lag", [1, 4, 16])
@pytest.mark.parametrize("excess", [4.0, 100.0])
def test_the_divergence_settles_at_its_limit_without_swinging(lag, excess):
    sensitivity = excess * 0.01 / (lag * RATE) ** 2
    drift = controller(lag=lag)
    divergences = course(drift, lag=lag, steps=12 * lag + 20, sensitivity=sensitivity)
    settled = divergences[3 * lag + 5 :]
    assert max(settled) < 1.05 * 0.01
    assert min(settled) > 0.95 * 0.01


def test_within_its_limits_nothing_is_slowed():
    drift = controller(lag=8)
    course(drift, lag=8, steps=60, sensitivity=0.5 * 0.01 / (8 * RATE) ** 2)
    assert drift.rate_factor == 1.0
    assert drift.batches_in_flight(9) == 9


def test_fresh_batches_are_never_slowed():
    drift = controller(lag=0)
    course(drift, lag=0, steps=20, sensitivity=1e9)
    assert drift.rate_factor == 1.0


def test_the_factor_has_a_floor():
    drift = controller(lag=4, floor=0.2)
    course(drift, lag=4, steps=60, sensitivity=1e12)
    assert drift.rate_factor == 0.2


def test_the_tighter_limit_counts():
    assert DriftLimits(0.01, 0.9).strain(0.04, 0.99) == pytest.approx(2)
    assert DriftLimits(0.01, 0.9).strain(0.001, 0.1) == pytest.approx(3)
    assert DriftLimits(None, 0.9).strain(5.0, 0.9) == pytest.approx(1)


def test_a_schedule_of_the_learning_rate_is_not_taken_for_drift():
    """The way counts what the steps had; a warm-up does not make the policy look steadier than it is."""
    drift = controller(lag=4)
    sensitivity, rates = 25 * 0.01 / (4 * RATE) ** 2, list[float]()
    for step in range(60):
        nominal = RATE * min(1.0, (step + 1) / 30)
        way = sum(rates[max(0, step - 4) :])
        factor = drift.rate_factor
        rates.append(nominal * factor)
        drift.observe(nominal * factor, factor, {min(step, 4): 1}, sensitivity * way**2, 1.0)
    assert sqrt(sensitivity) * sum(rates[-4:]) == pytest.approx(sqrt(0.01), rel=0.1)


@dataclass
class Now:
    held: int
    batch_size: int = 4
    bound: int = 8
    step: int = 0
    accepted: int = 0
    capacity: int = 36
    open: int = 0


def test_admission_leaves_room_for_as_many_batches_as_the_limits_allow_and_for_one_always():
    drift = controller(lag=8, floor=0.01)
    policy = Feedback(drift=drift).admission(by_slots)
    assert policy(Now(held=35)) and not policy(Now(held=36))
    course(drift, lag=8, steps=1, sensitivity=1.0)
    # Measured at the full learning rate: a quarter of the lag is at the limit.
    for _ in range(120):
        drift.observe(RATE, 1.0, {8: 100}, 16 * 0.01, 1.0)
    assert drift.batches_in_flight(9) == 3
    assert policy(Now(held=11)) and not policy(Now(held=12))
    for _ in range(60):
        drift.observe(RATE, 1.0, {8: 100}, 1e6, 1.0)
    assert policy(Now(held=3)) and not policy(Now(held=4))


def test_a_resumed_run_goes_on_with_what_was_measured():
    config = load_recipe(Path("quickstart"), ["actor.drift={kl: 0.001}"])
    feedback = Feedback.of(config, None)
    batch = EncodedBatch(3, (), None, (), None, lags={})  # type: ignore[arg-type]
    metrics = {"train/lr": RATE, "train/ess": 1.0, "staleness/kl": 0.1, "mismatch/logprob_square_mean": 0.04}
    assert feedback.prepared(batch).mismatch is None
    feedback.observe(batch, metrics)
    assert feedback.prepared(batch).mismatch == 0.04
    feedback.observe(batch, metrics | {"mismatch/logprob_square_mean": 0.09})
    assert feedback.mismatch == pytest.approx(0.05)
    assert feedback.drift is not None
    for _ in range(9):
        feedback.drift.observe(RATE, 1.0, {2: 5}, 0.1, 1.0)
    restored = Feedback.of(config, json.loads(json.dumps(feedback.state())))
    assert restored == feedback
    assert restored.rate_factor == feedback.rate_factor < 1.0
    assert Feedback.of(load_recipe(Path("quickstart")), feedback.state()).rate_factor == 1.0
