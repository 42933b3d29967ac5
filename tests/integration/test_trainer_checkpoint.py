"""Checkpoints of the real trainer: exact in the same layout, close in another one, of the moment that they
were begun at, and harmless when the disk is full."""

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import torch

from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.configs.schema import LoraConfig, ParallelConfig, RunConfig
from tests.exported import buckets_of
from tests.integration.test_megatron_parity import config_for, make_batch
from tests.models import make_checkpoint
from tests.ports import held_port
from tests.ranks import Job, run_jobs, run_ranks
from tests.selection import chosen, shortened

ADAPTERS = {"rank": 3, "alpha": 12.0}
OTHERS = {
    "advantage": [{"type": "reward", "estimator": "gae"}],
    "kl": {"coefficient": 0.1, "reference": {"type": "average", "decay": 0.5}},
}
VOCAB = 101
"""Odd: the embedding has another padding at every tensor-parallel size."""


@dataclass(frozen=True)
class Case:
    parallel: dict[str, int]
    dtype: str = "float32"
    distributed: bool = False
    model: str = "tied"
    lora: bool = False
    others: bool = False
    """With a critic and a moving average."""

    @property
    def ranks(self) -> int:
        return ParallelConfig.model_validate(self.parallel).world_size

    def config(self, models: Path) -> RunConfig:
        optimizer = {
            "lr": 1e-3,
            "warmup_steps": 10,
            "weight_decay": 0.1,
            "clip_grad": 0.0,
            "distributed": self.distributed,
        }
        config = config_for(
            models / self.model,
            self.parallel,
            dtype=self.dtype,
            minibatches=2,
            lora=ADAPTERS if self.lora else None,
            optimizer=optimizer,
            **OTHERS if self.others else {},
        )
        if not self.others:
            return config
        return RunConfig.model_validate(config.model_dump() | {"critic": {"optimizer": optimizer}})


CASES = {
    "one rank": Case({}),
    "tensor 2": Case({"tensor": 2}),
    "tensor 2 bfloat16": Case({"tensor": 2}, dtype="bfloat16"),
    "pipeline 2 distributed": Case({"pipeline": 2}, distributed=True),
    "virtual pipeline 2": Case({"pipeline": 2, "virtual_pipeline": 2}, model="deep"),
    "expert 2": Case({"data": 2, "expert": 2}, model="mixture"),
    "expert 2 distributed": Case({"data": 2, "expert": 2}, distributed=True, model="mixture"),
    "data 2": Case({"data": 2}, model="untied"),
    "data 2 distributed": Case({"data": 2}, distributed=True),
    "data 2 distributed bfloat16": Case({"data": 2}, dtype="bfloat16", distributed=True),
    "tensor 2 adapters": Case({"tensor": 2}, lora=True),
    "tensor 2 adapters bfloat16": Case({"tensor": 2}, dtype="bfloat16", distributed=True, lora=True),
    "expert 2 adapters": Case({"data": 2, "expert": 2}, model="mixture", lora=True),
    "data 2 distributed, other models": Case({"data": 2}, distributed=True, others=True),
    "pipeline 2 bfloat16, other models": Case({"pipeline": 2}, dtype="bfloat16", others=True),
    "linear attention, tensor 2": Case({"tensor": 2, "sequence": True}, model="hybrid"),
    "linear attention, data 2 distributed bfloat16": Case(
        {"data": 2}, dtype="bfloat16", distributed=True, model="hybrid"
    ),
    "linear attention, tensor 2 adapters": Case({"tensor": 2}, model="hybrid", lora=True),
}
RESHARDED = {
    "tensor 2 -> pipeline 2": ("tensor 2", Case({"pipeline": 2})),
    "tensor 2 -> one rank": ("tensor 2", Case({})),
    "one rank -> tensor 2": ("one rank", Case({"tensor": 2})),
    "expert 2 -> one rank": ("expert 2", Case({}, model="mixture")),
    "expert 2 distributed -> data 2": ("expert 2 distributed", Case({"data": 2}, model="mixture")),
    "data 2 -> one rank": ("data 2", Case({}, model="untied")),
    "data 2 distributed -> one rank": ("data 2 distributed", Case({})),
    "data 2 distributed -> tensor 2 distributed": (
        "data 2 distributed",
        Case({"tensor": 2}, distributed=True),
    ),
    "pipeline 2 distributed -> data 2 distributed": (
        "pipeline 2 distributed",
        Case({"data": 2}, distributed=True),
    ),
    "tensor 2 adapters -> pipeline 2 distributed": (
        "tensor 2 adapters",
        Case({"pipeline": 2}, distributed=True, lora=True),
    ),
    "expert 2 adapters -> one rank": ("expert 2 adapters", Case({}, model="mixture", lora=True)),
    "data 2 distributed, other models -> tensor 2": (
        "data 2 distributed, other models",
        Case({"tensor": 2}, others=True),
    ),
    "linear attention, tensor 2 -> one rank": ("linear attention, tensor 2", Case({}, model="hybrid")),
    "linear attention, tensor 2 -> pipeline 2 distributed": (
        "linear attention, tensor 2",
        Case({"pipeline": 2}, distributed=True, model="hybrid"),
    ),
    "linear attention, tensor 2 adapters -> one rank": (
        "linear attention, tensor 2 adapters",
        Case({}, model="hybrid", lora=True),
    ),
}

