"""The benchmark of one GPU: its commands are legal, and figures, bounds and failures are told as they are."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.one_gpu import __main__ as program
from benchmarks.one_gpu.bounds import OF_PART, passed, verdicts
from benchmarks.one_gpu.figures import Ended, figures_of_run, figures_of_step
from benchmarks.one_gpu.plan import PARTS, Inputs, Settings, Step, Training, commands, overrides
from benchmarks.one_gpu.run import run
from slipstream.backend.simulate import only_simulated
from slipstream.configs.load import load_recipe
from slipstream.configs.published import MODELS
from tests.environment import ROOT
from tests.unit.run_folders import metrics_line, recipe

INPUTS = Inputs.below(Path("/elsewhere/inputs"))
WITHOUT_INPUTS = [
    f"model.path={MODELS / 'Qwen3-0.6B'}",
    f"prepare={only_simulated.__module__}.{only_simulated.__name__}",
]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


# ---- the commands


@pytest.mark.parametrize("dry", [False, True], ids=["gpu", "dry"])
@pytest.mark.parametrize("part", [part for part in PARTS if part != "f"])
def test_every_run_of_the_plan_is_a_legal_recipe(part, dry):
    for command in commands(part, INPUTS, dry=dry):
        assert isinstance(command, Training)
        anywhere = {**command.settings, "actor.layer_spec": "auto"}  # Transformer Engine is not everywhere
        config = load_recipe(Path("quickstart"), [*overrides(anywhere), *WITHOUT_INPUTS])
        assert config.cluster.device == ("cpu" if dry else "gpu")
        assert config.run.steps is not None
        if dry:
            assert config.run.steps <= 3 and config.rollout.sampling.max_new_tokens <= 24
        else:
            assert config.model.dtype == "bfloat16"
            assert config.rollout.engine.colocated, "there is one GPU"
            assert config.rollout.engine.takes_turns or config.rollout.engine.gpu_share
            assert config.weights.transport.type != "shards", "NCCL joins no two processes on one GPU"


def test_a_dry_run_has_the_commands_of_a_real_one():
    for part in PARTS:
        real, dry = (commands(part, INPUTS, dry=dry) for dry in (False, True))
        assert [command.name for command in real] == [command.name for command in dry]
        assert [command.environment for command in real] == [command.environment for command in dry]


def runs_of(attention: str) -> dict[str, Settings]:
    found = [command for part in PARTS for command in commands(part, INPUTS, attention=attention)]
    return {command.name: command.settings for command in found if isinstance(command, Training)}


def test_the_parts_compare_what_they_say():
    runs = runs_of("fa3")
    assert sorted(str(runs[name]["actor.layer_spec"]) for name in runs if name.startswith("c-")) == [
        "local",
        "local",
        "transformer_engine",
        "transformer_engine",
    ]
    bounds = [runs[f"d-{kind}"]["rollout.max_head_offpolicyness"] for kind in ("async", "sync")]
    assert bounds == [2, 0] and runs["d-async"]["run.steps"] == runs["d-sync"]["run.steps"]
    distances = [name for name in runs if name[0] in "ce"]
    assert {runs[name]["rollout.max_head_offpolicyness"] for name in distances} == {0}, "of all tokens"
    assert "rollout.engine.gpu_share" not in runs["d-turns"]
    [fp8] = [name for name in runs if "rollout.engine.quantization" in runs[name]]
    assert fp8 == "e-fp8"
    other = {k: v for k, v in runs["e-fp8"].items() if k != "rollout.engine.quantization"}
    assert other == runs["e-bf16"]


def test_a_backend_of_attention_is_that_of_every_run_that_compares_none():
    runs = runs_of("flashinfer")
    backend = "rollout.engine.args.attention_backend"
    assert {runs[name][backend] for name in runs} == {"flashinfer", "triton"}
    assert "c-local-flashinfer" in runs and len(commands("c", INPUTS, attention="triton")) == 2


@pytest.mark.parametrize(("text", "parts"), [("c,a", ["a", "c"]), ("f", ["f"]), (" b , f", ["b", "f"])])
def test_parts_run_in_the_order_of_the_plan(text, parts):
    assert program.parts_of(text) == parts


@pytest.mark.parametrize("text", ["", "g", "a,g", "a,,b"])
def test_a_part_that_does_not_exist_is_refused(text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["one_gpu", "--dry-run", "--only", text])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2
    assert "expected some of a, b, c, d, e, f" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "0 GPUs found, expected 1: `slipstream doctor --gpu` says why"),
        ({"gpus": ["L4", "L4"]}, "2 GPUs found, expected 1: choose one with CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_machine_without_one_gpu_is_told_what_to_do(facts, words):
    with pytest.raises(SystemExit, match=words):
        program.card_of(facts)
    assert program.card_of({"gpus": ["NVIDIA L4"]}) == "NVIDIA L4"


# ---- figures


def write_run(folder: Path, stalls: list[float]) -> None:
    folder.mkdir()
    lines = [
        metrics_line(n, n) | {"perf/weight_update_stall_s": stall, "process/engines_gpu_memory_gib": 10.0 + n}
        for n, stall in enumerate(stalls, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "recipe.yaml").write_text(json.dumps(recipe(bound=4)))


def test_figures_are_medians_behind_the_first_two_steps_and_extremes_of_all(tmp_path):
    write_run(tmp_path / "run", [9.0, 9.0, 0.1, 0.3, 0.2])
    figures = figures_of_run(tmp_path / "run")
    assert figures["stall_s"] == 0.2
    assert (figures["engine_gpu_gib"], figures["engine_rest_gib"]) == (15.0, 11.0)
    assert "done" not in figures and "discrepancies" not in figures, "there is no summary and no ledger"


@pytest.mark.parametrize(("stalls", "median"), [([0.7], 0.7), ([9.0, 0.5], 0.5)])
def test_a_run_of_few_steps_has_the_figures_of_its_last_one(tmp_path, stalls, median):
    write_run(tmp_path / "run", stalls)
    assert figures_of_run(tmp_path / "run")["stall_s"] == median


def test_a_run_that_wrote_nothing_has_no_figures(tmp_path):
    assert figures_of_run(tmp_path / "nothing") == {}
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    assert figures_of_run(tmp_path / "empty") == {}


@pytest.mark.parametrize("output", ["", "Killed\n", '{"mfu": 0.4}\n', "[1]\n", '{"mfu": null}\n'])
def test_a_step_that_did_not_end_has_no_figures(output):
    assert figures_of_step(output) == {}


# ---- bounds

KEPT = {
    "done": 1.0,
    "discrepancies": 0.0,
    "lag": 2.0,
    "lag_bound": 2.0,
    "accuracy_before": 0.3,
    "accuracy_after": 0.6,
    "stall_s": 0.3,
    "distance_mean": 0.001,
    "run_tokens_per_s": 1000.0,
    "mfu": 0.40,
}


def ended_of(part: str, changes: dict[str, dict[str, float]] | None = None) -> dict[str, Ended]:
    """The commands of a part that have kept every bound, but for these figures of some."""
    figures = {command.name: dict(KEPT) for command in commands(part, INPUTS)}
    if part == "d":
        figures["d-async"]["run_tokens_per_s"] = 1200.0
    for name, changed in (changes or {}).items():
        figures[name] |= changed
    return {name: Ended(name, 0, 1.0, found, f"{name}.log") for name, found in figures.items()}


@pytest.mark.parametrize("part", PARTS)
def test_figures_within_every_bound_pass(part):
    found = verdicts(part, ended_of(part))
    assert passed(found) and all(verdict.kept for verdict in found), found


BROKEN = [
    ("a", {"a-turns": {"accuracy_after": 0.3}}, "the accuracy rises: 30.0% -> 30.0%"),
    ("a", {"a-disk": {"stall_s": 1.01}}, "a-disk: pause for a version, s: 1.01 (at most 1)"),
    ("b", {"b-delta": {"discrepancies": 1.0}}, "b-delta: discrepancies of the audit: 1 (at most 0)"),
    ("b", {"b-disk": {"lag": 3.0}}, "b-disk: largest lag: 3 (at most 2)"),
    ("c", {"c-local-triton": {"distance_mean": 0.011}}, "c-local-triton: mean distance: 0.011"),
    ("c", {"c-local-fa3": {"distance_mean": 0.0016}}, "ratio of distances: 1.6 (at most 1.5)"),
    ("c", {"c-transformer_engine-fa3": {"distance_mean": 0.0016}}, "ratio of distances: 1.6"),
    ("d", {"d-async": {"run_tokens_per_s": 1050.0}}, "tokens/s: 1.05 (at least 1.1)"),
    ("d", {"d-turns": {"stall_s": 2.5}}, "d-turns: pause for a version, s: 2.5 (at most 2)"),
    ("e", {"e-fp8": {"distance_mean": 0.006}}, "distance in fp8 over bfloat16: 6 (at most 5)"),
    ("f", {"f-8k": {"mfu": 0.38}}, "f-8k: MFU: 0.38 (at least 0.395)"),
]


@pytest.mark.parametrize(("part", "changes", "words"), BROKEN)
def test_a_figure_outside_its_bound_fails_and_is_named(part, changes, words):
    broken = [verdict.bound for verdict in verdicts(part, ended_of(part, changes)) if not verdict.kept]
    assert any(words in bound for bound in broken)


@pytest.mark.parametrize("part", PARTS)
def test_a_figure_that_is_missing_keeps_no_bound(part):
    empty = {name: replace(ended, figures={}) for name, ended in ended_of(part).items()}
    measured = [verdict for verdict in verdicts(part, empty) if "ends well" not in verdict.bound]
    assert not any(verdict.kept for verdict in measured)
    assert all("not measured" in verdict.bound for verdict in measured)


def test_a_dry_run_judges_ends_audits_and_lags_alone():
    for part, changes, _ in BROKEN:
        found = verdicts(part, ended_of(part, changes), dry=True)
        assert passed(found) == (part != "b")
    ended = ended_of("f")
    assert not passed(verdicts("f", {n: replace(e, returncode=1) for n, e in ended.items()}, dry=True))


def test_every_part_has_bounds():
    assert set(OF_PART) == set(PARTS)


# ---- runs


def test_a_command_that_fails_is_told_with_the_last_lines_of_its_output(tmp_path, capsys):
    [command, *_] = commands("b", INPUTS, dry=True)
    assert isinstance(command, Training)
    wrong = replace(command, settings={"rollout.batch_sise": 4})
    ended = run(wrong, tmp_path, limit_s=240)
    assert ended.failed and ended.returncode == 2 and ended.figures == {}
    assert any("batch_sise" in line for line in ended.last_lines)
    found = verdicts("b", {**ended_of("b"), ended.name: ended})
    assert not passed(found)
    program.report("b", {ended.name: ended}, found, program.table_console())
    told = capsys.readouterr().out
    assert f"b-tensor ended with 2; the last lines of {ended.log}:" in told
    assert "batch_sise" in told and "FAIL" in told


def test_a_command_that_takes_too_long_is_ended(tmp_path):
    ended = run(Step("f-never", ("--steps", "1000000000")), tmp_path, limit_s=0.1)
    assert ended.returncode is None and ended.failed


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Call the program's dry run of some parts; return its exit status, its output and its last line."""

    def called(only: str) -> tuple[int, str, dict]:
        monkeypatch.setattr(sys, "argv", ["one_gpu", "--dry-run", "--only", only, "--root", str(tmp_path)])
        monkeypatch.setattr(program, "make_inputs", lambda inputs, **options: None)
        with pytest.raises(SystemExit) as ended:
            program.main()
        output = capsys.readouterr().out
        assert isinstance(ended.value.code, int)
        return ended.value.code, output, json.loads(output.splitlines()[-1])

    return called


def test_the_program_tells_everything_in_its_last_line(call, monkeypatch):
    parts = {name: ended for part in PARTS for name, ended in ended_of(part).items()}
    parts["b-disk"] = replace(parts["b-disk"], returncode=1, last_lines=("out of memory",))
    monkeypatch.setattr(program, "run", lambda command, root, limit_s: parts[command.name])
    code, output, told = call("b,a,f")
    assert code == 1 and "b-disk ended with 1" in output and "out of memory" in output
    assert [told[part]["pass"] for part in "abf"] == [True, False, True] and "c" not in told
    assert told["b"]["commands"]["b-disk"]["last_lines"] == ["out of memory"]
    assert told["dry_run"] is True and told["card"] == "CPU, a dry run" and "torch" in told["versions"]
    assert "f: MFU of a training step" in output and "not judged" in output


@pytest.mark.slow  # four processes that import torch and Megatron
def test_the_part_without_an_engine_runs_on_cpus(call):
    code, output, told = call("f")
    assert code == 0, output
    assert set(told["f"]["commands"]) == {command.name for command in commands("f", INPUTS)}
    for command in told["f"]["commands"].values():
        assert command["figures"]["tokens_per_s"] > 0
