"""The time for which an update stops an engine that generates, against the time of its requests alone."""

import asyncio
import pickle
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks.publish.engine import NOTHING, serving
from benchmarks.publish.trainer import TIMEOUTS, published, random_trainer
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.quickstart.policy import build_policy
from slipstream.backend.quickstart.tokenizer import build_tokenizer
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.publish.bucket_stream import BucketStream
from slipstream.bridge.publish.publication import Publication
from slipstream.bridge.publish.publisher import Publisher
from slipstream.bridge.publish.report import PublishReport
from slipstream.rollout.engine.client import EngineAddress, EngineClient
from tests.ranks import run_ranks

ARCHITECTURE = {"architectures": ["Qwen3ForCausalLM"]}
CONTEXT = 512
RUNNING = 64
"""Requests that the engine has at any time, as in a quickstart."""
TOKENS = 48
ROUNDS = 40
STEPS = ("pause", "begin", "receive", "end", "stamp", "resume")


@dataclass(frozen=True)
class Stall:
    """Median seconds over all rounds."""

    n_bytes: int
    shards_s: float
    floor_s: float
    """Time of the same six requests, of which the third one brings nothing."""
    shards_parts_s: Mapping[str, float]
    floor_parts_s: Mapping[str, float]

    @property
    def ratio(self) -> float:
        return self.shards_s / self.floor_s


class RequestsAlone:
    """A transport that sends the requests of a publication, and no weights."""

    async def prepare(self, publication: Publication, buckets: BucketStream) -> None: ...

    async def update(self, publication: Publication, buckets: BucketStream) -> None:
        handle = pickle.dumps([("nothing", torch.zeros(256, dtype=torch.uint8))])
        await publication.each("begin", lambda engine: engine.begin_update())
        await publication.each(
            "receive",
            lambda engine: engine.take([handle] * engine.ranks, load_format=NOTHING, version=None),
        )
        await publication.each("end", lambda engine: engine.end_update())
        await publication.each("stamp", lambda engine: engine.rename_version(publication.version))


def measure() -> Stall:
    hf = build_policy(build_tokenizer(), seed=0).config.to_dict() | ARCHITECTURE
    with serving(hf, "float32", CONTEXT) as (engine, _), load(engine):
        [stall] = run_ranks(1, on_rank, hf, engine, timeout_s=600)
    return stall


def on_rank(rank: RankSpec, hf: Mapping[str, object], engine: EngineAddress) -> Stall:
    """Publish the policy and nothing in turns."""
    torch.set_num_threads(1)
    store = TCPStore(rank.address, rank.port, 1, True)
    trainer = random_trainer(hf, Layout(), 0, store, torch.float32)
    floor = Publisher(RequestsAlone(), interrupt="retract", timeouts=TIMEOUTS)
    shards, bare = list[PublishReport](), list[PublishReport]()
    for number in range(ROUNDS + 1):
        result = trainer.publish(partial(published, version=2 * number + 1, engine=engine))
        assert result is not None
        shards.append(result[0])
        bare.append(asyncio.run(published(floor, 2 * number + 2, engine))[0])
    del shards[0], bare[0]  # the first publication opens connections

    def parts(reports: list[PublishReport]) -> dict[str, float]:
        return {step: median(report.parts_s[step] for report in reports) for step in STEPS}

    return Stall(
        shards[0].bytes_sent,
        median(report.stall_s for report in shards),
        median(report.stall_s for report in bare),
        parts(shards),
        parts(bare),
    )


@contextmanager
def load(engine: EngineAddress) -> Iterator[None]:
    """Keep the engine busy with ``RUNNING`` requests inside the block."""
    over = threading.Event()

    async def ask(client: EngineClient) -> None:
        sampling = {"max_new_tokens": TOKENS, "ignore_eos": True}
        while not over.is_set():
            await client._post("/generate", {"input_ids": list(range(5, 25)), "sampling_params": sampling})

    async def asking() -> None:
        async with EngineClient(engine) as client:
            await asyncio.gather(*(ask(client) for _ in range(RUNNING)))

    thread = threading.Thread(target=lambda: asyncio.run(asking()), name="load")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
