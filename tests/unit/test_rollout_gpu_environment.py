"""Variables on which trainer and engines must agree come from one table, and reach the processes of both."""

import os
import re

import pytest

from slipstream.backend.cluster import trainer_actor
from slipstream.backend.cluster.trainer_actor import TrainerActor
from slipstream.configs.schema import EngineConfig, ParallelConfig, RunConfig
from slipstream.rollout.engine import server_process
from slipstream.rollout.engine.server_process import ServerSpec
from slipstream.rollout.system.gpu_environment import environment, variables
from tests.environment import ROOT
from tests.unit.test_engine_process import spec

VALID = {
    "run": {"name": "test", "steps": 1},
    "model": {"path": "m"},
    "data": {"path": "d.jsonl"},
    "rollout": {"max_head_offpolicyness": 1, "batch_size": 2, "n_samples_per_prompt": 2, "reward": "a.B"},
}


def recipe(*, actor: dict | None = None, **engine: object) -> RunConfig:
    return RunConfig.model_validate(
        {**VALID, "actor": actor or {}, "rollout": {**VALID["rollout"], "engine": engine}}
    )


def sections(config: RunConfig) -> tuple[EngineConfig, ParallelConfig]:
    return config.rollout.engine, config.actor.parallel


@pytest.mark.parametrize(
    ("arguments", "cumem", "multicast"),
    [
        ({}, "0", "0"),
        ({"enable_nccl_nvls": True}, "0", "1"),
        ({"enable_symm_mem": True}, "1", "1"),
        ({"enable_symm_mem": False, "enable_nccl_nvls": False}, "0", "0"),
    ],
)
def test_both_sides_get_the_values_that_sglang_gives_itself(arguments, cumem, multicast):
    config = recipe(args=arguments)
    for side in ("trainer", "engines"):
        given = environment(*sections(config), side)
        assert (given["NCCL_CUMEM_ENABLE"], given["NCCL_NVLS_ENABLE"]) == (cumem, multicast)


def test_a_value_that_both_sides_get_is_the_same_on_both():
    config = recipe(actor={"parallel": {"tensor": 2}}, colocated=True)
    trainer, engines = environment(*sections(config), "trainer"), environment(*sections(config), "engines")
    shared = {variable.name for variable in variables(*sections(config)) if len(variable.who) == 2}
    assert shared == trainer.keys() & engines.keys()
    assert all(trainer[name] == engines[name] for name in shared)


@pytest.mark.parametrize(("parallel", "needed"), [({}, False), ({"tensor": 2}, True), ({"context": 2}, True)])
def test_megatron_gets_one_connection_where_it_overlaps_communication(parallel, needed):
    config = recipe(actor={"parallel": parallel})
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in environment(*sections(config), "trainer")) is needed
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environment(*sections(config), "engines")


@pytest.mark.parametrize("colocated", [False, True])
def test_colocated_engines_can_release_their_cuda_graphs(colocated):
    given = environment(*sections(recipe(colocated=colocated)), "engines")
    assert given.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH") == ("1" if colocated else None)


def test_an_engine_on_gpus_gets_its_side_of_the_table(monkeypatch):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    server: ServerSpec = spec(environment=environment(*sections(recipe()), "engines"))
    given = server_process._environment(server)
    assert given["NCCL_CUMEM_ENABLE"] == "0"
    assert given["OMP_NUM_THREADS"] == "8"


@pytest.mark.parametrize(("device", "expected"), [("cuda", "0"), ("cpu", "1")])
def test_a_trainer_rank_gets_its_side_of_the_table_on_gpus_only(device, expected, monkeypatch, tmp_path):
    for name in environment(*sections(recipe()), "trainer"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    monkeypatch.setattr(trainer_actor, "redirect_output", lambda path: None)
    umask = os.umask(0o77)
    try:
        actor = TrainerActor(recipe(), 0, device, str(tmp_path), f"{__name__}.Rank")
        actor.connect("127.0.0.1", 1)
    finally:
        os.umask(umask)
    assert Rank.environment["NCCL_CUMEM_ENABLE"] == expected


class Rank:
    """Keeps the environment in which it is built."""

    environment: dict[str, str]

    def __init__(self, config: RunConfig, rank: object) -> None:
        Rank.environment = dict(os.environ)


def test_no_other_module_sets_a_variable_of_the_table():
    config = recipe(actor={"parallel": {"tensor": 2}}, colocated=True)
    names = re.compile("|".join(variable.name for variable in variables(*sections(config))))
    modules = {
        path.relative_to(ROOT).as_posix()
        for package in ("backend", "bridge", "configs", "rollout", "slurm")
        for path in (ROOT / package).rglob("*.py")
        if names.search(path.read_text()) and "stand_ins" not in path.parts
    }
    others = {"rollout/sandbox/interface.py", "rollout/sandbox/running.py"}  # of commands of a policy
    assert modules == {"rollout/system/gpu_environment.py", "rollout/engine/cpu.py"} | others
