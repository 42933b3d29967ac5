"""Finds the code that judges: the class or function that a recipe names, and its shape.

path, args ──► class     ──► instance ──► its method `score` or `score_group`
           └─► function  with the parameters of one of these methods: the function itself
           └─► function  that returns such an instance
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeGuard, cast

from slipstream.rollout.system import plugins


class JudgeKind(NamedTuple):
    """The shape of user code that judges."""

    what: str
    method: str
    parameters: tuple[str, ...]
    """First parameters of a function that judges by itself, and does not return an object that does."""


EPISODES = JudgeKind("a reward", "score", ("prompt", "response", "trajectory"))
GROUPS = JudgeKind("a reward of groups", "score_group", ("prompt", "responses", "trajectories"))
TURNS = JudgeKind("a judge of live turns", "judge", ("turn", "next_state"))
REWARDS = (EPISODES, GROUPS)


class LoadedJudge(NamedTuple):
    """Code that judges, ready to be called."""

    call: Callable[..., object]
    """The method or function: a coroutine function or a plain one."""
    kind: JudgeKind
    plugin: object
    """The instance that the method belongs to, or the function."""


MODEL = "judge_model"
"""Parameter by which code asks for the language model that the recipe's section ``judge`` names."""


def load_judge(
    path: str,
    args: Mapping[str, object],
    kinds: Sequence[JudgeKind] = REWARDS,
    model: Callable[[], object] | None = None,
) -> LoadedJudge:
    """Return the code at ``path``, constructed with ``args``. Raises PluginError for code of another shape,
    and what a constructor raises. ``model``: returns the value of a parameter ``judge_model``.
    """
    factory = plugins.resolve(path)
    args = _with_model(path, factory, args, model)
    kind = _kind_of_function(factory, kinds)
    _check_args(path, factory, args, kind, kinds)
    if kind is not None:
        return LoadedJudge(partial(factory, **args) if args else factory, kind, factory)
    plugin = plugins.construct(path, args)
    kind = _kind_of_object(path, plugin, kinds)
    call = getattr(plugin, kind.method)
    _check_signature(path, kind, call)
    return LoadedJudge(call, kind, plugin)


def check_judge(
    path: str,
    args: Mapping[str, object],
    kinds: Sequence[JudgeKind] = REWARDS,
    model: Callable[[], object] | None = None,
) -> None:
    """Raise PluginError if ``load_judge`` could only fail. No code of the user's is called.

    What comes with Slipstream is constructed as well: it looks at nothing but its arguments, and raises
    ValueError.
    """
    factory = plugins.resolve(path)
    if path.startswith("slipstream."):
        load_judge(path, args, kinds, model)
        return
    args = _with_model(path, factory, args, model)
    kind = _kind_of_function(factory, kinds)
    _check_args(path, factory, args, kind, kinds)
    if inspect.isclass(factory):
        kind = _kind_of_object(path, factory, kinds)
        method = inspect.getattr_static(factory, kind.method)
        if inspect.isfunction(method):
            _check_signature(path, kind, partial(method, None))


def wants_model(factory: object) -> TypeGuard[Callable[..., object]]:
    """True if a class or function has a parameter ``judge_model``."""
    try:
        return callable(factory) and MODEL in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a callable that Python cannot look into
        return False


def _with_model(
    path: str, factory: object, args: Mapping[str, object], model: Callable[[], object] | None
) -> Mapping[str, object]:
    """Return the arguments, with the model if it is asked for.

    Raises PluginError if the recipe names none, unless the parameter's default is None.
    """
    if MODEL in args or not wants_model(factory):
        return args
    if model is None and inspect.signature(factory).parameters[MODEL].default is None:
        return args
    if model is None:
        raise plugins.PluginError(
            f"{path} asks a language model (parameter `{MODEL}`), but the recipe names none: expected a "
            "section `judge` of type model"
        )
    return {**args, MODEL: model()}


def is_concurrent(call: Callable[..., object]) -> bool:
    """True if ``call`` is a coroutine function, so that calls may overlap."""
    method = getattr(type(call), "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(method)


def _kind_of_function(factory: object, kinds: Sequence[JudgeKind]) -> JudgeKind | None:
    if inspect.isfunction(factory):
        parameters = tuple(inspect.signature(factory).parameters)
        for kind in kinds:
            if parameters[: len(kind.parameters)] == kind.parameters:
                return kind
    return None


def _check_args(
    path: str, factory: object, args: Mapping[str, object], kind: JudgeKind | None, kinds: Sequence[JudgeKind]
) -> None:
    """Raise PluginError for arguments that do not fit. ``kind``: that of a function which judges itself.

    Any other function is taken for one that returns an object, and may well be meant to judge.
    """
    try:
        plugins.check_args(path, factory, args, given=len(kind.parameters) if kind else 0)
    except plugins.PluginError as error:
        if kind is not None or not inspect.isfunction(factory):
            raise
        raise plugins.PluginError(f"{error}; a function that judges is {_functions(path, kinds)}") from None


def _functions(path: str, kinds: Sequence[JudgeKind]) -> str:
    name = path.rpartition(".")[2]
    return " or ".join(f"{name}({', '.join(kind.parameters)})" for kind in kinds)


def _kind_of_object(path: str, plugin: object, kinds: Sequence[JudgeKind]) -> JudgeKind:
    """Return the only kind whose method ``plugin`` has: an instance, or its class."""
    present = [kind for kind in kinds if callable(getattr(plugin, kind.method, None))]
    if not present and inspect.isclass(plugin):
        present = [kind for kind in kinds if hasattr(plugin, kind.method)]
    if len(present) == 1:
        return present[0]
    name = cast(type, plugin).__name__ if inspect.isclass(plugin) else type(plugin).__name__
    if present:
        both = " and ".join(f"`{kind.method}`" for kind in present)
        raise plugins.PluginError(f"{path}: {name} has the methods {both}; expected one of them alone")
    methods = " or ".join(f"`{kind.method}`" for kind in kinds)
    raise plugins.PluginError(
        f"{path}: {name} has no method {methods}; expected the class of {kinds[0].what}, or a function "
        f"{_functions(path, kinds)}"
    )


def _check_signature(path: str, kind: JudgeKind, call: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # a callable that Python cannot look into
        return
    try:
        signature.bind(*kind.parameters)
    except TypeError as error:
        raise plugins.PluginError(
            f"{path}: `{kind.method}{signature}` cannot be called with ({', '.join(kind.parameters)}): "
            f"{error}"
        ) from None
