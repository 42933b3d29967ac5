"""Engines for tests of publishing without files: processes that do with orders what SGLang's schedulers do.

Each holds a model that loads as SGLang's do, and calls the weight loader with what it gets. The test talks to
it over pipes.
"""

import asyncio
import os
import pickle
import signal
import sys
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn

from slipstream.bridge.engine.orders import Load, Receive
from slipstream.bridge.engine.take import ORDER, decoded_order, take
from slipstream.bridge.publish.endpoint import Pause


class Model(nn.Module):
    """Holds the tensors of a checkpoint, the matrices cut by rows over the ranks, in one parameter each."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], rank: int, ranks: int) -> None:
        super().__init__()
        self._rank, self._ranks = rank, ranks
        for name, shape in shapes.items():
            rows = len(range(shape[0])[self._cut(shape)]) if len(shape) > 1 else shape[0]
            dtype = torch.float64 if "norm" in name else torch.float32  # as some routers are held wider
            parameter = nn.Parameter(torch.zeros(rows, *shape[1:], dtype=dtype), requires_grad=False)
            self.register_parameter(name.replace(".", "~"), parameter)

    def _cut(self, shape: tuple[int, ...]) -> slice:
        if len(shape) == 1:
            return slice(None)
        each = -(-shape[0] // self._ranks)
        return slice(self._rank * each, (self._rank + 1) * each)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            target = self.get_parameter(name.replace(".", "~"))
            target.data.copy_(tensor[self._cut(tuple(tensor.shape))])


def next_order(orders: Connection) -> object:
    """Return the next order; None when the owner has closed the pipe."""
    try:
        return orders.recv()
    except EOFError:
        return None


def serve(orders: Connection, shapes: dict, rank: int, ranks: int, port: int, trouble: str | None) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    model = Model(shapes, rank, ranks)
    orders.send("started")
    received = 0
    while (order := next_order(orders)) is not None:
        if order == "weights":
            orders.send({name.replace("~", "."): p.numpy() for name, p in model.named_parameters()})
            continue
        named = pickle.loads(order)
        if isinstance(decoded_order(dict(named)[ORDER]), Receive | Load):
            received += 1
            if trouble == "dies" and received == 2:
                sys.exit(1)
            if trouble == "stops" and received == 2:
                os.kill(os.getpid(), signal.SIGSTOP)
            if trouble == "spoils" and received == 2:
                spoil()
            if trouble == "refuses" and received == 2:
                model.load_weights = refuse
        take(model, named)
        orders.send("done")


def refuse(weights) -> None:
    raise RuntimeError("the loader does not know these weights")


def spoil() -> None:
    """Let the next weights be changed on their way into the parameters."""
    from slipstream.bridge.engine.receiver import ShardReceiver

    receive = ShardReceiver.receive

    def spoiled(self) -> None:
        receive(self)
        self._messages[0][0].places[0].add_(1)

    ShardReceiver.receive = spoiled


async def readable(pipe: Connection) -> None:
    """Return when something can be received. Unlike a thread that receives, it can be cancelled."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(pipe.fileno())


class ShardEngine:
    """An ``EngineEndpoint`` of ``ranks`` processes, which end with the pipe to their owner.

    They are forked: make all engines before anything starts a thread.

    ``trouble`` of its last rank with the second version, or the second bucket of the first one: "dies",
    "stops" (SIGSTOP), "spoils" or "refuses".
    """

    def __init__(self, name: str, shapes: dict, ranks: int, port: int, trouble: str | None = None) -> None:
        self.name = self.address = name
        self.ranks = ranks
        self.version = 0
        context = get_context("fork")
        current_process()._config["daemon"] = False  # else a rank of a test may have no children
        self._pipes, self.processes = [], []
        for rank in range(ranks):
            mine, other = context.Pipe()
            own = trouble if rank == ranks - 1 else None
            process = context.Process(target=serve, args=(other, shapes, rank, ranks, port, own))
            process.start()
            other.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def wait(self) -> None:
        """Wait until all ranks take orders, so that no time-out of an order holds the start of a process."""
        for pipe in self._pipes:
            assert pipe.poll(120), f"{self.name} has not started in two minutes"
            assert pipe.recv() == "started"

    async def take(self, handles, *, load_format, version) -> None:
        for pipe, handle in zip(self._pipes, handles, strict=True):
            pipe.send(handle)
        for pipe in self._pipes:
            try:
                await readable(pipe)
                pipe.recv()
            except EOFError:
                raise ConnectionResetError(f"{self.name} is gone") from None

    def weights(self) -> list[dict]:
        for pipe in self._pipes:
            pipe.send("weights")
        return [pipe.recv() for pipe in self._pipes]

    async def respond(self) -> None: ...
    async def pause(self, mode: Pause) -> None: ...
    async def resume(self) -> None: ...
    async def begin_update(self) -> None: ...
    async def end_update(self) -> None: ...
    async def rename_version(self, version: int) -> None:
        self.version = version

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
