"""Simulated runs: the bound, the account of every token, and the same figures every time."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from slipstream.backend.simulate.account import Outcome
from slipstream.backend.simulate.compare import ROWS, SAMPLES, Timeline, Work, compare
from slipstream.backend.simulate.gpu_split import layout_of, split, splits, time_shared
from slipstream.backend.simulate.picture import IDLE, PUBLISHING, TRAINING, WAITING, draw
from slipstream.backend.simulate.schedules import (
    BOUNDS,
    INTERRUPTS,
    Schedule,
    compared,
    policies,
    recipe_schedule,
    synchronous,
    volume_gate,
)
from slipstream.backend.simulate.workload import FAILING
from slipstream.backend.simulate.world import MeasuredSteps, SimulationStalled, World
from slipstream.configs.schema import RunConfig
from slipstream.rollout.control.ends import Loss
from tests.environment import environment
from tests.tries import tries

ROOT = Path(__file__).parents[2]


def config(steps=6, simulate=None, **rollout) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "small", "steps": steps, "batch_timeout_s": 1e7},
            "model": {"path": "none"},
            "data": {"path": "none.jsonl"},
            "rollout": {
                "max_head_offpolicyness": 2,
                "batch_size": 4,
                "n_samples_per_prompt": 2,
                "max_concurrent": 16,
                "episode_timeout_s": 1e6,
                "sampling": {"max_new_tokens": 400},
                "reward": "slipstream.rollout.reward.FinalAnswer",
                "engine": {"count": 2},
            }
            | rollout,
            "simulate": {
                "responses": {"median": 60, "sigma": 0.8},
                "prompts": {"median": 20},
                "engine": {
                    "step_s": 0.02,
                    "request_s": 0.001,
                    "max_running": 6,
                    "prefill_tokens_per_s": 2000,
                },
                "trainer": {"step_s": 0.5, "tokens_per_s": 2000},
                "transfer": {"bytes": 1000, "bytes_per_s": 1e4, "pause_s": 0.05},
                "reward": {"median_s": 0.1},
            }
            | (simulate or {}),
        }
    )


def simulated(config: RunConfig, schedule: Schedule | None = None, seed=0, held_out=0) -> Outcome:
    schedule = schedule or recipe_schedule(config)
    layout = time_shared(layout_of(config)) if schedule.shared else layout_of(config)
    return World(config, schedule, layout, Work(config, seed).workload(), held_out).run()


SCHEDULES = st.builds(
    Schedule,
    st.just("any"),
    st.integers(0, 4),
    st.sampled_from(list(policies((0.0, 0.25, 0.5)).values())),
    st.sampled_from(INTERRUPTS),
    st.sampled_from([1.0, 1.5]),
)


@tries(20)
@given(
    schedule=SCHEDULES,
    seed=st.integers(0, 1000),
    stragglers=st.sampled_from([0.0, 0.1]),
    failing=st.booleans(),
    kv_tokens=st.sampled_from([None, 5000]),
)
def test_every_schedule_keeps_the_bound_and_accounts_for_every_token(
    schedule, seed, stragglers, failing, kv_tokens
):
    base = config().simulate
    recipe = config(
        simulate={
            "responses": {"median": 60, "sigma": 0.8, "straggler_fraction": stragglers},
            "engine": base.engine.model_dump() | {"kv_tokens": kv_tokens},
            "failures": {"engine_mean_time_s": 20, "engine_restart_s": 3, "episode": 0.05} if failing else {},
        }
    )
    found = simulated(recipe, schedule, seed)
    assert found.steps == 6
    assert found.max_lag <= schedule.bound
    assert max(found.token_lags) <= schedule.bound
    counts = found.counts
    assert counts.trained == 24
    assert counts.expired == sum(found.losses[loss] for loss in (Loss.STALE, Loss.REQUEUED, Loss.SURPLUS))
    assert found.trajectories == 48
    assert sum(found.token_lags.values()) == found.tokens_trained
    unfinished = found.tokens_generated - found.tokens_trained - found.tokens_masked
    unfinished -= sum(found.tokens_lost.values())
    assert unfinished >= 0
    if not failing and schedule.over_sampling == 1:  # else answers are given up while they are generated
        assert counts.in_flight == unfinished == 0
    seconds = found.engine_s
    assert seconds.total == pytest.approx(2 * found.makespan_s)
    assert sum(found.step_s) == pytest.approx(found.makespan_s)


def test_a_window_measures_the_middle_of_a_run_without_its_begin_and_end():
    """With equal lengths and a slow trainer every step takes as long; only the first has to wait."""
    recipe = config(
        steps=12,
        simulate={"responses": {"median": 60, "sigma": 0}, "trainer": {"step_s": 20, "tokens_per_s": 2000}},
    )
    schedule, layout = recipe_schedule(recipe), layout_of(recipe)

    def run(window: MeasuredSteps | None) -> Outcome:
        return World(recipe, schedule, layout, Work(recipe, 0).workload()).run(window=window)

    whole, middle = run(None), run(MeasuredSteps(3, 4))
    assert (middle.steps, len(middle.step_s)) == (4, 4)
    assert middle.step_s == pytest.approx(whole.step_s[3:7])
    assert middle.makespan_s == pytest.approx(sum(whole.step_s[3:7]))
    assert middle.trajectories == 4 * 8
    assert middle.trainer_idle < whole.trainer_idle
    assert middle.wait_s == pytest.approx(0)
    assert middle.engine_s.total == pytest.approx(2 * middle.makespan_s)


def test_the_gate_exceeds_the_bound_and_admission_order_does_not():
    recipe = config(steps=20, simulate={"responses": {"median": 60, "straggler_fraction": 0.05}})
    gate = simulated(recipe, volume_gate(1))
    fifo = simulated(recipe, Schedule("fifo", 1, policies()["fifo"]))
    assert gate.max_lag > 1 >= fifo.max_lag
    assert gate.tokens_wasted == fifo.tokens_wasted == 0


def test_a_small_run_comes_out_as_reckoned_by_hand():
    """One engine, one answer of 10 tokens at a time, all constants given, so that times can be added up."""
    recipe = config(
        steps=3,
        max_head_offpolicyness=0,
        batch_size=1,
        n_samples_per_prompt=2,
        engine={"count": 1},
        simulate={
            "responses": {"median": 10, "sigma": 0},
            "prompts": {"median": 5, "sigma": 0},
            "engine": {"step_s": 1.0, "request_s": 0.5, "prefill_tokens_per_s": 10},
            "trainer": {"step_s": 4.0, "tokens_per_s": 30},
            "transfer": {"prepare_s": 0.25, "pause_s": 0.5, "bytes": 100, "bytes_per_s": 100},
            "reward": {"median_s": 2.0, "sigma": 0},
        },
    )
    found = simulated(recipe)
    prefill, decode, judge = 2 * 5 / 10, 10 * (1.0 + 2 * 0.5), 2.0
    train, publish = 4.0 + 2 * 15 / 30, 0.25 + 0.5 + 1.0
    assert found.step_s == pytest.approx([prefill + decode + judge + train + publish] * 3)
    assert found.wait_s == pytest.approx(3 * (prefill + decode + judge))
    assert found.train_s == pytest.approx(3 * train)
    assert found.publish_s == pytest.approx(3 * publish)
    assert found.trainer_idle == pytest.approx(1 - train / (prefill + decode + judge + train + publish))
    assert found.engine_s.paused == pytest.approx(3 * 1.5)
    assert found.engine_s.prefill == pytest.approx(3 * prefill)
    assert found.engine_s.decode == pytest.approx(3 * decode)
    assert found.running == pytest.approx(2)
    assert found.head_lags == {0: 6}
    assert found.tokens_trained == found.tokens_generated == 60


def test_training_is_slower_beside_decoding_and_decoding_beside_training():
    slower = {"trainer": {"step_s": 0.5, "tokens_per_s": 2000, "slowdown": 2.0}}
    assert simulated(config(simulate=slower)).train_s > 1.3 * simulated(config()).train_s
    engine = config().simulate.engine.model_dump()
    slowed = simulated(config(simulate={"engine": engine | {"slowdown": 2.0}}))
    assert slowed.makespan_s > simulated(config()).makespan_s


def test_asynchrony_is_faster_and_shared_gpus_are_never_used_at_the_same_time():
    recipe = config(steps=12)
    apart, shared = simulated(recipe, synchronous()), simulated(recipe, synchronous(shared=True))
    assert simulated(recipe).tokens_per_s > 1.2 * apart.tokens_per_s
    assert apart.max_lag == shared.max_lag == 0


def test_evaluations_take_time_from_the_engines_and_count_for_nothing():
    recipe = config(steps=8)
    recipe = recipe.model_copy(
        update={"eval": RunConfig.model_fields["eval"].annotation.__args__[0](path="held.jsonl", every=2)}
    )
    without, beside = simulated(recipe), simulated(recipe, held_out=40)
    assert beside.makespan_s > without.makespan_s
    assert beside.tokens_trained <= beside.tokens_generated == without.tokens_generated


def test_an_episode_that_takes_too_long_is_a_failed_attempt():
    found = simulated(config(episode_timeout_s=3.0, episode_attempts=2))
    assert found.failed_attempts > 0
    assert all(failure.endswith("TimeoutError: not done within 3 s") for failure in found.failures)
    assert found.losses[Loss.FAILED] > 0
    assert found.counts.trained == 24


def test_a_run_that_cannot_go_on_says_who_waits():
    recipe = config(simulate={"failures": {"episode": 1.0}})
    with pytest.raises(SimulationStalled, match=r"groups in a row have failed.*tasks wait"):
        simulated(recipe)


# ---- layouts


def test_splits_use_every_gpu_and_leave_at_least_one_engine_and_one_replica():
    recipe = config().model_copy(
        update={"actor": config().actor.model_copy(update={"parallel": _parallel(tensor=2)})}
    )
    for gpus in (4, 8, 64, 512):
        found = splits(recipe, gpus)
        assert 1 <= len(found) <= 13
        for layout in found:
            assert layout.trainer_gpus % 2 == 0
            assert layout.trainer_gpus >= 2
            assert layout.engines >= 1
            assert layout.trainer_gpus + layout.engine_gpus == layout.gpus == gpus
    assert split(recipe, 8, 100).trainer_gpus == 6


def _parallel(**ranks):
    return config().actor.parallel.model_copy(update=ranks)


def test_all_schedules_are_compared_once():
    found = [(one.name, one.bound, one.interrupt) for one in compared(config())]
    assert len(found) == len(set(found))
    own = recipe_schedule(config())
    for bound in BOUNDS:
        for interrupt in INTERRUPTS:
            assert any(
                one.consumption == own.consumption and (one.bound, one.interrupt) == (bound, interrupt)
                for one in compared(config())
            )


# ---- comparison, timeline


def test_a_comparison_recommends_the_fastest_split():
    recipe = config(steps=3, simulate={"layout": {"type": "cluster", "gpus_per_node": 4}})
    comparison = compare(Work(recipe, 0))
    assert {run.layout.gpus for run in comparison.splits} == {4}
    assert comparison.recommended.tokens_per_s == max(run.tokens_per_s for run in comparison.splits)
    assert comparison.synchronous.schedule.bound == 0
    assert comparison.speedup(comparison.synchronous) == 1
    assert comparison.variant(2, "retract").outcome == comparison.outcome


def timeline_of(recipe: RunConfig) -> Timeline:
    world = World(recipe, recipe_schedule(recipe), layout_of(recipe), Work(recipe, 0).workload())
    timeline = Timeline(world)
    world.run(timeline.advance)
    return timeline


def test_a_timeline_shows_as_much_decoding_as_there_was(monkeypatch):
    for samples in (SAMPLES, 64):
        monkeypatch.setattr("slipstream.backend.simulate.compare.SAMPLES", samples)
        recipe = config(steps=10)
        timeline = timeline_of(recipe)
        assert len(timeline.times_s) <= samples
        running = timeline.running(0, timeline.end_s, 200)
        assert running.shape == (2, 200)
        assert running.min() >= 0
        assert running.max() <= 6 + 1e-9
        found = simulated(recipe)
        requests = found.running * found.engine_s.decode / found.makespan_s / 2
        stalled = found.engine_s.prefill + found.engine_s.paused
        assert requests <= running.mean() <= requests + 6 * stalled / found.makespan_s + 0.5


def test_many_engines_are_drawn_in_few_rows():
    timeline = timeline_of(config(engine={"count": 3 * ROWS}, max_concurrent=1000))
    assert len(timeline.rows) == ROWS
    assert timeline.rows[:2] == ["engine-0..2", "engine-3..5"]
    assert timeline.running(0, timeline.end_s, 10).shape == (ROWS, 10)


@pytest.mark.parametrize("steps", [1, 2, 12])
def test_the_picture_is_a_png_with_all_its_colours(steps):
    picture = draw(timeline_of(config(steps=steps)), "a run", "as simulated", 6)
    pixels = imread(io.BytesIO(picture), "png")
    assert pixels.shape[1] == 2400
    packed = np.rint(255 * pixels[..., :3]).astype(np.int64) @ (1 << 16, 1 << 8, 1)
    colours = {f"#{colour:06x}" for colour in np.unique(packed)}
    assert {PUBLISHING, TRAINING, WAITING, IDLE} <= colours


def test_a_pause_without_a_length_is_seen_and_nothing_outside_the_time():
    timeline = timeline_of(config(steps=12))
    middle_s, end_s = timeline.pauses[5][1], timeline.end_s
    timeline.pauses[:] = [(middle_s, middle_s), (end_s, end_s)]
    timeline.training[:] = [(2 * end_s, 3 * end_s)]
    pixels = imread(io.BytesIO(draw(timeline, "", "", 6)), "png")[200:]  # below the legend
    whole = pixels[: len(pixels) // 2, :, :3]
    columns = np.isclose(whole, to_rgb(PUBLISHING)).all(axis=-1).sum(axis=0) > 20
    assert 1 <= columns.sum() <= 6
    assert not np.isclose(pixels[..., :3], to_rgb(TRAINING)).all(axis=-1).any()


# ---- determinism

REPORT = """
import hashlib, sys
sys.path.insert(0, {root!r})
from tests.unit.test_simulate_world import config
from slipstream.backend.simulate.compare import Work, compare
from slipstream.backend.simulate.picture import draw
from slipstream.backend.simulate.report import Report, as_json
recipe = config(steps=2, simulate={{
    "failures": {{"engine_mean_time_s": 10, "engine_restart_s": 2, "episode": 0.05}},
    "responses": {{"median": 60, "straggler_fraction": 0.1}},
}})
for seed in (7, 8):
    work = Work(recipe, seed)
    found = compare(work)
    report = as_json(Report(work, None, (found,))).encode() + draw(found.timeline, "t", "s", 6)
    print(hashlib.sha256(report).hexdigest())
