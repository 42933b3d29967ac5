"""Prompts and parsers by import path: user code that the recipe names, and what it is called with."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, cast

from slipstream.configs.schema.plugin import PluginConfig
from slipstream.rollout.reward.live import JudgedTurn
from slipstream.rollout.reward.model.prompts import message_text, transcript
from slipstream.rollout.reward.model.votes import Vote
from slipstream.rollout.reward.value import number_of
from slipstream.rollout.system import plugins
from slipstream.rollout.tokens.trajectory import Messages

Prompt = Callable[[JudgedTurn, Messages], Messages]
Parser = Callable[[str], Vote | None]


class Given(NamedTuple):
    """Everything that the parameters of a prompt may name."""

    turn: JudgedTurn
    next_state: Messages
    response_text: str
    next_state_text: str
    next_state_role: str

    @classmethod
    def of(cls, turn: JudgedTurn, next_state: Messages) -> "Given":
        """Return all values. ``next_state_text`` is the text of one message, or a transcript of several."""
        text = message_text(next_state[0]) if len(next_state) == 1 else transcript(next_state)
        role = str(next_state[-1].get("role") or "user") if next_state else "user"
        return cls(turn, next_state, message_text(turn.answer), text, role)


def load_prompt(plugin: PluginConfig) -> Prompt:
    """Return the function that makes a question of a turn. Raises PluginError."""
    function, args = plugins.resolve(plugin.path), plugin.args
    named = [name for name in _parameters(plugin.path, function) if name in Given._fields]
    given: Mapping[str, object] = dict.fromkeys(named)
    plugins.check_args(plugin.path, function, {**args, **given})
    if not {"turn", "next_state", "next_state_text"} & set(named):
        raise plugins.PluginError(
            f"{plugin.path}: its parameters name nothing of a turn; expected some of "
            f"{', '.join(Given._fields)}"
        )

    def prompt(turn: JudgedTurn, next_state: Messages) -> Messages:
        values = Given.of(turn, next_state)._asdict()
        messages: object = function(**{name: values[name] for name in named}, **args)
        return _messages(plugin.path, messages)

    return prompt


def load_parser(plugin: PluginConfig) -> Parser:
    """Return the function that reads a vote in a text. Raises PluginError."""
    function, args = plugins.resolve(plugin.path), plugin.args
    if not _parameters(plugin.path, function):
        raise plugins.PluginError(f"{plugin.path}: it takes no parameter; expected the text of an answer")
    plugins.check_args(plugin.path, function, args, given=1)
    read = partial(function, **args)
    return lambda text: _vote(plugin.path, read(text))


def _parameters(path: str, function: object) -> list[str]:
    if not callable(function) or inspect.isclass(function):
        raise plugins.PluginError(f"{path} is of type {type(function).__name__}, expected a function")
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:  # a callable that Python cannot look into
        raise plugins.PluginError(f"{path} has no readable signature: {error}") from error


def _messages(path: str, value: object) -> Messages:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages = cast("list[object]", value) if isinstance(value, list) else []
    if not messages or not all(isinstance(message, dict) for message in messages):
        kind = type(cast(object, value)).__name__
        raise TypeError(f"{path} has returned {kind}, expected a list of messages, or a text")
    return cast(Messages, messages)


def _vote(path: str, value: object) -> Vote | None:
    """Return what a parser has returned as a vote. Raises TypeError for what is none, NoNumber."""
    if value is None or isinstance(value, Vote):
        return value
    is_pair = isinstance(value, tuple) and len(cast("tuple[object, ...]", value)) == 2
    score, hint = cast("tuple[object, object]", value if is_pair else (value, None))
    if score is None:
        return None
    if hint is not None and not isinstance(hint, str):
        raise TypeError(f"{path} has returned a hint of type {type(hint).__name__}, expected a text or None")
    return Vote(number_of(score), hint or None)
