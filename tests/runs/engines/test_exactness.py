"""Random conversations with a real SGLang server, whose weights are replaced in the middle of answers."""

import json
import subprocess
import sys

import pytest

from tests.environment import ROOT, environment
from tests.exactness.__main__ import ALLOWED_GAP, WRONG

CONVERSATIONS = 8


@pytest.mark.slow  # tests/unit/test_exactness.py has it with a stand-in for the engine
def test_what_is_trained_is_what_the_server_has_sampled_and_the_trainer_agrees_about_log_probs():
    command = [sys.executable, "-m", "tests.exactness", "--engine", "real", "--seed", "1"]
    process = subprocess.run(
        [*command, "--conversations", str(CONVERSATIONS)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.stdout, process.stderr
    report = json.loads(process.stdout)
    assert not any(report[name] for name in WRONG), report
    assert report["worst_logprob_gap"] < ALLOWED_GAP
    assert report["turns_trained"] > CONVERSATIONS and report["several_turns"] > 0
    assert report["versions"] > 1
