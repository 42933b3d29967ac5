"""The weight loader that our SGLang servers are started with: ``--custom-weight-loader``.

``/update_weights_from_tensor`` with ``load_format`` TAKE calls it in every scheduler process with the live
model. The request carries an order and no weights: these come over a process group, into the parameters in
place, or lie in memory that the trainer offers. A request of its own stamps the version after all ranks have
answered, so a transfer that failed is never stamped.

SGLang ends a scheduler whose loader raises. So whatever goes wrong is the answer that a rank leaves in the
store.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.bridge.engine import orders
from slipstream.bridge.engine.loader_trace import EngineTable, Untraceable, Wanted, trace
from slipstream.bridge.engine.memory_reader import MemoryReader, located
from slipstream.bridge.engine.orders import (
    Describe,
    Described,
    Join,
    Load,
    Locate,
    Meeting,
    Order,
    RankAnswer,
    Receive,
)
from slipstream.bridge.engine.receiver import ShardReceiver
from slipstream.bridge.group.store import fetch, join_store, put

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

log = logging.getLogger(__name__)

ORDER = "order"
"""Name of the tensor that carries the order: uint8, the order's bytes."""


@dataclass
class _State:
    """The state that a scheduler process keeps between orders. There is one trainer at a time."""

    meeting: Meeting | None = None
    store: "TCPStore | None" = None
    receiver: ShardReceiver | None = None
    reader: MemoryReader | None = None

    def store_of(self, meeting: Meeting) -> "TCPStore":
        if self.store is None or self.meeting != meeting:
            self.leave()
            self.store = join_store(meeting.address, meeting.port, 1, meeting.timeout_s, wait=False)
            self.meeting = meeting
        return self.store

    def leave(self) -> None:
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.close()
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.close()


_state = _State()


def take(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Carry out the order among ``named_tensors``, and leave the answer in the order's store."""
    try:
        order = decoded_order(dict(named_tensors)[ORDER])
        rank = dist.get_rank() if dist.is_initialized() else 0
        store = _state.store_of(order.meeting)
        try:
            answer = _carried_out(model, order, rank, store)
        except Exception as error:
            log.exception("an order of the trainer failed")
            answer = RankAnswer(error=f"{type(error).__name__}: {error}")
        put(store, orders.answer_key(order, rank), answer)
    except Exception:
        log.exception("the trainer's order could not be answered")


def encoded_order(order: Order) -> Tensor:
    """Return the order as uint8 [bytes]."""
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(order)), dtype=torch.uint8)


def decoded_order(tensor: Tensor) -> Order:
    return msgspec.msgpack.decode(bytes(tensor.cpu().numpy()), type=Order)


def _carried_out(model: torch.nn.Module, order: Order, rank: int, store: "TCPStore") -> RankAnswer:
    match order:
        case Describe():
            try:
                return RankAnswer(described=_describe(model, store))
            except Untraceable as error:
                return RankAnswer(untraceable=str(error))
        case Join():
            _state.leave()
            _state.receiver = ShardReceiver(model, order, rank, store)
        case Receive(number=number, digests=digests):
            if _state.receiver is None:
                raise RuntimeError("this engine has not joined the trainer's group")
            _state.receiver.receive()
            if digests:
                _state.receiver.check_digests(number)
            # SGLang leaves this out at the end of an update in which a loader was called.
            derive: Any = getattr(model, "post_load_weights", None)
            if derive is not None:
                derive()
        case Locate(trial=trial):
            return RankAnswer(place=located(next(model.parameters()).device, trial))
        case Load():
            _state.reader = _state.reader or MemoryReader()
            _state.reader.load(model, order)
    return RankAnswer()


def _describe(model: torch.nn.Module, store: "TCPStore") -> Described:
    tensors = fetch(store, orders.WANTED, list[orders.Tensor])
    wanted = [Wanted(each.name, each.shape, getattr(torch, each.dtype)) for each in tensors]
    table = trace(model, wanted)
    digest = hashlib.sha256(msgspec.msgpack.encode(table.regions)).hexdigest()
    put(store, orders.table_key(digest), table.regions)
    partly = [name for name, filled in table.filled.items() if filled]
    return Described(
        digest,
        unfilled=[name for name, filled in table.filled.items() if not filled],
        partly=[name for name in partly if not _rest_is_padding(model, table, name)],
    )


def _rest_is_padding(model: torch.nn.Module, table: EngineTable, name: str) -> bool:
    """True if all elements of a parameter that no region fills are zero."""
    parameter = model.get_parameter(name).detach()
    rest = torch.ones_like(parameter, dtype=torch.bool)
    for region in table.regions:
        if region.tensor == name:
            place = torch.as_strided(rest, region.size, region.stride, region.offset)
            place.fill_(False)
    return not bool(parameter[rest].any())
