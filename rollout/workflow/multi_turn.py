"""Episodes of several turns: with tools, or in any environment.

reset ──► messages ──► completion ──► step ──► messages ──► completion ──► ... ──► done, or a limit
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from slipstream.configs.schema.plugin import Plugin, PluginConfig
from slipstream.rollout.system import plugins
from slipstream.rollout.tokens.trajectory import Messages, Prompt, Trajectory, joined
from slipstream.rollout.workflow.contract import WorkflowContext
from slipstream.rollout.workflow.dialogue import Dialogue
from slipstream.rollout.workflow.environment.contract import Action, Environment
from slipstream.rollout.workflow.environment.environment_pool import EnvironmentPool
from slipstream.rollout.workflow.environment.tools import ToolEnvironment
from slipstream.rollout.workflow.limited import OnLimit, limited, wrong_on_limit

_PLUGIN: TypeAdapter[PluginConfig] = TypeAdapter(Plugin)


class MultiTurn:
    """Talks to an environment until it is done.

    rollout:
      workflow:
        path: slipstream.rollout.workflow.MultiTurn
        args: {environment: {path: my_package.GuessNumber}, max_turns: 10}
    """

    def __init__(
        self,
        environment: str | Mapping[str, object] | Callable[[], Environment],
        *,
        max_turns: int = 16,
        max_tokens: int | None = None,
        on_limit: OnLimit = "train",
        environments: int | None = None,
        reset_timeout_s: float = 60.0,
        reset_attempts: int = 3,
        template: Mapping[str, object] | None = None,
    ) -> None:
        """``environment``: import path, ``{path: ..., args: {...}}``, or what makes one. ``max_turns``: most
        completions. ``max_tokens``: largest number of tokens of a conversation, its next completion
        included; None: as many as the engines have room for. ``on_limit``: treatment of an episode that ends
        by one of the two, by a completion that was cut off, or by a limit of the environment.
        ``environments``, ``reset_timeout_s``, ``reset_attempts``: see ``EnvironmentPool``. ``template``:
        settings of the chat template.
        """
        if wrong := wrong_on_limit(on_limit):
            raise ValueError(wrong[0])
        make = environment if callable(environment) else _factory(environment)
        self._pool = EnvironmentPool(
            make,
            limit=environments,
            reset_timeout_s=reset_timeout_s,
            reset_attempts=reset_attempts,
            name=_name_of(environment),
        )
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._on_limit: OnLimit = on_limit
        self._template = dict(template or {})

    async def run(self, prompt: Prompt, context: WorkflowContext) -> Trajectory:
        async with self._pool.begun(prompt) as (environment, messages):
            settings = {**getattr(environment, "template", {}), **self._template}
            dialogue = Dialogue(context, settings)
            is_done = await self._talk(environment, dialogue, [*messages], context)
        episode = joined(dialogue.trajectories())
        return episode if is_done else limited(episode, self._on_limit)

    async def _talk(
        self,
        environment: Environment,
        dialogue: Dialogue,
        messages: Messages,
        context: WorkflowContext,
    ) -> bool:
        """Hold the conversation. Return True if it has ended by itself."""
        for _ in range(self._max_turns):
            prompt = dialogue.prompt(messages)
            sampling = context.sampling
            if self._max_tokens is not None:
                room = self._max_tokens - (0 if prompt is None else prompt.length)
                if room < 1:
                    return False
                most = min(room, sampling.max_new_tokens)
                sampling = sampling.model_copy(update={"max_new_tokens": most})
            completion = await dialogue.complete(messages, sampling, prompt=prompt)
            action = Action(dialogue.text(completion), completion.finish)
            step = await environment.step(action)
            if step.reward is not None:
                dialogue.reward_turn(step.reward)
            if step.is_truncated:
                return False
            if step.is_done:
                return not dialogue.is_cut_off
            messages += [{"role": "assistant", "content": action.text}, *step.messages]
        return False

    async def close(self) -> None:
        """Close all environments."""
        await self._pool.close()


class ToolUse(MultiTurn):
    """Answers with the help of tools.

    rollout:
      workflow:
        path: slipstream.rollout.workflow.ToolUse
        args: {tools: [my_package.tools.search], parser: qwen25, max_turns: 8}
    """

    def __init__(self, tools: Sequence[str], *, parser: str, **settings: Any) -> None:
        """``tools``, ``parser``, ``system``, ``timeout_s``, ``most_calls``: see ``ToolEnvironment``; all
        other settings are those of ``MultiTurn``."""
        own = {name: settings.pop(name) for name in ("system", "timeout_s", "most_calls") if name in settings}
        super().__init__(ToolEnvironment(list(tools), parser=parser, **own).another, **settings)


def _name_of(environment: str | Mapping[str, object] | Callable[[], Environment]) -> str:
    """Return how messages name an environment."""
    if isinstance(environment, str):
        return f"the environment {environment}"
    return f"the environment {environment['path']}" if isinstance(environment, Mapping) else "the environment"


def _factory(environment: str | Mapping[str, object]) -> Callable[[], Environment]:
    """Return a function that makes environments as configured. Raises PluginError and ValueError."""
    plugin = _PLUGIN.validate_python(environment)
    make: Callable[..., Environment] = plugins.resolve(plugin.path)
    plugins.check_args(plugin.path, make, plugin.args)
    return partial(make, **plugin.args)
