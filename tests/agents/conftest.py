"""One collector's endpoint with scripted engines for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.agents.process import AgentsProcess
from tests.chat_model import write_chat_model


@pytest.fixture(scope="session")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentsProcess]:
    folder = write_chat_model(tmp_path_factory.mktemp("model"), weights=False)
    with AgentsProcess(folder, tool_parser="qwen25") as process:
        yield process
