"""A real SGLang server with random weights, and the real trainer's log-probs of what it has sampled.

Both compute in float32. Each update gives the server other weights, in the middle of its answers.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch

from slipstream.backend.batch.micro_batch import assemble
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec, initialize
from slipstream.bridge.families import model_spec
from slipstream.configs.schema import ActorConfig
from slipstream.rollout.engine.client import EngineAddress, EngineClient
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.engine.sampling import LiveSampling
from slipstream.rollout.engine.server_process import LIVE_SERVER_ARGS, ServerProcess, ServerSpec
from slipstream.rollout.tokens.trajectory import Trajectory
from tests.chat_model import CONTEXT, build_policy, build_tokenizer, write_chat_model
from tests.exactness.dialects import DIALECTS
from tests.exactness.engines import Records
from tests.exactness.run import TEMPERATURE, Scene
from tests.ports import held_port
from tests.ranks import Job, run_jobs

START_S = 180.0
MOST_TOKENS = 24
"""Length of the longest answer: random weights hardly ever end one."""


class RecordedClient(EngineClient):
    """A client of the server that keeps what the server has sent."""

    def __init__(self, address: EngineAddress, records: Records) -> None:
        super().__init__(address)
        self._records = records

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: LiveSampling,  # pyright: ignore[reportIncompatibleMethodOverride]
        completion: GrowingCompletion,
        *,
        greedy: bool = False,
        cache_key: str | None = None,
        version: int,
        grown: Callable[[], None] | None = None,
    ) -> None:
        record = self._records.of(input_ids, completion)
        try:
            await super().generate(
                input_ids,
                sampling,
                completion,
                greedy=greedy,
                cache_key=cache_key,
                version=version,
                grown=grown,
            )
            record.finish = completion.finish
        finally:
            record.tokens = completion.tokens.tolist()
            record.logprobs = completion.logprobs.tolist()
            record.said = [version for version, tokens in completion.spans() for _ in range(tokens)]


class RealEngines:
    """One server, whose weights are replaced: ``driver.Engines``."""

    def __init__(self, client: EngineClient, folder: Path) -> None:
        self._client = client
        self._folder = folder

    def serving(self) -> list[EngineClient]:
        return [self._client]

    async def update(self, version: int, roster: EngineRoster, published: Callable[[], None]) -> None:
        """Load other weights while requests are retracted."""
        folder = checkpoint_of(self._folder, version)
        write_weights(folder, version)
        await self._client.pause("retract")
        try:
            await self._client.load_files(folder, version=version)
            published()
        finally:
            await self._client.resume()

    async def replaced(self, lost: EngineClient) -> EngineClient:
        raise AssertionError(f"{lost.name} is lost")


def checkpoint_of(folder: Path, version: int) -> Path:
    """Return where the weights of a version are."""
    return folder / f"version-{version}"


def write_weights(folder: Path, version: int) -> None:
    """Write a checkpoint with weights that no other version has."""
    tokenizer = build_tokenizer(DIALECTS[0].template)
    build_policy(tokenizer, seed=version).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@asynccontextmanager
async def real_scene(folder: Path) -> AsyncIterator[Scene]:
    """Start a server, and end it behind the block."""
    model = write_chat_model(checkpoint_of(folder, 0), DIALECTS[0].template)
    tokenizer = build_tokenizer(DIALECTS[0].template)
    spec = ServerSpec(
        model, "float32", "cpu", 1, "127.0.0.1", held_port(), version=0, seed=0, args=LIVE_SERVER_ARGS
    )
    process = ServerProcess(spec, folder / "engine.log")
    try:
        await process.wait_healthy(START_S)
        access = process.access
        address = EngineAddress(
            "engine", access.url, 1, len(tokenizer), CONTEXT, 60.0, stream_interval=4, key=access.key
        )
        records = Records()
        async with EngineClient(address) as client:
            yield Scene(
                DIALECTS[0],
                model,
                tokenizer,
                records,
                RealEngines(client, folder),
                lambda address: RecordedClient(address, records),
                context=CONTEXT,
                most_tokens=MOST_TOKENS,
            )
    finally:
        await asyncio.to_thread(process.stop)


def worst_gap(folder: Path, trajectories: Sequence[Trajectory]) -> float:
    """Return the largest difference between a log-prob of the server and that of the trainer."""
    versions = sorted({int(v) for t in trajectories for v in np.unique(t.versions_T[t.loss_mask_T])})
    of_version = np.concatenate([t.versions_T[t.loss_mask_T] for t in trajectories])
    engines = np.concatenate([t.logprobs_T[t.loss_mask_T] for t in trajectories])
    jobs = {
        version: Job(1, of_the_trainer, (checkpoint_of(folder, version), list(trajectories)))
        for version in versions
    }
    results = run_jobs(jobs, timeout_s=600)
    gaps = [np.abs(results[v][0] - engines)[of_version == v].max() for v in versions]
    return float(max(gaps))


def of_the_trainer(rank: RankSpec, model: Path, trajectories: list[Trajectory]) -> np.ndarray:
    """Return the trainer's log-probs of all tokens that carry loss, one trajectory behind the other."""
    actor = ActorConfig()
    device = initialize(rank, actor.parallel, seed=0, timeout_s=600)
    from slipstream.backend.megatron.frozen import FrozenModel

    frozen = FrozenModel(model_spec(model), actor, torch.float32, device)
    batch = TrainBatch(0, tuple(trajectories), np.arange(len(trajectories)))
    parts = [
        frozen.log_probs([assemble(batch, (place,), multiple=1)], temperature=TEMPERATURE)[0]
        for place in range(len(trajectories))
    ]
    return np.concatenate([part.cpu().numpy() for part in parts if part is not None])
