"""Exit codes and messages of the command line."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from slipstream.backend.cli import main
from slipstream.backend.cli.app import app
from slipstream.backend.cli.options import hiding_modules
from tests.environment import environment, killed_at_end
from tests.models import make_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture
def slipstream(tmp_path, monkeypatch) -> Callable[..., CompletedProcess]:
    """Return what calls the command line in this process, with modules of ``tmp_path`` to import."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(ROOT)

    def call(*args: str) -> CompletedProcess:
        result = CliRunner().invoke(app, args, env={"NO_COLOR": "1", "PYTHONPATH": str(tmp_path)})
        return CompletedProcess(args, result.exit_code, result.stdout, result.stderr)

    return call


def started(*args: str, folder: Path | None = None) -> CompletedProcess:
    """Call the command line as a shell does."""
    return subprocess.run(
        [sys.executable, "-m", "slipstream.backend.cli", *args],
        cwd=ROOT,
        env=environment(*filter(None, [folder]), NO_COLOR="1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def recipe(tmp_path):
    def write(**changes) -> str:
        content = {
            "run": {"name": "test", "root": str(tmp_path / "runs"), "steps": 1},
            "model": {"path": str(tmp_path / "model")},
            "data": {"path": str(tmp_path / "data.jsonl")},
            "rollout": {
                "max_head_offpolicyness": 2,
                "batch_size": 2,
                "n_samples_per_prompt": 2,
                "reward": "slipstream.rollout.reward.FinalAnswer",
            },
            "prepare": "my_inputs.raises",
        } | changes
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(content))
        return str(path)

    (tmp_path / "my_inputs.py").write_text("def raises(**_):\n    raise OSError('no room [on] the disk')\n")
    return write


def unprepared(folder: Path) -> dict[str, dict[str, str]]:
    """Return inputs that are not there, and that ``prepare`` may make."""
    made = folder / ".made"
    return {"model": {"path": str(made / "model")}, "data": {"path": str(made / "data.jsonl")}}


def test_a_path_that_prepare_does_not_own_is_a_slip_of_the_pen(slipstream, recipe, tmp_path):
    ended = slipstream("check", recipe(**unprepared(tmp_path)), f"data.path={tmp_path}/trian.jsonl")
    assert ended.returncode == 2
    assert "trian.jsonl" in ended.stderr and "creates only what lies in a hidden folder" in ended.stderr


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_wrong_recipe_is_exit_code_2_with_every_mistake_on_standard_error(command, recipe, tmp_path):
    path = recipe(model={"path": "x", "dtyp": "float32"}, actor={"optimizer": {"lr": -1}})
    ended = started(command, path, folder=tmp_path)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert "model.dtyp" in ended.stderr
    assert "actor.optimizer.lr" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("words", [(), ("train",), ("sft",), ("convert",), ("engine", "list"), ("submit",)])
def test_switches_have_no_kind_of_value_in_their_help(slipstream, words):
    said = slipstream(*words, "--help")
    assert said.returncode == 0 and "--help" in said.stdout
    assert "bool" not in said.stdout


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_recipe_that_is_not_there_is_exit_code_2(slipstream, command, tmp_path):
    ended = slipstream(command, str(tmp_path / "no.yaml"))
    assert ended.returncode == 2
    assert "no.yaml" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_override_that_is_wrong_is_exit_code_2(slipstream, recipe, tmp_path):
    ended = slipstream("check", recipe(), "run.steps=none")
    assert ended.returncode == 2
    assert "run.steps" in ended.stderr


@pytest.mark.parametrize("command", ["train", "sft"])
def test_changed_inputs_are_accepted_of_a_resumed_run_only(slipstream, command, recipe, tmp_path):
    ended = slipstream(command, recipe(), "--accept-changed-inputs")
    assert ended.returncode == 2
    assert "--accept-changed-inputs has no meaning without --resume" in ended.stderr


def test_a_recipe_with_nothing_wrong_is_exit_code_0(slipstream, recipe, tmp_path):
    ended = slipstream("check", recipe(**unprepared(tmp_path)), "run.steps=12")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.strip().endswith("nothing wrong (test, 12 steps)")


def test_a_preparation_that_fails_is_exit_code_1_with_the_cause(recipe, tmp_path):
    ended = started("train", recipe(**unprepared(tmp_path)), folder=tmp_path)
    assert ended.returncode == 1
    assert "PrepareFailed: my_inputs.raises failed with exit code 1" in ended.stderr
    assert "OSError: no room [on] the disk" in ended.stderr
    assert not (tmp_path / "runs").exists()


def test_inputs_that_cannot_be_used_are_exit_code_2_all_at_once_and_nothing_is_started(
    slipstream, recipe, tmp_path
):
    make_checkpoint(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"question": 1}\n')
    earlier = tmp_path / "runs" / "test"
    earlier.mkdir(parents=True)
    path = recipe(prepare=None)
    overrides = ["rollout.workflow=slipstream.rollout.workflow.NoSuch", "rollout.sampling.max_new_tokens=64"]
    ended = slipstream("train", path, *overrides)
    assert ended.returncode == 2
    for part in ("data.path", "line 1", "rollout.workflow", "NoSuch", "model.path"):  # it has no tokenizer
        assert part in ended.stderr
    assert "Traceback" not in ended.stderr
    assert list(earlier.parent.iterdir()) == [earlier]


def test_a_model_that_is_not_mapped_is_exit_code_2(slipstream, recipe, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    ended = slipstream("check", recipe(prepare=None))
    assert ended.returncode == 2
    assert "model_type 'bert' is not mapped; " in ended.stderr
    assert "; supported: arcee, deepseek_v2, deepseek_v3, " in ended.stderr


def test_the_files_of_every_model_are_checked(slipstream, recipe, tmp_path):
    make_checkpoint(tmp_path / "model", tied=False)
    for name in ("teacher", "critic"):
        shutil.copytree(tmp_path / "model", tmp_path / name)
        weights = load_file(tmp_path / name / "model.safetensors")
        del weights["lm_head.weight"]  # a critic needs none
        save_file(weights, tmp_path / name / "model.safetensors", {"format": "pt"})
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    path = recipe(
        prepare=None,
        rollout={**yaml.safe_load(Path(recipe()).read_text())["rollout"], "sampling": {"max_new_tokens": 64}},
        actor={
            "advantage": [
                {"type": "reward", "estimator": "gae"},
                {"type": "teacher", "scores": {"type": "model", "path": str(tmp_path / "teacher")}},
            ]
        },
        critic={"path": str(tmp_path / "critic")},
    )
    ended = slipstream("check", path)
    assert ended.returncode == 2
    assert "actor.advantage.scores.path" in ended.stderr and "missing: lm_head.weight" in ended.stderr
    assert "critic" not in ended.stderr
    assert ended.stderr.count("model.path: ") == 1 and "has no tokenizer" in ended.stderr


def test_the_doctor_says_what_it_found_and_its_exit_code_whether_something_is_wrong(slipstream):
    from slipstream.backend.commands.doctor import examine

    ended = slipstream("doctor")
    assert ended.returncode == int(any(finding.wrong for finding in examine()))
    for finding in examine():
        assert finding.what in ended.stdout


def test_a_folder_that_may_not_be_used_is_exit_code_2(monkeypatch):
    def closed(run):
        raise PermissionError(13, "Permission denied", f"{run}/driver.json")

    monkeypatch.setattr("slipstream.backend.commands.manage.standing", closed)
    result = CliRunner().invoke(app, ["status", "runs/mine"])
    assert result.exit_code == 2
    assert result.stderr == "runs/mine/driver.json: Permission denied; expected a path that you may use\n"


def test_without_a_command_the_commands_are_listed():
    ended = started("--help")
    assert ended.returncode == 0
    assert all(command in ended.stdout for command in ("train", "check", "doctor"))


def test_a_file_that_hides_a_needed_module_is_named(tmp_path):
    (tmp_path / "json.py").write_text("x = 1")
    (tmp_path / "torch").mkdir()
    assert hiding_modules(tmp_path) == ["json.py"], "a folder that is no package hides nothing"
    (tmp_path / "torch" / "__init__.py").touch()
    assert hiding_modules(tmp_path) == ["json.py", "torch"]
    assert hiding_modules(tmp_path / "absent") == [] and hiding_modules(ROOT) == []


def test_an_output_without_room_is_told():
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "slipstream.backend.cli", "settings", "run.name"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            timeout=300,
        )
    assert ended.returncode == 1 and ended.stderr.startswith("failed: the output cannot be written: No space")


def test_a_folder_that_is_gone_is_told(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "is not there any more" in capsys.readouterr().err


BEING_IMPORTED = "import os\nos.write(1, b'importing\\n')\nos.read(0, 1)\n"
"""A module whose import takes until the end of the test."""

AS_MODULE = [sys.executable, "-m", "slipstream.backend.cli"]
AS_SERVER = [sys.executable, "-m", "slipstream.rollout.sandbox.serve"]
AS_SCRIPT = [str(Path(sys.executable).with_name("slipstream"))]


@pytest.mark.parametrize(
    ("module", "command", "number", "code"),
    [
        ("typer", AS_MODULE, signal.SIGINT, 130),
        ("typer", AS_SCRIPT, signal.SIGINT, 130),
        ("typer", AS_MODULE, signal.SIGTERM, -signal.SIGTERM),
        ("msgspec", [*AS_MODULE, "engine", "list", "runs"], signal.SIGINT, 130),
        ("msgspec", AS_SERVER, signal.SIGINT, 130),
    ],
    ids=["module", "script", "sigterm", "imports of a command", "server of sandboxes"],
)
def test_a_command_that_is_ended_while_it_imports_shows_no_traceback(tmp_path, module, command, number, code):
    (tmp_path / f"{module}.py").write_text(BEING_IMPORTED)
    with killed_at_end(
        command,
        env=environment(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # it may be ignored here
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        said = process.communicate(timeout=120)
    assert (process.returncode, *said) == (code, "", "")
