"""A judge pool: what a reward may be, what it is given, who waits for whom, how a pool starts and ends."""

import asyncio
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import uvloop

from slipstream.configs.schema import JudgingConfig, PluginConfig
from slipstream.rollout.reward.judge.judge_pool import (
    JudgePool,
    JudgesClosed,
    JudgeStartFailed,
    JudgingFailed,
)
from slipstream.rollout.tokens.trajectory import Prompt
from tests.environment import environment
from tests.unit.judge_rewards import described
from tests.unit.judging import HANGS_S, Judging, score, trajectory


@pytest.fixture
def judging(tmp_path, monkeypatch) -> Judging:
    return Judging(tmp_path, monkeypatch)


# -- What a reward may be, and what it is given


def test_a_reward_is_constructed_with_the_recipes_arguments(judging):
    assert judging.ask(["1", "2"], args={"scale": 2.5}) == [2.5, 5.0]


@pytest.mark.parametrize(("args", "expected"), [({}, [1.0, 0.0]), ({"limit": 7}, [1.0, 1.0])])
def test_a_function_is_a_reward(judging, args, expected):
    assert judging.ask(["short", "longer"], "by_length", args) == expected


def test_a_plain_function_may_return_an_awaitable_or_use_an_event_loop(judging):
    assert judging.ask(["1", "2"], "Wrapped") == [1.0, 2.0]
    assert judging.ask(["uses_an_event_loop", "2", "uses_an_event_loop"]) == [1.0, 2.0, 1.0]


def test_a_reward_is_given_what_was_asked(judging):
    prompt = Prompt(
        7, [{"role": "user", "content": "ä€"}], {"answer": [4, 4.0, None]}, {"level": 1, "raw": b"\0"}
    )

    async def ask(pool):
        with pytest.raises(JudgingFailed) as failed:
            await pool.score(prompt, "ä 😀", trajectory())
        return str(failed.value)

    *_, told = re.findall("<<(.*)>>", judging.use(judging.pool("Echo"), ask))
    assert told == f"{prompt!r} {'ä 😀'!r} {described(trajectory())}"


def test_what_cannot_be_sent_is_named_and_harms_nobody(judging):
    async def ask(pool):
        with pytest.raises(
            JudgingFailed, match=r"prompt 3 or its trajectory cannot be sent to a process: \w+Error"
        ):
            await pool.score(Prompt(3, "2+2?", label={2**70: threading.Lock()}), "1", trajectory())
        return await score(pool, 4, "2")

    assert judging.use(judging.pool(), ask) == 2.0


def test_modules_and_files_are_found_as_in_the_process_that_starts_the_pool(judging, tmp_path, monkeypatch):
    (tmp_path / "reward_of_the_user.py").write_text(
        "from pathlib import Path\n"
        "def score(prompt, response, trajectory):\n"
        "    return float(Path('relative').read_text())\n"
    )
    (tmp_path / "relative").write_text("0.125")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    plugin = PluginConfig(path="reward_of_the_user.score")
    pool = JudgePool(JudgingConfig(), plugin, judging.logs, "test")
    assert judging.use(pool, lambda pool: score(pool, 0, "")) == 0.125


