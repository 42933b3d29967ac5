"""One rank of an engine as a receiver: the messages that it gets, and their places in its parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.bridge.engine.orders import Incoming, Join, digests_key, list_key
from slipstream.bridge.group.peers import Peers
from slipstream.bridge.group.store import take_out
from slipstream.bridge.group.windows import windows
from slipstream.bridge.shards.digest import digest

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


class WrongDigest(RuntimeError):
    """The parameters do not hold what was sent."""


@dataclass(frozen=True)
class _Message:
    sender: int
    """Number in the group."""
    numel: int
    dtype: torch.dtype
    direct: bool
    """The message can be received into its place."""
    places: Sequence[Tensor]
    """Views of the parameters."""
    names: Sequence[str]


class ShardReceiver:
    """Keeps the group and the places from one version to the next."""

    def __init__(self, model: torch.nn.Module, order: Join, rank: int, store: "TCPStore") -> None:
        """``rank``: this process's among the engine's. Blocks until the senders have joined."""
        self._order, self._rank, self._store = order, rank, store
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        self._messages: list[list[_Message]] = []
        """By sender, in the order of the sender."""
        for number, sender in enumerate(order.senders):
            listed = take_out(store, list_key(order.engine, rank, sender), list[Incoming])
            self._messages.append([_message(number, incoming, tensors) for incoming in listed])
        self._staging: dict[torch.dtype, Tensor] = {}
        self._peers = Peers(
            store,
            order.engine,
            len(order.senders) + rank,
            len(order.senders) + order.ranks,
            backend=order.backend,
            device=next(model.parameters()).device,
            timeout_s=order.timeout_s,
        )

    def receive(self) -> None:
        """Receive one version into the parameters. Raises RuntimeError if a sender is gone."""
        for window in windows(self._messages):
            flats = self._flats(window)
            self._peers.receive([(message.sender, flat) for message, flat in zip(window, flats, strict=True)])
            for message, flat in zip(window, flats, strict=True):
                if not message.direct:
                    sizes = [place.numel() for place in message.places]
                    for place, values in zip(message.places, torch.split(flat, sizes), strict=True):
                        place.copy_(values.view(place.shape))

    def check_digests(self, number: int) -> None:
        """Compare what the parameters hold with what was sent in transfer ``number``. Raises WrongDigest."""
        wrong: list[str] = []
        for sender, messages in zip(self._order.senders, self._messages, strict=True):
            key = digests_key(self._order.engine, number, self._rank, sender)
            sent = take_out(self._store, key, list[int])
            for message, expected in zip(messages, sent, strict=True):
                if digest(_packed(message)) != expected:
                    wrong += message.names
        if wrong:
            names = sorted(set(wrong))
            raise WrongDigest(
                f"rank {self._rank} holds other values than were sent in {len(names)} parameters: "
                f"{', '.join(names[:8])}"
            )

    def close(self) -> None:
        self._peers.leave()

    def _flats(self, window: Sequence[_Message]) -> list[Tensor]:
        """Return a tensor for each message: its place, or a part of the staging memory."""
        needed: dict[torch.dtype, int] = {}
        for message in window:
            if not message.direct:
                needed[message.dtype] = needed.get(message.dtype, 0) + message.numel
        for dtype, numel in needed.items():
            if dtype not in self._staging or self._staging[dtype].numel() < numel:
                self._staging[dtype] = torch.empty(numel, dtype=dtype, device=window[0].places[0].device)
        used = dict.fromkeys(needed, 0)
        flats: list[Tensor] = []
        for message in window:
            if message.direct:
                flats.append(message.places[0])
                continue
            dtype = message.dtype
            flats.append(self._staging[dtype][used[dtype] : used[dtype] + message.numel])
            used[dtype] += message.numel
        return flats


def _message(sender: int, incoming: Incoming, tensors: Mapping[str, Tensor]) -> _Message:
    places = [
        torch.as_strided(
            tensors[target.parameter].detach(),
            target.shape,
            target.stride,
            int(tensors[target.parameter].storage_offset()) + target.offset,
        )
        for target in incoming.targets
    ]
    names = [target.parameter for target in incoming.targets]
    dtype: torch.dtype = getattr(torch, incoming.dtype)
    direct = incoming.direct and places[0].dtype == dtype
    return _Message(sender, incoming.numel, dtype, direct, places, names)


def _packed(message: _Message) -> Tensor:
    """Return what the parameters hold as it was sent: a wider type gives the same bits back."""
    parts = [place.to(message.dtype).reshape(-1) for place in message.places]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
