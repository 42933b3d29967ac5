"""Imports the endpoint, and SGLang with it, into a process that has other things to do."""

import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from slipstream.rollout.engine.process import prepare_for_sglang

if TYPE_CHECKING:
    from slipstream.rollout.endpoint.serve import CollectorEndpoint


def load() -> "Callable[..., AbstractAsyncContextManager[CollectorEndpoint]]":
    """Return ``endpoint.serve.serve``. Takes some seconds.

    Called before transformers is imported, which looks once whether there is a torchvision: on a CPU SGLang
    needs a stand-in for it.
    Stand-ins that SGLang needs on a CPU are not left on the path: processes that this one starts later, such
    as judges, inherit it.
    """
    path = list(sys.path)
    prepare_for_sglang()
    from slipstream.rollout.endpoint.serve import serve

    sys.path[:] = path
    return serve
