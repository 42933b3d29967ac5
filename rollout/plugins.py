"""Builds the objects that a recipe names by import path: workflows, rewards, group filters."""

import importlib
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
    try:
        return factory(**args)
    except TypeError as error:
        raise PluginError(f"{path} cannot be constructed from args {dict(args)}: {error}") from error
