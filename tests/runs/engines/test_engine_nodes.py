"""A real engine over two nodes, which are both this machine: a server and a rank on each."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from slipstream.backend.megatron.parallel import RankSpec
from slipstream.configs.schema import RunConfig, SamplingConfig
from slipstream.rollout.engine.client import EngineAddress
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.leftovers import members
from slipstream.rollout.engine.server_process import ServerProcess
from slipstream.rollout.tokens.trajectory import Completion
from tests.integration.test_megatron_parity import config_for, make_batch
from tests.models import reference_logprobs, reference_model
from tests.ranks import run_ranks
from tests.runs.engines.conftest import VOCAB, Server, serve, serve_over_nodes, version_of
from tests.unit.test_engine_process import alive, wait_until

PROMPTS = [[5, 9, 12, 7, 30, 2, 11], [1, 2, 3], list(range(40))]


@pytest.fixture(scope="module")
def spread(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve_over_nodes(checkpoint, tmp_path_factory.mktemp("logs")) as running:
        yield running


def completed(server: Server) -> list[Completion]:
    """Return the likeliest completions of the prompts."""
    growing = [GrowingCompletion() for _ in PROMPTS]
    sampling = SamplingConfig(max_new_tokens=24, ignore_eos=True)
    server.ask(
        *(
            lambda client, ids=ids, to=to: client.generate(ids, sampling, to, version=0, greedy=True)
            for ids, to in zip(PROMPTS, growing, strict=True)
        )
    )
    return [each.completion() for each in growing]


def test_an_engine_over_two_nodes_computes_what_an_engine_of_one_does(
    spread: Server, server: Server, checkpoint: Path
):
    model = reference_model(checkpoint)
    for ids, ours, theirs in zip(PROMPTS, completed(spread), completed(server), strict=True):
        assert ours.tokens == theirs.tokens
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
        expected = reference_logprobs(model, [*ids, *ours.tokens])[len(ids) - 1 :].detach().numpy()
        np.testing.assert_allclose(ours.logprobs, expected, atol=1e-4)


def train_and_publish(
    rank: RankSpec, config: RunConfig, engines: list[EngineAddress], folder: Path, text: list[int]
):
    """One step, published to the engines and exported; the report, and the trainer's log-probs."""
    from slipstream.backend.trainer.rank import TrainerRank

    trainer = TrainerRank(config, rank)
    trainer.train(make_batch(VOCAB, seed=0, version=0))
    report = trainer.publish(1, engines)
    trainer.export_hf(folder)
    return report, trainer.logprobs(text)


@pytest.mark.parametrize("transport", ["disk", "shards"])
def test_a_version_reaches_the_ranks_of_both_nodes(
    spread: Server, checkpoint: Path, tmp_path: Path, transport: str
):
    published_and_read_back(spread, checkpoint, tmp_path, transport)


def published_and_read_back(spread: Server, checkpoint: Path, folder: Path, transport: str) -> None:
    """Publish a version to the engine, and compare it with the trainer's and with its export."""
    text = np.random.default_rng(1).integers(0, VOCAB, 60).tolist()
    settings = {"type": transport, **({"path": str(folder / "versions")} if transport == "disk" else {})}
    weights = {"transport": settings, "interrupt": "retract"}
    config = config_for(checkpoint, {}, optimizer={"lr": 1e-3}, weights=weights)
    before = spread.probe([text])
    [(report, expected)] = run_ranks(
        1, train_and_publish, config, [spread.address], folder / "exported", text
    )
    assert (report.version, report.failed, report.updated) == (1, {}, ["over-nodes"])
    version, found, published = spread.ask(
        version_of, lambda client: client.prompt_logprobs(text, version=1), lambda client: client.checksum()
    )
    assert version == 1
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(np.array(before[0]) - found).max() > 1e-3, "the update can be seen"
    spread.load(checkpoint)
    spread.load(folder / "exported")
    assert spread.ask(lambda client: client.checksum()) == [published]
    spread.load(checkpoint)


def kill_first(process: ServerProcess, title: bytes) -> None:
    """Kill the first process of a server whose command line holds ``title``."""
    pids = [pid for pid in members(process.pid) if title in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(pids[0], signal.SIGKILL)


def ends_and_leaves_nothing(server: Server) -> None:
    """See the end of a server noticed; the driver has the others ended then, as is done here."""
    processes = [server.process, *server.others]

    async def noticed() -> None:
        exits = [asyncio.ensure_future(process.wait_exit()) for process in processes]
        async with asyncio.timeout(60):
            await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)

    asyncio.run(noticed())
    for process in processes:
        process.stop()
    wait_until(lambda: not any(alive(pid) for process in processes for pid in members(process.pid)))


def test_the_death_of_a_scheduler_of_the_other_node_is_noticed_there(spread: Server):
    """Last test of this module: it ends the engine."""
    [other] = spread.others
    kill_first(other, b"sglang::scheduler")

    async def exit_code() -> int:
        return await asyncio.wait_for(other.wait_exit(), 30)

    assert asyncio.run(exit_code()) != 0
    ends_and_leaves_nothing(spread)


@pytest.mark.slow
def test_an_engine_over_two_nodes_computes_bit_for_bit_what_two_ranks_of_one_do(
    checkpoint: Path, tmp_path: Path
):
    with serve(checkpoint, tmp_path / "one.log", ranks=2) as one:
        expected = completed(one)
        kept = one.ask(lambda client: client.checksum())
    with serve_over_nodes(checkpoint, tmp_path) as two:
        assert completed(two) == expected
        assert two.ask(lambda client: client.checksum()) == kept


@pytest.mark.slow
@pytest.mark.parametrize("split", [{"data_parallel": 2}, {"tensor_parallel": 1, "pipeline_parallel": 2}])
@pytest.mark.parametrize("node", [0, 1])
def test_other_splits_over_nodes_compute_the_same_and_end_with_any_scheduler(
    server: Server, checkpoint: Path, tmp_path: Path, split: dict[str, int], node: int
):
    with serve_over_nodes(checkpoint, tmp_path, **split) as spread:
        for ours, theirs in zip(completed(spread), completed(server), strict=True):
            assert ours.tokens == theirs.tokens
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
        for transport in ("disk", "shards") if "data_parallel" in split else ("disk",):
            published_and_read_back(spread, checkpoint, tmp_path / transport, transport)
        kill_first([spread.process, *spread.others][node], b"sglang::scheduler")
        ends_and_leaves_nothing(spread)
