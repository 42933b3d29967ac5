"""Random conversations with scripted engines: what is trained is what the engines have sampled, once."""

import json
import subprocess
import sys

import pytest

from tests.environment import ROOT, environment

CONVERSATIONS = 30
"""Five for each chat template."""


@pytest.fixture(scope="module")
def report() -> dict:
    command = [sys.executable, "-m", "tests.exactness", "--conversations", str(CONVERSATIONS), "--seed", "2"]
    process = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280, check=False
    )
    assert process.stdout, process.stderr
    return json.loads(process.stdout)


@pytest.mark.parametrize(
    "wrong",
    [
        "mismatched_ids",
        "missing_logprobs",
        "tokens_with_loss_twice",
        "untrainable_trained",
        "wrong_versions",
        "wrong_questions",
        "wrong_prompts",
        "wrong_answers",
        "lost_turns",
    ],
)
def test_nothing_is_wrong(report, wrong):
    assert report[wrong] == 0, report["examples"]


def test_the_ledger_is_in_order_and_every_turn_has_ended(report):
    assert report["discrepancies"] == []
    assert report["ends"].keys() <= {"trained", "expired", "side", "cancelled", "filtered", "unpaired"}


def test_everything_has_happened(report):
    """A run in which nothing goes on could not go wrong."""
    assert report["conversations"] == CONVERSATIONS
    assert report["turns_trained"] > 3 * CONVERSATIONS
    assert report["several_turns"] > 0
    assert report["versions"] > 10
    assert report["branches"].keys() >= {"history rewritten", "thinking removed", "template", "fork"}
    assert report["side"].keys() >= {"temperature"}
    assert report["outcomes"].keys() >= {"answered", "left"}
    assert sum(report["restarts"].values()) > 0
