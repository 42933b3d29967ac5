"""Looks at the code that a recipe names: it can be imported, and has the shape that it is asked for.

Modules of the user are imported, and what comes with Slipstream is constructed; nothing else is called. So
these checks run in a process of their own where they meet code of the user's (``plugin_process``).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

from slipstream.backend.driver.prepare import input_paths
from slipstream.configs.schema import PluginConfig, RunConfig
from slipstream.rollout import plugins
from slipstream.rollout.endpoint.needed import endpoint_problems
from slipstream.rollout.judge.named_model import judge_of_turns, named_model
from slipstream.rollout.reward.loading import TURNS, check_judge, wants_model
from slipstream.rollout.reward.model.judge_model import JudgeModel

OURS = "slipstream."
"""Beginning of the import paths of what comes with Slipstream."""


class Method(NamedTuple):
    """A method that code of a recipe must have."""

    name: str
    parameters: tuple[str, ...]
    is_async: bool


WORKFLOW = (Method("run", ("prompt", "context"), is_async=True),)
FILTER = (Method("keep", ("group",), is_async=False),)
ENVIRONMENT = (
    Method("reset", ("prompt",), is_async=True),
    Method("step", ("action",), is_async=True),
    Method("close", (), is_async=True),
)


class Named(NamedTuple):
    """Code that a recipe names."""

    setting: str
    path: str
    check: Callable[[RunConfig], object]
    """Raises whatever is wrong with it."""


def named_code(config: RunConfig) -> list[Named]:
    """Return all code that a recipe names, in the order of its settings."""
    rollout, named = config.rollout, list[Named]()
    if config.prepare is not None:
        named.append(Named("prepare", config.prepare.path, _check_prepare))
    if (reward := rollout.reward) is not None:
        named.append(Named("rollout.reward", reward.path, _check_reward))
        named.append(Named("judge", reward.path, _check_model_is_asked))
    if config.live is not None and config.live.train:
        named.append(Named("judge", judge_of_turns(config.judge).path, _check_judge_of_turns))
    named.append(Named("rollout.workflow", rollout.workflow.path, _check_workflow))
    if rollout.group_filter is not None:
        named.append(Named("rollout.group_filter", rollout.group_filter.path, _check_filter))
    return named


def plugin_problems(config: RunConfig) -> list[str]:
    """Return what is wrong with the code that the recipe names. Imports it into this process."""
    problems = [problem for code in named_code(config) if (problem := problem_with(code, config)) is not None]
    return [*problems, *endpoint_problems(config)]


def problem_with(code: Named, config: RunConfig) -> str | None:
    """Return what is wrong with one import path of the recipe, with its setting; None: nothing."""
    try:
        code.check(config)
    except (plugins.PluginError, ValueError) as error:
        return f"{code.setting}: {error}"
    except BaseException as error:  # modules of the user are imported, and may exit
        return f"{code.setting}: {code.path}: {plugins.raised(error)}"
    return None


def names_user_code(config: RunConfig) -> bool:
    """True if the recipe names code that does not come with Slipstream, in the arguments of its plug-ins
    too."""
    rollout = config.rollout
    settings = [config.prepare, rollout.reward, rollout.workflow, rollout.group_filter]
    if config.live is not None and config.live.train:
        settings.append(judge_of_turns(config.judge))
    return any(each is not None and is_user_code(each) for each in settings)


def is_user_code(settings: PluginConfig) -> bool:
    """True if a plug-in, or what its arguments name, does not come with Slipstream."""
    return not settings.path.startswith(OURS) or any(map(_is_foreign_path, _texts(settings.args)))


def _is_foreign_path(text: str) -> bool:
    return all(part.isidentifier() for part in text.split(".")) and "." in text and not text.startswith(OURS)


def _texts(value: object) -> list[str]:
    """Return all texts of plain data."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = list(cast("Mapping[str, object]", value).values())
    if isinstance(value, list | tuple):
        return [text for each in cast("Sequence[object]", value) for text in _texts(each)]
    return []


