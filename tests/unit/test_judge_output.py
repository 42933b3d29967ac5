"""The log of a judge: whatever is printed, its size and rate are bounded and its newest text is kept."""

from pathlib import Path

import pytest

from slipstream.rollout.system.bounded_log import BURST, LARGEST_FILE, RATE, TAIL, BoundedLog
from tests.unit.test_monitor_progress import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "judge.log"


def test_a_little_output_is_written_as_it_is(path, clock):
    log = BoundedLog(str(path), clock)
    log.write(b"a line\n")
    log.write(b"another\n")
    log.close()
    assert path.read_bytes() == b"a line\nanother\n"
    assert log.tail == b"a line\nanother\n"


def test_a_flood_is_dropped_but_for_its_beginning_and_its_end(path, clock):
    log = BoundedLog(str(path), clock)
    for number in range(1000):
        log.write(b"%09d\n" % number * 6554)
    log.close()
    written = path.read_bytes()
    assert written.startswith(b"000000000\n") and written.endswith(b"000000999\n")
    dropped = 1000 * 65540 - BURST - TAIL
    assert b"\n[... %d bytes dropped ...]\n" % dropped in written
    assert len(written) < BURST + TAIL + 100
    assert log.tail == written[-TAIL:]


def test_a_reward_that_prints_for_hours_is_logged_at_a_rate(path, clock):
    log = BoundedLog(str(path), clock)
    written = 0
    for _ in range(10_000):
        clock.now += 1
        before = path.stat().st_size if path.exists() else 0
        log.write(b"x" * (2 * RATE))
        after = path.stat().st_size
        written += after - before if after >= before else after
    assert written <= BURST + 10_000 * RATE * 1.01
    assert path.stat().st_size <= LARGEST_FILE
    assert path.with_name("judge.log.1").stat().st_size <= LARGEST_FILE
    assert len(list(path.parent.iterdir())) == 2


def test_output_goes_on_after_a_flood(path, clock):
    log = BoundedLog(str(path), clock)
    log.write(b"x" * (4 * BURST))
    clock.now += 3600
    log.write(b"calm again\n")
    assert path.read_bytes().endswith(b"bytes dropped ...]\ncalm again\n")


def test_processes_that_follow_each_other_share_the_file(path, clock):
    for line in (b"first\n", b"second\n"):
        log = BoundedLog(str(path), clock)
        log.write(line)
        log.close()
    assert path.read_bytes() == b"first\nsecond\n"


def test_a_log_that_cannot_be_written_costs_nothing_else(tmp_path, clock):
    log = BoundedLog(str(tmp_path / "missing" / "judge.log"), clock)
    log.write(b"a line\n")
    log.close()
    assert log.tail == b"a line\n"
