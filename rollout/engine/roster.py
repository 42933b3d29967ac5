"""The serving engines, seen by the driver: which ones serve, and which record every collector follows.

    supervisor ── add, remove ──┐                      ┌── routing_for(name) ──► collector: EnginePool.follow
    weights ── doubt, trust ────┼─► record number n ───┤                                      │
    load ── limit ──────────────┘                      └── reported(name, status) ◄───────────┘

Every change makes a record with a new number, which the server of the collectors sends to all of them, once
for all changes of one tick of the event loop. Some changes must be in force everywhere before the driver goes
on: these are awaited. A collector that does not follow in time is reported as lagging and not waited for.

Only engines that hold the current policy version are in the roster.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from slipstream.rollout.engine.client import EngineAddress, EngineClient
from slipstream.rollout.engine.routing import PoolStatus, Routing, ServingEngine, Suspect
from slipstream.rollout.system.changes import Changes

log = logging.getLogger(__name__)

FOLLOW_TIMEOUT_S = 60.0
"""Time within which a collector follows a routing record. One whose event loop is busy for seconds is not
dead: it was seen to take longer than 5 seconds under load."""

GATEWAY_TIMEOUT_S = 2.0
"""Time within which a gateway follows a routing record. No code of a user's runs on its event loop. One that
stands still holds up no update for longer: it loses its connection, and comes back by itself."""

REPORT_S = 1.0
"""Time in which a gateway says which of its requests ran on an engine that was lost, in seconds."""

RECORDS_OF_AN_EPOCH = 1 << 32
"""Numbers of one driver's records. Those of the next driver are larger, however many the last one made."""


@dataclass
class _Serving:
    life: int
    doubted: int | None = None


@dataclass(eq=False)
class _Collector:
    since: int
    """Number of the first record that it can have."""
    follow_timeout_s: float
    status: PoolStatus = field(default_factory=PoolStatus)
    limit: int | None = None
    """Number of requests that it may run beside the collectors' limit; None: it has a share of that."""
    lags: bool = False
    """It has not followed a record in time; the driver ends it."""


