"""One collector's endpoint with scripted engines for all tests of this folder."""

import re
from collections.abc import Iterator

import pytest

from tests.agents.process import AgentsProcess
from tests.chat_model import write_chat_model
from tests.environment import ROOT


def example(language: str) -> str:
    """Return the first example in a language that the documentation of agents has."""
    [text, *_] = re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs/agents.md").read_text(), re.DOTALL)
    return text


@pytest.fixture(scope="session")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentsProcess]:
    folder = write_chat_model(tmp_path_factory.mktemp("model"), weights=False)
    (folder / "my_package").mkdir()
    (folder / "my_package/agents.py").write_text(example("python"))
    with AgentsProcess(folder, tool_parser="qwen25") as process:
        yield process