def test_a_judge_loads_neither_the_schema_nor_anything_heavy():
    script = """
        import sys
        from slipstream.rollout.system.programs import keeper
        assert not {"numpy", "asyncio", "msgspec", "multiprocessing"} & set(sys.modules), "the keeper"
        from slipstream.rollout.reward.judge import worker
        from slipstream.rollout import reward
        assert not {"pydantic", "torch", "ray", "aiohttp", "yaml"} & set(sys.modules), "the worker"
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=240, env=environment()
    )


# -- Attempts


def test_only_the_judging_is_tried_again(judging, tmp_path):
    tries = tmp_path / "tries"
    assert judging.ask([f"fail until {tries}"], attempts=3) == [0.75]
    assert tries.read_text() == "xxx"
    assert judging.status.failed_attempts == 2


def test_an_error_has_the_cause_of_every_attempt(judging, tmp_path):
    [answer] = judging.ask([f"fail until {tmp_path / 'tries'}"], attempts=2)
    assert isinstance(answer, JudgingFailed)
    assert "attempts 1 to 2: it raised ConnectionError" in str(answer)
    assert "in fails_until" in str(answer) and "a judge is down" in str(answer)


def test_a_cancelled_error_of_a_reward_cancels_nobody(judging):
    async def ask(pool):
        asking = asyncio.create_task(score(pool, 0, "raises_cancelled_error"))
        await asyncio.wait({asking})
        return asking.cancelled(), type(asking.exception())

    assert judging.use(judging.pool(), ask) == (False, JudgingFailed)


# -- Order, cancellation, state


def test_questions_are_asked_in_the_order_in_which_they_came(judging, tmp_path):
    order = tmp_path / "order"
    judging.ask(["1"] * 40, "Ordered", {"path": str(order)})
    assert order.read_text().split() == [str(number) for number in range(40)]


@pytest.mark.parametrize("reward", ["Plain", "Overlapping"])
def test_every_process_takes_part(judging, tmp_path, reward):
    assert judging.ask([str(n) for n in range(64)], reward, processes=2, concurrency=4) == list(range(64))


def test_overlapping_questions_are_as_many_as_the_recipe_allows(judging):
    async def ask(pool):
        asking = [asyncio.create_task(score(pool, n, "awaits_for_ever")) for n in range(7)]
        await asyncio.sleep(0)
        status = pool.status()
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        return status

    status = judging.use(judging.pool("Overlapping", concurrency=3, processes=2), ask)
    assert (status.running, status.waiting) == (6, 1)
    assert status.oldest_s >= 0


def test_a_caller_that_is_cancelled_frees_the_place_of_its_question(judging):
    async def ask(pool):
        asking = [asyncio.create_task(score(pool, n, "awaits_for_ever")) for n in range(4)]
        await asyncio.sleep(0.05)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        assert all(task.cancelled() for task in asking)
        return await score(pool, 5, "0.5"), pool.status()

    pool = judging.pool("Overlapping", concurrency=2)
    reward, status = judging.use(pool, ask)
    assert reward == 0.5
    assert (status.running, status.waiting, status.failed_attempts, status.restarts) == (0, 0, 0, 0)


def test_a_cancelled_caller_costs_the_others_nothing_when_its_question_ends_the_process(judging):
    async def ask(pool):
        culprit = asyncio.create_task(score(pool, 0, "sleeps"))
        others = [asyncio.create_task(score(pool, n, str(n))) for n in range(1, 4)]
        await asyncio.sleep(0)
        culprit.cancel()
        return await asyncio.gather(*others)

    pool = judging.pool("Overlapping", timeout_s=HANGS_S)  # of the question that ends the process
    assert judging.use(pool, ask) == [1.0, 2.0, 3.0]
    assert judging.status.failed_attempts == 0


def test_time_in_the_queue_does_not_count(judging):
    count = round(1.2 * HANGS_S / 0.1)
    answers = judging.ask(["uses_a_tenth_of_a_second"] * count, timeout_s=HANGS_S)
    assert answers == [1.0] * count
    assert judging.status.failed_attempts == 0


def test_a_pool_works_on_uvloop(judging):
    async def run():
        async with judging.pool("Overlapping") as pool:
            return await asyncio.gather(
                *(score(pool, n, response) for n, response in enumerate(["1", "exits", "2"])),
                return_exceptions=True,
            )

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        first, culprit, second = runner.run(run())
    judging.assert_nothing_is_left()
    assert (first, second) == (1.0, 2.0)
    assert "exit code 3" in str(culprit)


# -- Start


def test_a_pool_that_is_closed_as_soon_as_it_is_open_leaves_nothing(judging):
    async def nothing(pool):
        """Return before the event loop has run any task of the pool."""

    judging.use(judging.pool(), nothing)


@pytest.mark.parametrize(
    ("reward", "args", "expected"),
    [
        ("Missing", {}, "judge_rewards has no 'Missing'"),
        ("NoScore", {}, r"NoScore has no method `score`.*a function NoScore\(prompt, response, trajectory\)"),
        ("Plain", {"scull": 1}, r"cannot be constructed from args \{'scull': 1\}"),
        (
            "RefusesToStart",
            {"how": "raise"},
            r"(?s)in __init__.*ConnectionError: the server of the judge is down",
        ),
        ("RefusesToStart", {"how": "leaves_by_sys_exit"}, "(?s)in leaves_by_sys_exit.*SystemExit: 7"),
        pytest.param(
            "RefusesToStart",
            {"how": "sleeps"},
            r"(?s)took longer than 40 s to start \(rollout.judging.start_timeout_s\).*in sleeps",
            marks=pytest.mark.slow,
        ),
        ("RefusesToStart", {"how": "sleeps"}, r"took longer than 3 s to start \(rollout"),
        ("RefusesToStart", {"how": "exits"}, "exit code 3"),
        ("RefusesToStart", {"how": "crashes"}, "(?s)SIGSEGV.*in crashes"),
        ("RefusesToStart", {"how": threading.Lock}, "its args .* are no plain data"),
    ],
)
def test_a_reward_that_cannot_start_is_an_error_at_the_start(judging, reward, args, expected):
    hanging = re.search(r"longer than (\d+) s", expected)  # in 40 s its imports are over
    limit_s = int(hanging[1]) if hanging else 240
    with pytest.raises(JudgeStartFailed, match=expected) as failed:
        judging.ask(["1"], reward, args, processes=2, start_timeout_s=limit_s)
    assert f"tests.unit.judge_rewards.{reward}" in str(failed.value)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("/no/such/python", "no process can be started: .*No such file"),
        ("/bin/false", "the keeper of its judge process has ended"),
    ],
)
def test_an_interpreter_that_does_not_work_is_an_error_at_the_start(judging, monkeypatch, program, expected):
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(JudgeStartFailed, match=expected):
        judging.ask(["1"])


def test_a_module_that_cannot_be_imported_is_named(judging):
    pool = JudgePool(JudgingConfig(), PluginConfig(path="no.such.module.Reward"), judging.logs, "test")
    with pytest.raises(JudgeStartFailed, match=r"no\.such\.module\.Reward: cannot import no\.such\.module"):
        judging.use(pool, lambda pool: score(pool, 0, "1"))


def test_a_reward_that_cannot_start_again_fails_every_question(judging, tmp_path):
    permit = tmp_path / "permit"
    permit.write_text("")

    async def ask(pool):
        permit.unlink()
        waiting = [asyncio.create_task(score(pool, n, "1")) for n in range(3)]
        await asyncio.wait(waiting)
        errors = [task.exception() for task in waiting]
        with pytest.raises(JudgeStartFailed):
            await score(pool, 3, "1")
        return errors

    errors = judging.use(judging.pool("StartsWhile", {"path": str(permit)}, attempts=2), ask)
    assert all(isinstance(error, JudgeStartFailed) for error in errors)
    assert all("FileNotFoundError" in str(error) for error in errors)


def test_a_reward_that_fails_in_the_same_way_at_each_start_is_started_twice_however_many_attempts_there_are(
    judging, tmp_path
):
    permit, starts = tmp_path / "permit", tmp_path / "starts"
    permit.write_text("")

    async def ask(pool):
        permit.unlink()
        return await score(pool, 0, "1")

    pool = judging.pool("StartsWhile", {"path": str(permit), "starts": str(starts)}, attempts=20)
    with pytest.raises(JudgeStartFailed, match=r"(?s)failed twice in the same way.*FileNotFoundError"):
        judging.use(pool, ask)
    assert len(starts.read_text()) == 3, "the one that the pool was opened with, and two more"


def test_a_reward_that_ends_its_process_while_it_is_idle_is_not_started_for_ever(judging):
    async def ask_now_and_then(pool):
        while True:
            await asyncio.sleep(1)
            await score(pool, 0, "1")

    # On a slow machine it ends before it is ready.
    reason = r"(ends its process while it is asked nothing|cannot be started).*exit code 5"
    with pytest.raises(JudgeStartFailed, match=reason):
        judging.use(judging.pool("EndsWhenIdle", attempts=2), ask_now_and_then)


# -- End


def test_open_questions_end_with_the_pool(judging):
    async def run():
        async with judging.pool("Overlapping") as pool:
            asking = [asyncio.create_task(score(pool, n, "awaits_for_ever")) for n in range(3)]
            await asyncio.sleep(0)
        await asyncio.wait(asking)
        with pytest.raises(JudgesClosed):
            await score(pool, 3, "1")
        return [task.exception() for task in asking]

    assert all(isinstance(error, JudgesClosed) for error in asyncio.run(run()))
    judging.assert_nothing_is_left()


@pytest.mark.parametrize("culprit", ["sleeps", "spins_in_c", "disables_the_watchdog"])
def test_a_pool_ends_at_once_although_a_reward_does_not(judging, culprit):
    async def run():
        async with judging.pool(timeout_s=600) as pool:
            asking = asyncio.create_task(score(pool, 0, culprit))
            await asyncio.sleep(0.05)
            async with asyncio.timeout(60):
                await pool.__aexit__(None, None, None)
        await asyncio.wait({asking})

    asyncio.run(run())
    judging.assert_nothing_is_left()


def test_a_start_that_is_cancelled_leaves_nothing(judging):
    async def run():
        pool = judging.pool("RefusesToStart", {"how": "sleeps"})
        opening = asyncio.create_task(pool.__aenter__())
        await asyncio.sleep(0.2)
        opening.cancel()
        await asyncio.wait({opening})
        assert opening.cancelled()

    asyncio.run(run())
    judging.assert_nothing_is_left()


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended, whoever is its parent."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], 60)[0], f"process {pid} goes on"
    finally:
        os.close(descriptor)


def killed_owner(judging: Judging, pids: Path) -> list[int]:
    """Kill a process with a pool that judges. Return its keeper, its judge and a daemon of the reward."""
    script = f"""
        import asyncio
        from pathlib import Path
        from tests.unit.judging import score
        from slipstream.configs.schema import JudgingConfig, PluginConfig
        from slipstream.rollout.reward.judge.judge_pool import JudgePool

        async def main():
            plugin = PluginConfig(path="tests.unit.judge_rewards.Lingers")
            async with JudgePool(JudgingConfig(), plugin, Path({str(judging.logs)!r}), "test") as pool:
                await score(pool, 0, {str(pids)!r})

        asyncio.run(main())
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment(TMPDIR=str(judging.temporary))
    )
    try:
        deadline = time.monotonic() + 60
        while not pids.exists() or len(pids.read_text().split()) < 3:
            assert owner.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    return [int(pid) for pid in pids.read_text().split()]


