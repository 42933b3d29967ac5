"""A real SGLang server against transformers, and against itself after weights came over the bridge."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import torch

from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.quickstart.tokenizer import build_tokenizer
from slipstream.configs.schema import RunConfig, SamplingConfig
from slipstream.rollout.control.concurrency import EngineLoad
from slipstream.rollout.engine.client import EngineAddress, EngineClient, EngineError, EngineLost, Silent
from slipstream.rollout.engine.engine_pool import EnginePool
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.engine.sampling import LiveSampling
from slipstream.rollout.tokens.trajectory import Completion, Finish
from tests.integration.test_megatron_parity import config_for, make_batch
from tests.models import reference_logprobs, reference_model
from tests.ranks import run_ranks
from tests.runs.engines.conftest import VOCAB, Server, serve, version_of
from tests.unit.doubles import Collector

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


async def running_requests(client: EngineClient, count: int) -> EngineLoad:
    """Wait until the engine runs ``count`` requests and none waits; return its load."""
    async with asyncio.timeout(60):
        while ((load := await client.load()).running, load.waiting) != (count, 0):
            await asyncio.sleep(0.1)
    return load


class Serving:
    """Engines that serve one collector, which uses the same clients as the driver."""

    def __init__(self, *clients: EngineClient) -> None:
        self._clients: dict[str, EngineClient] = {}
        self.roster = EngineRoster(lambda: 0, limit=8)
        collector = Collector(
            self.roster, connect=lambda address: self._clients[address.name], wait_timeout_s=60
        )
        self.pool: EnginePool = collector.pool
        for client in clients:
            self.add(client)

    def add(self, client: EngineClient) -> None:
        self._clients[client.name] = client
        self.roster.add(client)

    async def generate(
        self, ids: list[int], max_new_tokens: int, grown: Callable[[int], None] | None = None
    ) -> Completion:
        """``grown`` is called with the number of tokens so far."""
        completion = GrowingCompletion()

        def tell() -> None:
            if grown is not None:
                grown(len(completion.tokens))

        sampling = SamplingConfig(max_new_tokens=max_new_tokens)
        await self.pool.generate(ids, sampling, completion, grown=tell)
        return completion.completion()


class Spare:
    """A second server, kept by its first user for the next one: to start it takes seconds."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: tuple[Server, contextlib.ExitStack] | None = None

    def started_from(self, model: Path) -> Server:
        """Return a server whose first weights are those of ``model``."""
        self.stop()
        stack = contextlib.ExitStack()
        server = stack.enter_context(serve(model, self._logs / f"{uuid4().hex}.log"))
        self._running = (server, stack)
        return server

    def with_weights_of(self, model: Path) -> Server:
        """Return a server that holds the weights of ``model`` as version 0, wherever it has them from."""
        if self._running is None:
            return self.started_from(model)
        server, _ = self._running
        server.load(model)
        return server

    def stop(self) -> None:
        if self._running is not None:
            _, stack = self._running
            stack.close()
            self._running = None


@pytest.fixture(scope="module")
def spare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spare]:
    server = Spare(tmp_path_factory.mktemp("spare"))
    yield server
    server.stop()


@pytest.mark.parametrize("max_new_tokens", [0, 12])
def test_a_live_request_may_have_its_prompt_scored(server: Server, max_new_tokens: int):
    """The log-probs come with the stream, also without a token, and are those of a plain question."""
    ids = [5, 9, 12, 7, 30, 2, 11]

    async def scored(client: EngineClient) -> GrowingCompletion:
        completion = GrowingCompletion()
        completion.wants_prompt = True
        sampling = LiveSampling(max_new_tokens, {"ignore_eos": True}, priority=0, top_logprobs=2)
        await client.generate(ids, sampling, completion, version=0)
        return completion

    completion, plain = server.ask(scored, lambda client: client.prompt_logprobs(ids))
    assert len(completion.tokens) == max_new_tokens
    first, *rest = completion.prompt_logprobs
    assert first is None
    assert rest == pytest.approx(plain, abs=1e-5)
    assert [len(position) for position in completion.prompt_alternatives] == [0] + [2] * (len(ids) - 1)


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
        growing = GrowingCompletion()
        server.ask(lambda client, ids=ids, to=growing: client.generate(ids, sampling, to, version=0))
        completion = growing.completion()
        whole = [*ids, *completion.tokens]
        expected = reference_logprobs(model, whole, 0.7)[len(ids) - 1 :].detach().numpy()
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert set(completion.versions()) == {0}


