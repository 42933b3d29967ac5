"""The cost model is found again in the trace of a run that was made with it."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from slipstream.backend.simulate.account import Account
from slipstream.backend.simulate.compare import Work
from slipstream.backend.simulate.fit import fit
from slipstream.backend.simulate.gpu_split import layout_of, model_of
from slipstream.backend.simulate.schedules import recipe_schedule
from slipstream.backend.simulate.simulated_engine import Engine
from slipstream.backend.simulate.simulated_pool import SimulatedPool
from slipstream.backend.simulate.trace import LONGEST_PAUSE_S, read_trace
from slipstream.backend.simulate.world import World
from slipstream.configs.violations import RecipeError
from tests.unit.test_simulate_world import config


class Written:
    """The trace that a simulated run would have left, were it a real one."""

    def __init__(self, monkeypatch):
        self.lines = []
        takes, joins, finished, step = Engine.take, Engine._join, SimulatedPool._finished, Account.step
        started, prefilled = {}, {}

        def taking(engine, request):
            # Real requests never start at the very same time.
            started[request.order] = engine._loop.time() + 1e-9 * request.order
            takes(engine, request)

        def joining(engine, request):
            joins(engine, request)
            prefilled[request.order] = engine._stall_until

        def ending(pool, engine, request):
            start_s, first_s = started[request.order], prefilled[request.order]
            now = pool._loop.time()
            token_s = 0.02 if request.length == 1 else (now - first_s) / request.length
            self.write(
                "request",
                engine=f"engine-{engine}",
                start_s=start_s,
                first_token_s=first_s + token_s,
                end_s=now,
                prompt_tokens=request.prompt_tokens,
                new_tokens=request.length,
                retractions=0,
                interrupted=False,
            )
            finished(pool, engine, request)

        def stepping(account, trained, status):
            world = self.world
            begin, end = world.trainer.training[-1]
            tokens = sum(trajectory.length for trajectory in trained.trajectories)
            now = world.trainer.pauses[-1][1]
            written = asdict(trained.times) | {"train_s": end - begin}
            self.write("step", version=trained.version, tokens=tokens, end_s=now, **written)
            self.write("publish", end_s=now, **asdict(trained.report))
            step(account, trained, status)

        monkeypatch.setattr(Engine, "take", taking)
        monkeypatch.setattr(Engine, "_join", joining)
        monkeypatch.setattr(SimulatedPool, "_finished", ending)
        monkeypatch.setattr(Account, "step", stepping)

    def write(self, kind, **values):
        self.lines.append(json.dumps({"kind": kind, **values}))

    def run(self, recipe, folder):
        self.world = World(recipe, recipe_schedule(recipe), layout_of(recipe), Work(recipe, 0).workload())
        self.outcome = self.world.run()
        (folder / "trace.jsonl").write_text("\n".join(self.lines) + "\n")
        return folder


def recipe(**simulate):
    return config(
        steps=40,
        batch_size=8,
        n_samples_per_prompt=4,
        max_concurrent=64,
        simulate={
            "responses": {"median": 60, "sigma": 0.8},
            "prompts": {"median": 30, "sigma": 0.4},
            "engine": {"step_s": 0.02, "request_s": 0.002, "prefill_tokens_per_s": 5000, "max_running": 32},
            "trainer": {"step_s": 1.0, "tokens_per_s": 1500},
            "transfer": {"bytes": 1000, "bytes_per_s": 5000, "pause_s": 0, "prepare_s": 0.1},
            "reward": {"median_s": 0},
        }
        | simulate,
    )


def test_known_constants_are_recovered(monkeypatch, tmp_path):
    made = recipe()
    trace = read_trace(Written(monkeypatch).run(made, tmp_path))
    found = fit(made, trace).model
    assert found.engine.step_s == pytest.approx(0.02, rel=0.15)
    assert found.engine.request_s == pytest.approx(0.002, rel=0.15)
    assert found.engine.prefill_tokens_per_s == pytest.approx(5000, rel=0.35)
    assert found.engine.slowdown == 1.0
    assert found.trainer.step_s == pytest.approx(1.0, rel=0.02)
    assert found.trainer.tokens_per_s == pytest.approx(1500, rel=0.02)
    assert found.transfer.prepare_s == pytest.approx(0.1)
    assert found.transfer.bytes / found.transfer.bytes_per_s == pytest.approx(0.2)
    assert found.prompts.median == pytest.approx(30, rel=0.1)
    assert found.prompts.sigma == pytest.approx(0.4, rel=0.2)


def test_the_slowdown_of_engines_beside_training_is_recovered(monkeypatch, tmp_path):
    engine = {"step_s": 0.02, "request_s": 0.002, "prefill_tokens_per_s": 5000, "max_running": 32}
    made = recipe(engine=engine | {"slowdown": 1.6})
    trace = read_trace(Written(monkeypatch).run(made, tmp_path))
    fitted = fit(made, trace)
    assert fitted.model.engine.slowdown == pytest.approx(1.6, abs=0.2)
    decoding = fitted.residuals[0]
    assert decoding.rms < 0.15 * decoding.mean


def test_a_run_and_its_fitted_simulation_agree(monkeypatch, tmp_path):
    made, written = recipe(), Written(monkeypatch)
    written.run(made, tmp_path)
    real = written.outcome
    fitted = fit(made, read_trace(tmp_path))
    again = made.model_copy(update={"simulate": fitted.model})
    work = Work(again, 3, fitted.lengths)
    found = World(again, recipe_schedule(again), layout_of(again), work.workload()).run()
    assert found.makespan_s == pytest.approx(real.makespan_s, rel=0.1)
    assert found.mean_lag == pytest.approx(real.mean_lag, rel=0.1)


def test_lengths_keep_their_groups(monkeypatch, tmp_path):
    made, written = recipe(), Written(monkeypatch)
    trace = read_trace(written.run(made, tmp_path))
    lengths = fit(made, trace).lengths
    assert lengths.shape[1] == 4
    assert lengths.size >= 0.5 * len(trace.requests)
    work = Work(made, 0, lengths).workload()
    groups = len(lengths)
    for position in (0, 5, groups - 1, groups, 3 * groups + 2):
        assert [work.sample(position, n)[1] for n in range(4)] == lengths[position % groups].tolist()


def test_constants_that_would_be_negative_are_zero():
    from slipstream.backend.simulate.fit import _least_squares

    random = np.random.default_rng(0)
    factors = random.uniform(1, 2, (200, 3))
    seconds = factors @ [2.0, -0.5, 1.0]
    found, rms = _least_squares(factors, seconds)
    assert found[1] == 0
    assert min(found) >= 0
    grid = [
        factors @ [a, b, c] for a in np.linspace(0, 3, 13) for b in (0, 0.25) for c in np.linspace(0, 2, 9)
    ]
    assert rms <= min(float(np.sqrt(np.mean((one - seconds) ** 2))) for one in grid)


def test_only_the_last_life_of_a_run_is_looked_at(monkeypatch, tmp_path):
    written = Written(monkeypatch)
    written.run(recipe(), tmp_path)
    lines = [json.loads(line) for line in written.lines]
    steps = [line for line in lines if line["kind"] == "step"]
    later = steps[10]["end_s"]
    for line in lines:
        if line["end_s"] > later:
            for name in ("start_s", "first_token_s", "end_s"):
                if name in line:
                    line[name] += 20 * LONGEST_PAUSE_S + 100
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    trace = read_trace(tmp_path)
    assert len(trace.end_S) == len(steps) - 11
    assert trace.begin_s > later


def test_everything_wrong_with_a_trace_is_told_at_once(tmp_path):
    with pytest.raises(RecipeError, match=r"no file trace\*.jsonl in this folder"):
        read_trace(tmp_path)
    (tmp_path / "trace.jsonl").write_text(
        '{"kind": "step", "version": 1}\nnot json\n{"kind": "unknown"}\n{"kind": "request"}\n{"half": '
    )
    with pytest.raises(RecipeError) as caught:
        read_trace(tmp_path)
    told = [str(violation) for violation in caught.value.violations]
    assert len(told) == 3
    assert "line 1" in told[0] and "tokens" in told[0]
    assert "line 2" in told[1] and "not a JSON object" in told[1]
    assert "line 4" in told[2]
    (tmp_path / "trace.jsonl").write_text("")
    with pytest.raises(
        RecipeError, match="0 steps, 0 publications and 0 answered requests; expected 3 steps"
    ):
        read_trace(tmp_path)


def test_a_recipe_with_its_own_rewards_keeps_them(monkeypatch, tmp_path):
    made = recipe(reward={"median_s": 0.3})
    trace = read_trace(Written(monkeypatch).run(made, tmp_path))
    assert fit(made, trace).model.reward == model_of(made).reward
    bare = made.model_copy(update={"simulate": None})
    assert fit(bare, trace).model.reward.median_s == 0