"""


def reports(hash_seed: str) -> list[str]:
    """Return the digests of the reports of two seeds, of a process of their own."""
    ended = subprocess.run(
        [sys.executable, "-c", REPORT.format(root=str(ROOT))],
        env=environment(PYTHONHASHSEED=hash_seed),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return ended.stdout.split()


def test_the_same_seed_gives_the_same_bytes_whatever_the_hash_seed():
    first, other = reports("0")
    assert reports("4242") == [first, other]
    assert first != other


@pytest.mark.parametrize("failing", [False, True])
def test_colocated_engines_stand_still_while_the_trainer_trains_and_go_on_with_what_they_had(failing: bool):
    failures = {"engine_mean_time_s": 20.0, "engine_restart_s": 1.0} if failing else {}
    recipe = config(
        steps=30,
        simulate={"failures": failures, "responses": {"median": 60}},
        engine={"count": 2, "colocated": True},
    )
    layout = layout_of(recipe)
    assert layout.shared and layout.gpus == layout.trainer_gpus
    world = World(recipe, recipe_schedule(recipe), layout, Work(recipe, 0).workload())
    outcome = world.run()
    # One pause for each version: that of an engine that was started again is none.
    assert len(world.trainer.training) == len(world.trainer.pauses) == recipe.run.steps
    for (began, ended), (paused, resumed) in zip(world.trainer.training, world.trainer.pauses, strict=True):
        assert paused <= began <= ended <= resumed
    assert 0 < outcome.max_lag <= recipe.rollout.max_head_offpolicyness


def test_a_run_survives_the_deaths_of_trainer_engines_and_nodes():
    base = config().simulate
    found = {}
    for placement in ("elastic", "fixed"):
        recipe = config(
            steps=60,
            engine={"count": 16},
            max_concurrent=64,
            consumption={"type": "fifo"},
            simulate={
                "trainer": base.trainer.model_dump() | {"checkpoint_write_s": 1, "checkpoint_stall_s": 0.1},
                "failures": {
                    "engine_mean_time_s": 400,
                    "engine_restart_s": 1,
                    "trainer_mean_time_s": 40,
                    "trainer_restart_s": 1,
                    "node_mean_time_s": 60,
                    "node_repair_s": 30,
                    "trainer_node_restart_s": 2,
                    "job_restart_s": 3,
                    "spare_nodes": 1,
                    "engine_placement": placement,
                },
            },
        )
        parallel = recipe.actor.parallel.model_copy(update={"data": 16})  # on two nodes
        recipe = recipe.model_copy(
            update={
                "checkpoint": recipe.checkpoint.model_copy(update={"every": 3}),
                "actor": recipe.actor.model_copy(update={"parallel": parallel}),
            }
        )
        world = World(recipe, recipe_schedule(recipe), layout_of(recipe), Work(recipe, 1).workload())
        outcome = found[placement] = world.run()
        assert outcome.failures_by_kind.keys() == set(FAILING)
        assert outcome.steps > 60  # some were undone and trained again
        assert outcome.undone_s > 0
        assert outcome.counts.trained == 60 * 4
        assert outcome.trajectories == 60 * 4 * 2
        assert (world.ledger.untold(outcome.counts.in_flight), world.ledger.trained_twice) == (0, 0)
        assert outcome.max_lag <= 2
        assert 0 < outcome.effective < 1 - outcome.trainer_idle
    assert found["elastic"].engine_s.down < found["fixed"].engine_s.down
