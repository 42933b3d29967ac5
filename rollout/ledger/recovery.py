"""Opens the ledger of a run: a new one, or the ledger of a run that goes on after its process has ended."""

import os
import socket
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipstream.rollout.control.core import GroupCounts, Loss
from slipstream.rollout.control.versions import Restart
from slipstream.rollout.ledger.database import LedgerError, explained, open_for_writing
from slipstream.rollout.ledger.records import decode_completion, decode_trajectory
from slipstream.rollout.ledger.writer import SAMPLES, Ledger
from slipstream.rollout.trajectory import UNSAMPLED, Completion, Span, Trajectory

LEDGER = "ledger.sqlite"
"""Name of the ledger's file in the run folder."""


@dataclass(frozen=True)
class StoredCompletion:
    """The completion of one request of an episode, with versions as numbered in the present epoch."""

    input_digest: bytes
    """Digest of the request's token ids (``records.digest``)."""
    completion: Completion
    done: bool
    """True if the completion is whole, False if tokens are missing at its end."""


@dataclass
class OpenGroup:
    """A group that has not ended, with the tokens that it has; versions as numbered in the present epoch."""

    id: int
    position: int
    """Position of its prompt in the endless order of the prompt set."""
    is_ready: bool
    trajectories: dict[int, Trajectory] = field(default_factory=dict[int, Trajectory])
    """Complete and judged episodes, by sample."""
    partials: dict[int, dict[int, StoredCompletion]] = field(
        default_factory=dict[int, dict[int, StoredCompletion]]
    )
    """Completions of the other episodes, by sample and number of the request."""

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        trajectories = sum(trajectory.sampled_length for trajectory in self.trajectories.values())
        stored = (stored for calls in self.partials.values() for stored in calls.values())
        return trajectories + sum(len(each.completion.tokens) for each in stored)

    @property
    def oldest_version(self) -> int | None:
        """Smallest version among the tokens that carry loss or may do so; None if there is no such token."""
        versions = [t.oldest_version for t in self.trajectories.values() if t.response_length]
        for calls in self.partials.values():
            versions += [span.version for stored in calls.values() for span in stored.completion.spans]
        return min(versions, default=None)


@dataclass
class Recovered:
    """The state from which a run goes on."""

    restart: Restart
    """The present start of the run."""
    step: int
    """Training steps behind the restored version."""
    position: int
    """Number of prompts drawn from the prompt set."""
    counts: GroupCounts
    losses: Counter[Loss]
    open: list[OpenGroup]
    """All groups that have not ended, by id."""


def open_ledger(
    path: Path,
    *,
    batch_size: int,
    n_samples: int,
    bound: int,
    restored: int = 0,
    step: int = 0,
    fence: Callable[[], None] = lambda: None,
) -> tuple[Ledger, Recovered]:
    """Open the ledger at ``path`` for a run that starts from version ``restored``; create it if necessary.

    ``step`` is the number of training steps behind this version. Trainings of later versions are undone:
    their groups are ready again. ``fence`` is called before each transaction and raises Fenced when another
    driver has the run (``Lease.check``). Raises LedgerError.
    """
    fence()
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
    return Ledger(connection, path, restart.epoch, n_samples, with_partials, fence), recovered


def restarts(connection: sqlite3.Connection) -> list[Restart]:
    """Return all starts of the run, in order."""
    rows: Iterable[tuple[int, int, int]] = connection.execute(
        "SELECT epoch, restored, version FROM epochs ORDER BY epoch"
    )
    return [Restart(*row) for row in rows]


def _begin_epoch(connection: sqlite3.Connection, restored: int, step: int, bound: int) -> Restart:
    """Begin an epoch, in which the restored weights get a version number that was never used."""
    last_epoch: int | None
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
    """Make groups ready again that were trained after ``restored``, or admitted if their tokens are gone."""
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
    unfinished: Iterable[tuple[int, int, str]] = connection.execute(
        "SELECT id, position, state FROM groups WHERE state IN ('admitted', 'ready') ORDER BY id"
    )
    groups = [OpenGroup(id_, position, state == "ready") for id_, position, state in unfinished]
    for group in groups:
        _read_tokens(connection, group, starts)
    ended = dict(_counts(connection, "SELECT state, count(*) FROM groups GROUP BY state"))
    losses = _counts(connection, "SELECT loss, count(*) FROM groups WHERE loss IS NOT NULL GROUP BY loss")
    position: int
    (position,) = connection.execute("SELECT coalesce(max(position) + 1, 0) FROM groups").fetchone()
    return Recovered(
        restart,
        step,
        position,
        GroupCounts(
            sum(ended.values()), *(ended.get(end, 0) for end in ("trained", "filtered", "expired", "failed"))
        ),
        Counter({Loss(loss): count for loss, count in losses}),
        groups,
    )


def _counts(connection: sqlite3.Connection, query: str) -> list[tuple[str, int]]:
    return connection.execute(query).fetchall()


def _read_tokens(connection: sqlite3.Connection, group: OpenGroup, starts: list[Restart]) -> None:
    """Read the trajectories and completions of a group, and renumber their versions."""
    bounds = (group.id * SAMPLES, (group.id + 1) * SAMPLES)
    trajectories: Iterable[tuple[int, int, bytes]] = connection.execute(
        "SELECT key, epoch, payload FROM trajectories WHERE key >= ? AND key < ?", bounds
    )
    for key, epoch, payload in trajectories:
        trajectory = decode_trajectory(payload)
        versions_T = renumber(trajectory.versions_T, epoch, starts)
        group.trajectories[key % SAMPLES] = trajectory.with_versions(versions_T)
    partials: Iterable[tuple[int, int, int, bytes, int, bytes]] = connection.execute(
        "SELECT key, call, epoch, input, done, payload FROM partials WHERE key >= ? AND key < ?", bounds
    )
    for key, call, epoch, input_digest, done, payload in partials:
        completion = _renumbered(decode_completion(payload), epoch, starts)
        calls = group.partials.setdefault(key % SAMPLES, {})
        calls[call] = StoredCompletion(input_digest, completion, bool(done))


def _renumbered(completion: Completion, epoch: int, starts: list[Restart]) -> Completion:
    """Return a completion of ``epoch`` with its versions as numbered after all later restarts."""
    spans: list[Span] = []
    for span in completion.spans:
        version = span.version
        for start in starts:
            if start.epoch > epoch:
                version = start.renumbered(version)
        if spans and spans[-1].version == version:
            spans[-1] = Span(version, spans[-1].start, span.end)
        else:
            spans.append(Span(version, span.start, span.end))
    return replace(completion, spans=tuple(spans))


def renumber(
    versions_T: npt.NDArray[np.int32], epoch: int, restarts: Iterable[Restart]
) -> npt.NDArray[np.int32]:
    """Return int32 [T] versions of ``epoch`` as numbered after all later restarts."""
    for restart in sorted(restarts, key=lambda restart: restart.epoch):
        if restart.epoch > epoch:
            distance_T = np.abs(versions_T.astype(np.int64) - restart.restored)
            versions_T = np.where(versions_T == UNSAMPLED, UNSAMPLED, (restart.version - distance_T)).astype(
                np.int32
            )
    return versions_T
