"""The ledger of a simulated run, in memory: what a trainer that is restored finds of the groups.

admitted ──► pieces, trajectories, rewards ──► ready ──► trained ──► forgotten with the next checkpoint
                                                 ▲          │
                                                 └──────────┴── undone: the trainer goes on from before it

``rollout.ledger.writing.writer.Ledger`` keeps the same on disk. Both are asked by the same ``Rewind``.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from slipstream.rollout.collection.driver.group_ledger import NoLedger
from slipstream.rollout.control.core import Ticket
from slipstream.rollout.control.ends import GroupCounts, Loss
from slipstream.rollout.ledger.reading.contents import OpenGroup, RequeuedGroup
from slipstream.rollout.ledger.reading.restart import Recovered
from slipstream.rollout.ledger.rows.samples import ANSWERED, GROWING, JUDGED, SAMPLES, WHOLE, OpenSample
from slipstream.rollout.ledger.writing.transaction import Training

CHUNK = b"\0"
"""Stands for the tokens of any chunk."""


class SimulatedLedger(NoLedger):
    """Single event loop. Nothing is damaged, and everything is on disk at once."""

    def __init__(self) -> None:
        self._open: dict[int, OpenGroup] = {}
        self._requeued: dict[int, RequeuedGroup] = {}
        self._trained: dict[int, list[OpenGroup]] = {}
        """Groups by the version that was trained on them, since the last checkpoint."""
        self._parents: dict[int, int] = {}
        self._copies: set[int] = set()
        self._failures: list[tuple[int, ...]] = []
        self._stepping: dict[int, tuple[int, ...]] = {}
        self._position = self._admitted = self._epochs = 0
        self._losses = Counter[Loss]()
        self.trained_ids = set[int]()
        """Groups that are trained on the present line of versions."""
        self.trained_twice = 0
        """Number of groups that were trained although they had been trained on the same line."""
        self.discarded_tokens = 0
        """Tokens that restarts have given up: they are generated again."""

    def read(self, refs: bytes) -> bytes:
        return CHUNK if refs else b""

    # ---- events

    def admitted(self, ticket: Ticket, position: int) -> None:
        before = None if ticket.requeued_from is None else self._requeued.pop(ticket.requeued_from)
        requeues = before.requeues if before is not None else 0
        if (again := self._open.get(ticket.id)) is not None:  # a restart has had to begin it anew
            requeues = again.requeues
        self._open[ticket.id] = OpenGroup(ticket.id, position, ticket.version, False, requeues)
        self._position = max(self._position, position + 1)
        self._admitted = max(self._admitted, ticket.id + 1)

    def piece(self, key: int, base: int, ref: bytes, header: bytes) -> None:
        self._add(key, GROWING, base, ref, header)

    def answered(self, key: int, refs: bytes, header: bytes) -> None:
        self._add(key, ANSWERED, WHOLE, refs, header)

    def judged(self, key: int, refs: bytes | None, header: bytes) -> None:
        self._add(key, JUDGED, WHOLE, refs, header)

    def ready(self, id_: int, tokens: int) -> None:
        self._open[id_].is_ready = True

    def lost(self, id_: int, loss: Loss, tokens: int = 0, note: str = "") -> None:
        group = self._open.pop(id_)
        self._losses[loss] += 1
        if loss is Loss.REQUEUED:
            self._requeued[id_] = RequeuedGroup(id_, group.position, group.requeues + 1)

    def step_begins(self, version: int, parent: int, groups: Sequence[int]) -> None:
        self._parents[version] = parent
        self._stepping[version] = tuple(groups)

    def copy_begins(self, version: int, parent: int) -> None:
        self._parents[version] = parent
        self._copies.add(version)

    def step_failed(self, version: int, reason: str) -> None:
        self._failures.append(self._stepping.pop(version))

    def published(self, version: int, trainings: Sequence[Training]) -> None:
        ids = [training.group_id for training in trainings]
        self.trained_twice += len(self.trained_ids.intersection(ids))
        self.trained_ids.update(ids)
        self._trained[version] = [self._open.pop(id_) for id_ in ids]
        self._stepping.pop(version, None)

    def discarded(self, id_: int, tokens: int) -> None:
        """A restart gives up what exists of a group."""
        self.discarded_tokens += tokens

    def release(self, version: int) -> None:
        """Forget what only a restart from before ``version`` would need."""
        self._trained = {step: groups for step, groups in self._trained.items() if step > version}

    def untold(self, in_flight: int) -> int:
        """Return the number of admitted groups that have neither ended nor are among those in flight."""
        ended = len(self.trained_ids) + self._losses.total()
        return self._admitted - ended - in_flight

    # ---- a restart of the trainer

    async def restarted(self, version: int, *, bound: int, n_samples: int) -> Recovered:
        """Go on from ``version``: trainings that are not on its line are undone."""
        self._epochs += 1
        line = self._line(version)
        for step in [step for step in self._trained if step not in line]:
            undone = self._trained.pop(step)
            self.trained_ids.difference_update(group.id for group in undone)
            self._open.update((group.id, group) for group in undone)
        self._failures = [
            left
            for left in (tuple(id_ for id_ in ids if id_ in self._open) for ids in self._failures)
            if left
        ]
        by_end = Counter[str]()
        for loss, number in self._losses.items():
            by_end[loss.end.value] += number
        return Recovered(
            epoch=self._epochs,
            restored=version,
            step=len(line - self._copies - {0}),
            versions=sorted(self._parents.items()),
            copies=set(self._copies),
            position=self._position,
            counts=GroupCounts(self._admitted, len(self.trained_ids), **by_end),
            losses=Counter(self._losses),
            open=[_copied(self._open[id_]) for id_ in sorted(self._open)],
            requeued=[self._requeued[id_] for id_ in sorted(self._requeued)],
            failures=self._failures,
            notes=[],
        )

    def _line(self, version: int) -> set[int]:
        line = {version}
        while version := self._parents.get(version, 0):
            line.add(version)
        return line

    def _add(self, key: int, state: int, base: int, refs: bytes | None, header: bytes) -> None:
        group = self._open.get(key // SAMPLES)
        if group is None:
            return
        sample = group.samples.setdefault(key % SAMPLES, OpenSample())
        if (problem := sample.add(state, base, refs, header)) is not None:
            raise AssertionError(f"group {group.id}: {problem}")


def _copied(group: OpenGroup) -> OpenGroup:
    """Return a group whose samples the driver may change."""
    samples = {
        number: replace(sample, pieces=list(sample.pieces), judged=None)
        for number, sample in group.samples.items()
    }
    return replace(group, samples=samples)
