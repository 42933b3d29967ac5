"""Episodes of several turns: with tools, or in any environment.

reset ──► messages ──► completion ──► step ──► messages ──► completion ──► ... ──► done, or a limit
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from slipstream.configs.schema.plugin import Plugin, PluginConfig
from slipstream.rollout.engine.context import InvalidRequest
from slipstream.rollout.system import plugins
from slipstream.rollout.tokens.trajectory import Messages, Prompt, Trajectory, joined
from slipstream.rollout.workflow.contract import WorkflowContext
from slipstream.rollout.workflow.dialogue import Dialogue
from slipstream.rollout.workflow.environment.contract import Action, Environment, Step
from slipstream.rollout.workflow.environment.environment_pool import EnvironmentPool
from slipstream.rollout.workflow.environment.tools import (
    HARMONY,
    ToolEnvironment,
    answer_message,
    parts_parser,
    ways_to_write,
)
from slipstream.rollout.workflow.limited import OnLimit, limited, wrong_on_limit

CHANNEL = "<|channel|>"
"""Begins a channel in the format of gpt-oss, whose template refuses it within the content of a message."""

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
        included; None: as many as the context of the model has room for, the last completion of which gets
        what is left. ``on_limit``: treatment of an episode that ends
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
            try:
                completion = await dialogue.complete(messages, sampling, prompt=prompt)
            except InvalidRequest as error:
                if error.room == 0 and dialogue.has_begun:
                    return False
                raise
            action = Action(dialogue.text(completion), completion.finish)
            step = await environment.step(action)
            if step.reward is not None:
                dialogue.reward_turn(step.reward)
            if step.is_truncated:
                return False
            if step.is_done:
                return not dialogue.is_cut_off
            messages = await _continued(dialogue, messages, action, step)
        return False

    async def close(self) -> None:
        """Close all environments."""
        await self._pool.close()


async def _continued(dialogue: Dialogue, messages: Messages, action: Action, step: Step) -> Messages:
    """Return a conversation with an action and the reaction to it.

    An answer goes on as the message in which the template repeats what was sampled: with its reasoning and
    its calls apart, or as a text. Raises what the template raises if it writes neither.
    """
    apart = step.answer
    if apart is None and CHANNEL in action.text:
        parts = await asyncio.to_thread(parts_parser, HARMONY, ())
        apart = answer_message(*parts(action.text))
    if apart is None:
        return [*messages, {"role": "assistant", "content": action.text}, *step.messages]
    written: list[Messages] = []
    failure: Exception | None = None
    for answer in ways_to_write(apart, action.text):
        conversation = [*messages, answer, *step.messages]
        try:
            if dialogue.is_continued_by(conversation):
                return conversation
            written.append(conversation)
        except Exception as error:  # the template is code of the model's
            failure = failure or error
    if written:
        return written[0]
    assert failure is not None
    raise failure


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
