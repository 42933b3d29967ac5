"""The turns of sessions that are not over, beside the core and the ledger that know them too."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.control.live_door import TurnEnd
from slipstream.rollout.ledger.rows.stored_turns import KnownTurn
from slipstream.rollout.ledger.writing.writer import Ledger
from slipstream.rollout.live.status import SinceLastBatch

ENDED = "ended"
"""End of a turn whose end is not known any more."""

PAST_KEPT = 20_000
"""Turns of sessions that are over whose ends are told to clients with late rewards: some megabytes."""


@dataclass(slots=True)
class Session:
    """A session that is not over."""

    turns: dict[int, KnownTurn] = field(default_factory=dict[int, KnownTurn])
    has_ended: bool = False
    """No further turn follows."""
    is_forgotten: bool = False
    """It has ended by being forgotten, and the ledger is to hear of its end when nothing of it is read."""

    def goes_on(self) -> None:
        """Note that a turn has come."""
        self.has_ended = self.is_forgotten = False

    def forget(self) -> None:
        """Note that the session was forgotten."""
        self.has_ended = self.is_forgotten = True


class TurnTable:
    """Everything that entries, verdicts and training share. Single event loop."""

    def __init__(self, core: RolloutControl, ledger: Ledger, clock: Callable[[], float]) -> None:
        """``clock``: seconds since the epoch."""
        self.core = core
        self.ledger = ledger
        self.clock = clock
        self.turns: dict[int, KnownTurn] = {}
        self.sessions: dict[int, Session] = {}
        self.since = SinceLastBatch()
        self._ready_listeners: list[Callable[[], None]] = []
        self._past: OrderedDict[int, str] = OrderedDict()
        """How turns of sessions that are over have ended, the newest last."""
        self._late: list[Callable[[], None]] | None = None

    def begin_again(self, core: RolloutControl) -> None:
        """Forget all turns, and go on with another control core."""
        self.core = core
        self.turns, self.sessions = {}, {}
        self._past.clear()

    # ---- while the ledger is held

    @property
    def is_held(self) -> bool:
        """True if nothing is to be recorded: the ledger goes back to an older version."""
        return self._late is not None

    def hold(self) -> None:
        """Record nothing until ``release``."""
        self._late = []

    def defer(self, event: Callable[[], None]) -> bool:
        """True if ``event`` is called later: by ``release``, because the ledger is held."""
        if self._late is None:
            return False
        self._late.append(event)
        return True

    def release(self) -> list[Callable[[], None]]:
        """Record again. Return what was deferred, in order, for the caller to call."""
        late, self._late = self._late or [], None
        return late

    # ---- turns that are ready

    def when_ready(self, then: Callable[[], None]) -> None:
        """Call ``then`` whenever a turn has become ready."""
        self._ready_listeners.append(then)

    def notify_ready(self) -> None:
        """Say that turns have become ready."""
        for then in self._ready_listeners:
            then()

    # ---- the ends of turns and sessions

    def remember(self, turn: KnownTurn) -> None:
        self.turns[turn.id] = turn
        self.sessions.setdefault(turn.session, Session()).turns[turn.id] = turn

    def end_of(self, id_: int) -> str:
        """Return how a turn has ended; ``ended`` if that was long ago."""
        turn = self.turns.get(id_)
        end = self.core.live.end_of(id_) or (None if turn is None else turn.end)
        return end or self._past.get(id_, ENDED)

    def erase(self) -> None:
        """Have what is forgotten written over, unless a training step may read it."""
        if not self.core.is_training:
            self.ledger.turns.may_erase()

    def drop_if_over(self, id_: int) -> None:
        """Forget a session of which no turn is to be trained or continued."""
        self.write_expired()  # it knows the turns
        session = self.sessions.get(id_)
        if session is None or not session.has_ended:
            return
        if not any(map(self.core.live.is_alive, session.turns)):
            for turn in session.turns.values():
                self._past[turn.id] = self.end_of(turn.id)
            while len(self._past) > PAST_KEPT:
                self._past.popitem(last=False)
            self.core.live.unlink(session.turns)
            for turn in session.turns:
                del self.turns[turn]
            del self.sessions[id_]
            if session.is_forgotten:
                self.ledger.turns.session_ended(id_)

    def write_expired(self) -> set[int]:
        """Write down the turns that have expired, and return their sessions."""
        sessions: set[int] = set()
        now = self.clock()
        for id_, lag in self.core.live.take_expired().items():
            turn = self.turns[id_]
            sessions.add(turn.session)
            self.ledger.turns.ended(turn.id, TurnEnd.EXPIRED, Loss.STALE, version=self.core.version, lag=lag)
            self.since.expired_lags.append(lag)
            self.since.expired_ages_s.append(max(0.0, now - turn.head.ended_s))
        return sessions