class EngineRoster:
    """Owner of the routing records. Single event loop."""

    def __init__(
        self,
        version: Callable[[], int],
        *,
        limit: int,
        epoch: int = 0,
        follow_timeout_s: float = FOLLOW_TIMEOUT_S,
        gateway_timeout_s: float = GATEWAY_TIMEOUT_S,
    ) -> None:
        """``version``: returns the policy version that every engine must hold. ``limit``: number of requests
        that run at one time. ``epoch``: of the run. ``follow_timeout_s``: in which a collector follows a
        record; ``gateway_timeout_s``: in which a gateway does.
        """
        self._version = version
        self._limit = limit
        self._follow_timeout_s = follow_timeout_s
        self._gateway_timeout_s = gateway_timeout_s
        self._number = epoch * RECORDS_OF_AN_EPOCH
        self._engines: dict[EngineClient, _Serving] = {}
        self._collectors: dict[str, _Collector] = {}
        self._suspects: dict[tuple[str, int], set[str]] = {}
        """Requests that ran on an engine when it was lost, by name and life of the engine."""
        self._last_lives: dict[str, int] = {}
        """The last life of each engine that has left."""
        self._gone = PoolStatus()
        """Totals of the collectors that have left."""
        self._holds = 0
        """Number of blocks inside of which requests are held."""
        self._awaiting = 0
        """Number of engines that wait for the trainer before they can serve."""
        self._changes = Changes()
        self._announcing = False
        self._changed: list[Callable[[], None]] = []
        self._lagging: list[Callable[[str], None]] = []
        self.lost: asyncio.Queue[tuple[EngineClient, str]] = asyncio.Queue()
        """Engines that were condemned, each once, with the reason; the supervisor restarts them."""
        self.outdated: asyncio.Queue[tuple[EngineClient, str]] = asyncio.Queue()
        """Engines that were withdrawn, each once, with the reason; the supervisor has them brought up to
        date."""
        self._judge: tuple[EngineAddress, ...] = ()
        self.withdrawn: set[EngineClient] = set()
        """Engines that were withdrawn and do not serve again yet."""

    # ---- engines

    @property
    def version(self) -> int:
        """Policy version that every engine in the roster holds."""
        return self._version()

    @property
    def clients(self) -> list[EngineClient]:
        return list(self._engines)

    def add(self, client: EngineClient) -> None:
        """Add an engine, which must hold the current version, to those that serve."""
        if client not in self._engines:
            self._engines[client] = _Serving(life=self._number + 1)
            self.withdrawn.discard(client)
            self._new_record()

    def remove(self, client: EngineClient) -> None:
        """Remove an engine from those that serve. Its requests end, and go on elsewhere."""
        self.withdrawn.discard(client)
        if (serving := self._engines.pop(client, None)) is not None:
            self._last_lives[client.name] = serving.life
            self._new_record()

    def withdraw(self, client: EngineClient, reason: str) -> None:
        """Remove an engine from those that serve until it has the current version. Its server goes on."""
        if client in self._engines:
            self.remove(client)
            self.withdrawn.add(client)
            self.outdated.put_nowait((client, reason))

    def condemn(self, client: EngineClient, reason: str) -> None:
        """Remove an engine from those that serve, to be restarted. Does nothing the second time."""
        if client in self._engines:
            self.remove(client)
            self.lost.put_nowait((client, reason))

    async def suspects(self, name: str) -> list[str]:
        """Return the users' requests that ran on an engine when it was lost last.

        Waits ``REPORT_S`` for the report of a gateway, if there is one.
        """
        lost = name, self._last_lives.get(name, 0)
        if any(collector.limit is not None for collector in self._collectors.values()):
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_S):
                    await self._changes.first(lambda: True if lost in self._suspects else None)
        return sorted(self._suspects.pop(lost, ()))

    @property
    def judge(self) -> tuple[EngineAddress, ...]:
        """The judge's own engines that serve."""
        return self._judge

    def judge_serves(self, addresses: tuple[EngineAddress, ...]) -> None:
        """Set the judge's own engines that may be asked: these and no others."""
        self._judge = addresses
        self._new_record()

    def announce(self) -> None:
        """Tell the collectors the new policy version."""
        self._new_record()

    async def doubt(self, version: int) -> None:
        """Hold back the tokens that the present engines sample from ``version`` on until they are trusted.

        Returns when every collector does. Await it before the version is published: else a collector could
        hand out tokens of weights that nobody has verified. Tokens that it handed out before are older.
        """
        for serving in self._engines.values():
            if serving.doubted is None:
                serving.doubted = version
        await self._followed(self._new_record())

    def trust(self, client: EngineClient) -> None:
        """Release what an engine in doubt has sampled: its weights are verified."""
        serving = self._engines.get(client)
        if serving is not None and serving.doubted is not None:
            serving.doubted = None
            self._new_record()

    def doubted(self, client: EngineClient) -> int | None:
        """Return the first version of an engine in the roster that is not verified yet; None: all are."""
        return self._engines[client].doubted

    # ---- holding requests back

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold new requests back inside the block."""
        self._holds += 1
        self._new_record()
        try:
            yield
        finally:
            self._holds -= 1
            self._new_record()

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Wait inside the block until an engine can be brought up to date. While none serves, requests are
        held back: they wait without a limit of their own.
        """
        self._awaiting += 1
        self._new_record()
        try:
            yield
        finally:
            self._awaiting -= 1
            self._new_record()

    @asynccontextmanager
    async def drained(self, timeout_s: float) -> AsyncIterator[None]:
        """Hold new requests back inside the block, and enter it once no request runs.

        Requests that run longer than ``timeout_s`` go on inside the block.
        """
        with self.holding():
            await self._followed(self._number)
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changes.first(lambda: None if self._running else True)
            except TimeoutError:
                log.warning("%d requests outlast %.0f s of draining", self._running, timeout_s)
            yield

    # ---- collectors

    def subscribe(self, changed: Callable[[], None], lagging: Callable[[str], None]) -> None:
        """Register ``changed``, which is called when the record of every collector is to be sent again.

        ``lagging`` is called with the name of a collector that has not followed a record in time, and that is
        not waited for from then on. It must see to it that nothing of this collector counts any more, and
        have it ended.
        """
        self._changed.append(changed)
        self._lagging.append(lagging)

    def joined(self, name: str, *, limit: int | None = None) -> None:
        """Count a collector in, which is to be sent a record first. Its name is never used again.

        ``limit``: of a gateway, which follows records as a collector does: the number of requests that it may
        run. They count for nobody's limit but its own.
        """
        if name in self._collectors:
            raise ValueError(f"there is a collector {name} already")
        timeout_s = self._follow_timeout_s if limit is None else self._gateway_timeout_s
        self._collectors[name] = _Collector(self._number + 1, timeout_s, limit=limit)
        self._new_record()

    def left(self, name: str) -> None:
        """Count a collector out. Whatever it has generated stays in the totals."""
        collector = self._collectors.pop(name, None)
        if collector is not None:
            self._gone = _total([self._gone, collector.status])
            self._new_record()
            self._changes.notify()

    def reported(self, name: str, status: PoolStatus) -> None:
        """Take note of the status of a collector's pool."""
        collector = self._collectors.get(name)
        if collector is None:
            return
        collector.status = status
        if collector.limit is not None:
            self._note_suspects(status.suspects)
        serving = {(client.name, serving.life): client for client, serving in self._engines.items()}
        for lost in status.lost:
            client = serving.get((lost.name, lost.life))
            if client is not None:
                self.condemn(client, lost.reason)
        self._changes.notify()

    def _note_suspects(self, suspects: Sequence[Suspect]) -> None:
        """Keep the suspects of the present lives of engines, and of the last ones of those that have left."""
        lives = {client.name: serving.life for client, serving in self._engines.items()}
        for suspect in suspects:
            if suspect.life >= {**self._last_lives, **lives}.get(suspect.name, 0):
                self._suspects.setdefault((suspect.name, suspect.life), set()).add(suspect.request)

    @property
    def number(self) -> int:
        """Number of the present record."""
        return self._number

    def share_of(self, name: str) -> int:
        """Return the number of requests that one collector runs at one time."""
        limit = self._collectors[name].limit
        if limit is not None:
            return limit
        names = [name for name, collector in self._collectors.items() if collector.limit is None]
        return max(1, self._limit // len(names) + (names.index(name) < self._limit % len(names)))

    def routing_for(self, name: str) -> Routing:
        """Return the present record for one collector."""
        engines = [
            ServingEngine(client.address, serving.life, serving.doubted)
            for client, serving in self._engines.items()
        ]
        # Collectors with little to do would else all prefer the same engines.
        names = list(self._collectors)
        first = names.index(name) * len(engines) // len(names)
        return Routing(
            number=self._number,
            version=self.version,
            held=self._holds > 0 or (self._awaiting > 0 and not self._engines),
            limit=self.share_of(name),
            engines=(*engines[first:], *engines[:first]),
            judge=self._judge if self._collectors[name].limit is None else (),
        )

    # ---- totals

    @property
    def limit(self) -> int:
        """Number of requests that run at one time, shared among the collectors: each has at least one.

        Lowering it disturbs no running request.
        """
        return self._limit

    @limit.setter
    def limit(self, size: int) -> None:
        if size != self._limit:
            self._limit = size
            self._new_record()

    @property
    def in_use(self) -> int:
        """Number of ``generate`` calls of rollouts that run; above ``limit`` for a while after it sank."""
        return sum(c.status.in_use for c in self._collectors.values() if c.limit is None)

    @property
    def live_in_use(self) -> int:
        """Number of ``generate`` calls of gateways that run."""
        return sum(c.status.in_use for c in self._collectors.values() if c.limit is not None)

    @property
    def tokens_generated(self) -> int:
        """Number of sampled tokens, those of gateways included. Evaluation (greedy) does not count."""
        return self._totals.tokens_generated

    @property
    def tokens_continued(self) -> int:
        """Number of tokens of interrupted completions that were continued instead of lost."""
        return self._totals.tokens_continued

    @property
    def requests_resent(self) -> int:
        return self._totals.requests_resent

    @property
    def _totals(self) -> PoolStatus:
        return _total([self._gone, *(c.status for c in self._collectors.values())])

    @property
    def _running(self) -> int:
        return sum(c.status.running for c in self._collectors.values() if not c.lags)

    # ---- records

    def _new_record(self) -> int:
        """Number the present state, and have it sent at the end of this tick. Return the number."""
        self._number += 1
        if not self._announcing:
            self._announcing = True
            asyncio.get_running_loop().call_soon(self._announce)
        return self._number

    def _announce(self) -> None:
        self._announcing = False
        for timeout_s in {collector.follow_timeout_s for collector in self._collectors.values()}:
            asyncio.get_running_loop().call_later(timeout_s, self._overdue, self._number, timeout_s)
        for changed in self._changed:
            changed()

    async def _followed(self, number: int) -> None:
        """Wait until every collector follows record ``number``; ``_overdue`` ends the wait for one."""
        await self._changes.first(lambda: None if self._behind(number) else True)

    def _behind(self, number: int) -> list[str]:
        return [
            name
            for name, collector in self._collectors.items()
            if not collector.lags and collector.since <= number and collector.status.number < number
        ]

    def _overdue(self, number: int, timeout_s: float) -> None:
        """Wait no longer for those that had to follow a record within ``timeout_s``, and have not."""
        for name in self._behind(number):
            if self._collectors[name].follow_timeout_s != timeout_s:
                continue
            log.warning("%s does not follow routing record %d within %g s", name, number, timeout_s)
            self._collectors[name].lags = True
            for lagging in self._lagging:
                lagging(name)
        self._changes.notify()


def _total(statuses: list[PoolStatus]) -> PoolStatus:
    """Add up the numbers of tokens and requests."""
    return PoolStatus(
        tokens_generated=sum(status.tokens_generated for status in statuses),
        tokens_continued=sum(status.tokens_continued for status in statuses),
        requests_resent=sum(status.requests_resent for status in statuses),
    )
