"""The ledger: acknowledged events are read again, under the right version numbers, exactly once."""

import asyncio
import contextlib
import os
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.rollout.control.core import GroupCounts, Loss, Ticket
from slipstream.rollout.control.versions import Restart, survives
from slipstream.rollout.ledger.database import LedgerBusy, LedgerError, open_for_reading
from slipstream.rollout.ledger.records import (
    CorruptRecord,
    decode_completion,
    decode_trajectory,
    digest,
    encode_completion,
    encode_trajectory,
)
from slipstream.rollout.ledger.recovery import open_ledger, renumber
from slipstream.rollout.trajectory import UNSAMPLED, Completion, Finish, Group, Prompt, Span, Trajectory

BATCH = {"batch_size": 1, "n_samples": 2, "bound": 2}

ASKED, AGAIN = (1, 2, 3), (4, 5)


def trajectory(versions, reward: float | None = 1.0, turns: bool = False) -> Trajectory:
    versions_T = np.array([UNSAMPLED, *versions], np.int32)
    n = len(versions_T)
    return Trajectory(
        np.arange(n) + 7,
        versions_T != UNSAMPLED,
        np.linspace(-3, 0, n).astype(np.float32),
        versions_T,
        Finish.LENGTH,
        3,
        reward,
        tuple((end, end / 3) for end in range(1, n + 1, 3)) if turns else (),
    )


def completion(*spans: tuple[int, int], finish=Finish.STOP) -> Completion:
    """(version, tokens) spans."""
    tiles, start = [], 0
    for version, n in spans:
        tiles.append(Span(version, start, start + n))
        start += n
    return Completion(tuple(range(start)), (-0.5,) * start, tuple(tiles), finish, 1)


def same(a: Trajectory, b: Trajectory) -> bool:
    arrays = ("tokens_T", "loss_mask_T", "logprobs_T", "versions_T")
    return all(
        getattr(a, x).dtype == getattr(b, x).dtype and np.array_equal(getattr(a, x), getattr(b, x))
        for x in arrays
    ) and all(getattr(a, x) == getattr(b, x) for x in ("finish", "retractions", "reward", "turn_rewards"))


# ---- records


@given(
    st.lists(st.sampled_from([UNSAMPLED, -3, 0, 1, 2]), max_size=40),
    st.none() | st.floats(allow_nan=False),
    st.integers(-4, 3),
    st.booleans(),
)
def test_a_trajectory_comes_back_as_it_was(versions, reward, oldest, turns):
    written = trajectory(versions, reward, turns).masked_before(oldest)
    assert same(decode_trajectory(encode_trajectory(written)), written)


def test_a_trajectory_written_before_there_were_rewards_of_turns_can_be_read():
    written = trajectory([0, 1])
    *before, turn_rewards = msgspec.msgpack.decode(encode_trajectory(written))
    assert turn_rewards == []
    assert same(decode_trajectory(msgspec.msgpack.encode(before)), written)


@given(st.lists(st.tuples(st.integers(-5, 50), st.integers(1, 5)), max_size=8))
def test_a_completion_comes_back_as_it_was(spans):
    written = completion(*spans)
    assert decode_completion(encode_completion(written)) == written


@pytest.mark.parametrize("data", [b"", b"\x93", b"nonsense", encode_completion(completion((0, 1)))])
def test_other_bytes_are_no_trajectory(data):
    with pytest.raises(CorruptRecord):
        decode_trajectory(data)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_bytes_are_refused_or_read_but_never_crash(data):
    encoded = bytearray(encode_trajectory(trajectory([0, 0, 1])))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptRecord):
        decode_trajectory(bytes(encoded))


# ---- version numbers over restarts


def test_tokens_keep_their_distance_from_the_restored_weights():
    restart = Restart(1, restored=4, version=7)
    versions = np.array([UNSAMPLED, 2, 4, 5, 6], np.int32)
    assert renumber(versions, 0, [Restart(0, 0, 0), restart]).tolist() == [UNSAMPLED, 5, 7, 6, 5]
    assert renumber(versions, 1, [restart]).tolist() == versions.tolist()


