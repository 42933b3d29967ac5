"""The reward that runs the program in a response, in a sandbox, and compares what it does with cases."""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal, cast, get_args

from slipstream.rollout.reward import code_calls
from slipstream.rollout.reward.code_cases import (
    AssertCase,
    CallCase,
    Case,
    StdioCase,
    cases_of,
    program_in,
    same_output,
)
from slipstream.rollout.sandbox.interface import ExecResult, Sandbox, SandboxFailed
from slipstream.rollout.sandbox.open import make_sandbox, sandbox_settings
from slipstream.rollout.tokens.trajectory import Prompt, Trajectory

PROGRAM, CALLS = "solution.py", "code_calls.py"

SHOWN = 500
"""Characters of an output in an error."""

MOST_ROUNDS = 100
"""Runs of a program for one case: as many as its statements give results to the program in a chain."""

MOST_KEPT = 1000
"""Statements whose first uses of a program are kept, for the other responses to the prompt."""

Counting = Literal["all", "share"]

Operation = list[object]
"""A use of the program, see ``code_calls``."""

_CALLS = Path(code_calls.__file__).read_bytes()


class CodeTests:
    """Runs the Python program in a response, its last fenced block, in a new sandbox for each case.

    A case is an input with the output that is expected for it, a call of a function with the value that is
    expected of it, or a text of assert statements. Cases are in the label, or in ``column``:
    ``rollout.reward.code_cases`` has the forms.

    The reward is 1.0 if all cases pass and 0.0 otherwise, or the share that passes. A response without such a
    block gets 0.0. A program fails a case by a wrong output, an error, or a limit of the sandbox. Where the
    sandbox does not work, or the prompt has no cases, judging has failed.

    What is expected never gets near the program. Assert statements run in a sandbox of their own: the program
    only gets the calls that they make, and only plain data comes back (``code_calls``).
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
        self._first_uses: dict[str, list[Operation]] = {}
        """First operations of each text of statements. They depend on no outcome, and so on no program."""
        self._python_runs = False
        """The command has run in a sandbox once. Until then a program that cannot be run says nothing."""

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ValueError for a prompt without cases."""
        cases_of(prompt, self._column)

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        """Return the reward. Raises SandboxFailed, and ValueError for a prompt without cases."""
        cases = cases_of(prompt, self._column)[: self._most_cases]
        program = program_in(response, _names(cases))
        if program is None:
            return 0.0
        passed = 0
        for case in cases:
            if await self._passes(program.encode(errors="replace"), case):
                passed += 1
            elif self.is_accuracy:
                return 0.0
        return passed / len(cases)

    @asynccontextmanager
    async def _sandbox(self, files: Mapping[str, bytes]) -> AsyncGenerator[Sandbox]:
        """Open a new sandbox with files."""
        sandbox = make_sandbox(self._settings)
        try:
            await sandbox.create()
            await self._check_python(sandbox)
            for name, data in files.items():
                await sandbox.upload(name, data)
            yield sandbox
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

    async def _passes(self, program: bytes, case: Case) -> bool:
        match case:
            case StdioCase():
                async with self._sandbox({PROGRAM: program}) as sandbox:
                    stdin = case.stdin.encode(errors="replace")
                    result = await sandbox.exec([self._python, PROGRAM], stdin=stdin)
                return not result.failed and same_output(result.stdout, case.stdout)
            case CallCase():
                arguments = cast("list[object]", code_calls.encoded([case.arguments, {}]))
                call: Operation = ["call", ["function", case.function], arguments]
                return _returns(await self._served(program, [call]), case)
            case AssertCase():
                return await self._statements_pass(program, case)

    async def _statements_pass(self, program: bytes, case: AssertCase) -> bool:
        """Run the statements and the program in turns, until no outcome is missing."""
        operations: list[Operation] = []
        answer = ""
        if (first := self._first_uses.get(case.statements)) is not None:
            operations = first
            if (answer := await self._served(program, operations)) is None:
                return False
        for _ in range(MOST_ROUNDS):
            asked = {
                "statements": case.statements,
                "own": case.uses.own,
                "ops": operations,
                "answer": answer,
            }
            async with self._sandbox({CALLS: _CALLS}) as sandbox:
                result = await self._called(sandbox, ["-S", CALLS, "check"], asked)
            if result.failed:
                if operations:  # what the program has returned takes more than the statements may
                    return False
                raise ValueError(
                    f"the statements do not run: {result.limit or result.stderr.strip()[-SHOWN:]}"
                )
            verdict = cast("dict[str, object]", json.loads(result.stdout))
            if "unsupported" in verdict:
                raise ValueError(f"the statements cannot test a program: {verdict['unsupported']}")
            if "passed" in verdict:
                return verdict["passed"] is True
            is_first = not operations
            operations = cast("list[Operation]", verdict["ops"])
            if is_first:
                if len(self._first_uses) >= MOST_KEPT:
                    self._first_uses.clear()
                self._first_uses[case.statements] = operations
            served = await self._served(program, operations)
            if served is None:
                return False
            answer = served
        return False

    async def _served(self, program: bytes, operations: Sequence[Operation]) -> str | None:
        """Return the outcomes of operations on a program, as it says itself. None: it has failed."""
        async with self._sandbox({PROGRAM: program, CALLS: _CALLS}) as sandbox:
            result = await self._called(sandbox, [CALLS, "serve", PROGRAM], {"ops": operations})
        return None if result.failed else result.stdout

    async def _called(self, sandbox: Sandbox, arguments: Sequence[str], asked: object) -> ExecResult:
        return await sandbox.exec([self._python, *arguments], stdin=json.dumps(asked).encode())


def _names(cases: Sequence[Case]) -> set[str]:
    """Return the names that a program must define."""
    names: set[str] = set()
    for case in cases:
        if isinstance(case, CallCase):
            names.add(case.function)
        elif isinstance(case, AssertCase):
            names.update(case.uses.names)
    return names


def _returns(answer: str | None, case: CallCase) -> bool:
    """True if the outcome of the call, as the program says, is right."""
    try:
        [outcome] = json.loads(answer or "")["outcomes"]
        return case.accepts(outcome["value"])
    except (ValueError, TypeError, LookupError, RecursionError):
        return False
