"""The handles of a run's Ray actors, as far as the driver uses them."""

from collections.abc import Awaitable
from typing import Protocol, TypeVar

from slipstream.backend.cluster.configured_ray import ray
from slipstream.rollout.engine.leftovers import ProcessIdentity
from slipstream.rollout.engine.server_process import MeetingPoint, ServerAccess

T_co = TypeVar("T_co", covariant=True)


class RemoteMethod(Protocol[T_co]):
    """A method of an actor. The result is what the method returns in the actor's process."""

    def remote(self, *arguments: object) -> Awaitable[T_co]: ...


class RankActor(Protocol):
    """The handle of a ``TrainerActor``."""

    @property
    def meeting_point(self) -> RemoteMethod[tuple[str, int]]: ...
    @property
    def process(self) -> RemoteMethod[tuple[ProcessIdentity, list[str]]]: ...
    @property
    def connect(self) -> RemoteMethod[None]: ...
    @property
    def call(self) -> RemoteMethod[object]: ...


class CollectorHandle(Protocol):
    """The handle of a ``CollectorActor``."""

    @property
    def collect(self) -> RemoteMethod[None]: ...


class EngineServerActor(Protocol):
    """The handle of an ``EngineActor``."""

    @property
    def meeting_point(self) -> RemoteMethod[MeetingPoint]: ...
    @property
    def start(self) -> RemoteMethod[ServerAccess]: ...
    @property
    def wait_exit(self) -> RemoteMethod[int]: ...
    @property
    def stop(self) -> RemoteMethod[None]: ...


def kill(actor: RankActor | EngineServerActor | CollectorHandle) -> None:
    """End the actor's process at once."""
    ray.kill(actor)  # pyright: ignore[reportArgumentType]  # Ray types handles by their class
