"""The store where the processes of a group find each other, on one address of the machine."""

import socket
from datetime import timedelta
from typing import Any, TypeVar, cast

import msgspec
from torch.distributed import (
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]  # public, but not declared so
)

T = TypeVar("T")


def serve_store(address: str, port: int, world_size: int, timeout_s: float, *, wait: bool) -> TCPStore:
    """Return a new store that others can connect to. It closes with the last reference to it.

    Left to itself, torch would listen on every interface of the machine. ``port``: 0 for any. ``wait`` for
    all ``world_size`` processes to connect. Raises OSError when the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    return TCPStore(
        address,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=wait,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def join_store(address: str, port: int, world_size: int, timeout_s: float, *, wait: bool) -> TCPStore:
    """Return a connection to a store, which does not keep the store open. The arguments are the server's."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(address, port, world_size, is_master=False, timeout=timeout, wait_for_workers=wait)


def put(store: TCPStore, key: str, value: object) -> None:
    """Store a value, in MessagePack, under ``key``."""
    # torch declares text alone, and takes bytes as well.
    store.set(key, cast(Any, msgspec.msgpack.encode(value)))


def fetch(store: TCPStore, key: str, kind: type[T]) -> T:
    """Return the value under ``key``. Waits for it, at most as long as the store's time-out."""
    return msgspec.msgpack.decode(store.get(key), type=kind)


def take_out(store: TCPStore, key: str, kind: type[T]) -> T:
    """Return the value under ``key`` as ``fetch`` does, and remove it: it has a single reader."""
    value = fetch(store, key, kind)
    store.delete_key(key)
    return value