def test_several_restarts_add_up():
    starts = [Restart(0, 0, 0), Restart(1, 4, 7), Restart(2, 8, 10)]
    # 6 is two updates beyond 4 = 7, and 8 is one update beyond 7 on the other side: three.
    assert renumber(np.array([6], np.int32), 0, starts).tolist() == [10 - 3]


def test_what_a_restart_went_back_behind_does_not_survive():
    starts = [Restart(0, 0, 0), Restart(1, 4, 7), Restart(2, 7, 9)]
    assert [survives(v, 0, starts) for v in (3, 4, 5, 6)] == [True, True, False, False]
    assert [survives(v, 1, starts) for v in (7, 8)] == [True, False]


# ---- the file


def in_ledger(path: Path, act, **state):
    """Open, run ``act`` on the ledger, flush, close. Return what opening recovered."""
    ledger, recovered = open_ledger(path, **BATCH, **state)

    async def run():
        await act(ledger)
        await ledger.flushed()

    try:
        asyncio.run(run())
    finally:
        ledger.close()
    return recovered


async def nothing(ledger):
    pass


def ready_group(ledger, id_: int, versions, version: int = 0) -> Group:
    group = Group(id_, Prompt(0, "?"), version, (trajectory(versions), trajectory(versions)))
    ledger.admitted(Ticket(id_, version), id_)
    for sample, each in enumerate(group.trajectories):
        ledger.trajectory(id_, sample, each)
    ledger.ready(group)
    return group


def test_every_kind_of_group_is_found_again(tmp_path):
    path = tmp_path / "ledger.sqlite"

    async def act(ledger):
        for id_ in range(7):
            ledger.admitted(Ticket(id_, 0), id_ + 10)
        ledger.partial(1, 0, 0, ASKED, completion((0, 3)), done=False)
        ledger.partial(1, 1, 0, ASKED, completion((0, 2)), done=True)
        ledger.partial(1, 1, 1, AGAIN, completion((0, 1)), done=False)
        await ledger.flushed()
        ledger.partial(1, 0, 0, ASKED, completion((0, 5)), done=False)
        ledger.trajectory(2, 0, trajectory([0]))
        ledger.lost(3, Loss.FILTERED, [trajectory([0])])
        ledger.lost(4, Loss.FAILED)
        ledger.trajectory(5, 0, trajectory([0]))
        ledger.lost(5, Loss.STALE, [trajectory([0])])

    in_ledger(path, act)
    recovered = in_ledger(path, nothing)
    assert recovered.restart == Restart(1, 0, 1)
    assert (recovered.position, recovered.step) == (17, 0)
    assert recovered.counts == GroupCounts(7, 0, 1, 1, 1)
    assert recovered.losses == {Loss.FILTERED: 1, Loss.FAILED: 1, Loss.STALE: 1}
    assert [group.id for group in recovered.open] == [0, 1, 2, 6]
    _, partial, half, _ = recovered.open
    assert len(partial.partials[0][0].completion.tokens) == 5
    assert partial.partials[1][0].done
    assert partial.partials[1][1].input_digest == digest(AGAIN)
    assert partial.tokens == 8
    assert [span.version for span in partial.partials[0][0].completion.spans] == [1], "0 is served as 1 now"
    assert half.trajectories[0].versions_T.tolist() == [UNSAMPLED, 1]
    assert half.position == 12


def test_a_finished_trajectory_replaces_its_completions(tmp_path):
    path = tmp_path / "ledger.sqlite"

    async def act(ledger):
        ledger.admitted(Ticket(0, 0), 0)
        ledger.partial(0, 0, 0, (), completion((0, 3)), done=True)
        ledger.trajectory(0, 0, trajectory([0]))
        ledger.partial(0, 1, 0, (), completion((0, 3)), done=True)

    in_ledger(path, act)
    [group] = in_ledger(path, nothing).open
    assert list(group.trajectories) == [0]
    assert list(group.partials) == [1]


