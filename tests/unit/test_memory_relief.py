"""A run that has run out of memory names the settings that free some, with the bytes of the memory plan."""

import re

import pytest

from slipstream.backend.commands.check import Planned, planned
from slipstream.backend.commands.outcome import Failed, WrongInput
from slipstream.backend.commands.run import attended
from slipstream.backend.memory.relief import Shortage, relief, shortage_of
from slipstream.backend.memory.verdict import GIB
from slipstream.configs.schema import RunConfig
from tests.environment import ROOT
from tests.unit.test_rollout_gpu_environment import VALID

MODEL = ROOT / "configs/models/Qwen3-1.7B"

OF_TORCH = (
    "the training step from version 3 failed on rank 1: OutOfMemoryError: CUDA out of memory. Tried to "
    "allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 3.20 GiB is free."
)
OF_CACHE = (
    "SGLang exited with code 1 while starting; the end of /logs/engine-0.log:\n"
    "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: 0.1"
)
OF_ENGINE = (
    "SGLang exited with code 1 while starting; the end of x:\ntorch.OutOfMemoryError: CUDA out of memory."
)
OF_CPU = (
    "the training step failed on rank 0: RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. "
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes. "
    "(log: logs/trainer-0.log)"
)
BY_KERNEL = "the process of trainer rank 0 ended during the training step from version 3 (log: x)"


def recipe(*, device: str = "gpu", actor: dict | None = None, **engine: object) -> RunConfig:
    rollout = {**VALID["rollout"], "engine": engine, "sampling": {"max_new_tokens": 512}}
    cluster = {"type": "local", "device": device, "gpu_memory_gib": 80 if device == "gpu" else None}
    model = {"path": str(MODEL)}
    given = {**VALID, "model": model, "rollout": rollout, "cluster": cluster, "actor": actor or {}}
    return RunConfig.model_validate(given)


def plan(config: RunConfig) -> Planned | None:
    try:
        return planned(config)
    except WrongInput:
        return None


@pytest.mark.parametrize(
    ("failure", "shortage"),
    [
        (OF_TORCH, Shortage.TRAINER),
        ("torch.OutOfMemoryError: HIP out of memory", Shortage.TRAINER),
        (OF_CACHE, Shortage.CACHE),
        (OF_ENGINE, Shortage.ENGINE),
        (OF_CPU, Shortage.HOST),
        (BY_KERNEL, Shortage.HOST),
        ("engine-0 has failed twice in the same way: its server exited with code -9", Shortage.HOST),
        (
            "RuntimeError: Rank 0 scheduler died during initialization (exit code: -7). If exit code is -9 "
            "(SIGKILL), a common cause is the OS OOM killer.",
            Shortage.SHARED,
        ),
        ("SGLang exited with code -7 while starting", Shortage.SHARED),
        ("RuntimeError: unable to resize shared memory file </torch_1> to the right size", Shortage.SHARED),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/x'", Shortage.SHARED),
        ("OSError: [Errno 28] No space left on device: '/data/x'", None),
        ("engine-0 has failed 4 times: its server exited with code -70", None),
        ("ValueError: no loss", None),
        ("engine-0 has failed 4 times: its server exited with code 1", None),
    ],
)
def test_the_text_of_a_failure_says_where_memory_has_run_out(failure: str, shortage: Shortage | None):
    assert shortage_of(failure) == shortage


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_a_trainer_names_each_setting_with_the_bytes_by_which_the_plan_shrinks(device: str):
    config = recipe(device=device, actor={"microbatch_tokens": 32768})
    first, *lines = relief(OF_TORCH if device == "gpu" else OF_CPU, config, plan)
    whole = planned(config)
    assert "The memory plan has for a rank of pipeline stage 0: weights " in first
    assert f"activations {whole.stages[0].activations / GIB:.2f} GiB" in first
    changes = dict(re.findall(r"^(\S+)=\S+ .*frees (.+) GiB", "\n".join(lines), re.MULTILINE))
    assert {"actor.microbatch_tokens", "actor.recompute", "actor.parallel.tensor"} <= changes.keys()
    actor = config.actor.model_copy(update={"microbatch_tokens": 16384})
    half = planned(config.model_copy(update={"actor": actor}))
    assert changes["actor.microbatch_tokens"] == f"{(whole.stages[0].peak - half.stages[0].peak) / GIB:.2f}"
    bytes_freed = [float(size) for size in changes.values()]
    assert bytes_freed == sorted(bytes_freed, reverse=True), "the largest relief comes first"


def test_what_frees_nothing_is_not_named():
    """A completion alone fills a larger micro-batch than the setting."""
    config = recipe(actor={"microbatch_tokens": 512, "recompute": "full"})
    text = "\n".join(relief(OF_TORCH, config, plan))
    assert "actor.microbatch_tokens=" not in text and "actor.recompute=" not in text
    assert "actor.parallel.tensor=2 (now 1; twice as many ranks)" in text


def test_an_engine_without_room_for_its_cache_is_told_the_other_direction_than_one_that_is_full():
    config = recipe(args={"mem_fraction_static": 0.1, "max_total_tokens": 100_000})
    engine = planned(config).engine
    assert engine is not None
    for failure, direction in ((OF_CACHE, "a larger "), (OF_ENGINE, "a smaller ")):
        text = "\n".join(relief(failure, config, plan))
        assert f"{direction}rollout.engine.args.mem_fraction_static (now 0.1)" in text
        assert "each 0.01 is 0.80 GiB" in text and f"weights {engine.weights / GIB:.2f} GiB" in text
        assert "rollout.engine.tensor_parallel=2 (now 1)" in text
    assert f"max_total_tokens=50000 (now 100000) frees {50_000 * engine.token / GIB:.2f} GiB" in text


def test_a_killed_process_of_a_run_on_gpus_names_what_its_host_holds():
    text = "\n".join(relief(BY_KERNEL, recipe(colocated=True), plan))
    assert text.startswith("if the kernel has killed the process, the memory of its machine has run out")
    assert (
        "rollout.engine.colocated=false frees up to" in text and "rollout.judging.processes (now 1)" in text
    )


def test_a_run_that_runs_out_of_memory_ends_with_the_settings_that_free_some(tmp_path):
    config = recipe(actor={"microbatch_tokens": 32768})
    config = config.model_copy(update={"run": config.run.model_copy(update={"root": tmp_path})})

    async def start(progress):
        raise RuntimeError(OF_TORCH)

    with pytest.raises(Failed, match=r"memory: actor\.recompute=full \(now none\) frees [\d.]+ GiB"):
        attended(config, start)


def test_a_plan_that_cannot_be_made_hides_no_failure(tmp_path):
    config = recipe()
    model = config.model.model_copy(update={"path": tmp_path / "gone"})
    run = config.run.model_copy(update={"root": tmp_path})
    config = config.model_copy(update={"model": model, "run": run})

    async def start(progress):
        raise RuntimeError(OF_TORCH)

    with pytest.raises(Failed, match="CUDA out of memory"):
        attended(config, start)
