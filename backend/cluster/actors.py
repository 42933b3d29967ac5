"""The Ray actor of one trainer rank. Imports nothing heavy, so that the driver stays light."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.configs.schema import RunConfig
from slipstream.rollout.network import free_port
from slipstream.rollout.plugins import resolve

if TYPE_CHECKING:
    from slipstream.backend.batch.micro_batch import TrainBatch
    from slipstream.backend.trainer.rank import StepResult
    from slipstream.bridge.publish import PublishReport
    from slipstream.rollout.engine.client import EngineAddress


def redirect_output(path: Path) -> None:
    """Send this process's standard output and error, those of C libraries included, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


class TrainerActor:
    """Holds a ``TrainerRank``, or what ``rank_class`` names.

    ``connect`` is called on all ranks at once, with rank 0's meeting point.
    """

    def __init__(self, config: RunConfig, rank: int, device: str, logs: str, rank_class: str) -> None:
        redirect_output(Path(logs) / f"trainer-{rank}.log")
        self._config = config
        self._rank = rank
        self._device = device
        self._rank_class = rank_class

    def meeting_point(self) -> tuple[str, int]:
        """An address and free port of this node for the trainer's process group."""
        import ray

        address = "127.0.0.1" if self._config.cluster.type == "local" else ray.util.get_node_ip_address()
        return address, free_port(address)

    def process(self) -> tuple[int, list[str]]:
        """This process's id, and the GPUs that Ray has given it, by their ids on this node."""
        import ray

        return os.getpid(), [str(gpu) for gpu in ray.get_gpu_ids()]

    def connect(self, address: str, port: int) -> None:
        if self._device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks
        from slipstream.backend.megatron.parallel import RankSpec

        world_size = self._config.actor.parallel.world_size
        self._trainer = resolve(self._rank_class)(
            self._config, RankSpec(self._rank, world_size, address, port)
        )

    def train(self, batch: "TrainBatch") -> "StepResult | None":
        return self._trainer.train(batch)

    def publish(self, engines: "Sequence[EngineAddress]") -> "PublishReport | None":
        return self._trainer.publish(engines)

    def logprobs(self, ids: list[int]) -> list[float] | None:
        return self._trainer.logprobs(ids)

    def export_hf(self, folder: str) -> None:
        self._trainer.export_hf(Path(folder))

    def rest(self, keep_weights: bool) -> None:
        self._trainer.rest(keep_weights)

    def wake(self) -> None:
        self._trainer.wake()

    def begin_checkpoint(self, folder: str) -> None:
        self._trainer.begin_checkpoint(folder)

    def checkpoint_done(self) -> bool:
        return self._trainer.checkpoint_done()

    def finish_checkpoint(self) -> None:
        self._trainer.finish_checkpoint()

    def restore(self, folder: str, version: int) -> int:
        return self._trainer.restore(folder, version)

    def renumber(self, version: int) -> None:
        self._trainer.version = version
