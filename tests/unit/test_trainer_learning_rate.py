"""The schedule of the learning rate against a float64 formula and against transformers' schedulers."""

import numpy as np
import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from slipstream.backend.trainer.learning_rate import learning_rate
from slipstream.configs.schema import OptimizerConfig

LR, WARMUP, END, RUN = 3e-4, 7, 50, 80


def rates(run_steps: int = RUN, **settings) -> np.ndarray:
    optimizer = OptimizerConfig.model_validate({"lr": LR, **settings})
    return np.array([learning_rate(optimizer, step, run_steps=run_steps) for step in range(RUN)])


@pytest.mark.parametrize("warmup", [0, 1, WARMUP])
@pytest.mark.parametrize("min_lr", [0.0, 2e-5])
@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_the_rate_is_that_of_a_float64_formula(kind: str, min_lr: float, warmup: int):
    step = np.arange(RUN, dtype=np.float64)
    progress = np.clip((step - warmup) / (END - warmup), 0, 1)
    left = {"linear": 1 - progress, "cosine": (1 + np.cos(np.pi * progress)) / 2}[kind]
    rising = (step + 1) / max(warmup, 1)
    expected = np.where(step < warmup, LR * rising, min_lr + (LR - min_lr) * left)
    actual = rates(warmup_steps=warmup, decay={"type": kind, "min_lr": min_lr, "steps": END})
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-20)


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)],
)
def test_the_decay_is_that_of_transformers(kind: str, schedule):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    scheduler, expected = schedule(optimizer, WARMUP, END), []
    for _ in range(END):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    actual = rates(warmup_steps=WARMUP, decay={"type": kind, "steps": END})
    np.testing.assert_allclose(actual[WARMUP:END], expected[WARMUP:], rtol=1e-9)
    # Their first step is trained at 0, ours is not.
    np.testing.assert_allclose(actual[: WARMUP - 1], expected[1:WARMUP], rtol=1e-9)


@pytest.mark.parametrize("start", [WARMUP - 2, 30])
def test_the_rate_can_stay_before_it_falls(start: int):
    actual = rates(warmup_steps=WARMUP, decay={"type": "linear", "start": start, "steps": END})
    start = max(start, WARMUP)
    assert (actual[WARMUP - 1 : start + 1] == LR).all()
    np.testing.assert_allclose(
        actual[start:END], LR * (1 - np.arange(END - start) / (END - start)), rtol=1e-12
    )


def test_without_a_decay_the_rate_stays():
    assert (rates(warmup_steps=2)[2:] == LR).all()


def test_a_decay_ends_with_the_run_unless_it_says_when():
    for kind in ("linear", "cosine"):
        assert (rates(decay=kind) == rates(decay={"type": kind, "steps": RUN})).all()


def test_every_step_of_a_run_has_a_rate_above_zero_even_where_it_is_all_warm_up():
    for kind in ("linear", "cosine"):
        assert (rates(warmup_steps=WARMUP, decay=kind) > 0).all()
        assert (rates(run_steps=3, warmup_steps=WARMUP, decay=kind)[:3] > 0).all()
