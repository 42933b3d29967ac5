"""The handles of a run's Ray actors, as far as the driver uses them."""

import re
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from slipstream.backend.cluster.configured_ray import ray
from slipstream.backend.cluster.stacks import ShownProcess
from slipstream.rollout.engine.leftovers import ProcessIdentity
from slipstream.rollout.engine.server_process import MeetingPoint, ServerAccess

T_co = TypeVar("T_co", covariant=True)

_TITLE = re.compile(r"^(?:\x1b\[\d+m)?ray::.*\(pid=.*$", re.MULTILINE)
_COLOR = re.compile(r"\x1b\[[\d;]*m")


class RemoteMethod(Protocol[T_co]):
    """A method of an actor. The result is what the method returns in the actor's process."""

    def remote(self, *arguments: object) -> Awaitable[T_co]: ...


class TrainerActorHandle(Protocol):
    """The handle of a ``TrainerActor``."""

    @property
    def meeting_point(self) -> RemoteMethod[tuple[str, int]]: ...
    @property
    def process(self) -> RemoteMethod[tuple[ProcessIdentity, list[str], ShownProcess]]: ...
    @property
    def connect(self) -> RemoteMethod[None]: ...
    @property
    def call(self) -> RemoteMethod[object]: ...


class CollectorActorHandle(Protocol):
    """The handle of a ``CollectorActor``."""

    @property
    def collect(self) -> RemoteMethod[None]: ...


class EngineActorHandle(Protocol):
    """The handle of an ``EngineActor``."""

    @property
    def meeting_point(self) -> RemoteMethod[MeetingPoint]: ...
    @property
    def start(self) -> RemoteMethod[ServerAccess]: ...
    @property
    def wait_exit(self) -> RemoteMethod[int]: ...
    @property
    def write_stacks(self) -> RemoteMethod[tuple[str, list[str]]]: ...
    @property
    def stop(self) -> RemoteMethod[None]: ...


def kill(actor: TrainerActorHandle | EngineActorHandle | CollectorActorHandle) -> None:
    """End the actor's process at once."""
    ray.kill(actor)  # pyright: ignore[reportArgumentType]  # Ray types handles by their class


def traceback_of(error: ray.exceptions.RayTaskError) -> str:
    """Return the traceback of an actor as Python prints it, without the titles and colors that Ray adds."""
    return _COLOR.sub("", _TITLE.sub("Traceback (most recent call last):", str(error))).strip()
