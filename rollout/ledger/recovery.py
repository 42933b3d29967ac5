"""Opening the ledger of a run: a new one, or one that goes on after its process has ended, however it did."""

import os
import socket
import sqlite3
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from slipstream.rollout.control.core import GroupCounts, Loss
from slipstream.rollout.control.versions import Restart
from slipstream.rollout.ledger.database import LedgerError, explained, open_for_writing
from slipstream.rollout.ledger.records import decode_completion, decode_trajectory
from slipstream.rollout.ledger.writer import SAMPLES, Ledger
from slipstream.rollout.trajectory import UNSAMPLED, Completion, Span, Trajectory

LEDGER = "ledger.sqlite"
"""In the run folder."""


@dataclass(frozen=True)
class PartialAnswer:
    """What is left of one request of an episode; versions as of the present epoch."""

    asked: bytes
    """Digest of its input."""
    answer: Completion
    done: bool


@dataclass
class OpenGroup:
    """A group that has not ended, with all that was generated for it; versions as of the present epoch."""

    id: int
    position: int
    is_ready: bool
    trajectories: dict[int, Trajectory] = field(default_factory=dict)
    """Finished and judged, by sample."""
    partials: dict[int, dict[int, PartialAnswer]] = field(default_factory=dict)
    """By sample and call."""

    @property
    def tokens(self) -> int:
        """Sampled ones."""
        partial = (p.answer for calls in self.partials.values() for p in calls.values())
        return sum(t.sampled_length for t in self.trajectories.values()) + sum(len(a.tokens) for a in partial)

    @property
    def oldest_version(self) -> int | None:
        """Of all sampled tokens; None: there is none."""
        found = [t.oldest_version for t in self.trajectories.values() if t.response_length]
        for calls in self.partials.values():
            found += [span.version for partial in calls.values() for span in partial.answer.spans]
        return min(found, default=None)


@dataclass
class Recovered:
    """Where the run stands."""

    restart: Restart
    """This start of the run."""
    step: int
    position: int
    """Prompts drawn from the prompt set so far."""
    counts: GroupCounts
    losses: Counter[Loss]
    open: list[OpenGroup]
    """By id."""


def open_ledger(
    path: Path, *, batch_size: int, n_samples: int, bound: int, restored: int = 0, step: int = 0
) -> tuple[Ledger, Recovered]:
    """The ledger at ``path``, made if it is not there, for a run that starts from version ``restored``.

    ``step``: the training steps that this version has behind it. Trainings of later versions are undone:
    their groups are ready again. Raises LedgerError.
    """
    connection = open_for_writing(path)
    try:
        connection.execute("BEGIN IMMEDIATE")
        restart = _begin_epoch(connection, restored, step, bound)
        settings = {"batch_size": batch_size, "n_samples_per_prompt": n_samples}
        connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", settings.items())
        _undo_trainings(connection, restored)
        recovered = _recover(connection, restart, step)
        with_partials = {key for (key,) in connection.execute("SELECT DISTINCT key FROM partials")}
        connection.execute("COMMIT")
    except (sqlite3.Error, LedgerError) as error:
        connection.close()
        raise error if isinstance(error, LedgerError) else explained(path, error) from error
    return Ledger(connection, path, restart.epoch, n_samples, with_partials), recovered


def restarts(connection: sqlite3.Connection) -> list[Restart]:
    """All starts of the run, in order."""
    rows = connection.execute("SELECT epoch, restored, version FROM epochs ORDER BY epoch")
    return [Restart(*row) for row in rows]


def _begin_epoch(connection: sqlite3.Connection, restored: int, step: int, bound: int) -> Restart:
    """A new epoch, in which the restored weights have a number that was never given before."""
    (last_epoch,) = connection.execute("SELECT max(epoch) FROM epochs").fetchone()
    if last_epoch is None:
        restart = Restart(0, restored, restored)
    else:
        (version,) = connection.execute(
            "SELECT 1 + max((SELECT coalesce(max(version), 0) FROM steps), (SELECT max(version) FROM epochs))"
        ).fetchone()
        restart = Restart(last_epoch + 1, restored, version)
    connection.execute(
        "INSERT INTO epochs VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            restart.epoch,
            restart.restored,
            restart.version,
            step,
            bound,
            datetime.now(UTC).isoformat(timespec="seconds"),
            f"{socket.gethostname()}:{os.getpid()}",
        ),
    )
    return restart


