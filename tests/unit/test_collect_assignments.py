"""Assignments: every group ends once, whoever works on it, and whatever becomes of whoever works on it."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.rollout.collection.driver.assignments import Assignments
from slipstream.rollout.collection.driver.batches import Batches
from slipstream.rollout.collection.driver.gate import AdmissionGate
from slipstream.rollout.collection.driver.group_ledger import NoLedger
from slipstream.rollout.collection.driver.intake import Intake
from slipstream.rollout.collection.driver.lost_groups import LostGroups
from slipstream.rollout.collection.messages import (
    ANSWERED,
    FAILED,
    FILTERED,
    JUDGED,
    NOTHING,
    PIECE,
    TRAIN,
    UP,
    Assignment,
    Event,
    GroupVerdict,
    LostGroup,
    Up,
)
from slipstream.rollout.control.consumption import Fifo, OnStale, ReadyFirst
from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.ledger.storage.database import LedgerError
from slipstream.rollout.prompts import PromptSet, PromptStream
from slipstream.rollout.system.frames import MalformedFrame, pack, split
from slipstream.rollout.tokens.record import REF, PieceHeader, checksum, encode
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Prompt, TrajectoryHeader
from tests.tries import tries
from tests.unit.doubles import Listener


def header(version: int, reward: float | None = None, tokens: int = 2) -> TrajectoryHeader:
    return TrajectoryHeader(((UNSAMPLED, False, 1), (version, True, 1 + tokens)), Finish.STOP, reward=reward)


class Held(NoLedger):
    """A ledger whose commits the test controls. It keeps payload, and what is on disk of each sample."""

    def __init__(self) -> None:
        self.data = bytearray(b"\0" * 7)
        self.then: list = []
        self.reads: list[tuple] = []
        self.damaged: set[bytes] = set()
        self.rows: list[tuple] = []
        self.states: dict[int, list[str]] = {}

    def append(self, payload: memoryview) -> tuple[int, int]:
        offset = len(self.data)
        self.data += payload
        return 3, offset

    def read(self, refs: bytes) -> bytes:
        chunks = b""
        for segment, offset, size, crc in REF.iter_unpack(refs):
            assert segment == 3
            chunk = bytes(self.data[offset : offset + size])
            if chunk in self.damaged:
                raise LedgerError("its bytes are damaged")
            assert checksum(chunk) == crc
            chunks += chunk
        return chunks

    def admitted(self, ticket, position):
        self.states.setdefault(ticket.id, []).append("admitted")

    def piece(self, key, base, ref, header):
        self.rows.append((key, PIECE, base, self.read(ref), header))

    def answered(self, key, refs, header):
        self.rows.append((key, ANSWERED, None, self.read(refs), header))

    def judged(self, key, refs, header):
        self.rows.append((key, JUDGED, None, None if refs is None else self.read(refs), header))

    def ready(self, id_, tokens):
        self.states[id_].append("ready")

    def read_lost(self, refs, then):
        assert refs is not None
        self.reads.append((then, [self.undamaged(each) for each in refs]))

    def undamaged(self, refs: bytes) -> bytes | None:
        try:
            return self.read(refs)
        except LedgerError:
            return None

    def lost(self, id_, loss, tokens=0, note=""):
        self.states[id_].append(str(loss.end))

    def published(self, version, trainings):
        for training in trainings:
            self.states[training.group_id].append("trained")

    def when_durable(self, then):
        self.then.append(then)

    def commit(self) -> None:
        then, self.then = self.then, []
        reads, self.reads = self.reads, []
        for each in then:
            each()
        for each, chunks in reads:
            each(chunks)

    async def flushed(self):
        self.commit()


ENDS = {"filtered", "failed", "expired"}
"""States of groups that have ended untrained."""


@dataclass
class Working:
    """One assigned group, as its collector knows it."""

    assignment: Assignment
    pieces: list[list[bytes]]
    """Chunks of each unfinished sample."""
    kinds: list[int]
    done: list[bool]
    """The engines are done with the sample."""


@dataclass
class FakeCollector:
    """A collector that does what the test says. What it says waits until it is delivered."""

    name: str
    samples: int
    working: dict[int, Working] = field(default_factory=dict)
    heard: list[tuple[str, tuple]] = field(default_factory=list)
    """Assignments and cancellations that have not arrived."""
    outbox: Up = field(default_factory=Up)
    payload: list[bytes] = field(default_factory=list)
    owed: int = 0
    """Episodes that are assigned here and not given back, by the driver's account."""
    all_leases: list[tuple[Assignment, list[bytes]]] = field(default_factory=list)

    # -- assignments.Outgoing

    def assign(self, assignment: Assignment, chunks: Sequence[bytes]) -> None:
        self.all_leases.append((assignment, list(chunks)))
        self.heard.append(("assignment", (assignment, list(chunks))))
        self.owed += self.samples

    def cancel(self, group: int, assignment: int) -> None:
        self.heard.append(("cancel", (group, assignment)))

    # -- its process

    def hear(self) -> None:
        """Let everything arrive that the driver has said."""
        heard, self.heard = self.heard, []
        for kind, what in heard:
            if kind == "assignment":
                assignment, chunks = what
                assert assignment.number not in self.working
                working = Working(
                    assignment,
                    [[] for _ in range(self.samples)],
                    [PIECE] * self.samples,
                    [False] * self.samples,
                )
                self.working[assignment.number] = working
                for prior in assignment.prior:
                    sizes = [size for size, _ in prior.pieces]
                    own, chunks = chunks[: len(sizes)], chunks[len(sizes) :]
                    assert [len(chunk) for chunk in own] == sizes
                    working.pieces[prior.sample] = own
                    working.kinds[prior.sample] = prior.kind
                    if prior.kind != PIECE:
                        self.give_back(working, prior.sample)
                assert not chunks
            else:
                _, number = what
                if (working := self.working.pop(number, None)) is not None:
                    self.give_back(working, *range(self.samples))

    def give_back(self, working: Working, *samples: int) -> None:
        for sample in samples:
            if not working.done[sample]:
                working.done[sample] = True
                self.outbox.released += 1

    def say(self, event: Event, chunk: bytes = b"") -> None:
        if chunk:
            event.size, event.crc = len(chunk), checksum(chunk)
            self.payload.append(chunk)
        self.outbox.events.append(event)

    def grow(self, working: Working, sample: int, chunk: bytes, base: int | None = None) -> None:
        pieces = working.pieces[sample]
        base = len(pieces) if base is None else min(base, len(pieces))
        piece = msgspec.Raw(encode(PieceHeader(0, b"", ((0, len(chunk)),))))
        self.say(
            Event(working.assignment.group, working.assignment.number, sample, PIECE, piece, base), chunk
        )
        pieces[base:] = [chunk]

    def answer(self, working: Working, sample: int, chunk: bytes, kind: int, version: int) -> None:
        raw = msgspec.Raw(encode(header(version, None if kind == ANSWERED else 0.5)))
        base = len(working.pieces[sample])
        self.say(Event(working.assignment.group, working.assignment.number, sample, kind, raw, base), chunk)
        working.pieces[sample].append(chunk)
        working.kinds[sample] = kind
        self.give_back(working, sample)

    def judge(self, working: Working, sample: int, version: int, chunk: bytes) -> None:
        """Send a reward, and a chunk with a teacher's scores unless it is empty."""
        raw = msgspec.Raw(encode(header(version, 0.5)))
        self.say(Event(working.assignment.group, working.assignment.number, sample, JUDGED, raw), chunk)
        working.kinds[sample] = JUDGED

    def decide(self, working: Working, verdict: int) -> None:
        self.outbox.verdicts.append(
            GroupVerdict(working.assignment.group, working.assignment.number, verdict, "note")
        )
        del self.working[working.assignment.number]
        self.give_back(working, *range(self.samples))

    def take_outbox(self) -> tuple[Up, memoryview]:
        message, payload = self.outbox, self.payload
        self.outbox, self.payload = Up(), []
        self.owed -= message.released
        return split(pack(message, payload), UP)


