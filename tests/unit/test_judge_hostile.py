"""Rewards that do what user code does: the others are judged, the culprit is named, and nothing stays behind.

Every test uses real processes. ``judging`` checks after each pool that no process, no temporary file and no
shared memory is left.
"""

import asyncio
import re
from pathlib import Path

import pytest

from slipstream.rollout.reward.judge import judge_process, seat
from slipstream.rollout.reward.judge.judge_pool import JudgingFailed
from slipstream.rollout.system import child
from tests.unit.judge_rewards import NUMBERS
from tests.unit.judging import HANGS_S, TIMEOUT_S, Judging, score


@pytest.fixture
def judging(tmp_path, monkeypatch) -> Judging:
    return Judging(tmp_path, monkeypatch)


def assert_only_culprits_failed(answers, responses, expected: dict[str, str]) -> None:
    """Numbers are judged as themselves; a culprit's error names its prompt, its cause and its function."""
    for number, (response, answer) in enumerate(zip(responses, answers, strict=True)):
        if response not in expected:
            assert answer == float(response), f"{response}: {answer}"
            continue
        text = str(answer)
        assert isinstance(answer, JudgingFailed), f"{response}: {answer!r}"
        assert "tests.unit.judge_rewards." in text and f"prompt {number} " in text
        assert re.search(expected[response], text), text


TOO_LONG = r"took longer than 3 s \(rollout\.judging\.timeout_s\)"

ENDS_ITS_PROCESS = {
    "sleeps": rf"{TOO_LONG}(.|\n)*in sleeps",
    "spins_in_python": rf"{TOO_LONG}(.|\n)*in spins_in_python",
    "spins_in_c": rf"{TOO_LONG}(.|\n)*in spins_in_c",
    "exits": "exit code 3",
    "crashes": r"SIGSEGV(.|\n)*in crashes",
    "aborts": r"SIGABRT(.|\n)*in aborts",
    "kills_itself": "SIGKILL; the kernel kills so when memory runs out",
    "kills_its_keeper": "keeper of its judge process has ended, perhaps killed by the reward",
}
"""Rewards that end their process, and what their errors say."""


def limit_of(expected: str) -> float:
    """Return the time limit for a culprit whose error is ``expected``."""
    return HANGS_S if TOO_LONG in expected or "watchdog" in expected else TIMEOUT_S


@pytest.mark.parametrize("culprit", ENDS_ITS_PROCESS)
def test_a_reward_that_ends_its_process_harms_only_itself(judging, culprit):
    responses = ["1", "2", culprit, "3", "4"]
    answers = judging.ask(responses, timeout_s=limit_of(ENDS_ITS_PROCESS[culprit]))
    assert_only_culprits_failed(answers, responses, ENDS_ITS_PROCESS)
    assert (judging.status.failed_attempts, judging.status.restarts) == (1, 1)


@pytest.mark.parametrize("culprit", ["spins_in_c", "kills_its_keeper"])
def test_a_question_that_ends_the_process_of_others_harms_only_itself(judging, culprit):
    responses = ["1", "2", culprit, "3", "4"]
    answers = judging.ask(responses, "Overlapping", timeout_s=limit_of(ENDS_ITS_PROCESS[culprit]))
    assert_only_culprits_failed(answers, responses, ENDS_ITS_PROCESS)
    assert judging.status.failed_attempts == 1


@pytest.mark.parametrize("culprit", ["blocks_after_a_while", "crashes"])
def test_a_culprit_that_leaves_a_traceback_is_found_at_once(judging, culprit):
    responses = [str(number) for number in range(16)]
    responses[7] = culprit
    expected = OVERLAPS | ENDS_ITS_PROCESS
    answers = judging.ask(responses, "Overlapping", timeout_s=limit_of(expected[culprit]))
    assert_only_culprits_failed(answers, responses, expected)
    assert (judging.status.failed_attempts, judging.status.restarts) == (1, 2)


def test_culprits_are_found_among_many_that_overlap(judging):
    responses = [str(number) for number in range(32)]
    responses[5], responses[6], responses[23] = "exits", "crashes", "aborts"
    answers = judging.ask(responses, "Overlapping")
    assert_only_culprits_failed(answers, responses, ENDS_ITS_PROCESS)
    assert judging.status.failed_attempts == 3