def _undo_trainings(connection: sqlite3.Connection, restored: int) -> None:
    """What only lost weights have learned is to be learned again, if need be from the prompt."""
    connection.execute(
        "UPDATE groups SET state = CASE WHEN EXISTS (SELECT 1 FROM trajectories t "
        f"WHERE t.key >= groups.id * {SAMPLES} AND t.key < (groups.id + 1) * {SAMPLES}) "
        "THEN 'ready' ELSE 'admitted' END, step = NULL WHERE state = 'trained' AND step > ?",
        (restored,),
    )
    connection.execute(
        f"DELETE FROM partials WHERE key / {SAMPLES} NOT IN (SELECT id FROM groups WHERE state = 'admitted')"
    )


def _recover(connection: sqlite3.Connection, restart: Restart, step: int) -> Recovered:
    starts = restarts(connection)
    groups = {
        id_: OpenGroup(id_, position, state == "ready")
        for id_, position, state in connection.execute(
            "SELECT id, position, state FROM groups WHERE state IN ('admitted', 'ready') ORDER BY id"
        )
    }
    for id_, group in groups.items():
        bounds = (id_ * SAMPLES, (id_ + 1) * SAMPLES)
        for key, epoch, payload in connection.execute(
            "SELECT key, epoch, payload FROM trajectories WHERE key >= ? AND key < ?", bounds
        ):
            trajectory = decode_trajectory(payload)
            versions_T = renumber(trajectory.versions_T, epoch, starts)
            group.trajectories[key % SAMPLES] = trajectory.with_versions(versions_T)
        for key, call, epoch, asked, done, payload in connection.execute(
            "SELECT key, call, epoch, input, done, payload FROM partials WHERE key >= ? AND key < ?", bounds
        ):
            answer = _renumbered(decode_completion(payload), epoch, starts)
            calls = group.partials.setdefault(key % SAMPLES, {})
            calls[call] = PartialAnswer(asked, answer, bool(done))
    ended = dict(connection.execute("SELECT state, count(*) FROM groups GROUP BY state"))
    losses = dict(
        connection.execute("SELECT loss, count(*) FROM groups WHERE loss IS NOT NULL GROUP BY loss")
    )
    (position,) = connection.execute("SELECT coalesce(max(position) + 1, 0) FROM groups").fetchone()
    return Recovered(
        restart,
        step,
        position,
        GroupCounts(
            sum(ended.values()), *(ended.get(end, 0) for end in ("trained", "filtered", "expired", "failed"))
        ),
        Counter({Loss(loss): n for loss, n in losses.items()}),
        list(groups.values()),
    )


def _renumbered(answer: Completion, epoch: int, starts: list[Restart]) -> Completion:
    spans: list[Span] = []
    for span in answer.spans:
        version = span.version
        for start in starts:
            if start.epoch > epoch:
                version = start.renumbered(version)
        if spans and spans[-1].version == version:
            spans[-1] = Span(version, spans[-1].start, span.end)
        else:
            spans.append(Span(version, span.start, span.end))
    return Completion(answer.tokens, answer.logprobs, tuple(spans), answer.finish, answer.retractions)


def renumber(versions_T: np.ndarray, epoch: int, restarts: Iterable[Restart]) -> np.ndarray:
    """int32 [T] versions as numbered in ``epoch``, as numbered after all later restarts."""
    for restart in sorted(restarts, key=lambda restart: restart.epoch):
        if restart.epoch > epoch:
            distance_T = np.abs(versions_T.astype(np.int64) - restart.restored)
            versions_T = np.where(versions_T == UNSAMPLED, UNSAMPLED, (restart.version - distance_T)).astype(
                np.int32
            )
    return versions_T