@dataclass
class FakeLog:
    """A collector's end of the episode log."""

    schedule: "Schedule"
    groups: dict[int, LostGroup] = field(default_factory=dict)

    def log_lost(self, group: LostGroup, chunks: Sequence[bytes]) -> bool:
        """Note a group: all undamaged bytes that collectors had sent when it was lost must be there."""
        assert group.group not in self.groups, "a group ends once"
        self.groups[group.group] = group
        held = {
            sample: chunks
            for sample, chunks in self.schedule.held_at_loss[group.group].items()
            if chunks and not self.schedule.journal.damaged.intersection(chunks)
        }
        assert {sample.sample: data for sample, data in zip(group.recorded, chunks, strict=True)} == {
            sample: b"".join(chunks) for sample, chunks in held.items()
        }
        for sample, data in zip(group.recorded, chunks, strict=True):
            assert sum(size for size, _ in sample.pieces) == len(data)
        return True

    def flush(self, number: int) -> None:
        raise AssertionError


SELDOM = st.integers(0, 3)
"""A rule is skipped unless this is 0."""


class Schedule(RuleBasedStateMachine):
    """Collectors that come, work, lag, lie and die, in any order, beside training and expiry."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()

    @initialize(
        samples=st.sampled_from([1, 2, 8]),
        policy=st.sampled_from([Fifo(), ReadyFirst(OnStale.REQUEUE), ReadyFirst(OnStale.DROP)]),
        eta=st.integers(0, 2),
        over=st.sampled_from([1.0, 2.0]),
        share=st.integers(1, 20),
    )
    def begin(self, samples, policy, eta, over, share):
        self.samples, self.share = samples, share
        self.core = RolloutControl(2, eta, consumption=policy, over_sampling=over)
        self.journal, self.listener = Held(), Listener()
        stream = PromptStream(PromptSet.of([Prompt(i, "?") for i in range(5)]), shuffle=False, seed=0)
        self.gate = AdmissionGate(self.core, Intake(stream), self.journal, self.listener)
        self.batches = Batches(self.gate, self.journal, self.listener.note)
        self.assignments = Assignments(
            self.gate, self.journal, self.listener, lambda name: self.share, samples
        )
        self.log = FakeLog(self)
        self.gate.when_lost(self.note_lost)
        lost = LostGroups(self.gate, self.assignments, self.journal, 1.0, samples, print)
        lost.joined("log", self.log)
        self.collectors: dict[str, FakeCollector] = {}
        self.numbers = 0
        self.rounds = 0
        self.held: dict[tuple[int, int], tuple[int, list[bytes]]] = {}
        """Kind and chunks of each sample, by what has been delivered."""
        self.held_at_loss: dict[int, dict[int, list[bytes]]] = {}
        self.assignments.open()

    def teardown(self):
        if hasattr(self, "assignments"):
            self.finish()
        self.loop.close()

    # -- what may happen

    @rule()
    def a_collector_joins(self):
        if len(self.collectors) < 3:
            self.numbers += 1
            collector = self.collectors[f"collector-{self.numbers}"] = FakeCollector(
                f"collector-{self.numbers}", self.samples
            )
            self.assignments.joined(collector.name, collector)

    @precondition(lambda self: self.collectors)
    @rule(data=st.data(), seed=st.integers(0, 2**16), hears=st.booleans())
    def a_collector_works(self, data, seed, hears):
        """Every one of its episodes goes on a little, or not; groups that are complete may end."""
        self.works(self.any_collector(data), random.Random(seed), hears)

    def works(self, collector: FakeCollector, chance: random.Random, hears: bool = True) -> None:
        if hears:
            collector.hear()
        for working in list(collector.working.values()):
            for sample in range(self.samples):
                self.episode_goes_on(collector, working, sample, chance)
            if chance.random() < 0.02:
                collector.decide(working, chance.choice([FAILED, FILTERED]))  # by its workflow
            elif all(kind == JUDGED for kind in working.kinds) and chance.random() < 0.7:
                collector.decide(working, chance.choice([TRAIN, TRAIN, TRAIN, FILTERED]))

    @precondition(lambda self: self.collectors)
    @rule(data=st.data(), seed=st.integers(0, 2**16), rounds=st.integers(1, 4))
    def time_passes(self, data, seed, rounds):
        """Everybody works, training included."""
        for number in range(rounds):
            for collector in self.collectors.values():
                self.works(collector, random.Random(seed + number))
                self.deliver(collector)
            self.the_trainer_asks_for_a_batch(publishes=True, commits=True)
            self.collect()

    def episode_goes_on(
        self, collector: FakeCollector, working: Working, sample: int, chance: random.Random
    ) -> None:
        kind, chunk = working.kinds[sample], chance.randbytes(chance.randint(1, 9))
        if chance.random() < 0.3:
            return
        if kind == PIECE and chance.random() < 0.4:
            collector.grow(working, sample, chunk, 0 if chance.random() < 0.2 else None)
        elif kind == PIECE:
            collector.answer(working, sample, chunk, chance.choice([ANSWERED, JUDGED]), self.core.version)
        elif kind == ANSWERED:
            collector.judge(working, sample, self.core.version, chance.choice([b"", chunk]))
        elif chance.random() < 0.2:  # a filter of groups judges once more
            collector.judge(working, sample, self.core.version, b"")

    @precondition(lambda self: self.collectors)
    @rule(data=st.data(), all_of_them=st.booleans())
    def messages_arrive(self, data, all_of_them):
        for collector in list(self.collectors.values()) if all_of_them else [self.any_collector(data)]:
            self.deliver(collector)

    @precondition(lambda self: self.collectors)
    @rule(data=st.data(), skipped=SELDOM)
    def a_collector_dies(self, data, skipped):
        if not skipped:
            self.die(self.any_collector(data))

    @precondition(lambda self: self.collectors)
    @rule(data=st.data(), what=st.integers(0, 6), skipped=SELDOM)
    def a_malformed_message_arrives(self, data, what, skipped):
        """Sound parts of it, which stand before, count. The server gives up the collector."""
        if skipped:
            return None
        collector = self.any_collector(data)
        message, payload = collector.take_outbox()
        decided = {(verdict.group, verdict.assignment) for verdict in message.verdicts}
        working = [each for each in collector.working.values() if not self.is_void(each)]
        ids = (working[0].assignment.group, working[0].assignment.number) if working else (0, 0)
        broken, unjudged = msgspec.Raw(b"\x91\xc0"), msgspec.Raw(encode(header(0)))
        kind = working[0].kinds[0] if working else PIECE
        bad = [
            Event(*ids, 0, PIECE, NOTHING, 0, size=5),
            Event(*ids, self.samples, PIECE, NOTHING),
            Event(*ids, 0, PIECE, NOTHING, 99),
            Event(*ids, 0, ANSWERED, unjudged, 99 if kind == PIECE else 0),
            Event(*ids, 0, JUDGED, unjudged),
            Event(*ids, 0, JUDGED if kind == ANSWERED else ANSWERED, broken),
            GroupVerdict(*ids, TRAIN),
        ][what if working else 0]
        if not isinstance(bad, Event) or not bad.size:
            self.note_held(message, payload)
        if isinstance(bad, Event):
            message.events.append(bad)
        elif all(kind == JUDGED for kind in working[0].kinds):
            return self.take(collector, message, payload)
        else:
            message.verdicts.append(bad)
        ready = {id_ for id_, states in self.journal.states.items() if states[-1] == "ready"}
        with pytest.raises(MalformedFrame):
            self.take(collector, message, payload)
        if isinstance(bad, Event):
            assert {id_ for id_, states in self.journal.states.items() if states[-1] == "ready"} == ready
        else:
            assert not decided & {(id_, group.assignment) for id_, group in self.assignments._groups.items()}
        return self.die(collector)

    @precondition(lambda self: self.collectors)
    @rule(data=st.data(), skipped=SELDOM)
    def a_workflow_blocks(self, data, skipped):
        if skipped:
            return
        collector = self.any_collector(data)
        if collector.working:
            working = data.draw(st.sampled_from(list(collector.working.values())))
            self.assignments.blocked(collector.name, working.assignment.group, "traceback")
        else:
            self.assignments.blocked(collector.name, 10**6, "traceback")
        self.die(collector)

    @rule(publishes=st.booleans(), commits=st.booleans())
    def the_trainer_asks_for_a_batch(self, publishes, commits):
        if commits:
            self.journal.commit()
        if self.batches._batch.groups or self.gate._failures_in_a_row >= 8:
            return
        batch = self.batches._next()
        if batch is not None and batch.groups:
            for group in batch.groups:
                assert self.journal.states[group.id][-1] == "ready"
            self.batches._batch = batch
            self.loop.run_until_complete(self.batches.step_begins())
            if publishes:
                self.the_trainer_publishes()

    @rule()
    def the_trainer_publishes(self):
        if self.batches._batch.groups:
            self.batches.published(self.batches.next_version)

    @rule()
    def the_loop_of_collection_runs(self):
        self.collect()

    @rule(share=st.integers(1, 20))
    def the_shares_change(self, share):
        self.share = share

    # -- invariants

    @invariant()
    def slots_are_those_of_open_groups(self):
        if not hasattr(self, "assignments"):
            return
        open_ids = set(self.assignments._groups)
        is_ended = ("ready", "filtered", "expired", "failed", "trained")
        for id_, states in self.journal.states.items():
            ends = [state for state in states if state in is_ended]
            if id_ in open_ids:
                # It may have expired: the collection gives it up as soon as it runs.
                assert ends in ([], ["expired"]), (id_, states)
            else:
                assert ends, (id_, states)
            assert ends.count("ready") <= 1
            assert len(ends) <= 2
            assert len(ends) < 2 or ends[0] == "ready"
            assert "trained" not in ends or ends[0] == "ready"

    @invariant()
    def each_collector_owes_what_it_was_assigned_and_has_not_given_back(self):
        for name, collector in getattr(self, "collectors", {}).items():
            assert self.assignments._collectors[name].generating == collector.owed >= 0

    @invariant()
    def a_group_has_one_assignment_and_its_collector_lives(self):
        if not hasattr(self, "assignments"):
            return
        waiting = [group.id for group in self.assignments._waiting]
        assert len(set(waiting)) == len(waiting)
        for id_, group in self.assignments._groups.items():
            assert (group.assignment == 0) == (id_ in waiting)
            if group.assignment:
                assert id_ in self.assignments._collectors[group.collector].groups
        for name, collector in self.assignments._collectors.items():
            assert {
                id_ for id_, g in self.assignments._groups.items() if g.collector == name
            } >= collector.groups

    @invariant()
    def nothing_is_ready_before_it_is_on_disk(self):
        if hasattr(self, "assignments"):
            durable = {g.id for g in self.gate._ready.values()}
            pending = {g.id for then in self.journal.then for g in then.args[0]}
            assert not durable & pending

    # -- how

    def any_collector(self, data) -> FakeCollector:
        return self.collectors[data.draw(st.sampled_from(sorted(self.collectors)))]

    def is_void(self, working: Working) -> bool:
        group = self.assignments._groups.get(working.assignment.group)
        return group is None or group.assignment != working.assignment.number

    def note_held(self, message: Up, payload: memoryview) -> None:
        """Keep an account of what the driver holds, apart from the product's."""
        start = 0
        for event in message.events:
            chunk = bytes(payload[start : start + event.size])
            start += event.size
            group = self.assignments._groups.get(event.group)
            if group is None or group.assignment != event.assignment or event.sample >= self.samples:
                continue
            kind, chunks = self.held.get((event.group, event.sample), (PIECE, []))
            if event.base > len(chunks) or (event.kind == PIECE and not chunk):
                continue
            if kind == PIECE:
                self.held[event.group, event.sample] = (
                    event.kind,
                    chunks[: event.base] + [chunk] * bool(chunk),
                )
            else:
                self.held[event.group, event.sample] = event.kind, chunks + [chunk] * bool(chunk)

    def take(self, collector: FakeCollector, message: Up, payload: memoryview) -> None:
        self.assignments.received(collector.name, message, payload)

    def deliver(self, collector: FakeCollector) -> None:
        message, payload = collector.take_outbox()
        self.note_held(message, payload)
        self.take(collector, message, payload)

    def die(self, collector: FakeCollector) -> None:
        before = {id_: list(each) for id_, each in self.held.items()}
        lost = set(self.assignments._collectors[collector.name].groups)
        fresh = set(self.journal.states)
        del self.collectors[collector.name]
        counts = {name: len(other.all_leases) for name, other in self.collectors.items()}
        self.assignments.left(collector.name)
        handed = [
            (assignment, chunks)
            for name, other in self.collectors.items()
            for assignment, chunks in other.all_leases[counts[name] :]
        ]
        admitted = [assignment.group for assignment, _ in handed if assignment.group not in fresh]
        again = [assignment.group for assignment, _ in handed if assignment.group in fresh]
        assert set(again) <= lost | set(fresh)
        if admitted:
            assert not self.assignments._waiting, "whoever has lost its collector goes first"
        for assignment, chunks in handed:
            for prior in assignment.prior:
                kind, held = before[assignment.group, prior.sample]
                own, chunks = chunks[: len(prior.pieces)], chunks[len(prior.pieces) :]
                assert (prior.kind, own) == (kind, held)
            assert not chunks
            numbers = [prior.sample for prior in assignment.prior]
            assert numbers == [
                n for n in range(self.samples) if before.get((assignment.group, n), (0, []))[1]
            ]

    def note_lost(self, lost: int, *_: object) -> None:
        """Note the bytes of a group at its end: its collector may send more before it hears of that."""
        self.held_at_loss[lost] = {
            sample: list(chunks) for (id_, sample), (_, chunks) in self.held.items() if id_ == lost
        }

    def collect(self) -> None:
        given_up, self.gate._given_up, self.gate._has_changed = self.gate._given_up, [], False
        self.assignments.give_up(given_up)
        self.assignments.grant()

    def complete(self, collector: FakeCollector) -> None:
        """Let a collector finish everything that it works on."""
        collector.hear()
        for working in list(collector.working.values()):
            for sample, kind in enumerate(working.kinds):
                if kind == PIECE:
                    collector.answer(working, sample, b"rest", JUDGED, self.core.version)
                elif kind == ANSWERED:
                    collector.judge(working, sample, self.core.version, b"")
            collector.decide(working, TRAIN)
        self.deliver(collector)

    def finish(self) -> None:
        """Let everything end that is open: then every slot is free again, and nobody owes anything."""
        self.the_trainer_publishes()
        self.assignments._is_open = True
        self.share = 10**6
        if not self.collectors:
            self.a_collector_joins()
        admit, self.gate.may_admit = self.gate.may_admit, lambda: False
        for _ in range(200):
            self.collect()
            for collector in self.collectors.values():
                self.complete(collector)
            self.journal.commit()
            if not self.assignments._groups:
                break
        assert not self.assignments._groups
        assert not self.assignments._waiting
        for collector in self.collectors.values():
            assert self.assignments._collectors[collector.name].generating == 0
            assert not self.assignments._collectors[collector.name].groups
        assert self.core.open == 0
        assert self.core.counts.in_flight == self.core.ready
        ended = {id_ for id_, states in self.journal.states.items() if states[-1] in ENDS}
        assert set(self.log.groups) == ended
        losses = Counter(group.loss for group in self.log.groups.values())
        assert losses == Counter({loss.value: n for loss, n in self.core.losses.items() if n})
        self.gate.may_admit = admit


Schedule.TestCase.settings = tries(50, stateful_step_count=60)
test_every_group_ends_once_under_any_schedule = Schedule.TestCase
