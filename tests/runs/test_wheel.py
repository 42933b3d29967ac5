"""The installed wheel beside folders of the user's own that are named like the folders of this repository."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import environment
from tests.wheels import build_wheel

FOLDERS = ("backend", "bridge", "configs", "rollout", "tests")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    wheel = build_wheel(tmp_path_factory.mktemp("wheel"))
    target = ["--no-deps", "--no-compile", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *target, str(wheel)], check=True)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FOLDERS)
def test_a_run_works_beside_a_folder_of_the_user_s_own(name: str, site: Path, inputs: Path, tmp_path: Path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise ImportError('the user has not asked for this')\n")
    settings = [
        f"model.path={inputs / 'policy'}",
        f"data.path={inputs / 'train.jsonl'}",
        "eval=null",
        "rollout.batch_size=4",
        "run.root=runs",
        "checkpoint.every=1",
    ]

    def slipstream(*arguments: str) -> str:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "slipstream.backend.cli", *arguments],
            cwd=tmp_path,
            env=environment() | {"PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    where = "import slipstream.backend.driver.run as run; print(run.__file__)"
    loaded = subprocess.run(
        [sys.executable, "-P", "-c", where],
        env=environment() | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout.startswith(str(site))
    slipstream("check", "quickstart", *settings)
    slipstream("train", "quickstart", *settings, "run.steps=2")
    slipstream("train", "quickstart", *settings, "run.steps=3", "--resume")
    assert "nothing lost, nothing trained twice" in slipstream("audit", "runs/quickstart")