def test_trainings_after_the_restored_version_are_undone(tmp_path):
    path = tmp_path / "ledger.sqlite"

    async def train_four(ledger):
        groups = [ready_group(ledger, id_, [id_], id_) for id_ in range(4)]
        for version, group in enumerate(groups, start=1):
            ledger.step_begins(version, version)
            ledger.published(version, [group])
        ledger.step_begins(5, 5)

    in_ledger(path, train_four)
    recovered = in_ledger(path, nothing, restored=2, step=2)
    assert recovered.restart == Restart(1, 2, 6), "5 was begun: an engine may have had it"
    assert recovered.counts.trained == 2
    assert [(group.id, group.is_ready, group.oldest_version) for group in recovered.open] == [
        (2, True, 6),
        (3, True, 5),
    ]
    # And the ledger can tell which trainings are in the weights.
    again = in_ledger(path, nothing, restored=2, step=2)
    assert again.restart == Restart(2, 2, 7)
    assert again.counts.trained == 2


def test_released_trajectories_are_gone_and_their_groups_start_from_the_prompt(tmp_path):
    path = tmp_path / "ledger.sqlite"

    async def act(ledger):
        for version in (1, 2):
            group = ready_group(ledger, version - 1, [version - 1], version - 1)
            ledger.step_begins(version, version)
            ledger.published(version, [group])
        await ledger.flushed()
        ledger.release(1)

    in_ledger(path, act)
    recovered = in_ledger(path, nothing)
    assert [(g.id, g.is_ready, len(g.trajectories)) for g in recovered.open] == [(0, False, 0), (1, True, 2)]


def test_a_group_that_starts_again_forgets_what_it_had(tmp_path):
    path = tmp_path / "ledger.sqlite"

    async def act(ledger):
        ready_group(ledger, 0, [0])
        ledger.partial(0, 1, 3, (), completion((0, 3)), done=True)
        await ledger.flushed()
        ledger.discarded(0, 2)
        await ledger.flushed()
        ledger.admitted(Ticket(0, 5), 0)

    in_ledger(path, act)
    [group] = in_ledger(path, nothing).open
    assert (group.is_ready, group.trajectories, group.partials) == (False, {}, {})
    connection = open_for_reading(path)
    assert connection.execute("SELECT group_id, epoch, tokens FROM discards").fetchall() == [(0, 0, 2)]


def test_a_training_is_recorded_with_its_lag_and_what_was_masked(tmp_path):
    path = tmp_path / "ledger.sqlite"

    async def act(ledger):
        group = ready_group(ledger, 0, [0, 1, 3])
        masked = tuple(each.masked_before(1) for each in group.trajectories)
        ledger.step_begins(4, 1)
        ledger.published(4, [Group(0, group.prompt, 0, masked)])

    in_ledger(path, act)
    row = open_for_reading(path).execute("SELECT * FROM trainings").fetchone()
    assert row == (4, 0, 2, 4, 2)


def test_a_second_process_is_refused_while_the_first_one_runs(tmp_path):
    path = tmp_path / "ledger.sqlite"
    ledger, _ = open_ledger(path, **BATCH)
    try:
        for opener in (lambda: open_ledger(path, **BATCH), lambda: open_for_reading(path)):
            with pytest.raises(LedgerBusy, match="another process is running this run"):
                opener()
    finally:
        ledger.close()
    open_for_reading(path).close()


