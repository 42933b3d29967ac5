"""Puts off the import of torch's compiler, which takes two seconds of a core.

transformers imports it with its tokenizers, for one class that the attention masks of compiled models use.
Driver, collectors, gateways and judges load a tokenizer, and compile nothing.
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

_MODULE = "torch._dynamo._trace_wrapped_higher_order_op"
_CLASS = "TransformGetItemToIndex"


class _Later(ModuleType):
    """Stands for the module until somebody makes an object of the class."""

    class TransformGetItemToIndex:
        def __new__(cls) -> object:
            return getattr(import_module(_MODULE), _CLASS)()


@contextmanager
def compiler_put_off() -> Generator[None]:
    """Let modules that are imported inside the block have the class without torch's compiler.

    The compiler is imported when a module first uses the class. After the block, nothing replaces it.
    """
    if _MODULE in sys.modules:
        yield
        return
    sys.modules[_MODULE] = _Later(_MODULE)
    try:
        yield
    finally:
        del sys.modules[_MODULE]
