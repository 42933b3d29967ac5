"""A trainer and an engine on GPUs: published weights, CUDA graphs, and memory that an engine gives up."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from slipstream.backend.megatron.parallel import RankSpec
from slipstream.bridge.engine.orders import TAKE
from slipstream.configs.schema import RunConfig, SamplingConfig
from slipstream.rollout.engine.client import EngineAddress, EngineClient
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.server_process import ServerProcess, ServerSpec
from tests.integration.test_megatron_parity import config_for
from tests.models import make_checkpoint
from tests.ports import held_port
from tests.ranks import run_ranks
from tests.runs.engines.conftest import VOCAB, Server
from tests.runs.engines.test_engine_weights import train_and_publish

pytestmark = pytest.mark.gpu(1, "sglang")

SIZES = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": VOCAB,
}
PROBES = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (2, 30, 100)]
EVERYTHING = ("weights", "kv_cache", "cuda_graph")
SAMPLING = SamplingConfig(max_new_tokens=128, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from slipstream.backend.quickstart.tokenizer import build_tokenizer

    folder = make_checkpoint(tmp_path_factory.mktemp("model"), **SIZES)
    build_tokenizer().save_pretrained(folder)
    return folder


@contextlib.contextmanager
def engine(
    model: Path, log: Path, *, gpu: int = 0, shared: bool = False, args: Mapping[str, object] = {}
) -> Iterator[Server]:
    """A server on one GPU of this process. ``shared``: it can give up its memory."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    # A server that shares no GPU uses those of its parent process.
    settings = {"base_gpu_id": gpu, "mem_fraction_static": 0.3} | dict(args)
    spec = ServerSpec(
        model,
        "bfloat16",
        "cuda",
        1,
        "127.0.0.1",
        held_port(),
        version=0,
        seed=0,
        args=settings,
        shared_gpus=(visible[gpu],) if shared else (),
        rests=shared,
    )
    process = ServerProcess(spec, log)
    try:
        asyncio.run(process.wait_healthy(240))
        url, key = process.access.url, process.access.key
        yield Server(EngineAddress("engine", url, 1, VOCAB, 256, 60, stream_interval=8, key=key), process)
    finally:
        process.stop()


def on_the_first_gpu(rank: RankSpec, config: RunConfig, engines: list[EngineAddress], folder: Path):
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return train_and_publish(rank, config, engines, folder)


@pytest.mark.gpu(2, "sglang")
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_published_weights_are_bit_for_bit_those_of_the_exported_checkpoint(
    tmp_path: Path, checkpoint: Path, cuda_graphs: bool
):
    """The trainer has the first GPU and the engine the second one: NCCL refuses two ranks on the same."""
    config = config_for(
        checkpoint,
        {},
        dtype="bfloat16",
        optimizer={"lr": 1e-2},
        weights={"transport": {"type": "shards"}},
    )
    args = {"disable_cuda_graph": not cuda_graphs, "custom_weight_loader": [TAKE]}
    with engine(checkpoint, tmp_path / "engine.log", gpu=1, args=args) as server:
        before = server.probe(PROBES)
        [report] = run_ranks(1, on_the_first_gpu, config, [server.address], tmp_path / "exported")
        assert report.updated == ["engine"]
        updated = server.probe(PROBES)
    assert updated != before
    with engine(tmp_path / "exported", tmp_path / "fresh.log", gpu=1, args=args) as fresh:
        assert fresh.probe(PROBES) == updated


def test_an_engine_that_rests_gives_up_its_memory_and_answers_as_before_afterwards(
    tmp_path: Path, checkpoint: Path
):
    """CUDA graphs hold memory too, which an engine gives up only if they were captured for that."""
    with engine(checkpoint, tmp_path / "engine.log", shared=True) as server:
        before, held = server.probe(PROBES), used_bytes()
        server.ask(lambda client: client.pause("retract"), lambda client: client.release_memory(EVERYTHING))
        resting = used_bytes()
        server.ask(
            lambda client: client.regain_memory(EVERYTHING),
            lambda client: client.resume(),
        )
        assert server.probe(PROBES) == before
    # What stays is the CUDA context and what NCCL and cuBLAS hold.
    assert resting < 0.15 * held


def test_an_engine_is_interrupted_by_its_rests_and_loses_no_request(tmp_path: Path, checkpoint: Path):
    """Kernels that the pause has started read the KV cache, which is released next."""

    async def rests(client: EngineClient) -> list[int]:
        requests = [
            asyncio.create_task(generate(client, np.random.default_rng(n).integers(0, VOCAB, 20).tolist()))
            for n in range(128)
        ]
        for n in range(30):
            await asyncio.sleep(0.02 * (n % 5))
            await client.pause("retract")
            await client.release_memory(EVERYTHING)
            await client.regain_memory(EVERYTHING)
            await client.resume()
        return await asyncio.gather(*requests)

    async def generate(client: EngineClient, prompt: list[int]) -> int:
        completion = GrowingCompletion()
        await client.generate(prompt, SAMPLING, completion)
        return len(completion.completion().tokens)

    with engine(checkpoint, tmp_path / "engine.log", shared=True) as server:
        [lengths] = server.ask(rests)
    assert lengths == [SAMPLING.max_new_tokens] * 128


def used_bytes() -> int:
    """Memory in use on the first GPU, by all processes."""
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    )
    return int(done.stdout) * 2**20
