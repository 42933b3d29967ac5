"""One gateway with scripted tokens for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chat_model import write_chat_model
from tests.gateway_process import GatewayProcess


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"), weights=False)


@pytest.fixture(scope="session")
def gateway(chat_model: Path) -> Iterator[GatewayProcess]:
    with GatewayProcess(
        chat_model, tool_parser="qwen25", limits={"choices": 4, "body_bytes": 65536}
    ) as process:
        yield process


@pytest.fixture(scope="session")
def thinking(chat_model: Path) -> Iterator[GatewayProcess]:
    """A gateway whose answers begin with reasoning."""
    with GatewayProcess(
        chat_model, tool_parser="qwen25", reasoning_parser="qwen3", context=100_000
    ) as process:
        yield process
