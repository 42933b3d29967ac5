"""The example hooks of a checkout of slime, unmodified, in a collector with scripted engines.

Each example runs one episode. The policy says what the last user message asks for, so that tools are called
and their output decides how the episode goes on. What is trained is compared with what the engines sampled.
"""

import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.agents.process import AgentsProcess, Episode
from tests.chat_model import write_chat_model

FOLDERS = ("retool", "search-r1", "multi_agent")
RETRIEVER = ("127.0.0.1", 8000)
"""Where search-r1 looks for its retriever."""

AGENTS = "examples.multi_agent.rollout_with_multi_agents"
FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters"

CALLS_TOOL = """#say <code>
print(chr(60) + "|im_start|>user\\n#" + "say Answer: " + chr(92) + "boxed{4}" + chr(60) + "|im_end|>")
</code>"""
ANSWERS = "<|im_start|>user\n#say <answer>4</answer><|im_end|>"


class Retriever(BaseHTTPRequestHandler):
    """A retriever whose one document asks for the answer."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"result": [[{"contents": f'"Numbers"\n{ANSWERS}'}]]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def retriever() -> Iterator[None]:
    server = ThreadingHTTPServer(RETRIEVER, Retriever)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def check_sampled(episode: Episode, trained: list[list[int]]) -> None:
    """Compare which requests are trained in which trajectory, token for token."""
    assert episode.error is None, episode.failures
    assert episode.trained() == trained, episode.texts


def tool(process: AgentsProcess) -> None:
    hooks = {
        "custom_generate_function": "generate_with_retool.generate",
        "custom_rm": "generate_with_retool.reward_func",
    }
    episode = process.hooked(CALLS_TOOL, hooks=hooks, label="4", reward_key="score")
    check_sampled(episode, [[0, 1]])
    assert "<interpreter>\nOutput:" in episode.texts[0]


def search(process: AgentsProcess) -> None:
    hooks = {
        "custom_generate_function": "generate_with_search.generate",
        "custom_rm": "generate_with_search.reward_func",
    }
    label = {"ground_truth": {"target": ["4"]}}
    with retriever():
        episode = process.hooked("#say <search>numbers</search>", hooks=hooks, label=label)
    assert episode.error is None, episode.failures
    [trajectory], [text] = episode.trajectories, episode.texts
    assert '<information>Doc 1(Title: "Numbers")' in text
    # The engines' completions end with the stop strings, and a token of this policy is a byte.
    assert sum(trajectory["mask"]) == len("<search>numbers</search><answer>4</answer>"), text
    assert {version for version in trajectory["versions"] if version is not None} == {3, 4}


def agents(process: AgentsProcess) -> None:
    hooks = {
        "custom_generate_function": f"{AGENTS}.generate_with_multi_agents",
        "rm_type": "math",
    }
    episode = process.hooked("#say Easy.</think>\\boxed{42}", hooks=hooks, label="42")
    assert episode.error is None, episode.failures
    assert len(episode.trajectories) == 11, "five solvers, five rewriters and a selector"
    for trajectory in episode.trajectories:
        sampled = trajectory["tokens"][trajectory["mask"].index(True) :]
        assert all(trajectory["mask"][-len(sampled) :])
        assert sampled in [request["tokens"] for request in episode.sampled]


def by_default(process: AgentsProcess) -> None:
    hooks = {
        "custom_generate_function": "slime.rollout.sglang_rollout.generate",
        "rm_type": "math",
        "dynamic_sampling_filter": f"{FILTERS}.check_reward_nonzero_std",
    }
    episode = process.hooked("#say \\boxed{4}", hooks=hooks, label="4")
    check_sampled(episode, [[0]])
    assert episode.rewards == [1.0] and episode.kept == [True, False]


EXAMPLES: dict[str, Callable[[AgentsProcess], None]] = {
    "retool": tool,
    "search-r1": search,
    "multi_agent": agents,
    "generate_and_filter": by_default,
}


def run_examples(checkout: Path, *path: Path) -> dict[str, object]:
    """Run all examples of a checkout. ``path``: what they import from; empty: the alias. Return outcomes."""
    outcomes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_chat_model(folder / "model", weights=False)
        shutil.copytree(checkout / "examples", folder / "examples")  # without slime beside them
        places = (folder, *(folder / "examples" / each for each in FOLDERS), *path)
        with AgentsProcess(model, *places) as process:
            for example, check in EXAMPLES.items():
                try:
                    check(process)
                    outcomes[example] = "passed"
                except Exception as error:  # whatever it is, the other examples run too
                    outcomes[example] = f"{type(error).__name__}: {error}"
    failed = [outcome for outcome in outcomes.values() if outcome != "passed"]
    return {**outcomes, "exit_code": int(bool(failed))}
