"""What is started again: failures that repeat end a run, those that break now and then do not."""

import pytest

from slipstream.rollout.system.restarts import RestartLimit, Restarts, sameness_of

DAY_S = 86400.0
NO_START = "it did not start: SGLang exited with code"


def limited(allowed: int | None = 3, same: int | None = 2) -> tuple[Restarts, list[float]]:
    """Return restarts, and their clock: its only number."""
    clock = [0.0]
    limit = RestartLimit("rollout.engine.restarts", allowed, DAY_S, "it has not served", same)
    return Restarts(limit, lambda: clock[0]), clock


def raised(error: str, *, file: str = "/a/site-packages/x/y.py", line: int = 7, function: str = "f") -> str:
    """A failure with the traceback of a chain: the first error is the original one."""
    return (
        f"the training step from version {line} failed\n"
        "Traceback (most recent call last):\n"
        f'  File "/home/me/slipstream/backend/trainer/rank.py", line {line}, in train\n'
        "    self._step(batch)\n"
        f'  File "{file}", line {line}, in {function}\n'
        "    raise\n"
        f"{error}\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n"
        f'  File "/somewhere/else.py", line {line}, in g\n'
        f"ValueError: number {line}"
    )


SAME = [
    ("ConnectionError: 127.0.0.1:4711 is gone", "ConnectionError: 10.0.0.7:80 is gone"),
    (
        "torch.OutOfMemoryError: Tried to allocate 20.00 MiB. GPU 0 has 79.10 GiB",
        "torch.OutOfMemoryError: Tried to allocate 1.5 GiB. GPU 3 has 79.10 GiB",
    ),
    ("RuntimeError: <Tensor at 0x7f00aa>", "RuntimeError: <Tensor at 0x7e11bb>"),
    ("OSError: cannot open /tmp/tmpa1b2/model", "OSError: cannot open /tmp/tmpzz/other/model"),
    ("KeyError: '6ba7b810-9dad-11d1-80b4-00c04fd430c8'", "KeyError: '6ba7b811-9dad-11d1-80b4-00c04fd430c8'"),
]


@pytest.mark.parametrize(("one", "other"), SAME, ids=lambda text: text.split(":")[0])
def test_two_failures_for_one_reason_are_the_same_whatever_their_numbers(one: str, other: str):
    assert sameness_of(raised(one, line=3)) == sameness_of(raised(other, line=9))
    assert sameness_of(one) == sameness_of(other)


def test_the_folder_of_an_installation_counts_for_nothing():
    one = raised("ValueError: no", file="/venv/a/lib/python3.12/site-packages/torch/cuda.py")
    assert sameness_of(one) == sameness_of(
        raised("ValueError: no", file="/other/site-packages/torch/cuda.py")
    )


def test_type_message_and_place_tell_failures_apart():
    failures = [
        raised("ValueError: no loss"),
        raised("KeyError: no loss"),
        raised("ValueError: no batch"),
        raised("ValueError: no loss", function="g"),
        raised("ValueError: no loss", file="/a/site-packages/x/z.py"),
        "its server exited with code 1",
        "its server exited with code -9",
        f"{NO_START} 1 while starting; the end of /logs/engine-0.log:\n[12:00] a\nRuntimeError: No memory",
        f"{NO_START} 1 while starting; the end of /logs/engine-0.log:\n[12:00] a\nImportError: no module",
    ]
    assert len({sameness_of(failure) for failure in failures}) == len(failures)


def test_the_end_of_a_log_is_the_same_although_its_times_are_not():
    def start(now: str) -> str:
        return (
            f"{NO_START} 1 while starting; the end of /logs/engine-{now}.log:\n"
            f"[2026-11-27 {now} TP0] Load weight begin. avail mem={now} GB\n"
            f"[2026-11-27 {now} TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
            f'  File "/x/sglang/srt/managers/scheduler.py", line 12, in run\n'
            "    init()\n"
            f"RuntimeError: Not enough memory. avail={now}"
        )

    assert sameness_of(start("06:00:01")) == sameness_of(start("06:05:17"))


def test_the_same_failure_twice_without_progress_ends_the_run_with_the_first_one():
    restarts, _ = limited(allowed=10)
    assert restarts.refused(raised("ValueError: no loss", line=3)) is None
    reason = restarts.refused(raised("ValueError: no loss", line=8))
    assert reason is not None
    assert reason.startswith("has failed twice in the same way, and it has not served in between")
    assert raised("ValueError: no loss", line=3) in reason
    assert restarts.count == 1


def test_progress_forgives_and_so_does_another_failure():
    restarts, _ = limited(allowed=None)
    for _ in range(5):
        assert restarts.refused("ValueError: no loss") is None
        restarts.progressed()
    for number in range(6):
        assert restarts.refused(("KeyError: a", "ValueError: b")[number % 2]) is None
    assert restarts.count == 11


def test_a_run_of_three_weeks_that_loses_an_engine_each_day_goes_on():
    restarts, clock = limited(allowed=3)
    for _ in range(21):
        restarts.progressed()
        assert restarts.refused("its server exited with code -9") is None
        clock[0] += DAY_S
    assert restarts.count == 21


def test_more_failures_within_the_window_than_allowed_end_the_run_and_name_both_settings():
    restarts, clock = limited(allowed=3)
    for _ in range(3):
        assert restarts.refused("it does not answer") is None
        restarts.progressed()
        clock[0] += DAY_S / 4
    assert restarts.refused("it does not answer") == (
        "has failed 4 times within 24 h (run.restart_window_s), and rollout.engine.restarts allows 3 "
        "restarts in that time; the last time: it does not answer"
    )


def test_no_restart_may_be_allowed():
    restarts, _ = limited(allowed=0)
    assert "allows 0 restarts" in (restarts.refused("it does not answer") or "")


def test_equal_failures_of_what_cannot_tell_its_reason_are_counted_like_others():
    restarts, _ = limited(allowed=3, same=None)
    assert [restarts.refused("it has ended with code 1") is None for _ in range(4)] == [True] * 3 + [False]
