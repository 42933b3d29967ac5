"""CodeTests: programs of responses in a real sandbox, and what becomes of one that does not work."""

import asyncio
import re

import pytest

from slipstream.rollout.reward import CodeTests, is_accuracy
from slipstream.rollout.reward.judge.judge_pool import JudgingFailed
from slipstream.rollout.sandbox.interface import ExecResult, SandboxFailed
from slipstream.rollout.tokens.trajectory import Prompt
from tests import reward_hacks
from tests.unit.judging import Judging, trajectory

LIMITS = {"type": "local", "wall_s": 60, "cpu_s": 2, "memory_mb": 128}
SUMS = [{"input": "2 3\n", "output": "5\n"}, {"input": "2 -3", "output": "-1"}]
DOUBLES = ["assert double(2) == 4", "assert double(-1) == -2"]

ADDS = "a, b = map(int, input().split())\nprint(a + b)"
DOUBLE = "def double(x):\n    return 2 * x"


def score(label, program, **args):
    reward = CodeTests(**{"sandbox": LIMITS, "reward": "share"} | args)
    response = f"Here it is:\n```python\n{program}\n```\nDone."
    return asyncio.run(reward.score(Prompt(3, "?", label), response, trajectory()))


@pytest.mark.parametrize(
    ("label", "program", "share"),
    [
        (SUMS, ADDS, 1.0),
        (SUMS, "print(5)", 0.5),
        (SUMS, "print(6)", 0.0),
        (SUMS, "print(5", 0.0),
        (SUMS, "raise SystemExit(1)", 0.0),
        (SUMS, ADDS + "\nraise ValueError", 0.0),
        (SUMS, "import os\nprint(5, flush=True)\nos.kill(os.getpid(), 9)", 0.0),
        (SUMS[:1], "while True: pass", 0.0),
        (SUMS, "print('5' * 10**7)", 0.0),
        (SUMS, "x = bytearray(10**9)\nprint(5)", 0.0),
        (SUMS, "\x00", 0.0),
        (SUMS, "print('\ud800')", 0.0),
        (DOUBLES, DOUBLE, 1.0),
        (DOUBLES, "def double(x): return 4", 0.5),
        (DOUBLES, "", 0.0),
        (DOUBLES, DOUBLE + "\nraise SystemExit(0)", 0.0),
        (DOUBLES, "import os\nos._exit(0)", 0.0),
        (DOUBLES, "import sys\nsys.exit(0)", 0.0),
        (DOUBLES, "def double(x): raise SystemExit(0)", 0.0),
    ],
)
def test_a_program_gets_the_share_of_the_cases_that_it_passes(label, program, share):
    assert score(label, program, sandbox=LIMITS | {"cpu_s": 1}) == share


@pytest.mark.parametrize(("program", "reward"), [(ADDS, 1.0), ("print(5)", 0.0), ("print(6)", 0.0)])
def test_a_program_that_must_pass_all_cases_gets_nothing_for_a_share(program, reward):
    assert score(SUMS, program, reward="all") == reward


CALLS = {"fn_name": "double", "inputs": [[2], [-1]], "outputs": [4, -2]}


@pytest.mark.parametrize(
    ("label", "program", "share"),
    [
        (CALLS, DOUBLE, 1.0),
        (CALLS, "class Solution:\n    def double(self, x):\n        print(x)\n        return 2 * x", 1.0),
        (CALLS, "def double(x):\n    return 4", 0.5),
        (CALLS, "def double(x):\n    return {2: 2 * x}", 0.0),
        (CALLS, "", 0.0),
        ({"fn_name": "pair", "inputs": [[1]], "outputs": [[[1, 1]]]}, "def pair(x):\n    return x, x", 1.0),
        (["assert double(3) == 6.0"], DOUBLE, 1.0),
        (["assert double([1]) == [1, 1]", "assert double('a') == 'b'"], DOUBLE, 0.5),
    ],
)
def test_a_function_is_called_and_its_value_compared_as_data(label, program, share):
    assert score(label, program) == share


@pytest.mark.parametrize("statements", ["import missing_module\nassert f() == 1", "1 / 0\nassert f() == 1"])
def test_statements_that_fail_by_themselves_are_a_failure_and_no_wrong_program(statements):
    with pytest.raises(
        ValueError, match=r"the statements cannot test a program: (ModuleNotFound|ZeroDivision)Error"
    ):
        score([statements], "f = int")


def test_a_function_that_cannot_cross_is_a_failure_and_no_wrong_program():
    with pytest.raises(ValueError, match="given a container with a value that is no plain data"):
        score(["assert double(lambda: 1) == 1"], DOUBLE)


