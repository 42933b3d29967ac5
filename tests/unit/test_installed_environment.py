"""Which kind of environment is installed is chosen aloud, recorded, and compared with what a run needs."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.backend.cli.app import app
from slipstream.backend.commands.machine import HostFacts, machine_problems
from slipstream.backend.commands.outcome import WrongInput
from slipstream.backend.commands.preflight import StartPlace, check_start
from slipstream.configs.installed import environment
from slipstream.configs.installed.environment import (
    FOLDER,
    RECORD,
    InstalledEnvironment,
    UnreadableRecord,
    digest,
    read_record,
    write_record,
)
from slipstream.configs.load import load_recipe
from slipstream.configs.schema import RunConfig
from tests.environment import ROOT
from tests.unit.test_rollout_gpu_environment import VALID

NOW = 1_000_000.0
LARGE = HostFacts(
    cores=64,
    memory=2**40,
    gpus=8,
    free_disk=lambda folder: 2**50,
    free_shared=2**40,
    port_problem=lambda host, port: "",
)


def chosen(venv: Path, asked: str = "", *, nvidia: bool) -> subprocess.CompletedProcess[str]:
    """The answer of kind.sh on a machine with or without nvidia-smi."""
    tools = venv.parent / "tools"
    tools.mkdir(exist_ok=True)
    if nvidia:
        (tools / "nvidia-smi").write_text("#!/bin/sh\n")
        (tools / "nvidia-smi").chmod(0o755)
    if not (tools / "sed").exists():
        (tools / "sed").symlink_to("/bin/sed" if os.path.exists("/bin/sed") else "/usr/bin/sed")
    return subprocess.run(
        ["/bin/sh", str(FOLDER / "kind.sh"), str(venv), asked],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    folder = tmp_path / "venv"
    folder.mkdir()
    return folder


def test_without_a_choice_a_machine_without_nvidia_smi_gets_the_cpu_kind_and_is_told_of_the_other(venv):
    answer = chosen(venv, nvidia=False)
    assert (answer.returncode, answer.stdout.strip()) == (0, "cpu")
    assert answer.stderr.count("\n") == 1 and "make install GPU=1" in answer.stderr


def test_without_a_choice_a_machine_with_nvidia_smi_installs_nothing_and_asks(venv):
    answer = chosen(venv, nvidia=True)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "GPU=1" in answer.stderr and "GPU=0" in answer.stderr


@pytest.mark.parametrize("nvidia", [False, True])
@pytest.mark.parametrize(("asked", "kind"), [("1", "gpu"), ("0", "cpu")])
def test_a_choice_is_followed_on_every_machine(venv, asked, kind, nvidia):
    answer = chosen(venv, asked, nvidia=nvidia)
    assert (answer.returncode, answer.stdout.strip(), answer.stderr) == (0, kind, "")


def test_a_choice_that_is_neither_is_refused(venv):
    answer = chosen(venv, "yes", nvidia=False)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "GPU=yes found" in answer.stderr


@pytest.mark.parametrize("nvidia", [False, True])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_an_environment_keeps_its_kind(venv, kind, nvidia):
    write_record(kind, venv)
    answer = chosen(venv, nvidia=nvidia)
    assert (answer.returncode, answer.stdout.strip(), answer.stderr) == (0, kind, "")


def test_the_other_kind_is_never_installed_over_an_environment(venv):
    write_record("cpu", venv)
    answer = chosen(venv, "1", nvidia=True)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "VENV=.venv-gpu" in answer.stderr


def test_make_passes_the_choice_on(tmp_path):
    """`make install` with a stand-in for Python that only says that it was called."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho called with $*; exit 3\n")
    python.chmod(0o755)
    made = subprocess.run(
        ["make", "install", "GPU=maybe", f"VENV={tmp_path}/venv", f"PYTHON={python}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert made.returncode == 2
    assert "GPU=maybe found" in made.stderr and "called with" not in made.stdout


@pytest.mark.parametrize("asked", ["", "GPU={}"])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_quickstart_runs_on_what_its_environment_is_for(venv, kind, asked, monkeypatch):
    """`make quickstart` with a stand-in for `slipstream` that only shows its arguments."""
    write_record(kind, venv)
    program = venv / "bin" / "slipstream"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    (venv / ".installed").touch()
    choice = [asked.format(int(kind == "gpu"))] if asked else []
    made = subprocess.run(
        ["make", "quickstart", "--no-print-directory", f"VENV={venv}", *choice],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    command, recipe, *overrides = made.stdout.splitlines()[-1].split()
    assert (command, recipe) == ("train", "configs/recipes/quickstart.yaml")
    monkeypatch.chdir(ROOT)
    if kind == "cpu":
        assert not overrides
        return
    config = load_recipe(Path(recipe), overrides)
    assert (config.cluster.device, config.model.dtype) == ("gpu", "bfloat16")
    assert config.rollout.engine.takes_turns, "one GPU is enough"
    if asked:  # the same overrides
        return
    assert CliRunner().invoke(app, ["check", recipe, *overrides]).exit_code == 0
    of_a_model = ["--model-config", "configs/models/Qwen3-0.6B", "--no-split", "cluster.gpu_memory_gib=22.5"]
    plan = CliRunner().invoke(app, ["plan", recipe, *overrides, *of_a_model])
    assert plan.exit_code == 0 and "engines and trainer take turns" in plan.stdout, plan.output
    assert "fits" in plan.stdout and "NOT FIT" not in plan.stdout


# ---- the record


def test_the_record_is_read_back_as_it_was_written(venv):
    write_record("gpu", venv)
    record = read_record(venv)
    assert record is not None
    assert (record.kind, record.pins) == ("gpu", digest("gpu"))
    assert record.python == ".".join(map(str, sys.version_info[:3]))


def test_without_a_record_nothing_is_known(venv):
    assert read_record(venv) is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"kind": "tpu", "python": "3.12", "pins": ""}'])
def test_a_damaged_record_is_refused_with_what_to_do(venv, content):
    (venv / RECORD).write_text(content)
    with pytest.raises(UnreadableRecord, match="make install"):
        read_record(venv)


def test_the_module_runs_as_a_file_before_anything_is_installed(tmp_path):
    script = FOLDER.parent / "installed" / "environment.py"
    ended = subprocess.run(
        [sys.executable, "-I", "-S", str(script), "tpu"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 1
    assert "cpu or gpu expected, found: tpu" in ended.stderr


def test_packages_that_differ_from_their_pins_are_named(monkeypatch):
    versions = {"torch": "2.13.0+cpu", "numpy": "1.0"}
    monkeypatch.setattr(environment, "pinned", lambda kind: {"torch": "2.13.0", "numpy": "2.3.5", "ray": "2"})

    def version(name: str) -> str:
        if name not in versions:
            raise environment.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(environment.importlib.metadata, "version", version)
    assert environment.differences("gpu") == [
        "numpy: 1.0 found, 2.3.5 expected",
        "ray: not installed found, 2 expected",
    ]


# ---- what a run needs


def start(
    cluster: dict[str, object],
    *,
    kind: str | None = "cpu",
    has_gpus: bool = False,
    variables: dict[str, str] | None = None,
    engine: dict[str, object] | None = None,
) -> str:
    """Return the refusal of a start; an empty text if there is none."""
    rollout = {**VALID["rollout"], "engine": engine or {}}
    config = RunConfig.model_validate({**VALID, "cluster": cluster, "rollout": rollout})
    job = {"RAY_ADDRESS": "10.0.0.1:6379"} if cluster["type"] == "slurm" else {}
    installed = InstalledEnvironment(kind, "3.12.1", "") if kind else None  # type: ignore[arg-type]
    try:
        check_start(config, StartPlace(has_gpus, installed, {**job, **(variables or {})}, NOW, LARGE))
    except WrongInput as error:
        assert error.exit_code == 2
        return str(error)
    return ""


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_run_on_a_machine_whose_shared_memory_is_full_is_refused(device):
    recipe = RunConfig.model_validate({**VALID, "cluster": {"type": "local", "device": device}})
    assert machine_problems(recipe, LARGE) == []
    [problem] = machine_problems(recipe, replace(LARGE, free_shared=2**20))
    assert problem.startswith("cluster: /dev/shm has 1.0 MiB free, expected at least 16 MiB: ")
    assert "--shm-size" in problem


@pytest.mark.parametrize(
    ("device", "kind", "has_gpus", "wrong"),
    [
        ("auto", "cpu", False, False),
        ("auto", "cpu", True, True),
        ("auto", "gpu", True, False),
        ("auto", "gpu", False, True),
        ("cpu", "cpu", True, False),
        ("cpu", "gpu", True, True),
        ("gpu", "gpu", False, False),  # the driver of a Slurm job may be on a node without GPUs
        ("gpu", "cpu", False, True),
        ("auto", None, True, False),
        ("gpu", None, False, False),
    ],
)
def test_a_run_on_the_wrong_kind_of_environment_is_refused(device, kind, has_gpus, wrong):
    message = start({"type": "local", "device": device}, kind=kind, has_gpus=has_gpus)
    assert ("cluster.device" in message) is wrong
    if wrong:
        assert "make install GPU=" in message


@pytest.mark.parametrize(("device", "has_gpus", "wrong"), [("auto", False, True), ("auto", True, False)])
def test_engines_in_fp8_are_refused_on_a_machine_without_gpus(device, has_gpus, wrong):
    cluster = {"type": "local", "device": device}
    message = start(cluster, kind=None, has_gpus=has_gpus, engine={"quantization": "fp8"})
    assert ("rollout.engine.quantization: fp8 found, and this machine has no GPUs" in message) is wrong


def test_a_container_that_the_job_does_not_run_in_is_refused():
    container = {"runtime": "apptainer", "image": "/images/slipstream.sif"}
    inside = {"SLIPSTREAM_CONTAINER": "apptainer", "SLIPSTREAM_CONTAINER_IMAGE": "/images/slipstream.sif"}
    cluster = {"type": "slurm", "container": container}
    assert start(cluster, variables=inside) == ""
    assert "slipstream submit" in start(cluster)
    assert "no container" in start({"type": "slurm"}, variables=inside)
    assert "other.sif" in start(cluster, variables=inside | {"SLIPSTREAM_CONTAINER_IMAGE": "/other.sif"})


@pytest.mark.parametrize(("left", "refused"), [(238, True), (242, False), (None, False)])
def test_a_job_that_ends_before_anything_is_trained_is_refused(left, refused):
    variables = {"SLURM_JOB_END_TIME": str(int(NOW) + left)} if left else {}
    assert ("--time" in start({"type": "slurm"}, variables=variables)) is refused
    assert not start({"type": "local"}, variables=variables)


def test_everything_that_is_wrong_is_said_at_once():
    variables = {"SLURM_JOB_END_TIME": str(int(NOW)), "SLIPSTREAM_CONTAINER": "pyxis"}
    message = start({"type": "slurm", "device": "gpu"}, variables=variables)
    assert [line.partition(":")[0] for line in message.splitlines()] == [
        "cluster.device",
        "cluster.container",
        "--time",
    ]


def test_train_refuses_the_wrong_kind_before_it_reads_anything(tmp_path):
    prefix = tmp_path / "environment"
    prefix.mkdir()
    (prefix / RECORD).write_text(json.dumps({"kind": "gpu", "python": "3.12.1", "pins": ""}))
    recipe = tmp_path / "recipe.yaml"
    content = {
        **VALID,
        "rollout": {**VALID["rollout"], "reward": "slipstream.rollout.reward.FinalAnswer"},
        "prepare": "slipstream.no_such.thing",
        "model": {"path": ".made/model"},
        "data": {"path": ".made/train.jsonl"},
        "cluster": {"type": "local", "device": "cpu"},
    }
    recipe.write_text(json.dumps(content))
    program = (
        "import sys; from slipstream.backend import cli\n"
        f"sys.prefix = {str(prefix)!r}; sys.argv = ['slipstream', 'train', {str(recipe)!r}]\n"
        "try:\n    cli.main()\nfinally:\n    print('ray' in sys.modules)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert "was installed for GPUs" in ended.stderr
    assert ended.stdout.split() == ["False"]
    assert not (tmp_path / "runs").exists()