def test_the_ledger_of_an_archived_run_can_be_read_where_nothing_can_be_written(tmp_path, monkeypatch):
    in_ledger(tmp_path / "ledger.sqlite", nothing)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    before = sorted(tmp_path.iterdir())
    assert open_for_reading(tmp_path / "ledger.sqlite").execute("SELECT * FROM groups").fetchall() == []
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_that_is_no_ledger_is_refused(tmp_path):
    (tmp_path / "ledger.sqlite").write_bytes(b"something else" * 100)
    with pytest.raises(LedgerError, match="not a database: the file is damaged"):
        open_ledger(tmp_path / "ledger.sqlite", **BATCH)
    with pytest.raises(LedgerError, match="does not exist"):
        open_for_reading(tmp_path / "none.sqlite")
    sqlite3.connect(tmp_path / "other.sqlite").execute("CREATE TABLE meta (key, value)").connection.commit()
    with pytest.raises(LedgerError, match="has the format none"):
        open_ledger(tmp_path / "other.sqlite", **BATCH)


def test_a_read_only_folder_is_refused_with_the_reason(tmp_path):
    with pytest.raises(LedgerError, match="cannot be written to"):
        open_ledger(tmp_path / "missing" / "ledger.sqlite", **BATCH)


def test_a_full_disk_ends_in_an_error_and_an_intact_ledger(tmp_path):
    """A child process may write files of 1 MiB only; SQLite takes that as a full disk."""
    path = tmp_path / "ledger.sqlite"
    program = textwrap.dedent(
        f"""
        import asyncio, resource, signal
        from pathlib import Path
        from tests.unit.test_ledger import BATCH, completion, open_ledger, ready_group
        from slipstream.rollout.ledger.database import LedgerError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

        async def main():
            ledger, _ = open_ledger(Path({str(path)!r}), **BATCH)
            for id_ in range(10**6):
                ready_group(ledger, id_, [0] * 5000)
                await ledger.flushed()
                print(id_, flush=True)

        try:
            asyncio.run(main())
        except LedgerError as error:
            print(error)
        """
    )
    root = str(Path(__file__).parents[2])
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=root
    )
    *acknowledged, error = output.stdout.splitlines() or [output.stderr]
    assert "make room" in error, output
    recovered = in_ledger(path, nothing)
    assert [group.id for group in recovered.open][: len(acknowledged)] == list(range(len(acknowledged)))
    assert all(group.is_ready and len(group.trajectories) == 2 for group in recovered.open)


@pytest.mark.parametrize("seed", range(3))
def test_what_was_acknowledged_survives_kill_9(tmp_path, seed):
    path = tmp_path / "ledger.sqlite"
    program = textwrap.dedent(
        f"""
        import asyncio
        from pathlib import Path
        from tests.unit.test_ledger import BATCH, completion, open_ledger, ready_group

        async def main():
            ledger, _ = open_ledger(Path({str(path)!r}), **BATCH)
            for id_ in range(10**6):
                ready_group(ledger, id_, [0] * 50)
                ledger.partial(id_, 1, 1, (), completion((0, 9)), done=False)
                if id_ % 3 == 0:
                    await ledger.flushed()
                    print(id_, flush=True)

        asyncio.run(main())
        """
    )
    root = str(Path(__file__).parents[2])
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=root)
    lines = 20 + seed * 37
    last = [child.stdout.readline() for _ in range(lines)][-1]
    os.kill(child.pid, 9)
    last = (child.stdout.read().splitlines() or [last])[-1]
    child.wait()
    recovered = in_ledger(path, nothing)
    ids = [group.id for group in recovered.open]
    assert ids == list(range(len(ids))), "a prefix of what was given"
    assert len(ids) > int(last), "with everything that was acknowledged"
    assert all(group.is_ready and len(group.trajectories) == 2 for group in recovered.open)


def test_a_failed_ledger_refuses_further_events(tmp_path):
    ledger, _ = open_ledger(tmp_path / "ledger.sqlite", **BATCH)
    ledger.close()
    with pytest.raises(LedgerError, match="is closed"):
        ledger.admitted(Ticket(0, 0), 0)


def test_digests_tell_inputs_apart():
    assert digest([1, 2]) == digest((1, 2))
    assert len({digest(ids) for ids in ([], [1], [1, 2], [2, 1], [258])}) == 5
