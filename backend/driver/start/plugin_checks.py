"""Looks at the code that a recipe names: it can be imported, and has the shape that it is asked for.

Modules of the user are imported, and what comes with Slipstream is constructed; nothing else is called. So
these checks run in a process of their own where they meet code of the user's (``plugin_process``).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

from slipstream.backend.driver.start.prepare import input_paths
from slipstream.configs.schema import PluginConfig, RunConfig
from slipstream.configs.schema.objective import PluginObjective
from slipstream.rollout.gateway.endpoint.needed import endpoint_problems
from slipstream.rollout.reward.judge.named_model import judge_of_turns, named_model
from slipstream.rollout.reward.loading import TURNS, check_judge, wants_model
from slipstream.rollout.reward.model.judge_model import JudgeModel
from slipstream.rollout.system import plugins

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


FAMILY = (Method("geometry", ("hf",), is_async=False), Method("mappings", ("geometry",), is_async=False))
DATA_SOURCE = (Method("prompts", ("start", "count"), is_async=False),)
OBJECTIVE = (Method("loss", ("tokens", "old_logp_M"), is_async=False),)
ADVANTAGE = (Method("advantage", ("batch", "micro", "scores"), is_async=False),)
PENALTY = (Method("estimate", ("logp_M", "reference_logp_M"), is_async=False),)
TRANSFORM = (Method("transform", ("batch",), is_async=False),)
METRICS = (Method("metrics", ("batch", "trained"), is_async=False),)


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
    named += [
        Named(setting, settings.path, partial(_check_object, settings, methods))
        for setting, settings, methods in _objects(config)
    ]
    if isinstance(objective := config.actor.objective, PluginObjective):
        named.append(Named("actor.objective", objective.path, _check_staleness_is_corrected_once))
    named += [
        Named(f"model.families.{kind}", path, lambda _, path=path: check_family(path))
        for kind, path in config.model.families.items()
    ]
    return named


def _objects(config: RunConfig) -> list[tuple[str, PluginConfig, Sequence[Method]]]:
    """Return the classes on ranks and beside the driver: setting, class and arguments, methods."""
    actor, source = config.actor, config.rollout.data_source
    found: list[tuple[str, PluginConfig, Sequence[Method]]] = []
    if source is not None:
        found.append(("rollout.data_source", source, DATA_SOURCE))
    if isinstance(actor.objective, PluginObjective):
        found.append(("actor.objective", actor.objective, OBJECTIVE))
    if actor.plugin_term is not None:
        found.append(("actor.advantage", actor.plugin_term, ADVANTAGE))
    if actor.kl is not None and actor.kl.penalty is not None:
        found.append(("actor.kl.penalty", actor.kl.penalty, PENALTY))
    found += [(f"actor.transforms[{place}]", each, TRANSFORM) for place, each in enumerate(actor.transforms)]
    return found + [(f"actor.metrics[{place}]", each, METRICS) for place, each in enumerate(actor.metrics)]


def plugin_problems(config: RunConfig) -> list[str]:
    """Return what is wrong with the code that the recipe names. Imports it into this process."""
    problems = [problem for code in named_code(config) if (problem := problem_with(code, config)) is not None]
    return [*problems, *endpoint_problems(config.rollout), *_traces_problems(config)]


def _traces_problems(config: RunConfig) -> list[str]:
    if config.gateway is None or config.gateway.traces is None:
        return []
    from slipstream.rollout.gateway.otlp import HEADERS, headers_of  # aiohttp takes a while to import

    try:
        headers_of(config.gateway.traces.headers_env, HEADERS)
    except ValueError as error:
        return [str(error)]
    return []


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
    settings += [each for _, each, _ in _objects(config)]
    settings += [PluginConfig(path=path) for path in config.model.families.values()]
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
    path = environment.get("path") if isinstance(environment, dict) else environment  # verifiers' have none
    if settings.path.startswith(OURS) and isinstance(path, str):
        _check_methods(path, plugins.resolve(path), ENVIRONMENT)


def _check_filter(config: RunConfig) -> None:
    assert config.rollout.group_filter is not None
    _check_class(config.rollout.group_filter, FILTER)


def _check_object(settings: PluginConfig, methods: Sequence[Method], config: RunConfig) -> None:
    _check_class(settings, methods)


def _check_staleness_is_corrected_once(config: RunConfig) -> None:
    """Raise ValueError if an objective says of itself what the recipe does not say of it."""
    objective = config.actor.objective
    assert isinstance(objective, PluginObjective)
    stated = getattr(plugins.resolve(objective.path), "corrects_staleness", None)
    if isinstance(stated, bool) and stated is not objective.corrects_staleness:
        also = ", and actor.use_decoupled_loss to false" if stated and config.actor.use_decoupled_loss else ""
        raise ValueError(
            f"{objective.path} says `corrects_staleness = {stated}`, and the recipe "
            f"{str(objective.corrects_staleness).lower()}: set actor.objective.corrects_staleness to "
            f"{str(stated).lower()}{also}"
        )


def check_family(path: str) -> None:
    """Raise PluginError for a model family that lacks a function, or whose functions cannot be called."""
    family = plugins.resolve_module(path)
    problems: list[str] = []
    for method in FAMILY:
        function = getattr(family, method.name, None)
        expected = f"def {method.name}({', '.join(method.parameters)})"
        if not callable(function):
            problems.append(f"there is no function `{method.name}`, expected `{expected}`")
            continue
        try:
            inspect.signature(function).bind(*method.parameters)
        except TypeError as error:
            place = plugins.place_of_code(function)
            problems.append(
                f"`{method.name}{inspect.signature(function)}` cannot be called as `{expected}`: {error} "
                f"({place})"
            )
        except ValueError:  # a callable that Python cannot look into
            continue
    if problems:
        raise plugins.PluginError(f"{path}: {'; '.join(problems)}")


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
        place = plugins.place_of_code(factory)
        return f"{factory.__name__} has no method `{method.name}`, expected `{expected}` ({place})"
    if not inspect.isfunction(function):
        return ""
    signature, place = inspect.signature(function), plugins.place_of_code(function)
    try:
        signature.bind(None, *method.parameters)
    except TypeError as error:
        return f"`{method.name}{signature}` cannot be called as `{expected}`: {error} ({place})"
    is_async = inspect.iscoroutinefunction(function)
    if method.is_async and not is_async and not hasattr(function, "__wrapped__"):
        return (
            f"`{method.name}` is a plain `def`, expected `{expected}`: what it returns is awaited ({place})"
        )
    if not method.is_async and is_async:
        reason = "nothing awaits it, and a coroutine would always count as true"
        return f"`{method.name}` is `async def`, expected `{expected}`: {reason} ({place})"
    return ""


def model_of(config: RunConfig) -> Callable[[], object] | None:
    """Return a function that makes the language model of the recipe; None: the recipe names none."""
    setup = named_model(config.judge, config.model)
    return setup and (lambda: JudgeModel.of(setup.settings, setup.policy, setup.template_args))