def test_no_hack_is_paid_and_every_right_program_is():
    """``python -m tests.reward_hacks`` tries all."""
    bad, good = list(reward_hacks.hacks()), list(reward_hacks.right())
    assert reward_hacks.kinds() >= 40 and len(good) == 100
    always = ("lists: empties its argument in a forged answer", "maps: StopIteration in the call")
    tried = bad[3::40] + [hack for hack in bad if hack[0] in always]
    paid = asyncio.run(reward_hacks.rewards(tried))
    assert len(paid) >= 8 and set(paid.values()) == {0.0}, paid
    unpaid = asyncio.run(reward_hacks.rewards(good[5::24]))
    assert set(unpaid.values()) == {1.0}, unpaid


def test_a_response_without_a_program_gets_nothing_and_no_sandbox():
    reward = CodeTests(sandbox={"type": "path", "path": "tests.unit.test_reward_code_tests.Broken"})
    assert asyncio.run(reward.score(Prompt(3, "?", SUMS), ADDS, trajectory())) == 0.0


def test_only_the_first_cases_are_run_if_the_recipe_says_so():
    assert score(SUMS, "print(5)", most_cases=1) == 1.0


def test_cases_may_be_in_another_column():
    reward = CodeTests(sandbox=LIMITS, column="tests")
    prompt = Prompt(3, "?", None, {"tests": DOUBLES})
    assert asyncio.run(reward.score(prompt, f"```\n{DOUBLE}\n```", trajectory())) == 1.0


class Broken:
    """A sandbox that does not work from its step ``at`` on."""

    closed = 0

    def __init__(self, at: str = "create") -> None:
        self._at = at

    async def _step(self, name: str) -> None:
        if name == self._at:
            raise SandboxFailed(f"no {name}")

    async def create(self) -> None:
        await self._step("create")

    async def upload(self, path: str, data: bytes) -> None:
        await self._step("upload")

    async def exec(self, command: list[str], *, stdin: bytes = b"") -> ExecResult:
        await self._step("exec")
        return ExecResult(0, "", "", None, 0.0)

    async def close(self) -> None:
        Broken.closed += 1


@pytest.mark.parametrize("step", ["create", "upload", "exec"])
def test_a_sandbox_that_does_not_work_is_a_failure_and_no_wrong_program(step):
    before = Broken.closed
    broken = {"type": "path", "path": "tests.unit.test_reward_code_tests.Broken", "args": {"at": step}}
    with pytest.raises(SandboxFailed, match=f"no {step}"):
        score(SUMS, ADDS, sandbox=broken)
    assert Broken.closed == before + 1


def test_a_python_that_is_not_there_is_a_failure_and_no_wrong_program():
    with pytest.raises(SandboxFailed, match=r"an empty program does not run with 'python9' .*exit code 127"):
        score(SUMS, ADDS, python="python9")


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"reward": "some"}, "reward: found 'some', expected all or share"),
        ({"most_cases": 0}, "most_cases: found 0"),
        ({"sandbox": {"type": "lokal"}}, "sandbox:"),
        ({"sandbox": {"type": "local", "wall": 3}}, "sandbox:"),
        ({"reward": "some", "most_cases": 0}, "(?s)reward: .*most_cases: "),
    ],
)
def test_arguments_are_checked_at_once(args, reason):
    with pytest.raises(ValueError, match=reason):
        CodeTests(**args)


def test_only_the_reward_for_all_cases_is_an_accuracy():
    assert is_accuracy(CodeTests()) and not is_accuracy(CodeTests(reward="share"))


def test_programs_run_side_by_side_in_a_judge_process_and_leave_nothing(tmp_path, monkeypatch):
    judging = Judging(tmp_path, monkeypatch)
    programs = [ADDS, "while True: pass", "print(5)", ADDS]

    async def ask(pool):
        async def about(number, program):
            prompt = Prompt(number, "?", SUMS if number < 3 else None)
            return (await pool.score(prompt, f"```\n{program}\n```", trajectory())).reward

        return await asyncio.gather(*(about(*each) for each in enumerate(programs)), return_exceptions=True)

    args = {"reward": "share", "sandbox": LIMITS | {"cpu_s": 1}}
    *rewards, failed = judging.use(judging.pool_of("slipstream.rollout.reward.CodeTests", args), ask)
    assert rewards == [1.0, 0.0, 0.5]
    assert isinstance(failed, JudgingFailed) and re.search("prompt 3: label.*found NoneType", str(failed))
