"""Sets the address at which hooks find the policy, and makes slime's client for requests to it."""

import inspect
from urllib.parse import urlsplit

from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.system.plugins import resolve
from slipstream.rollout.workflow.endpoint import OpenEndpoint


def address(args: SlimeArguments, endpoint: OpenEndpoint) -> None:
    """Let hooks find an endpoint under slime's names."""
    url = urlsplit(endpoint.base_url)
    args.sglang_router_ip = f"episode:{endpoint.api_key}@{url.hostname}"
    args.sglang_router_port = url.port


def prepare_requests(arguments: SlimeArguments) -> None:
    """Make the HTTP client of a checkout of slime, which its own start would make. The alias needs none."""
    requests = resolve("slime.utils.http_utils.post")
    prepare = inspect.getmodule(requests)
    make = getattr(prepare, "init_http_client", None)
    if make is not None:
        make(arguments)
