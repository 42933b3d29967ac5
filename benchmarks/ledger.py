"""The ledger alone: CPU per trajectory, bytes written per byte of payload, times of a resume and an audit.

    python -m benchmarks.ledger

Trajectories of a prompt of 64 tokens and 512 further ones come in frames, as collectors send them. A batch
has 256 of them, and checkpoints release what was trained 20 steps ago. Growing completions come in pieces, a
frame per two seconds of generation. The ledger is on this folder's disk.
"""

import asyncio
import json
import os
import resource
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import uvloop

from slipstream.rollout.control.core import Ticket
from slipstream.rollout.ledger.audit.account import audit_ledger
from slipstream.rollout.ledger.reading.history import history_of
from slipstream.rollout.ledger.recovery import open_ledger
from slipstream.rollout.ledger.writing.writer import SAMPLES, Ledger, Training
from slipstream.rollout.tokens.record import REF, PieceHeader, encode, encode_chunk
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, TrajectoryHeader

BATCH = 256
TOKENS = 512
PROMPT_TOKENS = 64
STEPS_KEPT = 20
"""Steps since the oldest checkpoint that is kept."""
FRAME = 16
"""Trajectories per frame."""
BACKLOG_BYTES = 64 << 20
"""Payload that waits for the disk before no more comes."""

_rng = np.random.default_rng(0)
_CHUNK = encode_chunk(
    _rng.integers(0, 150_000, PROMPT_TOKENS).tolist(),
    _rng.integers(0, 150_000, TOKENS).tolist(),
    (-_rng.random(TOKENS, np.float32)).tolist(),
)
_CRC = zlib.crc32(_CHUNK)


def header(version: int) -> bytes:
    """Return the encoded header of a trajectory."""
    runs = ((UNSAMPLED, False, PROMPT_TOKENS), (version, True, PROMPT_TOKENS + TOKENS))
    return encode(TrajectoryHeader(runs, Finish.STOP, reward=1.0))


@dataclass
class Costs:
    """Costs of one way of using the ledger."""

    loop_us: float
    """CPU of the event loop's thread, per trajectory."""
    thread_us: float
    """CPU of the writer thread, per trajectory."""
    per_s: float
    write_ratio: float
    """Bytes given to the operating system to write, per byte of payload."""
    commits: int


