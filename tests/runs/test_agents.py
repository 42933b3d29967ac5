"""A whole run whose episodes are an agent's: it asks the policy twice, as any client of a provider does."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.environment import environment
from tests.runs.conftest import LaunchedRun, run_command
from tests.runs.test_run import finish, summary, wait_for_step


async def ask_twice(base_url: str, api_key: str, prompt: Any, metadata: dict[str, Any]) -> None:
    """Ask the same question twice in one conversation. The recipe's reward judges the last answer."""
    question = {"role": "user", "content": prompt}
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as policy:
        first = await policy.chat.completions.create(model="policy", messages=[question])  # type: ignore
        answer = {"role": "assistant", "content": first.choices[0].message.content}
        await policy.chat.completions.create(model="policy", messages=[question, answer, question])  # type: ignore


@pytest.mark.slow  # tests/agents has the endpoint, test_resume.py a collector that is lost
def test_agents_are_trained_and_a_collector_that_is_killed_loses_nothing(
    launch: Callable[..., LaunchedRun], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    run = launch(
        "run.steps=5",
        "eval.every=5",
        "eval.max_prompts=8",
        "rollout.max_head_offpolicyness=1",
        "rollout.workflow.path=slipstream.rollout.workflow.Agent",
        "rollout.workflow.args.run=tests.runs.test_agents.ask_twice",
        "rollout.workflow.args.max_turns=2",
    )
    wait_for_step(run, 2)
    [collector, *_] = run.pids_of("ray::CollectorActor")
    os.kill(collector, signal.SIGKILL)
    assert finish(run) == 0, run.output()
    groups = summary(run)["groups"]
    assert (groups["trained"], groups["failed"]) == (20, 0), run.output()
    audit = subprocess.run(
        run_command("audit", str(run.folder), "--json"), capture_output=True, text=True, timeout=120
    )
    assert json.loads(audit.stdout)["clean"], audit.stdout + audit.stderr
    run.assert_nothing_left()
