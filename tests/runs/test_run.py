"""Whole runs as a user starts them: real Megatron, SGLang and Ray, in a few steps. All of these are slow."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.peft import write_peft
from slipstream.bridge.hf.peft_config import PeftIndex
from slipstream.bridge.shards.adapter import a_name, adapter_spec, b_name, peft_config_of
from slipstream.rollout.ledger.lease.driver_file import begin_term, look
from slipstream.rollout.system.durable import write_durably
from tests.runs.conftest import LaunchedRun


def wait_for_record(run: LaunchedRun, wanted: Callable[[dict], bool], timeout_s: float = 120) -> None:
    """Until one of the run's steps was as `wanted`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if any(map(wanted, records(run))):
            return
        assert run.process.poll() is None, run.output()
        time.sleep(0.2)
    pytest.fail(f"no step was as it was wanted in {timeout_s} s:\n{run.output()}")


def wait_for_step(run: LaunchedRun, step: int, timeout_s: float = 120) -> None:
    wait_for_record(run, lambda record: record["step"] == step, timeout_s)


def summary(run: LaunchedRun) -> dict:
    return json.loads((run.folder / "summary.json").read_text())


def records(run: LaunchedRun) -> list[dict]:
    """The steps that the run has written so far, whole lines only."""
    metrics = run.folder / "metrics.jsonl"
    if not metrics.exists():
        return []
    lines = metrics.read_text().rpartition("\n")[0].splitlines()
    return [record for record in map(json.loads, lines) if "reward/mean" in record]


def finish(run: LaunchedRun, timeout_s: float = 240) -> int:
    try:
        return run.process.wait(timeout_s)
    except Exception:
        pytest.fail(f"the run did not end in {timeout_s} s:\n{run.output()}")


Launch = Callable[..., LaunchedRun]


@pytest.mark.slow  # test_resume.py kills an engine too
@pytest.mark.parametrize("interrupt", ["retract", "in_place"])
def test_a_killed_engine_is_replaced_and_brought_to_the_current_version(launch: Launch, interrupt: str):
    """Asynchronous, trained with tensor parallel 2 (retract) or pipeline parallel 2 (in place).

    Of the transports that keep something for the next version, as the one by shards does elsewhere.
    """
    settings = {
        "retract": ("actor.parallel.tensor=2", "weights.transport.type=delta"),
        "in_place": ("actor.parallel.pipeline=2", "weights.transport.type=tensor"),
    }[interrupt]
    run = launch(
        "run.steps=14", "rollout.max_head_offpolicyness=3", f"weights.interrupt={interrupt}", *settings
    )
    wait_for_step(run, 3)
    killed = run.pids_of("slipstream.rollout.engine.launch")
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert finish(run) == 0, run.output()
    found = summary(run)
    assert found["engine_restarts"] == 1
    assert (found["steps"], found["groups"]["trained"], found["groups"]["failed"]) == (14, 56, 0)
    assert found["head_lag_max"] <= 3
    # Tokens of lag 0 after the restart come from the replaced engine: they agree with the trainer.
    fresh = [r["mismatch/logprob_abs_max"] for r in records(run) if "mismatch/logprob_abs_max" in r]
    assert fresh
    if interrupt == "retract":
        assert max(fresh) < 1e-3
    run.assert_nothing_left()