def _written() -> int:
    """Return the bytes that this process has written so far."""
    [line] = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("wchar")]
    return int(line.split()[1])


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Feeder:
    """Feeds a ledger with trajectories as fast as it takes them, or at a given rate."""

    def __init__(
        self, ledger: Ledger, n_samples: int, rate: float | None = None, kept: int = STEPS_KEPT
    ) -> None:
        """``rate``: trajectories per second. ``kept``: steps after which trajectories are released."""
        self.ledger = ledger
        self.n_samples = n_samples
        self.rate = rate
        self.kept = kept
        self.version = 0
        self.next = 0
        self.ready: deque[tuple[int, int]] = deque()
        """Group, and the version that sampled its tokens."""

    async def trajectories(self, number: int) -> None:
        """Have ``number`` trajectories generated, and train on them."""
        began = time.perf_counter()
        for first in range(0, number, FRAME):
            self.frame()
            while len(self.ready) * self.n_samples >= BATCH:
                await self.step()
            if self.rate is not None:
                await asyncio.sleep(max(0.0, began + first / self.rate - time.perf_counter()))
            else:
                await asyncio.sleep(0)
            while self.ledger.backlog > BACKLOG_BYTES:
                await self.ledger.flushed()
        await self.ledger.flushed()

    def frame(self) -> None:
        ledger, size = self.ledger, len(_CHUNK)
        segment, offset = ledger.append(b"".join([_CHUNK] * FRAME))
        encoded = header(self.version)
        for _ in range(FRAME // self.n_samples):
            id_ = self.next
            self.next += 1
            ledger.admitted(Ticket(id_, self.version), id_)
            for sample in range(self.n_samples):
                ref = REF.pack(segment, offset, size, _CRC)
                ledger.judged(id_ * SAMPLES + sample, ref, encoded)
                offset += size
            ledger.ready(id_, TOKENS * self.n_samples)
            ledger.when_durable(partial(self.ready.append, (id_, self.version)))

    async def step(self) -> None:
        ledger, version = self.ledger, self.version + 1
        groups = [self.ready.popleft() for _ in range(BATCH // self.n_samples)]
        ledger.step_begins(version, self.version, [id_ for id_, _ in groups])
        await ledger.flushed()
        tokens = TOKENS * self.n_samples
        trainings = [
            Training(id_, self.version - sampled, tokens, 0, tokens, ((sampled, tokens),))
            for id_, sampled in groups
        ]
        ledger.published(version, trainings)
        self.version = version
        if version > self.kept:
            ledger.release(version - self.kept)


@contextmanager
def opened(folder: Path, n_samples: int = 1) -> Iterator[Ledger]:
    """An open ledger in ``folder``."""
    ledger, _ = open_ledger(folder, batch_size=BATCH // n_samples, n_samples=n_samples, bound=64)
    try:
        yield ledger
    finally:
        ledger.close()


def costs(number: int = 40_000, n_samples: int = 1, rate: float | None = None) -> Costs:
    """Measure what ``number`` trajectories cost that come in groups of ``n_samples``."""

    async def main(ledger: Ledger) -> Costs:
        feeder = Feeder(ledger, n_samples, rate)
        await feeder.trajectories(2 * BATCH)  # warm
        cpu, loop, began, written = _cpu_s(), time.thread_time(), time.perf_counter(), _written()
        sequence = ledger.watermark().sequence
        await feeder.trajectories(number)
        seconds, loop_s = time.perf_counter() - began, time.thread_time() - loop
        return Costs(
            loop_us=loop_s / number * 1e6,
            thread_us=(_cpu_s() - cpu - loop_s) / number * 1e6,
            per_s=number / seconds,
            write_ratio=(_written() - written) / (number * len(_CHUNK)),
            commits=ledger.watermark().sequence - sequence,
        )

    with tempfile.TemporaryDirectory(dir=".") as folder, opened(Path(folder), n_samples) as ledger:
        return uvloop.run(main(ledger))


def growing_ratio(side_by_side: int, tokens: int = 32_768, piece: int = 256) -> float:
    """Return bytes written per byte of payload for completions that grow piece by piece, side by side."""
    chunk = encode_chunk((), range(piece), [-0.5] * piece)
    crc = zlib.crc32(chunk)
    encoded = encode(PieceHeader(0, b"0" * 16, ((0, piece),)))

    async def main(ledger: Ledger) -> float:
        for id_ in range(side_by_side):
            ledger.admitted(Ticket(id_, 0), id_)
        await ledger.flushed()
        before = _written()
        for number in range(tokens // piece):
            segment, offset = ledger.append(chunk * side_by_side)
            for id_ in range(side_by_side):
                ref = REF.pack(segment, offset + id_ * len(chunk), len(chunk), crc)
                ledger.piece(id_ * SAMPLES, number, ref, encoded)
            await ledger.flushed()
        return (_written() - before) / (tokens // piece * len(chunk) * side_by_side)

    with tempfile.TemporaryDirectory(dir=".") as folder, opened(Path(folder)) as ledger:
        return asyncio.run(main(ledger))


@dataclass
class Restart:
    """Times of a restart with a large ledger."""

    resume_s: float
    audit_s: float
    megabytes: float


def restart(number: int = 100_000, open_groups: int = 4_000) -> Restart:
    """Measure opening and auditing a ledger of ``number`` trajectories, of which some thousand are open.

    Nothing was released: a restart may go back to any version.
    """

    async def fill(ledger: Ledger) -> None:
        feeder = Feeder(ledger, 1, kept=number)
        await feeder.trajectories(number - open_groups)
        for _ in range(open_groups // FRAME):
            feeder.frame()
        await ledger.flushed()

    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        with opened(folder) as ledger:
            asyncio.run(fill(ledger))
        size = sum(os.stat(path).st_size for path in folder.rglob("*") if path.is_file())
        newest = history_of(folder).newest
        began = time.perf_counter()
        ledger, recovered = open_ledger(folder, batch_size=BATCH, n_samples=1, bound=64, restored=newest)
        resume_s = time.perf_counter() - began
        assert len(recovered.open) >= open_groups
        assert not recovered.notes, recovered.notes
        ledger.close()
        began = time.perf_counter()
        audit, _ = audit_ledger(folder)
        audit_s = time.perf_counter() - began
        assert not audit.discrepancies, audit.discrepancies
        return Restart(resume_s, audit_s, size / 1e6)


def main() -> None:
    document = {
        "single": asdict(costs()),
        "groups_of_8": asdict(costs(n_samples=8)),
        "growing_write_ratio": {str(number): round(growing_ratio(number), 2) for number in (1, 8, 64)},
        **asdict(restart()),
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
