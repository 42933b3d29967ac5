"""The ports of the driver: what its loops need of a trainer, of the engines and of a listener.

Every object that implements a port is passed to a constructor, ready for use. In a real run these objects
stand for Ray actors and SGLang servers, in a simulated run for models.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from slipstream.backend.batch.skipped import SkippedUpdate
from slipstream.backend.batch.train_batch import EncodedBatch, TrainBatch
from slipstream.backend.checkpoint.folder import FoundCheckpoint
from slipstream.backend.checkpoint.manifest import CheckpointRecord
from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.backend.monitor.status import RunStatus, TrainedStep
from slipstream.bridge.publish.report import PublishReport
from slipstream.configs.schema import TransportConfig
from slipstream.rollout.collection.driver.listener import CollectionListener
from slipstream.rollout.control.ends import GroupCounts
from slipstream.rollout.engine.client import EngineAddress
from slipstream.rollout.ledger.rows.watermark import Watermark

__all__ = [
    "CheckpointListener",
    "CheckpointRecord",
    "Checkpoints",
    "ClientT",
    "FoundCheckpoint",
    "NamedClient",
    "RestartableTrainer",
    "RestorableCheckpoints",
    "RunHistory",
    "RunListener",
    "RunPosition",
    "RunTrainer",
    "ServingEngines",
    "Trainer",
    "TrainerFailed",
]
"""The ports, and what those who implement them raise and return."""


class Trainer(Protocol):
    """All trainer ranks as one object. One call at a time: the ranks meet in collectives."""

    async def train(self, batch: EncodedBatch | TrainBatch) -> Mapping[str, float]:
        """Train one step. Return its metrics by the tags of ``monitor/tags.py``."""
        ...

    async def skipped_updates(self) -> Sequence[SkippedUpdate]:
        """Return the updates that the last step has left out because they were not finite."""
        ...

    async def publish(
        self, version: int, engines: Sequence[EngineAddress], transport: TransportConfig | None = None
    ) -> PublishReport:
        """Send the weights to ``engines``, which hold policy version ``version`` afterwards.

        ``transport``: None for the recipe's.
        """
        ...

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probs of ids[1:], each given its prefix, at temperature 1."""
        ...

    def kill(self) -> None:
        """End the processes of all ranks, which frees their memory: nothing of them reaches an engine."""
        ...


class RestartableTrainer(Trainer, Protocol):
    """A trainer that may be started again after ``kill``. Its methods raise TrainerFailed."""

    def create(self) -> None:
        """Make new ranks in place of killed ones."""
        ...

    async def connect(self) -> None:
        """Start the new ranks, with the initial weights."""
        ...

    async def respond(self) -> None:
        """Return when every rank has answered."""
        ...

    async def restore(self, folder: Path) -> int:
        """Load a checkpoint. Return the number of steps that were trained before it was taken."""
        ...

    async def restore_from_nodes(self, tokens: Mapping[int, str]) -> tuple[int | None, Sequence[str]]:
        """Load the newest of these versions that is whole on the disks of nodes; None: none is.

        Return it, and why newer ones were passed over. ``tokens``: digest of each version's record.
        """
        ...


class RunTrainer(RestartableTrainer, Protocol):
    """The trainer of a run, from its start to its last export. Its methods raise TrainerFailed."""

    @property
    def gpus(self) -> Sequence[Sequence[str]]:
        """Ids of each rank's GPUs. Empty before ``connect``."""
        ...

    # ---- the memory of its devices, which it lends to engines

    @property
    def left(self) -> Sequence[tuple[int, int]]:
        """Bytes of each rank's GPU that were free at its peak, and all of them. Empty before
        ``show_peak``, and on CPUs."""
        ...

    async def show_peak(self) -> None:
        """Take the memory of the largest training step once, and change nothing."""
        ...

    async def rest(self, *, keep_weights: bool = False) -> None:
        """Move everything to host memory, or everything except the weights."""
        ...

    async def wake(self) -> None:
        """Move the trainer's state back to the devices."""
        ...

    # ---- its checkpoints, which it writes while it trains on. These raise CheckpointError as well.

    async def begin_checkpoint(self, folder: Path, tokens: Mapping[int, str] | None = None) -> None:
        """Copy the state and start to write it into ``folder``. Training may go on when this returns.

        ``tokens``: digest of the record of each version that the disks of nodes keep, this one first written
        there; None: nodes keep nothing.
        """
        ...

    async def checkpoint_written(self) -> None:
        """Wait until no rank writes any more, well or not. May be awaited beside any other call."""
        ...

    async def finish_checkpoint(self) -> Sequence[str]:
        """Make the checkpoint readable. Return what has failed on the disks of nodes."""
        ...

    async def forget_on_nodes(self) -> None:
        """Delete what the disks of nodes have of the run's checkpoints."""
        ...

    # ---- what it leaves

    async def export_hf(self, folder: Path) -> None:
        """Write the weights as an HF checkpoint directory."""
        ...

    async def flush(self) -> None:
        """Write what is written beside the steps, such as episodes."""
        ...