@pytest.mark.parametrize(
    ("reward", "culprit", "expected"),
    [
        ("Plain", "stops_itself", "the watchdog of its process did not end it"),
        ("Overlapping", "disables_the_watchdog", "the watchdog of its process did not end it"),
        ("Plain", "stops_its_keeper", f"{TOO_LONG}|closed the connection"),
        ("Plain", "closes_every_descriptor", "closed the connection of its judge process"),
        ("Overlapping", "closes_every_descriptor", "closed the connection of its judge process"),
        ("Plain", "writes_into_every_descriptor", "written into the connection of its judge process"),
    ],
)
def test_a_reward_that_fights_its_process_harms_only_itself(judging, monkeypatch, reward, culprit, expected):
    monkeypatch.setattr(judge_process, "GRACE_S", 0.3)
    monkeypatch.setattr(child, "KILL_S", 1.0)
    monkeypatch.setattr(seat, "GRACE_S", 0.3)
    responses = ["1", culprit, "2"]
    answers = judging.ask(responses, reward, timeout_s=limit_of(expected))
    assert_only_culprits_failed(answers, responses, {culprit: expected})
    assert judging.status.failed_attempts == 1


RAISED = {
    "raises": r"LookupError(.|\n)*in raises(.|\n)*a judge is down",
    "leaves_by_sys_exit": r"SystemExit(.|\n)*in leaves_by_sys_exit",
    "interrupts": r"KeyboardInterrupt(.|\n)*in interrupts",
    "raises_cancelled_error": r"CancelledError(.|\n)*in raises_cancelled_error",
    "raises_generator_exit": r"GeneratorExit(.|\n)*in raises_generator_exit",
    "raises_stop_iteration": r"in raises_stop_iteration(.|\n)*StopIteration",
    "raises_a_base_exception": r"Interrupted(.|\n)*in raises_a_base_exception",
    "recurses": r"RecursionError(.|\n)*in recurses",
    "raises_an_error_that_cannot_be_shown": "Unspeakable",
    "raises_an_endless_message": r"characters left out",
    "returns_nothing": r"returned None of type NoneType, expected a finite number",
    "returns_a_text": r"returned '0\.5' of type str, expected a finite number",
    "returns_an_array_of_text": r"returned array\('0\.5'.* of type ndarray, expected a finite number",
    "returns_nan": "returned nan of type float",
    "returns_infinity": "returned inf of type float",
    "returns_more_than_float32": r"returned 1e\+39, expected at most 3\.40282e\+38 \(float32\)",
    "returns_a_complex_number": "returned 1j of type complex",
    "returns_a_complex_scalar": r"returned .*1\+0j.* of type complex64",
    "returns_two_numbers": r"returned array\(\[0\., 0\.\]\) of type ndarray",
    "returns_a_huge_integer": "of type int, expected a finite number",
    "returns_an_object_that_cannot_be_shown": "of type Unspeakable, expected a finite number",
}
"""Rewards that raise or return something else than a number, and what their errors say."""


@pytest.mark.parametrize("reward", ["Plain", "Overlapping"])
def test_whatever_a_reward_raises_or_returns_is_a_failed_attempt_of_its_own(judging, reward):
    responses = [response for culprit in RAISED for response in (culprit, "1")]
    answers = judging.ask(responses, reward)
    assert_only_culprits_failed(answers, responses, RAISED)
    assert all(len(str(answer)) < 20_000 for answer in answers)
    assert judging.status.failed_attempts == len(RAISED)
    assert judging.status.restarts == 0


def test_every_kind_of_real_number_is_a_reward(judging):
    answers = judging.ask([f"number {name}" for name in NUMBERS])
    assert dict(zip(NUMBERS, answers, strict=True)) == {name: number for name, (_, number) in NUMBERS.items()}
    assert all(type(answer) is float for answer in answers)


LEAVES_SOMETHING = (
    "waits_in_a_thread_that_never_ends",
    "forks_and_returns_twice",
    "forks_and_raises",
    "forks_a_child_that_lingers",
    "forks_a_daemon",
    "starts_a_program_that_lingers",
    "starts_a_program_with_a_bare_environment",
    "leaves_a_temporary_file",
    "closes_its_output",
)


def test_what_rewards_leave_behind_ends_with_their_pool(judging, monkeypatch):
    monkeypatch.setattr(judge_process, "GRACE_S", 0.5)  # for the thread that never ends
    responses = [response for behaviour in LEAVES_SOMETHING for response in (behaviour, "3")]
    answers = judging.ask(["2", *responses])
    assert answers == [2.0, *[1.0, 3.0] * len(LEAVES_SOMETHING)]
    assert (judging.status.failed_attempts, judging.status.restarts) == (0, 0)


def test_shared_memory_of_a_killed_reward_is_removed(judging):
    name = f"slipstream-test-{judging.mark}"
    [answer] = judging.ask([name], "SharesMemory")
    assert "SIGKILL" in str(answer)
    assert not (Path("/dev/shm") / name).exists()


def test_a_reward_that_leaves_its_directory_leaves_it_for_itself_only(judging, tmp_path, monkeypatch):
    (tmp_path / "label").write_text("0.25")
    monkeypatch.chdir(tmp_path)
    assert judging.ask(["read label", "leaves_its_directory", "read label"]) == [0.25, 1.0, 0.25]


