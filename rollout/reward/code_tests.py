"""The reward that runs the program in a response, in a sandbox, and compares what it does with cases."""

import secrets
from collections.abc import Mapping
from typing import Literal, get_args

from slipstream.rollout.reward.code_cases import (
    AssertCase,
    Case,
    StdioCase,
    cases_of,
    last_block,
    same_output,
)
from slipstream.rollout.sandbox.interface import Sandbox, SandboxFailed
from slipstream.rollout.sandbox.open import make_sandbox, sandbox_settings
from slipstream.rollout.tokens.trajectory import Prompt, Trajectory

PROGRAM, RUNNER = "solution.py", "runner.py"

SHOWN = 500
"""Characters of an output in an error."""

Counting = Literal["all", "share"]

_RUN_STATEMENTS = f"""\
import sys
word, statements = sys.stdin.read().split("\\n", 1)
names = {{"__name__": "solution"}}
exec(compile(open({PROGRAM!r}).read(), {PROGRAM!r}, "exec"), names)
exec(compile(statements, "case", "exec"), names)
sys.stdout.write("\\n" + word + "\\n")
"""
"""Prints the word of its first line of input after the case: a program that exits before has not passed."""


class CodeTests:
    """Runs the last fenced block of a response, a Python program, in a sandbox, once for each case.

    A case is an input with the output that is expected for it, or a text of assert statements that run after
    the program. Cases are in the label, or in ``column``: ``rollout.reward.code_cases`` has the forms.

    The reward is 1.0 if all cases pass and 0.0 otherwise, or the share that passes. A response without such a
    block gets 0.0. A program fails a case by a wrong output, an error, or a limit of the sandbox. Where the
    sandbox does not work, or the prompt has no cases, judging has failed.

    Assert statements run in the process of the program, which can therefore do with them what it likes; what
    is expected of an input never gets near the program.
    """

    def __init__(
        self,
        reward: Counting = "all",
        sandbox: Mapping[str, object] | None = None,
        column: str = "label",
        most_cases: int | None = None,
        python: str = "python3",
    ) -> None:
        """``sandbox``: a section ``sandbox``; null: a local one with the defaults. ``column``: of the prompt
        set. ``most_cases``: number of cases that are run, from the first; null: all. ``python``: the command.
        """
        problems: list[str] = []
        if reward not in get_args(Counting):
            problems.append(f"reward: found {reward!r}, expected all or share")
        if most_cases is not None and (type(most_cases) is not int or most_cases < 1):
            problems.append(f"most_cases: found {most_cases!r}, expected at least 1, or null")
        try:
            self._settings = sandbox_settings(sandbox)
        except ValueError as error:
            problems.append(f"sandbox: {error}")
        if problems:
            raise ValueError("\n".join(problems))
        self.is_accuracy = reward == "all"
        self._column = column
        self._most_cases = most_cases
        self._python = python
        self._python_runs = False
        """The command has run in a sandbox once. Until then a program that cannot be run says nothing."""

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ValueError for a prompt without cases."""
        cases_of(prompt, self._column)

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        """Return the reward. Raises SandboxFailed, and ValueError for a prompt without cases."""
        cases = cases_of(prompt, self._column)[: self._most_cases]
        program = last_block(response)
        if program is None:
            return 0.0
        sandbox = make_sandbox(self._settings)
        try:
            await sandbox.create()
            await self._check_python(sandbox)
            await sandbox.upload(PROGRAM, program.encode(errors="replace"))
            await sandbox.upload(RUNNER, _RUN_STATEMENTS.encode())
            return await self._share(sandbox, cases)
        finally:
            await sandbox.close()

    async def _check_python(self, sandbox: Sandbox) -> None:
        """Raise SandboxFailed if not even an empty program runs."""
        if self._python_runs:
            return
        result = await sandbox.exec([self._python, "-c", ""])
        if result.failed:
            why = result.limit or f"exit code {result.exit_code}"
            raise SandboxFailed(
                f"an empty program does not run with {self._python!r} (args: python) in the sandbox ({why}): "
                f"{result.stderr.strip()[-SHOWN:]}"
            )
        self._python_runs = True

    async def _share(self, sandbox: Sandbox, cases: list[Case]) -> float:
        """Return the share of the cases that pass; 0 with the first that does not if all have to."""
        passed = 0
        for case in cases:
            if await self._passes(sandbox, case):
                passed += 1
            elif self.is_accuracy:
                return 0.0
        return passed / len(cases)

    async def _passes(self, sandbox: Sandbox, case: Case) -> bool:
        if isinstance(case, StdioCase):
            stdin = case.stdin.encode(errors="replace")
            result = await sandbox.exec([self._python, PROGRAM], stdin=stdin)
            return not result.failed and same_output(result.stdout, case.stdout)
        return await self._statements_pass(sandbox, case)

    async def _statements_pass(self, sandbox: Sandbox, case: AssertCase) -> bool:
        word = secrets.token_hex(16)
        stdin = f"{word}\n{case.statements}".encode(errors="replace")
        result = await sandbox.exec([self._python, RUNNER], stdin=stdin)
        return not result.failed and result.stdout.rstrip().endswith(f"\n{word}")
