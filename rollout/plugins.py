"""Builds the objects that a recipe names by import path: workflows, rewards, group filters."""

import difflib
import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a judge process constructs its reward without loading the schema
    from slipstream.configs.schema import PluginConfig


class PluginError(ImportError):
    """An import path of the recipe cannot be imported, or its object cannot be constructed."""


def resolve(path: str) -> Any:
    """Return the object at ``package.module.Name``. Raises PluginError.

    The object is the user's, so its type is not known here: the caller annotates what it expects.
    """
    module_path, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_path)
    except ImportError as error:
        raise PluginError(f"{path}: cannot import {module_path}: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise PluginError(f"{path}: {module_path} has no {name!r}") from None


def build(plugin: "PluginConfig") -> Any:
    """Construct the class that ``plugin`` names with the recipe's arguments. Raises PluginError."""
    return construct(plugin.path, plugin.args)


def construct(path: str, args: Mapping[str, object]) -> Any:
    """Construct the class at ``path`` with keyword arguments. Raises PluginError."""
    factory = resolve(path)
    check_args(path, factory, args)
    try:
        return factory(**args)
    except TypeError as error:
        raise PluginError(_cannot(path, args, str(error))) from error


def check_args(path: str, factory: object, args: Mapping[str, object], *, given: int = 0) -> None:
    """Compare keyword arguments with the parameters of a class or function, without calling it.

    ``given``: number of its first parameters that get their values elsewhere. Raises PluginError with every
    argument that is unknown and every one that is missing.
    """
    if not callable(factory):
        raise PluginError(_cannot(path, args, f"it is of type {type(factory).__name__}, expected a class"))
    try:
        parameters = list(inspect.signature(factory).parameters.values())[given:]
    except (TypeError, ValueError):  # a callable that Python cannot look into
        return
    named = {
        each.name: each
        for each in parameters
        if each.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    problems = [] if takes_any else [_unknown(name, list(named)) for name in args if name not in named]
    missing = [name for name, each in named.items() if each.default is each.empty and name not in args]
    problems += [f"`{name}` is missing" for name in missing]
    if problems:
        raise PluginError(_cannot(path, args, "; ".join(problems)))


def _unknown(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    expected = f"did you mean `{nearest[0]}`?" if nearest else f"expected one of {', '.join(known) or 'none'}"
    return f"`{name}` is unknown: {expected}"


def _cannot(path: str, args: Mapping[str, object], reason: str) -> str:
    return f"{path} cannot be constructed from args {dict(args)}: {reason}"