def test_everything_ends_when_the_process_of_the_pool_is_killed(judging, tmp_path):
    for pid in killed_owner(judging, tmp_path / "pids"):
        wait_for_end(pid)
    judging.assert_nothing_is_left()


def test_the_next_pool_removes_the_temporary_files_of_a_keeper_that_was_killed_too(judging, tmp_path):
    for pid in killed_owner(judging, tmp_path / "pids"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
    (judging.temporary / "slipstream.judge.orphaned").mkdir()  # the keeper may have had the time for its own
    assert judging.ask(["1"]) == [1.0]


def test_a_pool_outlives_the_thread_that_has_opened_it(judging):
    loop = asyncio.new_event_loop()
    pool = judging.pool()
    opening = threading.Thread(target=lambda: loop.run_until_complete(pool.__aenter__()))
    opening.start()
    opening.join()
    assert loop.run_until_complete(score(pool, 0, "0.5")) == 0.5
    assert pool.status().restarts == 0
    loop.run_until_complete(pool.__aexit__(None, None, None))
    loop.close()
    judging.assert_nothing_is_left()


def test_logs_are_named_after_the_pool(judging):
    judging.ask(["1"], processes=2)
    assert sorted(path.name for path in judging.logs.iterdir()) == ["judge-test-0.log", "judge-test-1.log"]


def test_the_log_has_what_a_reward_prints(judging):
    judging.ask(["1", "says_hello", "2"])
    assert "hello from a reward" in (judging.logs / "judge-test-0.log").read_text()
