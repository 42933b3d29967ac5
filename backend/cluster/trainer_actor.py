"""The Ray actor of one trainer rank. It imports nothing heavy, so that the driver stays light."""

import os
from pathlib import Path

from slipstream.backend.cluster.stacks import ShownProcess, shown_process
from slipstream.configs.schema import RunConfig
from slipstream.rollout.engine.leftovers import ProcessIdentity, this_process
from slipstream.rollout.system import gpu_environment
from slipstream.rollout.system.garbage import kept_for_good, return_free_memory
from slipstream.rollout.system.network import hold_port, port_of, process_group_variables
from slipstream.rollout.system.plugins import resolve


def redirect_output(path: Path) -> None:
    """Send this process's standard output and error, those of C libraries included, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


class TrainerActor:
    """Holds one rank: an instance of the class that ``rank_class`` names."""

    def __init__(self, config: RunConfig, rank: int, device: str, logs: str, rank_class: str) -> None:
        os.umask(config.run.umask)
        redirect_output(Path(logs) / f"trainer-{rank}.log")
        self._config = config
        self._rank = rank
        self._device = device
        self._rank_class = rank_class
        self._logs = Path(logs)

    def meeting_point(self) -> tuple[str, int]:
        """Return an address of this node and a port of it, held for the trainer's process group."""
        address = self._address()
        self._port_holder = hold_port(address)
        return address, port_of(self._port_holder)

    def process(self) -> tuple[ProcessIdentity, list[str], ShownProcess]:
        """Return this process's identity, the ids of the GPUs that Ray has given it on this node, and
        where it writes its stacks.
        """
        import ray

        shown = shown_process(self._logs, f"trainer-{self._rank}")
        return this_process(), [str(gpu) for gpu in ray.get_gpu_ids()], shown

    def connect(self, address: str, port: int) -> None:
        """Build the rank. Called on all ranks at once, with rank 0's meeting point."""
        if self._device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks
        else:
            engine, parallel = self._config.rollout.engine, self._config.actor.parallel
            os.environ.update(gpu_environment.environment(engine, parallel, "trainer"))
        os.environ.update(process_group_variables(self._address()))
        with kept_for_good():
            from slipstream.backend.megatron.parallel import RankSpec

            rank_class = resolve(self._rank_class)

        world_size = self._config.actor.parallel.world_size
        self._instance = rank_class(self._config, RankSpec(self._rank, world_size, address, port))

    def call(self, verb: str, *arguments: object) -> object:
        """Call the method ``verb`` of the rank."""
        try:
            return getattr(self._instance, verb)(*arguments)
        finally:
            return_free_memory()  # else the largest batch of a run decides what the process holds

    def _address(self) -> str:
        """Return the address of this node at which the run's processes reach each other."""
        import ray

        return "127.0.0.1" if self._config.cluster.type == "local" else ray.util.get_node_ip_address()
