"""``slipstream check`` reports what Megatron and SGLang themselves say of a recipe, without a GPU."""

from pathlib import Path

import pytest

from slipstream.backend.commands import program_checks
from slipstream.backend.commands.check import check
from slipstream.backend.commands.outcome import WrongInput
from slipstream.backend.commands.program_checks import asked_arguments, problem_of, program_answers
from slipstream.bridge.engine.orders import TAKE
from slipstream.configs.load import load_recipe
from slipstream.configs.rules.inputs import NO_INPUTS
from slipstream.rollout.system.imports import ImportEnding
from tests.models import make_checkpoint

GPUS = ("cluster={type: local, device: gpu}", "model.dtype=bfloat16")


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("experts"), "deepseek_v3", tied=False)


def problems(model: Path, *overrides: str) -> list[str]:
    config = load_recipe(Path("quickstart"), [f"model.path={model}", f"prepare={NO_INPUTS}", *overrides])
    against, silent = program_answers(config, has_engines=True)
    assert silent == []
    return against


def test_megatron_is_asked_about_fields_that_do_not_go_together(experts):
    modules = "actor.megatron.recompute_modules=[moe, shared_experts]"
    overlap = ("actor.megatron.moe_shared_expert_overlap=true", "actor.untested=[moe_shared_expert_overlap]")
    [problem] = problems(experts, "actor.recompute=selective", modules, *overlap)
    assert problem.startswith("actor.megatron.")
    assert "moe_shared_expert_overlap" in problem and "shared_experts" in problem


def test_megatron_is_asked_about_kernels_of_the_machine_that_the_recipe_is_for(experts):
    fused = "actor.megatron.moe_permute_fusion=true"
    assert problems(experts, fused, *GPUS) == []
    assert problems(experts, fused) == [
        "actor.megatron.moe_permute_fusion is true, but there is no GPU; leave it out"
    ]


def test_sglang_is_asked_about_arguments_that_do_not_go_together(experts):
    queue = (
        "rollout.engine.args.schedule_policy=lpm",
        "rollout.engine.args.enable_priority_scheduling=true",
    )
    [problem] = problems(experts, *queue, *GPUS)
    assert problem.startswith("rollout.engine.args.schedule_policy = ") and "'fcfs'" in problem


def test_sglang_is_asked_about_all_that_a_run_starts_its_engines_with(experts):
    given = ("weights.transport={type: shards}", "actor.routing_replay=rollout", *GPUS)
    nodes = ("rollout.engine={tensor_parallel: 2, nodes: 2}", "cluster.type=slurm")
    chosen = [f"model.path={experts}", f"prepare={NO_INPUTS}", *given, *nodes]
    arguments = asked_arguments(load_recipe(Path("quickstart"), chosen))
    assert arguments["custom_weight_loader"] == [TAKE]
    assert arguments["enable_return_routed_experts"] is True
    assert (arguments["nnodes"], arguments["tp_size"], arguments["device"]) == (2, 2, "cuda")


def test_a_program_is_not_asked_about_fields_that_stand_alone(experts, monkeypatch):
    monkeypatch.setattr(program_checks, "ask", lambda *_: pytest.fail("a process was started"))
    assert problems(experts, "rollout.engine.args={max_running_requests: 4, mem_fraction_static: 0.3}") == []
    with pytest.raises(pytest.fail.Exception):
        problems(experts, "rollout.engine.args={context_length: 64}")


def test_what_a_program_says_stands_beside_everything_else_that_is_wrong(experts, monkeypatch):
    monkeypatch.setattr(program_checks, "ask", lambda *_: (["deterministic_mode needs more"], None))
    overrides = [
        f"model.path={experts}",
        f"prepare={NO_INPUTS}",
        "rollout.reward=slipstream.rollout.reward.Absent",
    ]
    config = load_recipe(Path("quickstart"), [*overrides, "actor.megatron.deterministic_mode=true"])
    with pytest.raises(WrongInput) as error:
        check(config, weights=False)
    assert "actor.megatron.deterministic_mode = true: deterministic_mode needs more" in str(error.value)
    assert "slipstream.rollout.reward.Absent" in str(error.value)


def test_check_names_a_program_that_cannot_be_asked(experts, monkeypatch):
    """Its fields are read from its source; its import may still fail, for a library of the system."""
    monkeypatch.setattr(program_checks, "ask", lambda *_: ([], ImportEnding.ENDED))
    overrides = [f"model.path={experts}", f"prepare={NO_INPUTS}", "rollout.engine.args={context_length: 64}"]
    findings = check(load_recipe(Path("quickstart"), overrides), weights=False)
    assert (
        "SGLang could not be asked on this machine what it says of rollout.engine.args (context_length): "
        "the process has ended; the start of the run will tell"
    ) in findings.notes


def test_a_refusal_names_the_fields_of_the_recipe_that_it_is_about():
    given = {"a_b": 1, "c": [2]}
    assert problem_of("s", given, "--a-b must be\n  2") == "s.a_b = 1: --a-b must be 2"
    assert problem_of("s", given, "no") == "s.a_b = 1, s.c = [2]: no"
