"""Decides from a recipe whether its collectors serve an endpoint, and imports the endpoint with SGLang."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from slipstream.configs.schema import RolloutConfig
from slipstream.rollout.engine.server_process import importing_sglang
from slipstream.rollout.system import plugins

if TYPE_CHECKING:
    from slipstream.rollout.gateway.endpoint.collector_endpoint import CollectorEndpoint


def needs_endpoint(rollout: RolloutConfig) -> bool:
    """True if the recipe's workflow or one of its hooks is to reach the policy over an endpoint.

    Raises PluginError when the workflow cannot be imported.
    """
    hooks = rollout.hooks
    if hooks is not None and (hooks.custom_generate_function or hooks.custom_rm or hooks.evaluating):
        return True
    return bool(getattr(plugins.resolve(rollout.workflow.path), "needs_endpoint", False))


def endpoint_problems(rollout: RolloutConfig) -> list[str]:
    """Return what is wrong with ``rollout.endpoint``; nothing if the workflow cannot be imported.

    The module of the workflow is imported, and nothing in it is called.
    """
    if rollout.endpoint is None:
        return []
    try:
        is_needed = needs_endpoint(rollout)
    except Exception:  # a module of the user's
        return []
    if is_needed:
        return []
    return [
        f"rollout.endpoint: neither {rollout.workflow.path} nor a hook needs an endpoint: leave the "
        "section out, or give the workflow an attribute `needs_endpoint = True`"
    ]


def load_endpoint() -> "Callable[..., AbstractAsyncContextManager[CollectorEndpoint]]":
    """Return ``collector_endpoint.serve``. Takes some seconds.

    Call it before transformers is imported, which looks once whether there is a torchvision: on a CPU SGLang
    needs a stand-in for it.
    """
    with importing_sglang():
        from slipstream.rollout.gateway.endpoint.collector_endpoint import serve
    return serve
