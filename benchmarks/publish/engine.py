"""An SGLang server with random weights of any shape, and a client that counts its requests."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import psutil

from slipstream.bridge.engine.orders import TAKE
from slipstream.rollout.engine.client import EngineAddress, EngineClient
from slipstream.rollout.engine.server_process import ServerProcess, ServerSpec
from slipstream.rollout.system.network import hold_port, port_of

LOOPBACK = "127.0.0.1"
NOTHING = "benchmarks.publish.engine.nothing"
"""Import path of the weight loader that does nothing."""
START_S = 240.0
TIMEOUT_S = 120.0


def nothing(model: object, named_tensors: object) -> None:
    """Be a weight loader whose request costs what any such request costs."""


@contextmanager
def serving(hf: Mapping[str, object], dtype: str, context: int) -> Iterator[tuple[EngineAddress, list[int]]]:
    """Serve a model of this shape: yields the address and the processes of the server.

    ``context``: largest number of tokens of a request.
    """
    with TemporaryDirectory(prefix="slipstream-publish-") as temporary, hold_port(LOOPBACK) as held:
        folder = Path(temporary)
        (folder / "config.json").write_text(json.dumps(hf))
        args: dict[str, object] = {
            "custom_weight_loader": [TAKE, NOTHING],
            "load_format": "dummy",
            "skip_tokenizer_init": True,
        }
        spec = ServerSpec(folder, dtype, "cpu", 1, LOOPBACK, port_of(held), version=0, seed=0, args=args)
        server = ServerProcess(spec, folder / "server.log")
        try:
            asyncio.run(server.wait_healthy(START_S))
            access, vocab = server.access, hf["vocab_size"]
            assert isinstance(vocab, int)
            address = EngineAddress("engine", access.url, 1, vocab, context, TIMEOUT_S, key=access.key)
            process = psutil.Process(server.pid)
            yield address, [process.pid, *(child.pid for child in process.children(recursive=True))]
        finally:
            server.stop()


class CountingClient(EngineClient):
    """Counts requests by path."""

    def __init__(self, address: EngineAddress) -> None:
        super().__init__(address)
        self.requests = Counter[str]()

    async def _send(self, method: str, path: str, **options: Any) -> aiohttp.ClientResponse:
        self.requests[path] += 1
        return await super()._send(method, path, **options)