# ---- one check for each setting


def _check_prepare(config: RunConfig) -> None:
    assert config.prepare is not None
    given = [*input_paths(config), "seed", "say"]
    function = plugins.resolve(config.prepare.path)
    plugins.check_args(config.prepare.path, function, {**config.prepare.args, **dict.fromkeys(given)})


def _check_reward(config: RunConfig) -> None:
    assert config.rollout.reward is not None
    check_judge(config.rollout.reward.path, config.rollout.reward.args, model=model_of(config))


def _check_model_is_asked(config: RunConfig) -> None:
    """Raise ValueError if only the reward could ask the model, and it does not."""
    reward = config.rollout.reward
    judges_turns = config.live is not None and config.live.train
    if reward is None or not model_of(config) or judges_turns:
        return
    if not wants_model(plugins.resolve(reward.path)):
        raise ValueError(
            f"nobody asks the language model: rollout.reward, {reward.path}, has no parameter `judge_model`; "
            "leave the section out, or name a reward that asks, such as slipstream.rollout.reward.ModelVotes"
        )


def _check_judge_of_turns(config: RunConfig) -> None:
    judge = judge_of_turns(config.judge)
    check_judge(judge.path, judge.args, (TURNS,), model_of(config))


def _check_workflow(config: RunConfig) -> None:
    settings = config.rollout.workflow
    _check_class(settings, WORKFLOW)
    if settings.path.startswith(OURS):
        plugins.build(settings)
    environment = settings.args.get("environment")
    if settings.path.startswith(OURS) and isinstance(environment, str | dict):
        path = environment if isinstance(environment, str) else str(environment.get("path"))
        _check_methods(path, plugins.resolve(path), ENVIRONMENT)


def _check_filter(config: RunConfig) -> None:
    assert config.rollout.group_filter is not None
    _check_class(config.rollout.group_filter, FILTER)


def _check_class(settings: PluginConfig, methods: Sequence[Method]) -> None:
    factory = plugins.resolve(settings.path)
    plugins.check_args(settings.path, factory, settings.args)
    _check_methods(settings.path, factory, methods)


def _check_methods(path: str, factory: object, methods: Sequence[Method]) -> None:
    """Raise PluginError for a class without one of the methods, or with another signature.

    A function that returns an object cannot be looked into.
    """
    if not inspect.isclass(factory):
        return
    problems = [problem for method in methods if (problem := _method_problem(factory, method))]
    if problems:
        raise plugins.PluginError(f"{path}: {'; '.join(problems)}")


def _method_problem(factory: type, method: Method) -> str:
    expected = f"{'async def' if method.is_async else 'def'} {method.name}(self"
    expected += "".join(f", {name}" for name in method.parameters) + ")"
    function = inspect.getattr_static(factory, method.name, None)
    if function is None:
        return f"{factory.__name__} has no method `{method.name}`, expected `{expected}`"
    if not inspect.isfunction(function):
        return ""
    signature = inspect.signature(function)
    try:
        signature.bind(None, *method.parameters)
    except TypeError as error:
        return f"`{method.name}{signature}` cannot be called as `{expected}`: {error}"
    is_async = inspect.iscoroutinefunction(function)
    if method.is_async and not is_async and not hasattr(function, "__wrapped__"):
        return f"`{method.name}` is a plain `def`, expected `{expected}`: what it returns is awaited"
    if not method.is_async and is_async:
        return (
            f"`{method.name}` is `async def`, expected `{expected}`: a coroutine would always count as true"
        )
    return ""


def model_of(config: RunConfig) -> Callable[[], object] | None:
    """Return what makes the language model of the recipe; None: it names none."""
    setup = named_model(config)
    return setup and (lambda: JudgeModel.of(setup.settings, setup.policy))