def test_a_reward_that_prints_much_costs_neither_disk_nor_memory(judging):
    assert judging.ask(["1", "prints_much", "2"]) == [1.0, 1.0, 2.0]
    assert sum(log.stat().st_size for log in judging.logs.iterdir()) < 5 << 20


def test_the_end_of_the_output_is_in_the_error_of_a_reward_that_says_nothing_else(judging):
    [answer] = judging.ask(["complains_and_exits"])
    assert "exit code 2" in str(answer) and "the compiler is missing" in str(answer)


@pytest.mark.parametrize("reward", ["Plain", "Overlapping"])
def test_a_leak_is_nobodys_failed_attempt(judging, reward):
    responses = ["leak 64"] * 6 + ["1"] * 6
    assert judging.ask(responses, reward, memory_mb=256, concurrency=1) == [1.0] * 12
    assert judging.status.failed_attempts == 0
    assert judging.status.restarts >= 1


@pytest.mark.parametrize("reward", ["Plain", "Overlapping"])
def test_a_reward_that_needs_too_much_memory_is_told_of_the_limit(judging, reward):
    responses = ["1", "allocates_too_much", "2", "3"]
    answers = judging.ask(responses, reward, memory_mb=512)
    expected = {"allocates_too_much": r"rollout\.judging\.memory_mb(.|\n)*in allocates_too_much"}
    assert_only_culprits_failed(answers, responses, expected)
    assert judging.status.failed_attempts == 1


@pytest.mark.parametrize("reward", ["Plain", "Overlapping"])
def test_a_process_without_file_descriptors_is_replaced(judging, reward):
    responses = ["1", "leaks_descriptors", "2", "3"]
    answers = judging.ask(responses, reward, concurrency=1)
    assert_only_culprits_failed(answers, responses, {"leaks_descriptors": "OSError.*Too many open files"})
    assert (judging.status.failed_attempts, judging.status.restarts) == (1, 1)


# -- Rewards that await


OVERLAPS = {
    "awaits_for_ever": rf"{TOO_LONG}(.|\n)*awaiting at(.|\n)*in awaits_for_ever(.|\n)*in inner_wait",
    "refuses_to_be_cancelled": rf"{TOO_LONG}(.|\n)*in refuses_to_be_cancelled",
    "waits_for_a_thread": rf"{TOO_LONG}(.|\n)*in waits_for_a_thread",
    "exits_in_a_task": r"SystemExit(.|\n)*in leave",
    "cancels_itself": r"CancelledError(.|\n)*in cancels_itself",
    "cancels_everybody": r"CancelledError(.|\n)*in cancels_everybody",
    "blocks_after_a_while": rf"{TOO_LONG}(.|\n)*in blocks_after_a_while",
}


@pytest.mark.parametrize("culprit", OVERLAPS)
def test_a_question_that_misuses_the_event_loop_harms_only_itself(judging, culprit):
    responses = ["1", "2", culprit, "3", "4", "5", "6", "7"]
    answers = judging.ask(responses, "Overlapping", timeout_s=limit_of(OVERLAPS[culprit]))
    assert_only_culprits_failed(answers, responses, OVERLAPS)
    assert judging.status.failed_attempts == 1


@pytest.mark.parametrize("behaviour", ["stops_the_loop", "forks_in_the_loop"])
def test_the_event_loop_outlives_a_question(judging, behaviour):
    assert judging.ask(["2", behaviour, "3"], "Overlapping") == [2.0, 1.0, 3.0]
    assert (judging.status.failed_attempts, judging.status.restarts) == (0, 0)


def test_a_question_may_start_programs(judging):
    assert judging.ask(["2", "runs_a_program"], "Overlapping") == [2.0, 0.5]


@pytest.mark.parametrize("culprit", ["refuses_to_be_cancelled", "waits_for_a_thread"])
def test_a_process_is_replaced_when_something_of_a_question_goes_on(judging, monkeypatch, culprit):
    monkeypatch.setattr(judge_process, "GRACE_S", 0.3)

    async def ask(pool):
        with pytest.raises(JudgingFailed):
            await score(pool, 0, culprit)
        async with asyncio.timeout(60):
            while pool.status().restarts == 0:
                await asyncio.sleep(0.05)
        return await score(pool, 1, "2")

    assert judging.use(judging.pool("Overlapping", timeout_s=HANGS_S), ask) == 2.0
    assert judging.status.failed_attempts == 1


def test_a_culprit_is_asked_as_often_as_any_other(judging):
    responses = ["1", "exits", "2", "3"]
    answers = judging.ask(responses, "Overlapping", attempts=3)
    assert_only_culprits_failed(answers, responses, {"exits": r"attempts 1 to 3: .*exit code 3"})
    assert judging.status.failed_attempts == 3
