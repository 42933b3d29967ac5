"""The door for the turns of live users: which of them wait, which are trained, which are too old. Pure.

    arrived() -> WAITING --ready()--> READY --take()--> TRAINING --published--> trained
                    |                   |  ^               |
                    +---- expired ------+  +-- given back -+
                    +---- ended(): filtered, failed, forgotten

A turn comes when a user wants it, with tokens that exist already. So it holds no slot: it neither waits for
one nor keeps a group from having one. ``core`` proves that groups notice nothing of it.

A turn is known by its number, and by the turn before it if its prompt repeats all tokens of that one. Such
turns form a tree. Turns on one path of a tree that are ready together are one trajectory of the batch. All
other turns on the path are context: a turn is trained once, whatever it is context of.

Each token is looked at by itself when a batch is taken: a token whose lag exceeds the bound carries no loss.
A turn expires as soon as this is so for all of its tokens, whether or not it is ready, because no later step
could train it.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from slipstream.rollout.control.versions import ControlError


class TurnEnd(StrEnum):
    """The ends of a turn: each turn reaches exactly one of them, once."""

    TRAINED = "trained"
    SIDE = "side"
    """The client says that the turn is no part of the task, or the trainer cannot reproduce its sampling."""
    FILTERED = "filtered"
    """There is nothing to train: no sampled token, no verdict that trains, or no training on turns."""
    EXPIRED = "expired"
    """The lag of each of its tokens exceeds the bound."""
    FAILED = "failed"
    """The turn cannot be trained: its tokens are incomplete or damaged, or it kills the trainer."""
    CANCELLED = "cancelled"
    """The client has gone before the end of the answer."""
    UNPAIRED = "unpaired"
    """Its next state was lost: no judge can say what it was worth."""
    FORGOTTEN = "forgotten"
    """The user has asked for its removal."""


class TurnState(StrEnum):
    """States of a turn that has not ended, as the core sees it."""

    WAITING = "waiting"
    """For what comes next, or for a verdict."""
    READY = "ready"
    TRAINING = "training"


class Present(Protocol):
    """The part of the core that the door uses, to learn the age of tokens."""

    bound: int
    step: int

    @property
    def version_in_the_making(self) -> int | None: ...
    def lag(self, version: int) -> int: ...


StaleOf = dict[int, frozenset[int]]
"""The turns of a trajectory, in the order of the conversation. Of each, the policy versions whose tokens must
not carry loss, because their lag exceeds the bound."""


@dataclass(slots=True)
class TurnAtDoor:
    """A turn as the door knows it: not its tokens, but how old they are."""

    id: int
    parent: int | None
    versions: frozenset[int]
    order: int
    """Order of arrival."""
    standing: int = 0
    """Largest standing of its tokens (``core`` defines standings)."""
    state: TurnState | None = TurnState.WAITING
    """None: the turn has ended, and is only a link between others."""
    end: TurnEnd | None = None
    """How it has ended. None: it has not, or before a restart."""
    is_withheld: bool = False
    end_if_given_back: TurnEnd | None = None
    """End of a turn in training that must not be trained again if its batch is given back."""
    children: list[int] = field(default_factory=list[int])


class LiveDoor:
    """All turns that wait for their training, and the paths between them."""

    def __init__(self, present: Present, trajectories: int) -> None:
        """``trajectories``: most live trajectories in a batch. 0: turns are not trained."""
        self.trajectories = trajectories
        self.ends: Counter[TurnEnd] = Counter()
        """Number of turns that reached each end."""
        self.states: dict[TurnState, int] = dict.fromkeys(TurnState, 0)
        self.training: list[StaleOf] = []
        """The live trajectories of the batch in training."""
        self._present = present
        self._turns: dict[int, TurnAtDoor] = {}
        self._by_standing: dict[int, set[int]] = {}
        """Turns that may expire, by standing."""
        self._undecided: set[int] = set()
        """Turns with tokens of the version in the making, which has no standing yet."""
        self._ready: list[tuple[int, int, int]] = []
        """Heap of (standing, order, id). Entries of turns that are no longer ready are skipped."""
        self._withheld: set[int] = set()
        self._plan: list[list[TurnAtDoor]] | None = None
        """The trajectories of the next batch; None: to be made anew."""
        self._expired: dict[int, int] = {}
        self._next_order = 0

    # ---- events of one turn

    def arrived(self, id_: int, versions: Collection[int], parent: int | None = None) -> None:
        """Take in a turn that may be trained once it is ``ready``.

        ``versions``: those of its sampled tokens, at least one. ``parent``: the turn whose tokens its prompt
        repeats in full; None, or a turn that is not known: the path begins here. A turn that is too old
        already expires. Raises UnknownVersion.
        """
        if not versions:
            raise ControlError(f"turn {id_} has no sampled token: it cannot be trained")
        for version in versions:
            self._present.lag(version)  # raises UnknownVersion before anything has changed
        turn = self._add(id_, frozenset(versions), parent)
        self.states[TurnState.WAITING] += 1
        self._stand(turn)
        self._expire_before(self._present.step - self._present.bound)

    def is_context(self, id_: int, parent: int | None = None, end: TurnEnd | None = None) -> None:
        """Take in a turn that has ended, but may be continued by others.

        ``end``: None if it was counted before a restart.
        """
        turn = self._add(id_, frozenset(), parent)
        turn.state, turn.end = None, end
        if end is not None:
            self.ends[end] += 1

    def ready(self, id_: int) -> None:
        """Record that a waiting turn is judged and is to be trained."""
        turn = self._turns.get(id_)
        if turn is None or turn.state is not TurnState.WAITING:
            raise ControlError(f"turn {id_} does not wait")
        self._move(turn, TurnState.READY)
        heapq.heappush(self._ready, (turn.standing, turn.order, id_))

    def is_waiting(self, id_: int) -> bool:
        """True if the turn is known and not judged yet."""
        turn = self._turns.get(id_)
        return turn is not None and turn.state is TurnState.WAITING

    def is_alive(self, id_: int) -> bool:
        """True if the turn is known and has not ended."""
        turn = self._turns.get(id_)
        return turn is not None and turn.state is not None

    def end_of(self, id_: int) -> TurnEnd | None:
        """Return how a turn has ended. None: it has not, or before a restart, or it is not known."""
        turn = self._turns.get(id_)
        return None if turn is None else turn.end

    def ended(self, id_: int, end: TurnEnd) -> bool:
        """Record that a turn is not trained. Return False if it has ended, or if it is in training.

        A turn in training counts as trained if its version is published, and has the ``end`` otherwise.
        """
        turn = self._turns.get(id_)
        if turn is None or turn.state is None:
            return False
        if turn.state is TurnState.TRAINING:
            turn.end_if_given_back = end
            return False
        self._end(turn, end)
        return True

    def unlink(self, ids: Iterable[int]) -> None:
        """Forget turns that have ended and that no further turn continues."""
        for id_ in ids:
            turn = self._turns.get(id_)
            if turn is None or turn.state is not None:
                continue
            del self._turns[id_]
            if turn.parent is not None and (parent := self._turns.get(turn.parent)) is not None:
                parent.children.remove(id_)
            for child in turn.children:
                self._turns[child].parent = None

    def take_expired(self) -> dict[int, int]:
        """Return the turns that have expired since the last call: of each, the smallest lag of its tokens,
        which is larger than the bound.
        """
        expired, self._expired = self._expired, {}
        return expired

    # ---- batches, as the core takes them

    @property
    def available(self) -> int:
        """Number of trajectories that the next batch can hold."""
        return len(self._planned())

    def take(self) -> None:
        """Move the turns of the next batch to training."""
        for path in self._planned():
            self.training.append({turn.id: self._stale(turn) for turn in path})
            for turn in path:
                self._unstand(turn)
                self._move(turn, TurnState.TRAINING)

    def published(self) -> None:
        """Record that the version was published which was made of the turns in training."""
        for turn in self._in_training():
            self._end(turn, TurnEnd.TRAINED)
        self.training = []
        self.settle()

    def given_back(self) -> None:
        """Record that the turns in training are not trained: they are ready again."""
        for turn in self._in_training():
            if turn.end_if_given_back is not None:
                self._end(turn, turn.end_if_given_back)
                continue
            self._move(turn, TurnState.READY)
            self._stand(turn)
            heapq.heappush(self._ready, (turn.standing, turn.order, turn.id))
        self.training = []
        self.settle()

    def settle(self) -> None:
        """Decide on tokens of the version that was in the making, and give up the turns that are too old."""
        undecided, self._undecided = self._undecided, set()
        for id_ in undecided:
            turn = self._turns[id_]
            self._unstand(turn)
            self._stand(turn)
            if turn.state is TurnState.READY:
                heapq.heappush(self._ready, (turn.standing, turn.order, id_))
        self._expire_before(self._present.step - self._present.bound)

    def withhold(self, ids: Collection[int]) -> None:
        """Leave out these ready turns, and no others. Turns that have ended are ignored."""
        turns = [turn for id_ in ids if (turn := self._turns.get(id_)) is not None and turn.state is not None]
        if wrong := [turn for turn in turns if turn.state is not TurnState.READY]:
            states = ", ".join(f"turn {turn.id} is {turn.state}" for turn in wrong)
            raise ControlError(f"only ready turns can be withheld, but {states}")
        before, self._withheld = self._withheld, {turn.id for turn in turns}
        for id_ in before:
            if (turn := self._turns.get(id_)) is not None:
                turn.is_withheld = False
                if turn.state is TurnState.READY:
                    heapq.heappush(self._ready, (turn.standing, turn.order, id_))
        for turn in turns:
            turn.is_withheld = True
        self._plan = None

    # ---- paths

    def _planned(self) -> list[list[TurnAtDoor]]:
        """Return the trajectories of the next batch: those of the turns that expire first."""
        if self._plan is None:
            self._plan = self._paths(self.trajectories)
        return self._plan

    def _paths(self, most: int) -> list[list[TurnAtDoor]]:
        paths: list[list[TurnAtDoor]] = []
        chosen: set[int] = set()
        passed: list[tuple[int, int, int]] = []
        while self._ready and len(paths) < most:
            entry = heapq.heappop(self._ready)
            turn = self._turns.get(entry[2])
            if turn is None or entry[0] != turn.standing or not self._is_trainable(turn):
                continue
            if passed and passed[-1] == entry:
                continue
            passed.append(entry)
            if turn.id not in chosen:
                path = self._path_through(turn, chosen)
                chosen.update(each.id for each in path)
                paths.append(path)
        for entry in passed:
            heapq.heappush(self._ready, entry)
        return paths

    def _path_through(self, turn: TurnAtDoor, chosen: set[int]) -> list[TurnAtDoor]:
        """Return the ready turns on the longest path through ``turn`` that are not chosen yet."""
        deepest, most = turn, 0
        below = [(turn, 0)]
        while below:
            node, trainable = below.pop()
            for child in map(self._turns.__getitem__, node.children):
                is_free = self._is_trainable(child) and child.id not in chosen
                if is_free and trainable + 1 > most:
                    deepest, most = child, trainable + 1
                below.append((child, trainable + is_free))
        path: list[TurnAtDoor] = []
        node = deepest
        while node is not None:
            if self._is_trainable(node) and node.id not in chosen:
                path.append(node)
            node = self._turns.get(node.parent) if node.parent is not None else None
        return path[::-1]

    @staticmethod
    def _is_trainable(turn: TurnAtDoor) -> bool:
        return turn.state is TurnState.READY and not turn.is_withheld

    # ---- ages

    def _stand(self, turn: TurnAtDoor) -> None:
        """Find the standing of a turn, and let the turn expire by it."""
        present = self._present
        decided = turn.versions - {present.version_in_the_making}
        if decided != turn.versions:
            self._undecided.add(turn.id)
            turn.standing = present.step
        else:
            turn.standing = present.step - min(map(present.lag, decided))
        self._by_standing.setdefault(turn.standing, set()).add(turn.id)
        self._plan = None

    def _unstand(self, turn: TurnAtDoor) -> None:
        """Keep a turn from expiring."""
        self._undecided.discard(turn.id)
        turns = self._by_standing.get(turn.standing)
        if turns is not None:
            turns.discard(turn.id)
            if not turns:
                del self._by_standing[turn.standing]

    def _expire_before(self, oldest: int) -> None:
        for standing in [each for each in self._by_standing if each < oldest]:
            for id_ in sorted(self._by_standing[standing], reverse=True):
                turn = self._turns[id_]
                self._expired[id_] = self._present.step - standing
                self._end(turn, TurnEnd.EXPIRED)

    def _stale(self, turn: TurnAtDoor) -> frozenset[int]:
        present = self._present
        return frozenset(version for version in turn.versions if present.lag(version) > present.bound)

    # ---- states

    def _add(self, id_: int, versions: frozenset[int], parent: int | None) -> TurnAtDoor:
        if id_ in self._turns:
            raise ControlError(f"turn {id_} has arrived before")
        before = self._turns.get(parent) if parent is not None else None
        turn = TurnAtDoor(id_, parent if before is not None else None, versions, self._next_order)
        self._next_order += 1
        self._turns[id_] = turn
        if before is not None:
            before.children.append(id_)
        return turn

    def _in_training(self) -> list[TurnAtDoor]:
        return [self._turns[id_] for path in self.training for id_ in path]

    def _move(self, turn: TurnAtDoor, state: TurnState | None) -> None:
        if turn.state is not None:
            self.states[turn.state] -= 1
        if state is not None:
            self.states[state] += 1
        turn.state = state
        self._plan = None

    def _end(self, turn: TurnAtDoor, end: TurnEnd) -> None:
        if turn.state is not TurnState.TRAINING:
            self._unstand(turn)
        turn.is_withheld = False
        self._withheld.discard(turn.id)
        self._move(turn, None)
        turn.end = end
        self.ends[end] += 1