KEPT = (
    "one rank",
    "virtual pipeline 2",
    "expert 2 distributed",
    "tensor 2 adapters bfloat16",
    "data 2 distributed, other models",
    "linear attention, data 2 distributed bfloat16",
)
KEPT_RESHARDED = (
    "tensor 2 -> one rank",
    "one rank -> tensor 2",
    "data 2 -> one rank",
    "expert 2 distributed -> data 2",
    "linear attention, tensor 2 -> one rank",
)


@dataclass(frozen=True)
class Line:
    """What a rank had after four training steps."""

    metrics: dict[str, float]
    weights: dict[str, np.ndarray]
    """Of this rank, as bytes."""
    exported: dict[str, np.ndarray]
    """The whole model, on rank 0."""
    drawn: list[float]
    """From each random generator at step 2."""


@contextmanager
def trainer_of(rank: RankSpec, config: RunConfig) -> Iterator[Any]:
    """A trainer whose process groups are gone afterwards, so that the process can have another one."""
    import torch.distributed as dist

    from slipstream.backend.megatron.parallel import leave
    from slipstream.backend.trainer.rank import TrainerRank

    trainer = TrainerRank(config, rank)
    try:
        yield trainer
    except BaseException:  # the other ranks may be elsewhere
        trainer._groups.destroy_model_parallel()
        dist.destroy_process_group()
        raise
    leave()


def train(trainer: Any, steps: int) -> dict[str, float]:
    metrics = {}
    for _ in range(steps):
        metrics = trainer.train(make_batch(VOCAB, n=4, seed=100 + trainer.step, version=trainer.step)) or {}
    return metrics


def own_weights(trainer: Any) -> dict[str, np.ndarray]:
    return {
        f"{chunk}.{name}": tensor.detach().view(torch.uint8).cpu().numpy().copy()
        for chunk, part in enumerate(trainer._parameters)
        for name, tensor in part.items()
    }


def draw() -> list[float]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        tensor_parallel = float(torch.rand(1))
    return [random.random(), float(np.random.rand()), float(torch.rand(1)), tensor_parallel]


