"""Has collectors write the groups that are never trained into the episode log.

    gate: a group is lost ──► ledger: reads what is recorded of it, then forgets it ──on disk──► a collector

The driver looks at no token: it passes the bytes on, as it does when it assignments a group again. Collectors
have a tokenizer. A group is logged only when its end is on disk, so that a restart cannot give it another
one. What does not go out in time is left out, and said.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from slipstream.rollout.collection.driver.assignments import Assignments, recorded
from slipstream.rollout.collection.driver.collected_group import CollectedGroup
from slipstream.rollout.collection.driver.gate import AdmissionGate
from slipstream.rollout.collection.driver.group_ledger import GroupLedger
from slipstream.rollout.collection.messages import LostGroup, PriorSample
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.control.versions import UnknownVersion
from slipstream.rollout.ledger.episode_log.rows import is_chosen
from slipstream.rollout.ledger.rows.samples import OpenSample
from slipstream.rollout.system.changes import Changes
from slipstream.rollout.system.frames import as_note
from slipstream.rollout.tokens.record import REF, CorruptRecord, decode_header, decode_piece
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Prompt

FLUSH_TIMEOUT_S = 60.0
"""Longest wait for collectors to write what they have got."""

MOST_WAITING = 64
"""Number of groups that wait for a collector while none is connected."""

MOST_READ = 64 * 2**20
"""Bytes that the ledger may have to read at one time: training waits for what it commits with them."""


class Logging(Protocol):
    """The way to one collector. Messages are sent soon, in order."""

    def log_lost(self, group: LostGroup, chunks: Sequence[bytes]) -> bool: ...
    def flush(self, number: int) -> None: ...


class LostGroups:
    """Single event loop."""

    def __init__(
        self,
        gate: AdmissionGate,
        assignments: Assignments,
        ledger: GroupLedger,
        share: float,
        samples: int,
        note: Callable[[str], None],
    ) -> None:
        """``share``: of the groups that are logged. ``samples``: episodes of a group."""
        self._gate = gate
        self._assignments = assignments
        self._ledger = ledger
        self._share = share
        self._samples = samples
        self._note = note
        self._collectors: dict[str, Logging] = {}
        self._turns = itertools.count()
        self._waiting: list[tuple[LostGroup, list[bytes]]] = []
        """Groups that were lost while no collector was connected."""
        self._reading = 0
        """Bytes that the ledger is about to read."""
        self.left_out = 0
        """Number of groups that are not in the log, because disk or collectors are slower, or gone."""
        self._flushes = 0
        self._flushed: dict[str, int] = {}
        self._changes = Changes()
        gate.when_lost(self._lost)

    def joined(self, name: str, collector: Logging) -> None:
        """Let a collector write from now on."""
        self._collectors[name] = collector
        waiting, self._waiting = self._waiting, []
        for group, chunks in waiting:
            self._send(group, chunks)

    def left(self, name: str) -> None:
        """Send nothing more to a collector that is gone."""
        self._collectors.pop(name, None)
        self._changes.notify()

    async def flush(self) -> None:
        """Wait until all groups that were lost so far are written, FLUSH_TIMEOUT_S at most."""
        await self._ledger.flushed()
        self._flushes += 1
        for collector in self._collectors.values():
            collector.flush(self._flushes)
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self._changes.first(lambda: None if self._is_behind() else True)
        except TimeoutError:
            self._note(f"episode log: collectors are not done writing after {FLUSH_TIMEOUT_S:.0f} s")

    def flushed(self, name: str, number: int) -> None:
        """Note that a collector has written what it was sent before flush ``number``."""
        self._flushed[name] = number
        self._changes.notify()

    def _is_behind(self) -> bool:
        return any(self._flushed.get(name, 0) < self._flushes for name in self._collectors)

    def _lost(self, id_: int, prompt: Prompt, loss: Loss, note: str, ready: CollectedGroup | None) -> None:
        if not is_chosen(id_, self._share):
            return
        all_samples = self._assignments.samples_of(id_) if ready is None else ready.samples
        samples = {n: sample for n, sample in enumerate(all_samples) if sample and not sample.is_empty}
        group = LostGroup(
            id_,
            loss.value,
            as_note(note),
            self._gate.core.step + 1,
            self._gate.core.version,
            self._lags(samples.values()),
            prompt,
            self._samples,
            [_described(number, sample) for number, sample in samples.items()],
        )
        refs = [sample.all_refs for sample in samples.values()]
        size = sum(size for each in refs for _, _, size, _ in REF.iter_unpack(each))
        if self._reading + size > MOST_READ:
            self._leave_out()
            return
        self._reading += size
        self._ledger.read_lost(refs, partial(self._read, group, size))

    def _lags(self, samples: Iterable[OpenSample]) -> list[tuple[int, int]]:
        """Return the lags of the versions of all tokens. A record that cannot be read has none."""
        versions: set[int] = set()
        for sample in samples:
            try:
                if sample.header is None:
                    versions.update(v for _, piece in sample.pieces for v, _ in decode_piece(piece).spans)
                else:
                    versions.update(version for version, _, _ in decode_header(sample.header).runs)
            except CorruptRecord:
                continue
        lags: list[tuple[int, int]] = []
        for version in sorted(versions - {UNSAMPLED}):
            try:
                lags.append((version, self._gate.core.lag(version)))
            except UnknownVersion:
                continue
        return lags

    def _read(self, group: LostGroup, size: int, chunks: Sequence[bytes | None]) -> None:
        """Send a group with what the ledger has read of it: ``size`` bytes at the most."""
        self._reading -= size
        read = list(zip(group.recorded, chunks, strict=True))
        group.recorded = [sample for sample, data in read if data is not None]
        self._send(group, [data for _, data in read if data is not None])

    def _send(self, group: LostGroup, chunks: list[bytes]) -> None:
        names = list(self._collectors)
        if not names and len(self._waiting) < MOST_WAITING:
            self._waiting.append((group, chunks))
            return
        if names and self._collectors[names[next(self._turns) % len(names)]].log_lost(group, chunks):
            return
        self._leave_out()

    def _leave_out(self) -> None:
        self.left_out += 1
        if self.left_out.bit_count() == 1:
            self._note(
                f"episode log: {self.left_out} lost groups left out: they come faster than they are written"
            )


def _described(number: int, sample: OpenSample) -> PriorSample:
    """Return what is recorded of an episode as messages have it."""
    header, pieces = recorded(sample)
    return PriorSample(number, sample.state, header, [(REF.unpack(ref)[2], piece) for ref, piece in pieces])
