"""Real SGLang servers, which take seconds to start: all tests of this folder share them."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from slipstream.backend.quickstart.tokenizer import build_tokenizer
from slipstream.bridge.engine.orders import TAKE
from slipstream.rollout.engine.adapters import POLICY, AdapterServing
from slipstream.rollout.engine.client import EngineAddress, EngineClient
from slipstream.rollout.engine.server_process import (
    MEETING_PORTS,
    MeetingPoint,
    ReplicaSpec,
    ServerProcess,
    ServerSpec,
)
from slipstream.rollout.system.network import hold_ports, port_of
from tests.models import make_checkpoint
from tests.ports import held_port

VOCAB = 48


async def version_of(client: EngineClient) -> int:
    """Return the policy version that the server says it has."""
    return int((await client._get("/model_info"))["weight_version"])


@dataclass
class Server:
    address: EngineAddress
    process: ServerProcess
    """The process that answers requests."""
    others: tuple[ServerProcess, ...] = ()
    """The servers on the engine's other nodes."""

    def ask(self, *questions) -> list:
        """Run client calls one after another: ``ask(lambda client: client.checksum())``."""

        async def answers() -> list:
            async with EngineClient(self.address) as client:
                return [await question(client) for question in questions]

        return asyncio.run(answers())

    def load(self, checkpoint: Path) -> None:
        """Replace its weights by those of ``checkpoint``, as version 0."""
        body = {"model_path": str(checkpoint), "weight_version": "0"}
        self.ask(lambda client: client._post("/update_weights_from_disk", body))

    def probe(self, sequences: list[list[int]]) -> list[list[float]]:
        return self.ask(*(lambda client, ids=ids: client.prompt_logprobs(ids) for ids in sequences))


def spec_of(
    model: Path,
    device: str = "cpu",
    *,
    ranks: int = 1,
    replica: bool = False,
    adapters: AdapterServing | None = None,
    args: Mapping[str, object] | None = None,
) -> ServerSpec:
    return ServerSpec(
        model,
        "float32",
        device,
        ranks,
        "127.0.0.1",
        held_port(),
        version=0,
        seed=0,
        replica=ReplicaSpec("slipstream.bridge.transport.replica.mount", "/dev/shm") if replica else None,
        adapters=adapters,
        args={"custom_weight_loader": [TAKE], **(args or {})},
    )


@contextlib.contextmanager
def serve(
    model: Path,
    log: Path,
    device: str = "cpu",
    *,
    name: str = "engine",
    ranks: int = 1,
    replica: bool = False,
    adapters: AdapterServing | None = None,
    args: Mapping[str, object] | None = None,
) -> Iterator[Server]:
    """``replica``: with a copy of the weights beside it. ``adapters``: which requests are to use."""
    spec = spec_of(model, device, ranks=ranks, replica=replica, adapters=adapters, args=args)
    process = ServerProcess(spec, log)
    try:
        asyncio.run(process.wait_healthy(120))
        url, key = process.access.url, process.access.key
        adapter = None if adapters is None else POLICY
        address = EngineAddress(name, url, ranks, VOCAB, 256, 60, stream_interval=8, key=key, adapter=adapter)
        yield Server(address, process)
    finally:
        process.stop()


@contextlib.contextmanager
def serve_over_nodes(model: Path, logs: Path, **split: int) -> Iterator[Server]:
    """Serve with an engine of two ranks over two nodes, which are both this machine."""
    with contextlib.ExitStack() as held:
        ports = [held.enter_context(holder) for holder in hold_ports("127.0.0.1", MEETING_PORTS)]
        meeting = MeetingPoint("127.0.0.1", port_of(ports[0]))
        parts = [
            replace(spec_of(model, ranks=2), nodes=2, node=node, meeting=meeting, **split)
            for node in range(2)
        ]
        processes = [ServerProcess(part, logs / f"node-{part.node}.log") for part in parts]
        try:
            first, *others = processes

            async def healthy() -> None:
                await asyncio.gather(*(process.wait_healthy(240) for process in processes))

            asyncio.run(healthy())
            url, key = first.access.url, first.access.key
            address = EngineAddress("over-nodes", url, 2, VOCAB, 256, 60, stream_interval=8, key=key)
            yield Server(address, first, tuple(others))
        finally:
            for process in processes:
                process.stop()


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model") / "policy", vocab_size=VOCAB)
    build_tokenizer().save_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)
    return folder


@pytest.fixture(scope="package")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of one rank. A test that changes its weights has to load the checkpoint's again."""
    with serve(checkpoint, tmp_path_factory.mktemp("logs") / "engine.log", replica=True) as running:
        yield running