def sampled(server: Server, ids: list[int], sampling: SamplingConfig) -> Completion:
    growing = GrowingCompletion()
    server.ask(lambda client: client.generate(ids, sampling, growing, version=0))
    return growing.completion()


def test_a_stop_text_ends_a_completion_whose_tokens_are_all_there_with_their_log_probs(
    server: Server, checkpoint: Path, probes: list[list[int]]
):
    model, tokenizer = reference_model(checkpoint), build_tokenizer()
    stops = ["5", "3"]
    sampling = SamplingConfig(max_new_tokens=100, stop=stops, ignore_eos=True)
    ended = 0
    for ids in probes:
        completion = sampled(server, ids, sampling)
        *before, last = [tokenizer.decode([token]) for token in completion.tokens]
        assert not any(stop in text for text in before for stop in stops)
        if completion.finish is Finish.STOP:
            ended += 1
            assert any(stop in last for stop in stops), "the token of the stop is the last one"
        whole = [*ids, *completion.tokens]
        expected = reference_logprobs(model, whole)[len(ids) - 1 :].detach().numpy()
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    assert ended


def test_stop_token_ids_end_a_completion(server: Server, probes: list[list[int]]):
    for ids in probes:
        completion = sampled(server, ids, SamplingConfig(max_new_tokens=100, stop_token_ids=[7, 9, 11, 13]))
        assert not {7, 9, 11, 13} & set(completion.tokens[:-1])


def test_log_probs_of_tokens_before_the_least_length_are_those_without_end_tokens(
    server: Server, checkpoint: Path, probes: list[list[int]]
):
    """They are those of the distribution that was sampled, so that an importance weight corrects it."""
    model, end = reference_model(checkpoint), build_tokenizer().eos_token_id
    least, forbidden = 6, [end, *range(20, 30)]  # many, so that they would matter
    sampling = SamplingConfig(max_new_tokens=8, min_new_tokens=least, stop_token_ids=forbidden[1:])
    for ids in probes:
        completion = sampled(server, ids, sampling)
        assert len(completion.tokens) >= least and not set(forbidden) & set(completion.tokens[:least])
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *completion.tokens]])).logits[0, len(ids) - 1 : -1].float()
        logits[:least, forbidden] = -torch.inf
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, logprobs.numpy(), atol=1e-4)


@pytest.mark.parametrize("truncated", [{"top_k": 3}, {"top_p": 0.3}, {"args": {"min_p": 0.6}}])
def test_log_probs_of_truncated_sampling_are_those_of_the_whole_distribution(
    server: Server, checkpoint: Path, probes: list[list[int]], truncated: dict
):
    """This is why it is refused for training: the tokens were likelier than that when they were sampled."""
    model = reference_model(checkpoint)
    for ids in probes[:2]:
        completion = sampled(server, ids, SamplingConfig(max_new_tokens=8, **truncated))
        whole = [*ids, *completion.tokens]
        expected = reference_logprobs(model, whole)[len(ids) - 1 :].detach().numpy()
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


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
    server.load(checkpoint)


def publishing(checkpoint: Path, interrupt: str) -> RunConfig:
    return config_for(checkpoint, {}, weights={"interrupt": interrupt, "transport": {"type": "shards"}})


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
            serving = Serving(client)
            running = asyncio.create_task(serving.generate(ids, 150))
            [report] = await asyncio.to_thread(
                run_ranks,
                1,
                train_and_publish,
                publishing(checkpoint, interrupt),
                [server.address],
                exported,
            )
            await client._post("/slow_down", {"forward_sleep_time": None})
            return serving.pool, await running, report

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
            serving = Serving(client)
            arrived = asyncio.Event()
            old = asyncio.create_task(serving.generate([5, 6, 7], 60, lambda _: arrived.set()))
            await arrived.wait()
            assert not old.done()
            async with serving.roster.drained(timeout_s=60):
                assert old.done()
                await client._post("/slow_down", {"forward_sleep_time": None})
                new = asyncio.create_task(serving.generate([8, 9], 60))
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
    assert len(old.tokens) == len(new.tokens) == 60