def line(trainer: Any, drawn: list[float]) -> Line:

    metrics = train(trainer, 2)
    exported = {}
    for bucket in buckets_of(trainer):
        if bucket is not None:
            exported |= {name: tensor.float().numpy().copy() for name, tensor in bucket.tensors()}
    return Line(metrics, own_weights(trainer), exported, drawn)


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Nothing is written before the event is set."""
    from torch.distributed.checkpoint import FileSystemWriter

    released = threading.Event()
    write_data = FileSystemWriter.write_data

    def wait_and_write(*args: Any) -> Any:
        assert released.wait(60)
        return write_data(*args)

    with patch.object(FileSystemWriter, "write_data", wait_and_write):
        yield released
    released.set()


def save(rank: RankSpec, config: RunConfig, folder: Path) -> Line:
    """Train two steps, begin a checkpoint, and train two more steps before any of it is written."""
    with trainer_of(rank, config) as trainer:
        train(trainer, 2)
        random.seed(rank.rank)  # no two ranks alike
        with held_back():
            trainer.begin_checkpoint(folder)
            result = line(trainer, draw())
        trainer.finish_checkpoint()
    return result


def resume(rank: RankSpec, config: RunConfig, folder: Path) -> Line:
    """Load the checkpoint, and train the same two steps."""
    with trainer_of(rank, config) as trainer:
        assert trainer.restore(folder) == trainer.step == 2
        return line(trainer, draw())


def on_ranks(
    function: Any, cases: dict[str, Case], models: Path, folders: dict[str, Path]
) -> dict[str, list[Line]]:
    """Return the lines of all ranks by case."""
    return run_jobs(
        {
            name: Job(case.ranks, function, (case.config(models), folders[name]))
            for name, case in cases.items()
        }
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint(folder / "tied", tied=True, num_hidden_layers=2)
    make_checkpoint(folder / "deep", tied=True)
    make_checkpoint(folder / "untied", tied=False, num_hidden_layers=2)
    make_checkpoint(folder / "mixture", "glm4_moe", tied=False, num_hidden_layers=2)
    make_checkpoint(
        folder / "hybrid", "qwen3_5_text", tied=False, num_hidden_layers=2, full_attention_interval=2
    )
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp(name.replace(" ", "-")) for name in CASES}


@pytest.fixture(scope="module")
def names(request) -> list[str]:
    """Return the cases, and the changes of layout, that tests are about or start from."""
    names = [*chosen(request, "name"), "tensor 2 -> one rank", "data 2 -> one rank", "one rank -> tensor 2"]
    return [*names, *(RESHARDED[name][0] for name in names if name in RESHARDED)]


@pytest.fixture(scope="module")
def uninterrupted(models: Path, folders: dict[str, Path], names: list[str]) -> dict[str, list[Line]]:
    cases = {name: case for name, case in CASES.items() if name in names}
    return on_ranks(save, cases, models, folders)


@pytest.fixture(scope="module")
def resumed(
    models: Path, folders: dict[str, Path], names: list[str], uninterrupted: dict[str, list[Line]]
) -> dict[str, list[Line]]:
    cases = CASES | {name: case for name, (_, case) in RESHARDED.items()}
    cases = {name: case for name, case in cases.items() if name in names}
    sources = folders | {name: folders[source] for name, (source, _) in RESHARDED.items()}
    return on_ranks(resume, cases, models, sources)


@pytest.mark.parametrize("name", shortened(CASES, KEPT))
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(name: str, uninterrupted, resumed):
    for before, after in zip(uninterrupted[name], resumed[name], strict=True):
        assert after.metrics == before.metrics
        assert after.drawn == before.drawn
        assert after.weights.keys() == before.weights.keys()
        for parameter, value in before.weights.items():
            np.testing.assert_array_equal(after.weights[parameter], value, err_msg=parameter)


@pytest.mark.parametrize("name", shortened(RESHARDED, KEPT_RESHARDED))
def test_a_checkpoint_loads_in_another_layout(name: str, uninterrupted, resumed):
    source, _ = RESHARDED[name]
    before, after = uninterrupted[source][0].exported, resumed[name][0].exported
    assert after.keys() == before.keys()
    for parameter, value in before.items():
        np.testing.assert_allclose(after[parameter], value, rtol=1e-4, atol=2e-6, err_msg=parameter)
    [expected] = [rank.metrics for rank in uninterrupted[source] if rank.metrics]
    [found] = [rank.metrics for rank in resumed[name] if rank.metrics]
    others = ("critic/loss", "critic/value_mean", "train/reference_kl") if "critic/loss" in expected else ()
    for metric in ("train/loss", "train/entropy", "train/lr", "train/grad_norm", *others):
        assert found[metric] == pytest.approx(expected[metric], rel=1e-3, abs=1e-5), metric


def test_ranks_draw_anew_in_another_layout_and_replicas_of_a_shard_draw_alike(resumed):
    [first], [second] = (
        [rank.drawn for rank in resumed[name]] for name in ("tensor 2 -> one rank", "data 2 -> one rank")
    )
    assert first == second  # the same seed, step and rank
    (python0, numpy0, torch0, tensor0), (python1, numpy1, torch1, tensor1) = (
        rank.drawn for rank in resumed["one rank -> tensor 2"]
    )
    assert torch0 == torch1
    assert python0 != python1 and numpy0 != numpy1 and tensor0 != tensor1


# ---- one pair of ranks through everything that can happen to a checkpoint


def error_of(call: Any, *args: Any) -> str | None:
    try:
        call(*args)
    except CheckpointError as error:
        return str(error)
    return None


def mishaps(rank: RankSpec, config: RunConfig, folders: dict[str, Path]) -> dict[str, Any]:
    import torch.distributed as dist

    found: dict[str, Any] = {}
    shm = set(os.listdir("/dev/shm"))
    with trainer_of(rank, config) as trainer:
        found["at step 0"] = own_weights(trainer)
        trainer.begin_checkpoint(folders["step 0"])
        trainer.finish_checkpoint()
        train(trainer, 1)
        begun = own_weights(trainer)
        with held_back() as released:
            trainer.begin_checkpoint(folders["snapshot"])
            train(trainer, 2)
            with torch.no_grad():
                for parameter in trainer._parameters[0].values():
                    parameter.fill_(7.0)
            found["done while held"] = trainer.checkpoint_done()
            found["children"] = len(psutil.Process().children())
            found["in /dev/shm"] = set(os.listdir("/dev/shm")) - shm
            released.set()
            deadline = time.monotonic() + 60
            while not trainer.checkpoint_done():
                assert time.monotonic() < deadline
                time.sleep(0.01)
        trainer.finish_checkpoint()
        found["restored step"] = trainer.restore(folders["snapshot"])
        found["snapshot"] = (begun, own_weights(trainer))

        if rank.rank == 1:  # real ENOSPC, for one rank's file and later for the index
            (folders["full"] / "__1_0.distcp").symlink_to("/dev/full")
            (folders["full index"] / ".metadata.tmp").symlink_to("/dev/full")
        dist.barrier()
        for name in ("full", "full index"):
            trainer.begin_checkpoint(folders[name])
            found[name] = error_of(trainer.finish_checkpoint)
        found["absent"] = error_of(trainer.begin_checkpoint, str(folders["full"] / "absent"))

        with held_back():
            trainer.begin_checkpoint(folders["given up"])
            trainer.begin_checkpoint(folders["afterwards"])
        found["after trouble"] = train(trainer, 1)
        trainer.finish_checkpoint()
        trainer.restore(folders["step 0"])
        found["restored at step 0"] = own_weights(trainer)
        found["first step again"] = train(trainer, 1)
        trainer.restore(folders["afterwards"])
        found["after restore"] = train(trainer, 1)
    actor = config.actor.model_copy(update={"lora": LoraConfig.model_validate(ADAPTERS)})
    others = {
        "other dtype": {"model": config.model.model_copy(update={"dtype": "bfloat16"})},
        "adapters": {"actor": actor},
    }
    for (name, change), port in zip(others.items(), folders["ports"], strict=True):
        with trainer_of(replace(rank, port=port), config.model_copy(update=change)) as trainer:
            found[name] = error_of(trainer.restore, str(folders["afterwards"]))
    return found


@pytest.fixture(scope="module")
def endured(models: Path, tmp_path_factory) -> list[dict[str, Any]]:
    names = ("step 0", "snapshot", "full", "full index", "given up", "afterwards")
    folders: dict[str, Any] = {name: tmp_path_factory.mktemp(name.replace(" ", "-")) for name in names}
    config = Case({"data": 2}, distributed=True).config(models)
    return run_ranks(2, mishaps, config, folders | {"ports": [held_port() for _ in "12"]})


def test_the_snapshot_does_not_see_training_that_goes_on(endured):
    for rank in endured:
        assert rank["done while held"] is False
        assert rank["restored step"] == 1
        begun, restored = rank["snapshot"]
        for name, value in begun.items():
            np.testing.assert_array_equal(restored[name], value, err_msg=name)


def test_writing_needs_no_process_and_no_shared_memory(endured):
    for rank in endured:
        assert rank["children"] == 0
        assert not rank["in /dev/shm"]


def test_a_full_disk_is_told_on_every_rank(endured):
    for rank in endured:
        assert "rank 1: No space left on device" in rank["full"] and "rank 0" not in rank["full"]
        assert "rank 0: No space left on device" in rank["full index"]
        assert "free space" in rank["full"]


def test_the_trainer_goes_on_after_a_failed_checkpoint_and_makes_another(endured):
    first, last = endured[0]["after trouble"], endured[0]["after restore"]
    assert first and first == last  # the same step, before the restart and after it


def test_an_absent_folder_is_told_on_every_rank(endured):
    for rank in endured:
        assert "absent" in rank["absent"] and "rank 0" in rank["absent"] and "rank 1" in rank["absent"]


def test_a_checkpoint_can_be_taken_before_the_first_step(endured):
    for rank in endured:
        for name, value in rank["at step 0"].items():
            np.testing.assert_array_equal(rank["restored at step 0"][name], value, err_msg=name)


def test_a_checkpoint_of_another_dtype_is_refused(endured):
    for rank in endured:
        assert "dtype is 'torch.float32' there and 'torch.bfloat16' here" in rank["other dtype"]


def test_a_checkpoint_without_these_adapters_is_refused(endured):
    for rank in endured:
        assert "actor.lora is None there and {'rank': 3, 'alpha': 12.0" in rank["adapters"]
