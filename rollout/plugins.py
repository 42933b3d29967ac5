"""Builds what a recipe names by import path, the built-in code included."""

import importlib
from typing import Any

from slipstream.configs.schema import PluginConfig


class PluginError(ImportError):
    """An import path of the recipe leads nowhere."""


def resolve(path: str) -> Any:
    """The object at ``package.module.Name``. Raises PluginError."""
    module_path, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_path)
    except ImportError as error:
        raise PluginError(f"{path}: cannot import {module_path}: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise PluginError(f"{path}: {module_path} has no {name!r}") from None


def build(plugin: PluginConfig) -> Any:
    """Construct the named class with the recipe's arguments."""
    factory = resolve(plugin.path)
    try:
        return factory(**plugin.args)
    except TypeError as error:
        raise PluginError(f"{plugin.path} cannot be constructed from args {plugin.args}: {error}") from error
