"""Adapters in real engines: beside the weights that these have loaded, version after version."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.quickstart.tokenizer import build_tokenizer
from slipstream.bridge.publish.report import PublishReport
from slipstream.configs.schema import RunConfig
from slipstream.rollout.engine.adapters import AdapterServing
from slipstream.rollout.engine.client import EngineAddress, EngineClient
from slipstream.rollout.tokens.trajectory import Completion, Finish
from tests.integration.test_megatron_parity import config_for, make_batch
from tests.models import make_checkpoint, reference_logprobs, reference_model
from tests.ranks import run_ranks
from tests.runs.engines.conftest import VOCAB, Server, serve, version_of
from tests.runs.engines.test_engine_weights import Serving, slowed

RANK = 3
RUNNING = 2
"""Requests that the engine runs at a time."""
MODULES = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On CPUs, SGLang fills up feed-forward layers of two ranks to 32, to which its adapters do not fit."""
    folder = tmp_path_factory.mktemp("model") / "policy"
    make_checkpoint(folder, vocab_size=VOCAB, intermediate_size=128)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["rank", "ranks"])
def server(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server, of one rank or of two, which knows no adapter yet."""
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    adapters, args = AdapterServing(RANK, MODULES), {"max_running_requests": RUNNING}
    with serve(checkpoint, log, ranks=request.param, adapters=adapters, args=args) as running:
        yield running


def publishing(checkpoint: Path, interrupt: str = "abort") -> RunConfig:
    lora = {"rank": RANK, "alpha": 12.0, "serve": "adapter"}
    return config_for(checkpoint, {}, lora=lora, optimizer={"lr": 1e-2}, weights={"interrupt": interrupt})


def publish(
    rank: RankSpec,
    config: RunConfig,
    engines: list[EngineAddress],
    versions: dict[int, Path],
    text: list[int],
) -> tuple[list[PublishReport], list[list[float]]]:
    """Publish each of ``versions`` and write it as a checkpoint, which is one step after the last."""
    from slipstream.backend.trainer.rank import TrainerRank

    trainer = TrainerRank(config, rank)
    reports, logps = [], []
    for version, folder in versions.items():
        while trainer.step < version:
            trainer.train(make_batch(VOCAB, seed=trainer.step, version=trainer.step))
        reports.append(trainer.publish(version, engines))
        logps.append(trainer.logprobs(text))
        trainer.export_hf(folder)
    return reports, logps


def test_engines_with_an_adapter_compute_what_merged_weights_do(
    server: Server, checkpoint: Path, tmp_path: Path
):
    text = np.random.default_rng(1).integers(0, VOCAB, 60).tolist()
    versions = {version: tmp_path / f"{version}-hf" for version in (0, 1, 2)}
    [(reports, logps)] = run_ranks(1, publish, publishing(checkpoint), [server.address], versions, text)
    for version, report in zip(versions, reports, strict=True):
        assert (report.version, report.failed) == (version, {})
        assert report.updated == ["engine"]
        assert list(report.parts_s) == ["ask", "gather", "pack", "load", "pause", "serve", "resume"]
    # A and B of this model alone, and not its weights.
    assert reports[-1].bytes_sent < (versions[2] / "model-00001.safetensors").stat().st_size / 4

    held, adapters, computed = server.ask(
        version_of, lambda client: client._adapters(), lambda client: client.prompt_logprobs(text, version=2)
    )
    assert held == 2
    assert sorted(adapters) == ["policy-1", "policy-2"], "earlier ones are unloaded"
    merged = reference_logprobs(reference_model(versions[2]), text).detach().numpy()
    np.testing.assert_allclose(computed, merged, rtol=0, atol=1e-5)
    np.testing.assert_allclose(computed, logps[-1], rtol=0, atol=1e-5)
    assert np.abs(np.subtract(logps[-1], logps[0])).max() > 1e-2, "the adapter matters"


def assert_logprobs_are_those_of_their_version(
    ids: list[int], completion: Completion, models: dict[int, Path]
) -> None:
    tokens = [*ids, *completion.tokens]
    for span in completion.spans:
        expected = reference_logprobs(reference_model(models[span.version]), tokens).detach().numpy()
        part = slice(len(ids) - 1 + span.start, len(ids) - 1 + span.end)
        np.testing.assert_allclose(
            completion.logprobs[span.start : span.end], expected[part], rtol=0, atol=1e-5
        )


def test_requests_that_run_or_wait_are_cut_off_and_continued_with_the_next_adapter(
    server: Server, checkpoint: Path, tmp_path: Path
):
    """One completion holds tokens of both versions, each sampled from the adapter of its version."""
    prompts = [[5, 6, 7 + number] for number in range(RUNNING + 3)]
    before, after = {3: tmp_path / "3-hf"}, {4: tmp_path / "4-hf"}
    arguments = (publishing(checkpoint), [server.address])
    run_ranks(1, publish, *arguments, before, prompts[0])

    async def generate_through_an_update() -> tuple[Serving, list[Completion]]:
        async with slowed(server.address, 0.25) as client:
            serving = Serving(client)
            running = [asyncio.create_task(serving.generate(ids, 100)) for ids in prompts]
            [(reports, _)] = await asyncio.to_thread(run_ranks, 1, publish, *arguments, after, prompts[0])
            assert reports[0].updated == ["engine"], reports[0].failed
            await client._post("/slow_down", {"forward_sleep_time": None})
            return serving, await asyncio.gather(*running)

    serving, completions = asyncio.run(generate_through_an_update())
    versions = [[span.version for span in completion.spans] for completion in completions]
    assert [3, 4] in versions and [4] in versions, "some run, and some wait in the queue of the engine"
    assert all(each in ([3], [3, 4], [4]) for each in versions)
    assert serving.pool.requests_resent >= len([each for each in versions if 4 in each])
    for ids, completion in zip(prompts, completions, strict=True):
        assert (len(completion.tokens), completion.finish) == (100, Finish.LENGTH)
        assert_logprobs_are_those_of_their_version(ids, completion, before | after)


def test_an_engine_that_missed_versions_gets_the_present_one_alone(
    server: Server, checkpoint: Path, tmp_path: Path
):
    """An adapter that was loaded for a version that never came is unloaded with the next one."""
    ids = [5, 6, 7]
    config_of_adapter = {"peft_type": "LORA", "r": RANK, "lora_alpha": 12, "target_modules": list(MODULES)}

    async def leave_an_adapter(client: EngineClient) -> list[str]:
        import torch

        from slipstream.bridge.transport.adapter import packed_tensors

        module = "base_model.model.model.layers.0.self_attn.o_proj"
        hidden = reference_model(checkpoint).get_submodule("model.layers.0.self_attn.o_proj").weight.shape
        tensors = {
            f"{module}.lora_A.weight": torch.zeros(RANK, hidden[1]),
            f"{module}.lora_B.weight": torch.zeros(hidden[0], RANK),
        }
        await client.load_adapter(77, config_of_adapter, packed_tensors(tensors))
        return await client._adapters()

    [held] = server.ask(leave_an_adapter)
    assert "policy-77" in held
    run_ranks(1, publish, publishing(checkpoint), [server.address], {5: tmp_path / "5-hf"}, ids)
    adapters, version = server.ask(lambda client: client._adapters(), version_of)
    assert version == 5
    assert "policy-5" in adapters and "policy-77" not in adapters