def test_silence_gives_up_the_request_and_what_it_was_given_is_continued(server: Server, checkpoint: Path):
    """A pause that outlasts the time-out: the engine is well, and the answer is whole in the end."""
    ids = [5, 6, 7]

    async def generate_through_a_pause() -> tuple[EngineRoster, Completion]:
        async with slowed(replace(server.address, timeout_s=5.0), 0.02) as client:
            serving = Serving(client)
            arrived = asyncio.Event()
            running = asyncio.create_task(serving.generate(ids, 60, lambda _: arrived.set()))
            await arrived.wait()
            await client.pause("retract")
            async with asyncio.timeout(60):
                while not serving.pool.requests_resent:
                    await asyncio.sleep(0.1)
            assert serving.pool.requests_resent == 1
            await client.resume()
            completion = await running
            await running_requests(client, 0)  # what was given up has ended
            return serving.roster, completion

    roster, completion = asyncio.run(generate_through_a_pause())
    assert roster.lost.empty()
    assert len(completion.tokens) == 60
    assert_logprobs_are_those_of_their_version(ids, completion, {0: checkpoint})


def test_a_request_that_ends_by_silence_names_the_engine_that_is_well(server: Server):
    async def ask() -> None:
        async with slowed(replace(server.address, timeout_s=0.5), 1.5) as client:
            sampling = SamplingConfig(max_new_tokens=9)
            with pytest.raises(Silent, match="engine /generate: nothing came for 0 s"):
                await client.generate([1], sampling, GrowingCompletion(), version=0)

    asyncio.run(ask())


def test_the_load_of_a_server_shows_its_running_requests(server: Server):
    async def watch() -> None:
        async with slowed(server.address, 0.02) as client:
            sampling = SamplingConfig(max_new_tokens=200)
            running = [
                asyncio.create_task(client.generate([i, 7], sampling, GrowingCompletion(), version=0))
                for i in range(4)
            ]
            load = await running_requests(client, 4)
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
    server: Server, spare: Spare, checkpoint: Path, probes: list[list[int]], tmp_path: Path, parallel: dict
):
    """The probe set scores the same, to the last bit, on a server that was started from the export."""
    config = config_for(
        checkpoint,
        parallel,
        optimizer={"lr": 1e-2},
        weights={"transport": {"type": "shards"}},
    )
    folder = tmp_path / "exported"
    before = server.probe(probes)
    reports = run_ranks(config.actor.parallel.world_size, train_and_publish, config, [server.address], folder)
    assert reports[0].updated == ["engine"]
    assert server.ask(version_of) == [2]
    updated = server.probe(probes)
    assert updated != before
    assert spare.started_from(folder).probe(probes) == updated


def test_token_ids_outside_the_vocabulary_never_reach_the_server(server: Server):
    with pytest.raises(ValueError, match="outside the vocabulary"):
        server.ask(lambda client: client.generate([1, VOCAB], ONE_TOKEN, GrowingCompletion(), version=0))
    assert server.ask(lambda client: client.healthy()) == [True]


def test_a_refused_update_names_the_reason(server: Server):
    with pytest.raises(EngineError, match="begin_weight_update"):
        server.ask(lambda client: client.take([b""], load_format="flattened_bucket", version=9))


def test_what_a_killed_engine_has_generated_is_continued_by_another_one(
    server: Server, spare: Spare, checkpoint: Path
):
    ids = [5, 6, 7]

    async def generate_through_a_loss(doomed: Server) -> tuple[EnginePool, Completion]:
        address = replace(doomed.address, name="doomed")
        async with slowed(address, 0.05) as dying, Endless(server.address) as client:
            serving = Serving(dying)
            arrived = asyncio.Event()

            def grown(tokens: int) -> None:
                if tokens > 20:
                    arrived.set()

            running = asyncio.create_task(serving.generate(ids, 60, grown))
            await arrived.wait()
            doomed.process.stop()
            serving.add(client)
            return serving.pool, await running

    pool, completion = asyncio.run(generate_through_a_loss(spare.with_weights_of(checkpoint)))
    assert pool.tokens_continued > 20
    assert pool.tokens_generated == len(completion.tokens) == 60
    assert completion.finish is Finish.LENGTH
    assert_logprobs_are_those_of_their_version(ids, completion, {0: checkpoint})
