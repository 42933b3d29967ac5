"""Small tools that hooks import."""

import importlib
from functools import cache
from typing import ClassVar


@cache
def load_function(path):
    """Return the object at ``package.module.name``."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class SingletonMeta(type):
    """Metaclass of classes that have one instance in a process."""

    _instances: ClassVar[dict] = {}  # of all such classes, which hooks may clear

    def __call__(cls, *args, **kwargs):
        if cls not in SingletonMeta._instances:
            SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._instances[cls]

    def clear_instances(cls) -> None:
        SingletonMeta._instances.clear()
