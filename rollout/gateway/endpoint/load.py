"""Imports the endpoint, and SGLang with it, into a process that has other things to do."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from slipstream.rollout.engine.server_process import importing_sglang

if TYPE_CHECKING:
    from slipstream.rollout.gateway.endpoint.collector_endpoint import CollectorEndpoint


def load() -> "Callable[..., AbstractAsyncContextManager[CollectorEndpoint]]":
    """Return ``endpoint.serve.serve``. Takes some seconds.

    Called before transformers is imported, which looks once whether there is a torchvision: on a CPU SGLang
    needs a stand-in for it.
    """
    with importing_sglang():
        from slipstream.rollout.gateway.endpoint.collector_endpoint import serve
    return serve
