"""A run that has run out of memory names the settings that free some, with the bytes of the memory plan."""

import re

import pytest

from slipstream.backend.commands.check import Planned, planned
from slipstream.backend.commands.outcome import Failed, WrongInput
from slipstream.backend.commands.run import attended
from slipstream.backend.commands.tryout import told
from slipstream.backend.memory.relief import Shortage, relief, shortage_of
from slipstream.backend.memory.verdict import GIB
from slipstream.configs.schema import RunConfig, WeightsConfig
from slipstream.rollout.engine.server_process import EngineStartError
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
        ("RuntimeError: CUDA error: out of memory", Shortage.TRAINER),
        ("torch.AcceleratorError: CUDA error: out of memory", Shortage.TRAINER),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", Shortage.TRAINER),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", Shortage.TRAINER),
        ("ncclUnhandledCudaError: Call to CUDA failed. Cuda failure 2 'out of memory'", Shortage.TRAINER),
        ("ncclUnhandledCudaError: Call to CUDA failed. Cuda failure 'out of memory'", Shortage.TRAINER),
        ("engine-0 has failed twice in the same way: regain: CUDA error: out of memory", Shortage.ENGINE),
        (
            "RuntimeError: CUDA error: out of memory\n  in _places: torch.empty(n, pin_memory=pin)",
            Shortage.HOST,
        ),
        ("RuntimeError: CUDA error: out of memory; cudaHostAlloc(&ptr, size, flags)", Shortage.HOST),
        ("terminate called after throwing an instance of 'std::bad_alloc'", Shortage.HOST),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0", Shortage.HOST),
        ("Task was killed due to the node running low on memory.", Shortage.HOST),
        (OF_CACHE, Shortage.CACHE),
        ("SGLang: weights leave no GPU memory. Raise --mem-fraction-static above 0.312", Shortage.CACHE),
        ("SGLang: Decode out of memory. Try to lower your batch size.", Shortage.CACHE),
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


def test_on_a_shared_gpu_each_side_names_what_divides_it():
    """The share of the engines takes the place of SGLang's own setting, which is refused beside it."""
    config = recipe(colocated=True, gpu_share=0.4)
    trainer, cache, engine = (
        "\n".join(relief(each, config, plan)) for each in (OF_TORCH, OF_CACHE, OF_ENGINE)
    )
    assert "a smaller rollout.engine.gpu_share (now 0.4) gives the trainer more: each 0.01" in trainer
    assert "a larger rollout.engine.gpu_share (now 0.4) gives weights and KV cache more" in cache
    assert "actor.recompute=full (now none) frees" in engine, "the trainer is on the engine's GPU"
    assert "mem_fraction_static" not in trainer + cache + engine
    turns = "\n".join(relief(OF_TORCH, recipe(colocated=True), plan))
    assert "rollout.engine.colocated=false takes the engines off the trainer's GPUs" in turns


def test_weights_that_leave_name_their_buckets():
    config = recipe(actor={"microbatch_tokens": 512, "recompute": "full"})
    weights = WeightsConfig.model_validate({"transport": {"type": "tensor", "bucket_mb": 30_000}})
    config = config.model_copy(update={"weights": weights})
    failure = OF_TORCH.replace("the training step from", "publishing")
    first, *lines = relief(failure, config, plan)
    assert "weights that leave" in first
    assert any(line.startswith("weights.transport.bucket_mb=15000 (now 30000) frees") for line in lines)
    assert not any("bucket_mb" in line for line in relief(OF_TORCH, config, plan)), "a step sends no weights"


def test_whatever_starts_an_engine_names_the_settings():
    with (
        pytest.raises(Failed, match=r"memory: .*larger rollout\.engine\.args\.mem_fraction_static"),
        told(recipe()),
    ):
        raise EngineStartError(OF_CACHE)


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
