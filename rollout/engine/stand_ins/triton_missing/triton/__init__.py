"""Import-only triton: every attribute of every ``triton.*`` module exists, decorators pass functions through.

No kernel can run, and none is launched on a machine without a GPU.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "3.9.0"


class _Inert:
    """Base of every capitalized attribute, which can be subclassed and constructed like a class."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__()

    def __init__(self, *args, **kwargs):
        pass


class _Module(types.ModuleType):
    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (_Inert,), {}) if name[:1].isupper() else _Module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        """Return the decorated function itself, for ``@triton.jit`` and ``@triton.jit(...)``."""
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function

    def __getitem__(self, item):
        return self

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith("triton."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())
_root = _Module("triton")


def cdiv(a, b):
    return -(a // -b)


def next_power_of_2(n):
    return 1 << (n - 1).bit_length() if n > 0 else 1


class Config(_Inert):
    pass


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_root, name)
