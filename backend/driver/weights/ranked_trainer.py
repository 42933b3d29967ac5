"""The trainer as the driver sees it: typed verbs over the group of its ranks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

from slipstream.backend.batch.skipped import SkippedUpdate
from slipstream.backend.batch.train_batch import EncodedBatch, TrainBatch
from slipstream.backend.cluster.configured_ray import ray
from slipstream.backend.cluster.rank_group import RankGroup
from slipstream.bridge.publish.report import PublishReport
from slipstream.configs.schema import TransportConfig
from slipstream.rollout.engine.client import EngineAddress

T = TypeVar("T")

POLL_S = 1.0
"""Seconds between two questions whether a checkpoint is written. Checkpoints are minutes apart."""

FINISH_PATIENCE = 2
"""Time-outs of a step that ``finish_checkpoint`` may take: a rank may have to end a training step first."""


class RankedTrainer:
    """Implements the trainer ports of ``driver/ports.py`` on a group of ranks."""

    def __init__(self, ranks: RankGroup, *, step_timeout_s: float) -> None:
        self._ranks = ranks
        self._step_timeout_s = step_timeout_s
        self.left: list[tuple[int, int]] = []

    @property
    def gpus(self) -> list[list[str]]:
        """Ids of each rank's GPUs. Empty before ``connect``."""
        return self._ranks.gpus

    async def connect(self) -> None:
        """Start the ranks' processes. Raises TrainerFailed."""
        await self._ranks.connect()

    def create(self) -> None:
        """Make new ranks in place of killed ones, which ``connect`` starts."""
        self._ranks.create()

    async def respond(self) -> None:
        """Return when every rank has answered, after all earlier calls. Raises TrainerFailed."""
        await self._ranks.call("asking whether the trainer is alive", "checkpoint_done")

    async def train(self, batch: EncodedBatch | TrainBatch) -> Mapping[str, float]:
        step = f"the training step from version {batch.version}"
        verb = "train_encoded" if isinstance(batch, EncodedBatch) else "train"
        return _reported(dict, await self._ranks.call(step, verb, ray.put(batch)))

    async def learn(self, batch: TrainBatch) -> Mapping[str, float]:
        """Train one supervised step. Return its metrics."""
        step = f"training step {batch.version + 1}"
        return _reported(dict, await self._ranks.call(step, "train", ray.put(batch)))

    async def skipped_updates(self) -> list[SkippedUpdate]:
        return _reported(list, await self._ranks.call("asking for skipped updates", "skipped_updates"))

    async def publish(
        self, version: int, engines: Sequence[EngineAddress], transport: TransportConfig | None = None
    ) -> PublishReport:
        publishing = f"publishing version {version}"
        reports = await self._ranks.call(publishing, "publish", version, list(engines), transport)
        return _reported(PublishReport, reports)

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        return _reported(list, await self._ranks.call("computing log-probs", "logprobs", list(ids)))

    async def show_peak(self) -> None:
        shown = await self._ranks.call("a first pass at the largest micro-batch", "show_peak")
        self.left = [cast("tuple[int, int]", each) for each in shown if each is not None]

    async def rest(self, *, keep_weights: bool = False) -> None:
        await self._ranks.call("moving the trainer to host memory", "rest", keep_weights)

    async def wake(self) -> None:
        await self._ranks.call("moving the trainer back to the GPUs", "wake")

    async def export_hf(self, folder: Path) -> None:
        """Write the weights as an HF checkpoint directory."""
        await self._ranks.call("writing the HF checkpoint", "export_hf", folder.absolute())

    async def flush(self) -> None:
        """Write what the ranks write beside their steps."""
        await self._ranks.call("writing the episode log", "flush")

    async def begin_checkpoint(self, folder: Path, tokens: Mapping[int, str] | None = None) -> None:
        await self._ranks.call("starting a checkpoint", "begin_checkpoint", folder.absolute(), tokens)

    async def checkpoint_written(self) -> None:
        await self._ranks.wait_until("writing a checkpoint", "checkpoint_done", every_s=POLL_S)

    async def finish_checkpoint(self) -> Sequence[str]:
        patience_s = FINISH_PATIENCE * self._step_timeout_s
        answers = await self._ranks.call("finishing a checkpoint", "finish_checkpoint", timeout_s=patience_s)
        problems = cast("list[Sequence[str]]", answers)
        return [f"rank {rank}: {text}" for rank, texts in enumerate(problems) for text in texts]

    async def forget_on_nodes(self) -> None:
        await self._ranks.call("deleting checkpoints on nodes", "forget_on_nodes")

    async def restore(self, folder: Path) -> int:
        [step, *_] = await self._ranks.call("loading a checkpoint", "restore", folder.absolute())
        assert isinstance(step, int)
        return step

    async def restore_from_nodes(self, tokens: Mapping[int, str]) -> tuple[int | None, Sequence[str]]:
        answers = await self._ranks.call("loading a checkpoint from nodes", "restore_from_nodes", tokens)
        return cast("tuple[int | None, Sequence[str]]", answers[0])

    def kill(self) -> None:
        """End the ranks' processes. Calls that are under way raise TrainerFailed, and so do later ones."""
        self._ranks.kill()


def _reported(kind: type[T], results: list[object]) -> T:
    """Return the result of the only rank that reports."""
    result = next(result for result in results if result is not None)
    assert isinstance(result, kind)
    return result
