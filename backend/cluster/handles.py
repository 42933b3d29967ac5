"""The handles of a run's Ray actors, as far as the driver uses them."""

from collections.abc import Awaitable
from typing import Any, Protocol

from slipstream.backend.cluster.configured_ray import ray


class RemoteMethod(Protocol):
    """A method of an actor. The result is what the method returns in the actor's process."""

    def remote(self, *arguments: object) -> Awaitable[Any]: ...


class RankActor(Protocol):
    """The handle of a ``TrainerActor``."""

    @property
    def meeting_point(self) -> RemoteMethod: ...
    @property
    def process(self) -> RemoteMethod: ...
    @property
    def connect(self) -> RemoteMethod: ...
    @property
    def call(self) -> RemoteMethod: ...


class EngineServerActor(Protocol):
    """The handle of an ``EngineActor``."""

    @property
    def start(self) -> RemoteMethod: ...
    @property
    def wait_exit(self) -> RemoteMethod: ...
    @property
    def stop(self) -> RemoteMethod: ...


def kill(actor: RankActor | EngineServerActor) -> None:
    """End the actor's process at once."""
    ray.kill(actor)  # pyright: ignore[reportArgumentType]  # Ray types handles by their class
