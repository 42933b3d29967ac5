"""The collectors of a run: started, watched, and started again under another name when one is gone.

    start ──► connected, gets assignments ──process or connection ends──► start again    (one task each)

A collector that is gone holds nobody up: its groups are assigned to others at once. A collector whose node is
lost stays away, and the others go on.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from slipstream.backend.cluster.actors import CollectorActors
from slipstream.backend.cluster.configured_ray import ray
from slipstream.backend.cluster.handles import kill, traceback_of
from slipstream.rollout.collection.collector.spec import CollectorSpec
from slipstream.rollout.system.key import Key
from slipstream.rollout.system.restarts import NodeLost, RestartLimit, Restarts


class CollectorGone(RuntimeError):
    """A collector must not be started again (``Restarts``), or cannot start."""


class Collectors:
    """Single event loop. ``run`` for as long as episodes are collected; its end ends every collector."""

    def __init__(
        self,
        limit: RestartLimit,
        has_progressed: Callable[[str], bool],
        actors: CollectorActors,
        logs: Path,
        key: Key,
        vocab_size: int,
        context: int,
        note: Callable[[str], None],
    ) -> None:
        """``limit``: of each collector's restarts. ``has_progressed``: returns whether the life of a
        collector has done something, by its name. ``key``: secret of the run. ``vocab_size``: number of
        token ids of the model. ``context``: largest number of tokens of prompt and completion together.
        """
        self._restarts = [Restarts(limit) for _ in range(actors.count)]
        self._has_progressed = has_progressed
        self._actors = actors
        self._logs = logs
        self._key = key
        self._vocab_size = vocab_size
        self._context = context
        self._note = note
        self._left = actors.count
        """Number of collectors that have a node."""

    @property
    def restarts(self) -> int:
        """Number of restarts of all collectors so far."""
        return sum(restarts.count for restarts in self._restarts)

    @property
    def count(self) -> int:
        """Number of collectors; 0 in a run without prompts."""
        return self._actors.count

    async def run(self, url: str) -> None:
        """Keep all collectors running, connected to ``url``. Ends by cancellation only.

        Raises, in an ExceptionGroup, CollectorGone, or NodeLost for the last collector.
        """
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._actors.count):
                tasks.create_task(self._keep(number, url), name=f"collector-{number}")

    async def _keep(self, number: int, url: str) -> None:
        life = 0
        while True:
            name = f"collector-{number}"
            spec = CollectorSpec(
                name,
                life,
                url,
                self._key,
                self._vocab_size,
                self._context,
                self._logs,
                number,
                self._actors.count,
            )
            try:
                reason = await self._live(number, spec)
            except NodeLost as lost:
                return self._without(name, lost)
            life += 1
            if self._has_progressed(spec.name):
                self._restarts[number].progressed()
            if (refused := self._restarts[number].refused(reason)) is not None:
                raise CollectorGone(f"{spec.collector} {refused}")
            self._note(f"{spec.collector} is started again: {reason.splitlines()[0]}")

    def _without(self, name: str, lost: NodeLost) -> None:
        """Go on without a collector whose node is lost. Raises NodeLost if there is no other one."""
        self._left -= 1
        if not self._left:
            raise lost
        of = f"{self._left} of {self._actors.count} collectors"
        self._note(f"{name} is gone with its node, and the run goes on with {of}: {lost}")

    async def _live(self, number: int, spec: CollectorSpec) -> str:
        """Run one life of a collector. Return the reason of its end. Raises NodeLost and CollectorGone."""
        actor = self._actors.create(number)
        try:
            await self._actors.collect(actor, spec)
            return "its connection has ended"
        except ray.exceptions.RayTaskError as error:
            cause = error.cause or error
            if spec.life == 0 and not self._has_progressed(
                spec.name
            ):  # most likely the recipe is wrong, and would be so again
                raise CollectorGone(f"{spec.collector}: {cause} (logs: {self._logs})") from error
            return f"{type(cause).__name__}: {cause}\n{traceback_of(error)}"
        except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError):
            self._actors.check_node(number)
            return f"its process has ended (log: {self._logs / spec.collector}.log)"
        finally:
            kill(actor)
