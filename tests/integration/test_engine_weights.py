"""A real SGLang server against transformers, and against itself after weights came over the bridge."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from backend.megatron.parallel import RankSpec
from backend.quickstart.tokenizer import build_tokenizer
from configs.schema import RunConfig, SamplingConfig
from rollout.engine.client import EngineAddress, EngineClient, EngineError, parse_completion
from rollout.engine.process import ServerProcess, ServerSpec
from rollout.trajectory import Completion
from tests.integration.test_megatron_parity import config_for, make_batch
from tests.models import make_checkpoint, reference_logprobs, reference_model
from tests.ranks import free_port, run_ranks

VOCAB = 48


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model") / "policy", vocab_size=VOCAB)
    build_tokenizer().save_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)
    return folder


@dataclass
class Server:
    address: EngineAddress

    def ask(self, *questions) -> list:
        """Run client calls one after another: ``ask(lambda client: client.version())``."""

        async def answers() -> list:
            async with EngineClient(self.address) as client:
                return [await question(client) for question in questions]

        return asyncio.run(answers())

    def probe(self, sequences: list[list[int]]) -> list[list[float]]:
        return self.ask(*(lambda client, ids=ids: client.prompt_logprobs(ids) for ids in sequences))


@contextlib.contextmanager
def serve(model: Path, log: Path, device: str = "cpu") -> Iterator[Server]:
    spec = ServerSpec(model, "float32", device, 1, "127.0.0.1", free_port(), version=0, seed=0)
    process = ServerProcess(spec, log)
    try:
        asyncio.run(process.wait_healthy(120))
        yield Server(EngineAddress("engine", process.url, 1, VOCAB, 256, 60))
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
        [completion] = server.ask(lambda client, ids=ids: client.generate(ids, sampling))
        whole = [*ids, *completion.tokens]
        expected = reference_logprobs(model, whole, 0.7)[len(ids) - 1 :].detach().numpy()
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert set(completion.versions()) == {0}


def train_and_publish(rank: RankSpec, config: RunConfig, engines: list[EngineAddress], folder: Path):
    """Two steps, the second published to the engines and exported; the report, where there is one."""
    from backend.trainer import TrainerRank

    trainer = TrainerRank(config, rank)
    for version in range(2):
        trainer.train(make_batch(VOCAB, seed=version, version=version))
    report = trainer.publish(engines)
    trainer.export_hf(folder)
    return report


@pytest.mark.parametrize("interrupt", ["retract", "in_place"])
def test_an_update_reaches_running_requests_which_go_on(
    server: Server, checkpoint: Path, tmp_path: Path, interrupt: str
):
    """One answer holds tokens of both versions, tiled by the engine's own spans."""
    config = config_for(checkpoint, {}, weights={"interrupt": interrupt, "transport": {"bucket_mb": 1}})

    async def generate_through_an_update() -> tuple[int, Completion, object]:
        async with EngineClient(server.address) as client:
            before = await client.version()
            await client._post("/slow_down", {"forward_sleep_time": 0.1})
            request = {
                "input_ids": [5, 6, 7],
                "sampling_params": {"max_new_tokens": 150, "ignore_eos": True},
                "return_logprob": True,
            }
            running = asyncio.create_task(client._post("/generate", request))
            reports = await asyncio.to_thread(
                run_ranks, 1, train_and_publish, config, [server.address], tmp_path / "exported"
            )
            await client._post("/slow_down", {"forward_sleep_time": None})
            return before, parse_completion(await running), reports[0]

    before, completion, report = asyncio.run(generate_through_an_update())
    assert report.failed == {}
    assert report.updated == ["engine"]
    assert [span.version for span in completion.spans] == [before, 2]
    assert len(completion.tokens) == 150
    # Put version 0 back for the tests that follow.
    server.ask(
        lambda client: client._post(
            "/update_weights_from_disk", {"model_path": str(checkpoint), "weight_version": "0"}
        )
    )


@pytest.mark.parametrize(
    "parallel", [{}, {"tensor": 2}, {"pipeline": 2}], ids=["one rank", "tensor 2", "pipeline 2"]
)
def test_published_weights_are_bit_for_bit_those_of_the_exported_checkpoint(
    server: Server, checkpoint: Path, probes: list[list[int]], tmp_path: Path, parallel: dict
):
    """The probe set scores the same, to the last bit, on a server that was started from the export."""
    config = config_for(checkpoint, parallel, optimizer={"lr": 1e-2}, weights={"transport": {"bucket_mb": 1}})
    folder = tmp_path / "exported"
    before = server.probe(probes)
    reports = run_ranks(config.actor.parallel.world_size, train_and_publish, config, [server.address], folder)
    assert reports[0].updated == ["engine"]
    assert server.ask(lambda client: client.version()) == [2]
    updated = server.probe(probes)
    assert updated != before
    with serve(folder, tmp_path / "fresh.log") as fresh:
        assert fresh.probe(probes) == updated


def test_token_ids_outside_the_vocabulary_never_reach_the_server(server: Server):
    with pytest.raises(ValueError, match="outside the vocabulary"):
        server.ask(lambda client: client.generate([1, VOCAB], SamplingConfig(max_new_tokens=1)))
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