class NamedClient(Protocol):
    """An engine that serves."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> EngineAddress: ...


ClientT = TypeVar("ClientT", bound=NamedClient)


class ServingEngines(Protocol[ClientT]):
    """The engines that serve, as a publisher of weights sees them: ``rollout.engine.roster.EngineRoster``."""

    @property
    def clients(self) -> Sequence[ClientT]: ...
    def condemn(self, client: ClientT, reason: str) -> None: ...
    async def doubt(self, version: int) -> None:
        """Return once nobody hands out what the engines sample from ``version`` on until they are trusted."""
        ...

    def trust(self, client: ClientT) -> None: ...
    def withdraw(self, client: ClientT, reason: str) -> None:
        """Remove an engine from those that serve until it has the current version."""
        ...

    def awaited(self) -> AbstractContextManager[None]:
        """Wait inside the block until an engine can be brought up to date: requests have patience."""
        ...

    def announce(self) -> None:
        """Tell all senders of requests the new policy version."""
        ...


@dataclass
class RunPosition:
    """Position of a run, as its checkpoints record it."""

    version: int
    step: int
    """Number of training steps done."""
    position: int
    """Number of prompts, or examples, drawn so far."""
    counts: GroupCounts


class Checkpoints(Protocol):
    """Takes checkpoints when they are due."""

    async def step_done(self, run: RunPosition) -> None:
        """A version was published: take a checkpoint of it if one is due."""
        ...


class RestorableCheckpoints(Checkpoints, Protocol):
    """Checkpoints of which a trainer that was killed is restored: ``weights/checkpointing.py``."""

    async def settled(self) -> None:
        """Wait for the end of a checkpoint that is being written, after the ranks were killed."""
        ...

    async def newest(self, is_behind: Callable[[int], bool]) -> FoundCheckpoint | None:
        """Return the newest sound checkpoint of a version for which ``is_behind``; None: there is none."""
        ...

    def on_nodes(self) -> Mapping[int, str]:
        """Return the tokens of versions that may be whole on the disks of nodes; none that the run folder has
        a newer one of.
        """
        ...

    def forget_on_nodes(self) -> None:
        """Do not count on the disks of nodes until the next checkpoint."""
        ...

    def restored(self, step: int) -> None:
        """Count the steps until the next checkpoint from here: the trainer was restored to ``step``."""
        ...


class RunHistory(Protocol):
    """The memory of a run besides its checkpoints: its ledger, if it has one."""

    @property
    def epoch(self) -> int: ...
    def watermark(self) -> Watermark | None:
        """Return how far the ledger is. Wait for ``flushed`` before a checkpoint with it is committed."""
        ...

    def checkpointed(self, version: int, digest: str) -> None:
        """Note that a checkpoint was committed. ``digest``: of its record."""
        ...

    async def flushed(self) -> None: ...
    def release(self, version: int) -> None:
        """Forget what only a restart from before ``version`` would need."""
        ...


class CheckpointListener(Protocol):
    def checkpoint_taken(self, stall_s: float) -> None:
        """Training waited ``stall_s`` seconds while the trainer's state was copied."""
        ...

    def checkpoint_committed(self, step: int, seconds: float) -> None:
        """A resume can go on after ``step`` now. The checkpoint took ``seconds`` from its begin."""
        ...

    def note(self, text: str) -> None:
        """Tell the user something that does not end the run."""
        ...


class RunListener(CollectionListener, CheckpointListener, Protocol):
    """Hears of everything that metrics, progress and the summary are made of."""

    def step(self, step: TrainedStep, status: RunStatus) -> None:
        """A training step was done and its version published."""
        ...

    def evaluated(
        self,
        version: int,
        reward: float,
        response_length: float,
        parts: Mapping[str, float],
        metrics: Mapping[str, float],
        of_samples: Mapping[str, float],
        *,
        is_logged: bool = False,
    ) -> None:
        """Held-out prompts were answered, with the mean ``reward``, the means of its ``parts`` and those of
        the ``metrics`` that workflows have recorded. ``of_samples``: avg@n and pass@k, if each prompt was
        answered several times. Beside training, some tokens may be of a newer version. ``is_logged``: a hook
        has logged it.
        """
        ...