@pytest.mark.slow  # test_served_adapters.py has it without a run
def test_a_killed_engine_gets_the_adapter_of_the_current_version(launch: Launch):
    run = launch(
        "run.steps=8",
        "rollout.max_head_offpolicyness=3",
        "weights.interrupt=abort",
        "actor.optimizer.lr=1e-2",
        "actor.lora={rank: 8, alpha: 16, serve: adapter}",
    )
    wait_for_step(run, 3)
    for pid in run.pids_of("slipstream.rollout.engine.launch"):
        os.kill(pid, signal.SIGKILL)
    assert finish(run) == 0, run.output()
    assert (summary(run)["engine_restarts"], summary(run)["steps"]) == (1, 8)
    fresh = [r["mismatch/logprob_abs_max"] for r in records(run) if "mismatch/logprob_abs_max" in r]
    assert fresh and max(fresh) < 1e-3
    assert (run.folder / "checkpoint-peft" / "adapter_model.safetensors").exists()
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_run_that_begins_with_an_adapter_samples_from_it_as_version_0(
    launch: Launch, inputs: Path, tmp_path: Path
):
    """Its engines are verified before they serve: without the adapter they would be refused."""
    spec = model_spec(inputs / "policy")
    adapter = adapter_spec(spec, rank=8, alpha=16.0, targets=None)
    torch.manual_seed(0)
    tensors = {
        name: 0.1 * torch.randn(shape)
        for layer, shapes in zip(adapter.modules, adapter.shapes, strict=True)
        for module, (rows, columns) in zip(layer, shapes, strict=True)
        for name, shape in ((a_name(module), (2, columns)), (b_name(module), (rows, 2)))
    }
    write_peft(tensors, peft_config_of(adapter, "policy") | {"r": 2, "lora_alpha": 4}, tmp_path / "adapter")
    run = launch("run.steps=2", f"actor.lora={{rank: 8, alpha: 16, path: {tmp_path / 'adapter'}}}")
    assert finish(run) == 0, run.output()
    assert summary(run)["engine_restarts"] == 0
    assert len(PeftIndex(run.folder / "checkpoint-peft").names) == len(tensors)
    run.assert_nothing_left()


@pytest.mark.slow  # test_colocated.py ends by a signal too
def test_a_signal_ends_everything_behind_a_checkpoint(launch: Launch):
    run = launch("run.steps=1000", "rollout.max_head_offpolicyness=2", "checkpoint.every=500")
    wait_for_step(run, 2)
    run.process.send_signal(signal.SIGTERM)
    assert finish(run, 120) == 3
    assert summary(run)["exit"] == "stopped"
    [checkpoint] = run.folder.glob("checkpoints/v????????")
    assert int(checkpoint.name[1:]) == summary(run)["versions"]
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_second_signal_waits_for_nothing(launch: Launch):
    run = launch("run.steps=1000", "rollout.max_head_offpolicyness=2", "checkpoint.every=500")
    wait_for_step(run, 2)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    run.process.send_signal(signal.SIGINT)
    assert finish(run, 120) == 3
    assert summary(run)["exit"] == "stopped"
    run.assert_nothing_left()


@pytest.mark.slow  # test_revival.py has it with restarts
def test_a_lost_trainer_without_a_restart_fails_the_run_with_its_name(launch: Launch):
    run = launch("run.steps=1000", "rollout.max_head_offpolicyness=2", "run.trainer_restarts=0")
    wait_for_step(run, 1)
    for pid in run.pids_of("ray::TrainerActor"):
        os.kill(pid, signal.SIGKILL)
    assert finish(run, 180) == 1
    assert "trainer" in run.output()
    assert summary(run)["exit"] == "failed"
    run.assert_nothing_left()


@pytest.mark.slow  # test_ledger_lease.py has it without engines and trainer
def test_a_run_that_another_machine_has_taken_over_ends_and_writes_nothing_more(launch: Launch):
    run = launch("run.steps=1000", "rollout.max_head_offpolicyness=2", "run.lease_s=6")
    wait_for_step(run, 2)
    seen = look(run.folder)
    assert seen.driver is not None and seen.term is not None
    assert begin_term(run.folder, seen.term + 1)
    other = msgspec.structs.replace(seen.driver, term=seen.term + 1, owner="other", host="elsewhere")
    write_durably(run.folder / "driver.json", msgspec.json.encode(other).decode())
    assert finish(run, 180) == 1
    assert "fenced: " in run.output() and "on elsewhere has taken the run over" in run.output()
    assert look(run.folder).driver == other
    assert not (run.folder / "summary.json").exists()
    run.assert_nothing_left()


@pytest.mark.slow  # test_resume.py kills a driver too
def test_a_killed_driver_takes_everything_with_it(launch: Launch):
    name = f"k{os.getpid()}"
    run = launch("run.steps=1000", "rollout.max_head_offpolicyness=2", name=name)
    wait_for_step(run, 1)
    assert len(list(Path("/tmp").glob(f"slipstream.*{name}.*"))) == 2, "Ray's folder and the engine's"
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + 120
    while run.descendants() and time.monotonic() < deadline:
        time.sleep(0.2)
    run.assert_nothing_left()
    assert not list(Path("/tmp").glob(f"slipstream.*{name}.*"))
