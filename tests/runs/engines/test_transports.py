"""Every way into the engines, with real ones: of one rank and of two, version after version."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from slipstream.backend.megatron.parallel import RankSpec
from slipstream.configs.schema import RunConfig
from slipstream.rollout.engine.client import EngineAddress, EngineClient
from tests.integration.test_megatron_parity import config_for, make_batch
from tests.ranks import run_ranks
from tests.runs.engines.conftest import VOCAB, Server, serve, version_of

VERSIONS = 3


@pytest.fixture(scope="module")
def servers(
    server: Server, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Server]]:
    """A server of a single rank, and one of two."""
    log = tmp_path_factory.mktemp("logs") / "of-2.log"
    with serve(checkpoint, log, name="of-2", ranks=2, replica=True) as second:
        yield [server, second]


def train_and_publish(
    rank: RankSpec, config: RunConfig, engines: list[EngineAddress], folder: Path, text: list[int]
):
    """Each of several versions to the engines, and the last one as a checkpoint; the reports."""
    from slipstream.backend.trainer.rank import TrainerRank

    trainer = TrainerRank(config, rank)
    reports = []
    for version in range(VERSIONS):
        trainer.train(make_batch(VOCAB, seed=version, version=version))
        reports.append(trainer.publish(version + 1, engines))
    trainer.export_hf(folder)
    return reports, trainer.logprobs(text)


@pytest.mark.parametrize("transport", ["shards", "tensor", "disk", "delta"])
def test_engines_hold_the_trainers_weights_to_the_last_bit(
    servers: list[Server], checkpoint: Path, tmp_path: Path, transport: str
):
    settings = {"type": transport} if transport == "shards" else {"type": transport, "bucket_mb": 1}
    if transport == "disk":
        settings["path"] = str(tmp_path / "versions")
    weights = {"transport": settings, "interrupt": "retract"}
    config = config_for(checkpoint, {}, optimizer={"lr": 1e-4}, weights=weights)
    text = np.random.default_rng(1).integers(0, VOCAB, 60).tolist()
    [(reports, expected)] = run_ranks(
        1, train_and_publish, config, [server.address for server in servers], tmp_path / "exported", text
    )
    for version, report in enumerate(reports, start=1):
        assert (report.version, report.failed) == (version, {})
        assert report.updated == ["engine", "of-2"]
        assert report.bytes_sent > 0
        assert report.stall_s < report.total_s

    async def examine(address: EngineAddress) -> None:
        async with EngineClient(address) as client:
            assert await version_of(client) == VERSIONS
            np.testing.assert_allclose(
                await client.prompt_logprobs(text, version=VERSIONS), expected, atol=1e-4
            )
            published = await client.checksum()
            await client.load_files(checkpoint, version=0)
            assert await client.checksum() != published
            await client.load_files(tmp_path / "exported", version=VERSIONS)
            assert await client.checksum() == published
            await client.load_files(checkpoint, version=0)

    for server in servers:
        asyncio.run(examine(server.address))
    if transport == "delta":  # the first version as well: its patch starts from the initial weights
        weights_bytes = sum(file.stat().st_size for file in (tmp_path / "exported").glob("*.safetensors"))
        assert max(report.bytes_sent for report in reports) < 0.9 * weights_bytes
    if transport == "disk":
        kept = sorted(path.name for path in (tmp_path / "versions").iterdir())
        assert kept == ["version-00000003"]
