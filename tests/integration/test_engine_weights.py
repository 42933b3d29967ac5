"""A real SGLang server against transformers, and against itself after weights came over the bridge."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from transformers import AutoTokenizer

from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.quickstart.tokenizer import build_tokenizer
from slipstream.configs.schema import RunConfig, SamplingConfig
from slipstream.rollout.engine.client import EngineAddress, EngineClient, EngineError, EngineLost, Silent
from slipstream.rollout.engine.pool import EnginePool
from slipstream.rollout.engine.process import ReplicaSpec, ServerProcess, ServerSpec
from slipstream.rollout.network import free_port
from slipstream.rollout.trajectory import Completion, Finish
from tests.integration.test_megatron_parity import config_for, make_batch
from tests.models import make_checkpoint, reference_logprobs, reference_model
from tests.ranks import run_ranks

VOCAB = 48
ONE_TOKEN = SamplingConfig(max_new_tokens=1)


class Endless(EngineClient):
    """Completions end by their length only, so that what a test interrupts is still running."""

    def _chunks(self, rid, body, stream):
        body["sampling_params"]["ignore_eos"] = True
        return super()._chunks(rid, body, stream)


@contextlib.asynccontextmanager
async def slowed(address: EngineAddress, seconds_per_token: float = 0.1) -> AsyncIterator[Endless]:
    async with Endless(address) as client:
        await client._post("/slow_down", {"forward_sleep_time": seconds_per_token})
        try:
            yield client
        finally:
            with contextlib.suppress(EngineLost):
                await client._post("/slow_down", {"forward_sleep_time": None})


async def version_of(client: EngineClient) -> int:
    """The policy version that the server says it has."""
    return int((await client._get("/model_info"))["weight_version"])


async def pool_of(*clients: EngineClient) -> EnginePool:
    pool = EnginePool(max_concurrent=8, wait_timeout_s=60, isolate_versions=False)
    for client in clients:
        await pool.add(client)
    return pool


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model") / "policy", vocab_size=VOCAB)
    build_tokenizer().save_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)
    return folder


@dataclass
class Server:
    address: EngineAddress
    process: ServerProcess

    def ask(self, *questions) -> list:
        """Run client calls one after another: ``ask(lambda client: client.checksum())``."""

        async def answers() -> list:
            async with EngineClient(self.address) as client:
                return [await question(client) for question in questions]

        return asyncio.run(answers())

    def probe(self, sequences: list[list[int]]) -> list[list[float]]:
        return self.ask(*(lambda client, ids=ids: client.prompt_logprobs(ids) for ids in sequences))


@contextlib.contextmanager
def serve(
    model: Path,
    log: Path,
    device: str = "cpu",
    *,
    name: str = "engine",
    ranks: int = 1,
    replica: bool = False,
) -> Iterator[Server]:
    """``replica``: with a copy of the weights beside it."""
    spec = ServerSpec(
        model,
        "float32",
        device,
        ranks,
        "127.0.0.1",
        free_port("127.0.0.1"),
        version=0,
        seed=0,
        replica=ReplicaSpec("slipstream.bridge.transport.replica.mount", f"/dev/shm/{uuid4().hex}")
        if replica
        else None,
    )
    process = ServerProcess(spec, log)
    try:
        asyncio.run(process.wait_healthy(120))
        yield Server(EngineAddress(name, process.url, ranks, VOCAB, 256, 60, stream_interval=8), process)
    finally:
        process.stop()


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(checkpoint, tmp_path_factory.mktemp("logs") / "engine.log") as running:
        yield running


@pytest.fixture(scope="module")
def probes() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCAB, n).tolist() for n in (2, 7, 30, 64, 100, 31)]


def test_engine_logprobs_equal_those_of_transformers(
    server: Server, checkpoint: Path, probes: list[list[int]]
):
    model = reference_model(checkpoint)
    for ids, found in zip(probes, server.probe(probes), strict=True):
        expected = reference_logprobs(model, ids).detach().numpy()
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_sampled_logprobs_are_those_of_the_distribution_at_the_temperature(
    server: Server, checkpoint: Path, probes: list[list[int]]
):
    model = reference_model(checkpoint)
    sampling = SamplingConfig(temperature=0.7, max_new_tokens=24)
    for ids in probes:
        [completion] = server.ask(lambda client, ids=ids: client.generate(ids, sampling, version=0))
        whole = [*ids, *completion.tokens]
        expected = reference_logprobs(model, whole, 0.7)[len(ids) - 1 :].detach().numpy()
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert set(completion.versions()) == {0}


def train_and_publish(rank: RankSpec, config: RunConfig, engines: list[EngineAddress], folder: Path):
    """Two steps, the second published to the engines and exported; the report, where there is one."""
    from slipstream.backend.trainer.rank import TrainerRank

    trainer = TrainerRank(config, rank)
    for version in range(2):
        trainer.train(make_batch(VOCAB, seed=version, version=version))
    report = trainer.publish(2, engines)
    trainer.export_hf(folder)
    return report


@pytest.fixture
def version_0(server: Server, checkpoint: Path) -> Iterator[None]:
    """The server has the initial weights again afterwards."""
    yield
    initial = {"model_path": str(checkpoint), "weight_version": "0"}
    server.ask(lambda client: client._post("/update_weights_from_disk", initial))


def publishing(checkpoint: Path, interrupt: str) -> RunConfig:
    return config_for(
        checkpoint, {}, weights={"interrupt": interrupt, "transport": {"type": "distributed", "bucket_mb": 1}}
    )


def assert_logprobs_are_those_of_their_version(
    ids: list[int], completion: Completion, models: dict[int, Path]
) -> None:
    """Of a model of the version that the engine names, given all that precedes."""
    tokens = [*ids, *completion.tokens]
    for span in completion.spans:
        expected = reference_logprobs(reference_model(models[span.version]), tokens)
        part = slice(len(ids) - 1 + span.start, len(ids) - 1 + span.end)
        found = completion.logprobs[span.start : span.end]
        np.testing.assert_allclose(found, expected[part].detach().numpy(), atol=1e-4)


@pytest.mark.usefixtures("version_0")
@pytest.mark.parametrize("interrupt", ["retract", "in_place", "abort"])
def test_an_update_reaches_running_requests_which_go_on(
    server: Server, checkpoint: Path, tmp_path: Path, interrupt: str
):
    """One answer holds tokens of both versions; with abort it is the answer to two requests."""
    ids, exported = [5, 6, 7], tmp_path / "exported"

    async def generate_through_an_update() -> tuple[EnginePool, Completion, object]:
        async with slowed(server.address) as client:
            pool = await pool_of(client)
            running = asyncio.create_task(pool.generate(ids, SamplingConfig(max_new_tokens=150)))
            [report] = await asyncio.to_thread(
                run_ranks,
                1,
                train_and_publish,
                publishing(checkpoint, interrupt),
                [server.address],
                exported,
            )
            await client._post("/slow_down", {"forward_sleep_time": None})
            return pool, await running, report

    pool, completion, report = asyncio.run(generate_through_an_update())
    assert report.failed == {}
    assert report.updated == ["engine"]
    assert [span.version for span in completion.spans] == [0, 2]
    assert len(completion.tokens) == 150
    assert completion.finish is Finish.LENGTH
    assert pool.requests_resent == (1 if interrupt == "abort" else 0)
    assert pool.tokens_continued == (completion.spans[0].end if interrupt == "abort" else 0)
    assert pool.tokens_generated == 150
    if interrupt != "in_place":  # which computes on with the KV of the old weights
        assert_logprobs_are_those_of_their_version(ids, completion, {0: checkpoint, 2: exported})


@pytest.mark.usefixtures("version_0")
def test_draining_lets_running_requests_end_under_the_old_version_and_new_ones_wait_for_the_next(
    server: Server, checkpoint: Path, tmp_path: Path
):
    async def generate_around_an_update() -> tuple[Completion, Completion, object]:
        async with slowed(server.address, 0.03) as client:
            pool = await pool_of(client)
            sampling = SamplingConfig(max_new_tokens=100)
            old = asyncio.create_task(pool.generate([5, 6, 7], sampling))
            await asyncio.sleep(1)
            entered = asyncio.get_running_loop().time()
            async with pool.drained(timeout_s=60):
                assert old.done()
                assert asyncio.get_running_loop().time() - entered > 1
                new = asyncio.create_task(pool.generate([8, 9], sampling))
                [report] = await asyncio.to_thread(
                    run_ranks,
                    1,
                    train_and_publish,
                    publishing(checkpoint, "drain"),
                    [server.address],
                    tmp_path / "exported",
                )
            return await old, await new, report

    old, new, report = asyncio.run(generate_around_an_update())
    assert report.updated == ["engine"]
    assert [span.version for span in old.spans] == [0]
    assert [span.version for span in new.spans] == [2]
    assert len(old.tokens) == len(new.tokens) == 100


def test_silence_gives_up_the_request_and_what_it_was_given_is_continued(server: Server, checkpoint: Path):
    """A pause that outlasts the time-out: the engine is well, and the answer is whole in the end."""
    ids = [5, 6, 7]

    async def generate_through_a_pause() -> tuple[EnginePool, Completion]:
        async with slowed(replace(server.address, timeout_s=2), 0.02) as client:
            pool = await pool_of(client)
            arrived = asyncio.Event()
            sampling = SamplingConfig(max_new_tokens=60)
            running = asyncio.create_task(pool.generate(ids, sampling, progress=lambda _: arrived.set()))
            await arrived.wait()
            await client.pause("retract")
            await asyncio.sleep(3)
            assert pool.requests_resent == 1
            await client.resume()
            completion = await running
            await asyncio.sleep(1)
            load = await client.load()
            assert (load.running, load.waiting) == (0, 0), "what was given up has ended"
            return pool, completion

    pool, completion = asyncio.run(generate_through_a_pause())
    assert pool.lost.empty()
    assert len(completion.tokens) == 60
    assert_logprobs_are_those_of_their_version(ids, completion, {0: checkpoint})


def test_a_request_that_ends_by_silence_names_the_engine_that_is_well(server: Server):
    async def ask() -> None:
        async with slowed(replace(server.address, timeout_s=0.5), 1.5) as client:
            with pytest.raises(Silent, match="engine /generate: nothing came for 0 s"):
                await client.generate([1], SamplingConfig(max_new_tokens=9), version=0)

    asyncio.run(ask())


def test_the_load_of_a_server_shows_its_running_requests(server: Server):
    async def watch() -> None:
        async with slowed(server.address, 0.02) as client:
            sampling = SamplingConfig(max_new_tokens=200)
            running = [asyncio.create_task(client.generate([i, 7], sampling, version=0)) for i in range(4)]
            await asyncio.sleep(2)
            load = await client.load()
            assert (load.running, load.waiting) == (4, 0)
            assert 0 < load.kv_use < 0.2
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(watch())


@pytest.mark.usefixtures("version_0")
@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({}, id="one rank", marks=pytest.mark.slow),
        pytest.param({"tensor": 2}, id="tensor 2"),
        pytest.param({"pipeline": 2}, id="pipeline 2", marks=pytest.mark.slow),
    ],
)
def test_published_weights_are_bit_for_bit_those_of_the_exported_checkpoint(
    server: Server, checkpoint: Path, probes: list[list[int]], tmp_path: Path, parallel: dict
):
    """The probe set scores the same, to the last bit, on a server that was started from the export."""
    config = config_for(
        checkpoint,
        parallel,
        optimizer={"lr": 1e-2},
        weights={"transport": {"type": "distributed", "bucket_mb": 1}},
    )
    folder = tmp_path / "exported"
    before = server.probe(probes)
    reports = run_ranks(config.actor.parallel.world_size, train_and_publish, config, [server.address], folder)
    assert reports[0].updated == ["engine"]
    assert server.ask(version_of) == [2]
    updated = server.probe(probes)
    assert updated != before
    with serve(folder, tmp_path / "fresh.log") as fresh:
        assert fresh.probe(probes) == updated


def test_token_ids_outside_the_vocabulary_never_reach_the_server(server: Server):
    with pytest.raises(ValueError, match="outside the vocabulary"):
        server.ask(lambda client: client.generate([1, VOCAB], ONE_TOKEN, version=0))
    assert server.ask(lambda client: client.healthy()) == [True]


def test_a_refused_update_names_the_reason(server: Server):
    with pytest.raises(EngineError, match="begin_weight_update"):
        server.ask(
            lambda client: client.receive(
                names=["model.norm.weight"],
                shapes=[[64]],
                dtype="float32",
                group="none",
                flush_cache=False,
                version=9,
            )
        )


def test_what_a_killed_engine_has_generated_is_continued_by_another_one(
    server: Server, checkpoint: Path, tmp_path: Path
):
    ids = [5, 6, 7]

    async def generate_through_a_loss(doomed: Server) -> tuple[EnginePool, Completion]:
        async with slowed(doomed.address, 0.05) as dying, Endless(server.address) as client:
            pool = await pool_of(dying)
            arrived = asyncio.Event()

            def progress(so_far: Completion) -> None:
                if len(so_far.tokens) > 20:
                    arrived.set()

            running = asyncio.create_task(
                pool.generate(ids, SamplingConfig(max_new_tokens=60), progress=progress)
            )
            await arrived.wait()
            doomed.process.stop()
            await pool.add(client)
            return pool, await running

    with serve(checkpoint, tmp_path / "doomed.log") as doomed:
        pool, completion = asyncio.run(generate_through_a_loss(doomed))
    assert pool.tokens_continued > 20
    assert pool.tokens_generated == len(completion.tokens) == 60
    assert completion.finish is Finish.LENGTH
    assert_logprobs_are_those_of_their_version(ids, completion, {0: checkpoint})
