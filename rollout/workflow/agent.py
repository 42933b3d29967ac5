"""The workflow of a foreign agent: code that talks to the policy as to any provider.

    run ──► base_url, api_key ──► agent ──requests──► endpoint ──► engines
                                    └──reward, or none             └──turns──► trajectories

An ``async def`` runs on the collector's event loop, as a workflow does. A plain function may block: it runs
in a process of its own, as a command does. Such a process ends with everything that it has started at the end
of the attempt, whatever that is.
"""

import inspect
import json
import os
import shlex
import tempfile
import weakref
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import cast

from slipstream.rollout.system.plugins import PluginError, resolve
from slipstream.rollout.system.programs.program import ProgramEnd, run_program
from slipstream.rollout.system.programs.start import python_calling
from slipstream.rollout.system.temporary import OwnedFolder
from slipstream.rollout.tokens.trajectory import Prompt
from slipstream.rollout.workflow.agent_episodes import (
    AgentEpisodes,
    AgentFailed,
    program_variables,
    wrong_limits,
)
from slipstream.rollout.workflow.endpoint import OpenEndpoint
from slipstream.rollout.workflow.limited import OnLimit

Run = Callable[[str, str, object, dict[str, object]], object]
"""``run(base_url, api_key, prompt, metadata)``, which returns a number, a mapping or None, or awaits it."""


class Agent(AgentEpisodes):
    """Runs an agent for each episode, and trains what the policy has answered it.

        workflow:
          path: slipstream.rollout.workflow.Agent
          args: {run: my_package.agents.solve, max_turns: 20}

    The agent is given the endpoint's ``base_url`` and a key of this attempt. It returns what a reward returns
    (a number, or a mapping of numbers), or None, so that the recipe's reward judges the episode.
    """

    def __init__(
        self,
        *,
        run: str | None = None,
        command: Sequence[str] | None = None,
        max_turns: int | None = None,
        max_tokens: int | None = None,
        on_limit: OnLimit = "train",
    ) -> None:
        """Take the agent from either ``run``, the import path of a function, or ``command``, a program.

        ``max_turns``, ``max_tokens``: completions and sampled tokens of an episode, after which requests are
        refused. ``on_limit``: treatment of an episode that such a limit, or the length of the context, has
        stopped. Raises PluginError, with all that is wrong.
        """
        wrong = [*_wrong_agent(run, command), *wrong_limits(max_turns, max_tokens, on_limit)]
        function = None
        if run is not None and not wrong:
            function = cast(Run, resolve(run))
            wrong += _wrong_function(run, function)
        if wrong:
            raise PluginError(f"slipstream.rollout.workflow.Agent: {'; '.join(wrong)}")
        super().__init__(max_turns=max_turns, max_tokens=max_tokens, on_limit=on_limit)
        self._run = function if function is not None and _is_async(function) else None
        self._command = (
            python_calling("slipstream.rollout.system.programs.call.call", run)
            if run is not None
            else tuple(command or ())
        )
        self._is_command = command is not None
        self._name = (
            f"the agent {run}" if run is not None else f"the agent command {shlex.join(self._command)}"
        )
        self._prompts = OwnedFolder(Path(tempfile.gettempdir()), "prompts")
        weakref.finalize(self, self._prompts.remove)

    async def result(self, endpoint: OpenEndpoint, prompt: Prompt) -> object:
        """Run the agent. Raises AgentFailed, and what the agent raises."""
        base_url, metadata = (
            f"{endpoint.base_url}/v1",
            {**prompt.metadata, **({} if prompt.label is None else {"label": prompt.label})},
        )
        if self._run is not None:
            running = cast(
                "Awaitable[object]", self._run(base_url, endpoint.api_key, prompt.prompt, metadata)
            )
            return await running
        if self._is_command:
            given = json.dumps({"prompt": prompt.prompt, "metadata": metadata})
            return _last_json(await self._program(endpoint, given))
        given = json.dumps([base_url, endpoint.api_key, prompt.prompt, metadata])
        return _last_json(await self._program(endpoint, given))

    async def _program(self, endpoint: OpenEndpoint, given: str) -> ProgramEnd:
        """Run the program of an episode. Raises AgentFailed."""
        fd, path = tempfile.mkstemp(suffix=".json", dir=self._prompts.path)
        try:
            with os.fdopen(fd, "w") as file:
                file.write(given)
            variables = program_variables(endpoint) | {
                "OPENAI_BASE_URL": f"{endpoint.base_url}/v1",
                "OPENAI_API_KEY": endpoint.api_key,
                "ANTHROPIC_BASE_URL": endpoint.base_url,
                "ANTHROPIC_API_KEY": endpoint.api_key,
                "SLIPSTREAM_PROMPT": path,
            }
            end = await run_program(self._command, variables, f"{given}\n".encode())
        finally:
            Path(path).unlink(missing_ok=True)
        if end.code:
            raise AgentFailed(
                f"{self._name} has ended with exit code {end.code}: {end.errors[-_LONGEST_NOTE:]}"
            )
        return end


_LONGEST_NOTE = 4000
"""Characters of a program's errors in the reason of a failure."""


def _wrong_agent(run: object, command: object) -> list[str]:
    if (run is None) == (command is None):
        return ["expected either run, the import path of a function, or command, a list of texts"]
    if run is not None and not isinstance(run, str):
        return [f"run: expected an import path, found {run!r}"]
    words = cast("list[object]", command) if isinstance(command, list | tuple) else []
    if run is None and not (words and all(isinstance(word, str) for word in words)):
        return [f"command: expected a list of texts, found {command!r}"]
    return []


def _wrong_function(path: str, function: object) -> list[str]:
    if not callable(function):
        return [f"run: {path} is no function"]
    try:
        inspect.signature(function).bind("base_url", "api_key", "prompt", {})
    except (TypeError, ValueError) as error:
        return [f"run: {path} cannot be called with (base_url, api_key, prompt, metadata): {error}"]
    return []


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def _last_json(end: ProgramEnd) -> object:
    """Return the number or the object on the last line of a program's output; None if there is none."""
    lines = end.output.strip().splitlines()
    try:
        value = cast(object, json.loads(lines[-1])) if lines else None
    except ValueError:
        return None
    return cast(object, value) if isinstance(value, int | float | dict) else None
