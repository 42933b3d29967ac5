"""Episodes of an environment of verifiers: its rewards, and what the engines sampled for it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.agents.process import AgentsProcess
from tests.chat_model import write_chat_model
from tests.environment import ROOT, environment

pytestmark = pytest.mark.verifiers

PYTHON = os.environ.get("VERIFIERS_PYTHON", str(ROOT / ".venv-verifiers/bin/python"))
ENVIRONMENT = {"taskset": {"id": "spelling"}, "agent": {"runtime": {"type": "subprocess"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and the task set beside it."""
    folder = write_chat_model(tmp_path_factory.mktemp("model"), weights=False)
    shutil.copy(Path(__file__).with_name("spelling.py"), folder)
    return folder


@pytest.fixture(scope="module")
def collector(folder: Path) -> Iterator[AgentsProcess]:
    with AgentsProcess(folder) as process:
        yield process


def workflow(**args: object) -> dict:
    args = {"environment": ENVIRONMENT, "python": PYTHON, **args}
    return {"path": "slipstream.rollout.workflow.Verifiers", "args": args}


def test_an_episode_has_the_reward_of_its_environment_and_the_tokens_of_the_engines(collector: AgentsProcess):
    episode = collector.episode(workflow(), metadata={"task": 1})
    assert episode.error is None, episode.failures
    assert episode.trained() == [[0, 1]]
    [trajectory] = episode.trajectories
    assert (trajectory["reward"], trajectory["parts"]) == (2.0, {"right": 1.0, "turns": 2.0})
    assert episode.open == 0


def test_the_recipe_may_train_one_reward_of_several(collector: AgentsProcess):
    episode = collector.episode(workflow(), metadata={"task": 0}, reward_key="turns")
    assert episode.rewards == [2.0], episode.failures


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"task": 2}, "the world has ended"),
        ({"task": 4}, "there is no task 4, only 4 of them"),
        ({}, "expected the number of a task"),
    ],
)
def test_what_fails_outside_the_policy_is_failed(collector: AgentsProcess, metadata: dict, why: str):
    episode = collector.episode(workflow(), metadata=metadata)
    assert why in episode.error
    assert episode.trajectories == []


@pytest.mark.parametrize("on_limit", ["train", "mask", "drop"])
def test_an_episode_that_a_limit_has_stopped_is_treated_as_asked(collector: AgentsProcess, on_limit: str):
    episode = collector.episode(workflow(max_turns=3, on_limit=on_limit), metadata={"task": 3})
    assert episode.error is None, episode.failures
    [trajectory] = episode.trajectories
    assert len(episode.sampled) == 3
    assert (True in trajectory["mask"], trajectory["dropped"]) == (on_limit == "train", on_limit == "drop")


def test_an_environment_that_there_is_not_is_named(collector: AgentsProcess):
    nowhere = workflow(environment={"taskset": {"id": "nowhere-at-all"}})
    episode = collector.episode(nowhere, metadata={"task": 0})
    assert "nowhere-at-all" in episode.error


def test_the_prompt_set_has_a_line_for_each_task(folder: Path, tmp_path: Path):
    described, output = tmp_path / "environment.json", tmp_path / "prompts.jsonl"
    described.write_text(json.dumps(ENVIRONMENT))
    command = [sys.executable, "-m", "slipstream.rollout.workflow.verifiers", str(described)]
    options = ["--python", PYTHON, "--first", "1", "--count", "2", "-o", str(output)]
    subprocess.run([*command, *options], env=environment(folder), check=True, timeout=120)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert rows == [{"prompt": "#say two", "task": 1}, {"prompt": "#say fail", "task": 2}]


def test_episodes_run_side_by_side_and_a_host_that_has_died_is_started_again(collector: AgentsProcess):
    alone = workflow(start_timeout_s=100)  # a host of this test
    before = hosts()
    for _ in range(2):
        with ThreadPoolExecutor(8) as pool:
            episodes = list(
                pool.map(lambda _: collector.episode(alone, metadata={"task": 1}, attempts=2), range(16))
            )
        assert [(episode.error, episode.rewards) for episode in episodes] == [(None, [2.0])] * 16
        [host] = hosts() - before
        os.kill(host, signal.SIGKILL)


def hosts() -> set[int]:
    """Return the processes in which environments run."""
    found: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if command[0] == PYTHON.encode() and b"verifiers_host.py" in command[2]:
                found.add(int(folder.name))
    return found
