"""Assigns groups to collectors, and turns the events of collectors into what the run knows.

    slot free ──► assignment ──► collector ──► events ──► ledger ──on disk──► gate: ready
                      ▲                          └─ verdict: filtered, failed ──► gate: slot free
                      └── a collector is gone: its groups go to others first, with all that is recorded

A group keeps its slot and its version when it changes hands. Only events of its present assignment count:
what a lost collector still sends is void. A group is ready when all of its trajectories are on disk.

Assignments run ahead of the engines: a collector holds more episodes than its engines may run at one time, so
that no place on an engine waits for a round trip. That, and the number of slots, is the back-pressure.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec

from slipstream.rollout.collection.driver.collected_group import CollectedGroup
from slipstream.rollout.collection.driver.gate import AdmissionGate
from slipstream.rollout.collection.driver.group_ledger import GroupLedger
from slipstream.rollout.collection.driver.listener import CollectionListener
from slipstream.rollout.collection.messages import (
    ANSWERED,
    FAILED,
    FILTERED,
    JUDGED,
    NOTHING,
    PIECE,
    TRAIN,
    Assignment,
    Event,
    GroupVerdict,
    PriorSample,
    Up,
)
from slipstream.rollout.control.core import Ticket
from slipstream.rollout.control.versions import UnknownVersion
from slipstream.rollout.ledger.rows.samples import SAMPLES, OpenSample
from slipstream.rollout.ledger.storage.database import LedgerError
from slipstream.rollout.system.changes import Changes
from slipstream.rollout.system.frames import MalformedFrame
from slipstream.rollout.tokens.record import HEADER, REF
from slipstream.rollout.tokens.trajectory import Prompt

AHEAD = 1 / 4
"""Episodes that a collector holds beyond those that its engines may run, as a share of these."""

BLOCKS = 2
"""Number of collectors that a group may stop before it is given up: its workflow blocks for good."""

CLOSE_TIMEOUT_S = 15.0
"""Seconds for collectors to send what they have. They give user code CLOSE_TIMEOUT_S of ``groups`` to end."""


class Outgoing(Protocol):
    """The way to one collector. Messages are sent soon, in order."""

    def assign(self, assignment: Assignment, chunks: Sequence[bytes]) -> None: ...
    def cancel(self, group: int, assignment: int) -> None: ...


@dataclass
class _Collector:
    outgoing: Outgoing
    generating: int = 0
    """Episodes assigned and not yet done with the engines."""
    groups: set[int] = field(default_factory=set[int])


class Assignments:
    """All groups between their slot and their verdict. Single event loop."""

    def __init__(
        self,
        gate: AdmissionGate,
        ledger: GroupLedger,
        listener: CollectionListener,
        share_of: Callable[[str], int],
        samples: int,
        resumed: Iterable[CollectedGroup] = (),
    ) -> None:
        """``share_of``: number of requests that a collector may run at one time. ``samples``: episodes of a
        group. ``resumed``: groups from before a restart, which have slots and are assigned first.
        """
        self._gate = gate
        self._ledger = ledger
        self._listener = listener
        self._share_of = share_of
        self._samples = samples
        self._waiting = deque(resumed)
        """Groups without a collector, which have slots already."""
        self._groups = {group.id: group for group in self._waiting}
        self._collectors: dict[str, _Collector] = {}
        self._numbers = itertools.count(1)
        self._is_open = False
        self._changes = Changes()
        self.void_events = 0
        """Number of events that came too late: of assignments that had ended."""

    # ---- collectors

    def joined(self, name: str, outgoing: Outgoing) -> None:
        """Give work to a collector from now on."""
        self._collectors[name] = _Collector(outgoing)
        self.grant()

    def left(self, name: str) -> None:
        """Assign the groups of a collector that is gone to others."""
        collector = self._collectors.pop(name, None)
        if collector is None:
            return
        for id_ in sorted(collector.groups):
            group = self._groups[id_]
            group.assignment, group.collector = 0, ""
            self._waiting.append(group)
        self._changes.notify()
        self.grant()

    def blocked(self, name: str, id_: int | None, traceback: str) -> None:
        """Note that the workflow of a group stands in the way of all others of its collector.

        The collector will end by itself. ``id_``: None if it cannot tell the group.
        """
        if id_ is None:
            self._listener.note(f"collector {name} stood still, for an unknown reason:\n{traceback}")
            return
        group = self._groups.get(id_)
        if group is None or group.collector != name:
            return
        group.blocks += 1
        reason = (
            f"{group.prompt.reference}: its workflow blocked collector {name}, so that no other episode went "
            f"on:\n{traceback}"
        )
        self._listener.attempt_failed(group.prompt.id, group.blocks, reason)
        if group.blocks >= BLOCKS:
            self._fail(group, reason)

    # ---- assignments

    def open(self) -> None:
        """Begin to give out assignments."""
        self._is_open = True
        self.grant()

    async def close(self) -> None:
        """Give out no further assignment, and stop the work that is under way: the run ends.

        Returns when the collectors have sent what they have of it, or after CLOSE_TIMEOUT_S.
        """
        self._is_open = False
        for group in self._groups.values():
            self._cancel(group)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._changes.first(lambda: None if self._busy() else True)
        except TimeoutError:
            names = ", ".join(self._busy())
            self._listener.note(
                f"{names}: episodes go on {CLOSE_TIMEOUT_S:.0f} s after they were cancelled, and are given up"
            )

    @property
    def is_open(self) -> bool:
        """True if assignments are given out."""
        return self._is_open

    def restored(self, groups: Iterable[CollectedGroup]) -> None:
        """Go on with these groups instead of all present ones, whose assignments end.

        Call it between ``close`` and ``open``.
        """
        for collector in self._collectors.values():
            collector.groups.clear()
        self._waiting = deque(groups)
        self._groups = {group.id: group for group in self._waiting}

    def _busy(self) -> list[str]:
        return [name for name, collector in self._collectors.items() if collector.generating]

    def grant(self, name: str | None = None) -> None:
        """Assign groups as long as there are slots, or groups without a collector, and room for them.

        ``name``: the only collector that has got room since the last call.
        """
        if not (self._is_open and self._gate.core.may_generate):
            return
        names = self._collectors if name is None else (name,)
        room = [
            (name, collector, most)
            for name, collector, most in (
                (name, self._collectors[name], max(0, self._share_of(name) * (1 + AHEAD) - self._samples))
                for name in names
            )
            if collector.generating <= most
        ]
        turn = 0
        while room and (self._waiting or self._gate.may_admit()):
            turn = (turn + 1) % len(room)
            name, collector, most = room[turn]
            group = self._waiting.popleft() if self._waiting else self._admitted(*self._gate.admit())
            self._assign(group, name, collector)
            if collector.generating > most:
                del room[turn]

    def samples_of(self, id_: int) -> Sequence[OpenSample | None]:
        """Return what exists of the episodes of a group; nothing of one that is complete or has ended."""
        group = self._groups.get(id_)
        return () if group is None else group.samples

    def give_up(self, ids: Iterable[int]) -> None:
        """Stop the work on groups that have expired."""
        for id_ in ids:
            if (group := self._groups.get(id_)) is not None:
                self._cancel(group)
                self._end(group)

    def _admitted(self, ticket: Ticket, prompt: Prompt) -> CollectedGroup:
        group = self._groups[ticket.id] = CollectedGroup(
            ticket.id, ticket.version, prompt, [None] * self._samples
        )
        return group

    def _assign(self, group: CollectedGroup, name: str, collector: _Collector) -> None:
        id_, prior, chunks = group.id, [], []
        for number, sample in enumerate(group.samples):
            if sample is not None:
                self._prior(group, number, sample, prior, chunks)
        group.assignment, group.collector = next(self._numbers), name
        collector.generating += self._samples
        collector.groups.add(id_)
        collector.outgoing.assign(
            Assignment(id_, group.assignment, group.version, group.prompt, prior), chunks
        )

    def _prior(
        self,
        group: CollectedGroup,
        number: int,
        sample: OpenSample,
        prior: list[PriorSample],
        chunks: list[bytes],
    ) -> None:
        """Add what is recorded of an episode. A damaged record is given up, and the episode begins anew."""
        header, pieces = recorded(sample)
        try:
            read = [self._ledger.read(ref) for ref, _ in pieces]
        except LedgerError as error:
            self._listener.note(f"group {group.id}, sample {number} is generated again: {error}")
            group.samples[number] = None
            group.unanswered += sample.is_whole
            return
        chunks += read
        sizes = [(len(chunk), piece) for chunk, (_, piece) in zip(read, pieces, strict=True)]
        prior.append(PriorSample(number, sample.state, header, sizes))

    def _cancel(self, group: CollectedGroup) -> None:
        if group.assignment:
            self._collectors[group.collector].outgoing.cancel(group.id, group.assignment)

    def _end(self, group: CollectedGroup) -> None:
        """Forget a group whose assignment has ended for good."""
        id_ = group.id
        del self._groups[id_]
        if group.assignment:
            self._collectors[group.collector].groups.discard(id_)
            group.assignment = 0
        else:
            self._waiting.remove(group)

    # ---- events

    def received(self, name: str, message: Up, payload: memoryview) -> None:
        """Take in a message of a collector. Raises MalformedFrame."""
        if sum(event.size for event in message.events) != len(payload):
            raise MalformedFrame(f"{len(payload)} bytes of chunks are not those of the frame's events")
        collector = self._collectors[name]
        try:
            self._take_events(message.events, payload)
            self._take_verdicts(message.verdicts)
        except msgspec.MsgspecError as error:
            raise MalformedFrame(str(error)) from error
        for failed in message.failed:
            self._listener.attempt_failed(failed.prompt, failed.attempt, failed.error)
        if message.released:
            collector.generating -= message.released
            self._changes.notify()
            self.grant(name)

    def _take_events(self, events: Sequence[Event], payload: memoryview) -> None:
        segment, offset = self._ledger.append(payload) if payload else (0, 0)
        for event in events:
            ref = REF.pack(segment, offset, event.size, event.crc) if event.size else b""
            offset += event.size
            self._happened(event, ref)

    def _take_verdicts(self, verdicts: Sequence[GroupVerdict]) -> None:
        ready: list[CollectedGroup] = []
        try:
            for verdict in verdicts:
                self._decided(verdict, ready)
        finally:
            if ready:
                self._ledger.when_durable(partial(self._gate.finished, ready))

    def _happened(self, event: Event, ref: bytes) -> None:
        """Take in one event. A malformed one changes nothing."""
        group = self._groups.get(event.group)
        if group is None or group.assignment != event.assignment:
            self.void_events += 1
            return
        if event.sample >= self._samples:
            raise MalformedFrame(f"group {event.group} has no sample {event.sample}")
        sample = group.samples[event.sample] or OpenSample()
        key, was_whole = event.group * SAMPLES + event.sample, sample.is_whole
        if event.kind == PIECE:
            self._add_piece(sample, key, event, ref)
        elif not was_whole:
            self._end_episode(sample, key, event, ref)
        elif event.kind == JUDGED and (sample.state == ANSWERED or not ref):
            self._add_judgement(sample, key, event, ref)  # a filter of groups may judge once more
        else:
            raise MalformedFrame(f"sample {event.sample} of group {event.group} has ended already")
        group.samples[event.sample] = sample
        if event.kind != PIECE and not was_whole:
            group.unanswered -= 1
            waits = not group.unanswered and any(each and each.state == ANSWERED for each in group.samples)
            if waits and self._gate.core.is_open(event.group):
                self._gate.core.judging(event.group)

    def _add_piece(self, sample: OpenSample, key: int, event: Event, ref: bytes) -> None:
        if sample.is_whole or event.base > len(sample.pieces) or not ref:
            raise MalformedFrame(f"piece {event.base} of a sample with {len(sample.pieces)} pieces")
        header = bytes(event.header)
        del sample.pieces[event.base :]
        sample.pieces.append((ref, header))
        self._ledger.piece(key, event.base, ref, header)

    def _end_episode(self, sample: OpenSample, key: int, event: Event, ref: bytes) -> None:
        """Note a whole trajectory: the first pieces of its record, and a last chunk."""
        if event.base > len(sample.pieces):
            raise MalformedFrame(f"a trajectory after {event.base} of {len(sample.pieces)} pieces")
        refs = b"".join([piece for piece, _ in sample.pieces[: event.base]]) + ref
        if event.kind == JUDGED:
            self._judge(sample, key, event, refs)
        else:
            HEADER.decode(event.header)
            sample.state, sample.header = ANSWERED, bytes(event.header)
            self._ledger.answered(key, refs, sample.header)
        sample.refs, sample.pieces = refs, []

    def _add_judgement(self, sample: OpenSample, key: int, event: Event, ref: bytes) -> None:
        """Note the reward of a trajectory that has been recorded, and a chunk that came with it, if any."""
        self._judge(sample, key, event, sample.refs + ref if ref else None)
        sample.refs += ref

    def _judge(self, sample: OpenSample, key: int, event: Event, refs: bytes | None) -> None:
        """Note the reward of a trajectory. ``refs``: all of its chunks; None: those that are recorded."""
        trajectory = HEADER.decode(event.header)
        if trajectory.reward is None:
            raise MalformedFrame(f"sample {event.sample} of group {event.group} has no reward")
        sample.state, sample.judged, sample.header = JUDGED, trajectory, bytes(event.header)
        self._ledger.judged(key, refs, sample.header)

    def _decided(self, verdict: GroupVerdict, ready: list[CollectedGroup]) -> None:
        group = self._groups.get(verdict.group)
        if group is None or group.assignment != verdict.assignment:
            return
        if verdict.verdict == FAILED:
            self._fail(group, verdict.note)
            return
        judged = len(group.judged)
        if judged != self._samples and verdict.verdict == TRAIN:
            raise MalformedFrame(f"group {verdict.group} has {judged} of {self._samples} trajectories")
        if (unknown := self._unknown_version(group.counted().trained_tokens)) is not None:
            self._fail(group, f"{group.prompt.reference}: {unknown}")
            return
        if not self._gate.core.is_open(verdict.group):
            self._end(group)
            return  # it has expired, and is about to be given up
        if verdict.verdict == FILTERED:
            self._gate.filtered(verdict.group, group.headers)
            self._end(group)
            return
        self._end(group)
        self._ledger.ready(verdict.group, group.sampled_length)
        ready.append(group)

    def _unknown_version(self, versions: Iterable[int]) -> UnknownVersion | None:
        """Return what is wrong with the policy versions of trained tokens. Their lags could not be found."""
        try:
            for version in versions:
                self._gate.core.lag(version)
        except UnknownVersion as error:
            return error
        return None

    def _fail(self, group: CollectedGroup, reason: str) -> None:
        """Give up a group that cannot be collected."""
        if self._gate.core.is_open(group.id):
            self._gate.failed(group.id, reason, group.headers)
        self._end(group)


def recorded(sample: OpenSample) -> tuple[msgspec.Raw, list[tuple[bytes, msgspec.Raw]]]:
    """Return the header and the pieces of a sample as ``messages.PriorSample`` has them, with
    ``record.REF`` in place of sizes.
    """
    if sample.header is None:
        return NOTHING, [(ref, msgspec.Raw(piece)) for ref, piece in sample.pieces]
    refs = [sample.refs[i : i + REF.size] for i in range(0, len(sample.refs), REF.size)]
    return msgspec.Raw(sample.header), [(ref, NOTHING) for ref in refs]
