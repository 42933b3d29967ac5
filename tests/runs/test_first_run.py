"""The commands of docs/first_run.md, as a newcomer types them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/first_run.md"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_first_run_of_a_newcomer_learns(tmp_path: Path):
    [block] = re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)
    commands = [line.removeprefix("$ ") for line in block.splitlines()]
    assert "slipstream train recipe.yaml" in commands
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-euc", "\n".join(commands)],
        cwd=tmp_path,
        env=os.environ | {"PATH": programs},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for words in ("def score", "nothing wrong", "2 of 2 episodes have a reward", "done after 30 steps"):
        assert words in result.stdout
    summary = json.loads((tmp_path / "my-run/runs/my-run/summary.json").read_text())
    assert summary["reward_after"] > summary["reward_before"] + 0.2
