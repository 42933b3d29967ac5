"""The trainer of a run that trains nothing: each batch becomes a file, and each version a new number.

batch ──► batches/step-000001.safetensors      episodes ──► episodes/0000-000000.jsonl
version v+1 ──► engines: paused, renamed, resumed: the weights stay
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from slipstream.backend.batch.saved import BATCHES, batch_path, saved_batch
from slipstream.backend.batch.skipped import SkippedUpdate
from slipstream.backend.batch.train_batch import EncodedBatch, TrainBatch
from slipstream.backend.trainer.episode_log import open_episode_log
from slipstream.backend.trainer.publishing import publish_to
from slipstream.bridge.publish.publication import Timeouts
from slipstream.bridge.publish.publisher import Publisher
from slipstream.bridge.publish.report import PublishReport
from slipstream.bridge.transport.renamed import RenamedWeights
from slipstream.configs.schema import EpisodeLogConfig, TransportConfig, WeightsConfig
from slipstream.rollout.engine.client import EngineAddress
from slipstream.rollout.system.durable import write_durably


class BatchSaver:
    """Implements the trainer ports of ``driver/ports.py`` without a process. Nothing of it can fail apart
    from the run, so that it is neither restarted nor restored; it has no weights to save or to verify.
    """

    gpus: Sequence[Sequence[str]] = ()
    left: Sequence[tuple[int, int]] = ()

    def __init__(
        self, weights: WeightsConfig, episodes: EpisodeLogConfig | None, run: Path, model: Path
    ) -> None:
        """``run``: the run folder. ``model``: folder of the tokenizer."""
        answer_s = min(weights.answer_timeout_s, weights.timeout_s)
        self._publisher = Publisher(
            RenamedWeights(),
            interrupt=weights.interrupt,
            timeouts=Timeouts(transfer_s=weights.timeout_s, answer_s=answer_s),
        )
        self._folder = run / BATCHES
        self._episodes = open_episode_log(episodes, run, model, writer=0, writers=1)
        self._step = 0

    async def connect(self) -> None:
        self._folder.mkdir(exist_ok=True)

    async def train(self, batch: EncodedBatch | TrainBatch) -> Mapping[str, float]:
        if isinstance(batch, TrainBatch):
            raise TypeError("a batch of the user's own is trained, never saved: OwnRun has a trainer")
        self._step += 1
        await asyncio.to_thread(self._save, batch)
        tokens = sum(header.response_length for header in batch.headers)
        return {"train/tokens": float(tokens), "train/tflop": 0.0}

    def _save(self, batch: EncodedBatch) -> None:
        write_durably(batch_path(self._folder, self._step), saved_batch(batch))
        if self._episodes is not None:
            self._episodes.saved(self._step, batch.decoded())

    async def skipped_updates(self) -> Sequence[SkippedUpdate]:
        return ()

    async def publish(
        self, version: int, engines: Sequence[EngineAddress], transport: TransportConfig | None = None
    ) -> PublishReport:
        return await publish_to(self._publisher, version, engines, iter(()))

    async def respond(self) -> None: ...

    def create(self) -> None: ...

    def kill(self) -> None: ...

    async def flush(self) -> None:
        if self._episodes is not None:
            await asyncio.to_thread(self._episodes.flush)

    async def show_peak(self) -> None: ...

    async def rest(self, *, keep_weights: bool = False) -> None: ...

    async def wake(self) -> None: ...

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        raise NotImplementedError("there are no weights to verify")

    async def export_hf(self, folder: Path) -> None:
        raise NotImplementedError("there are no weights to write")

    async def begin_checkpoint(self, folder: Path, tokens: Mapping[int, str] | None = None) -> None:
        raise NotImplementedError("there is no state to save")

    async def checkpoint_written(self) -> None: ...

    async def finish_checkpoint(self) -> Sequence[str]:
        return ()

    async def forget_on_nodes(self) -> None: ...

    async def restore(self, folder: Path) -> int:
        raise NotImplementedError("there is no state to restore")

    async def restore_from_nodes(self, tokens: Mapping[int, str]) -> tuple[int | None, Sequence[str]]:
        raise NotImplementedError("there is no state to restore")
