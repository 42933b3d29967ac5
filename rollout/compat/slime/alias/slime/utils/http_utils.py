"""Requests of hooks: to the policy's endpoint, and to servers of their own."""

import asyncio
import json
import logging
import weakref

import httpx

log = logging.getLogger(__name__)

_REFUSALS = (400, 401, 403, 404, 422)

_clients: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]" = (
    weakref.WeakKeyDictionary()
)
"""A client cannot be shared by event loops, and a process may have several."""


def _client() -> httpx.AsyncClient:
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        _clients[loop] = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)
    return _clients[loop]


async def post(url, payload, max_retries=60, headers=None):
    """POST ``payload`` as JSON, and return the reply as JSON, or as text where it is none.

    A failed request is sent again after a second, ``max_retries`` times in all; then its error is raised. The
    time limit of the episode bounds the whole.
    """
    for attempt in range(1, max_retries + 1):
        try:
            response = await _client().post(url, json=payload or {}, headers=headers)
            response.raise_for_status()
        except httpx.HTTPError as error:
            if attempt == max_retries or _is_refusal(error):
                raise
            log.info("attempt %d of %d at %s has failed: %s", attempt, max_retries, url, error)
            await asyncio.sleep(1)
        else:
            return _decoded(response.content)
    raise ValueError(f"max_retries is {max_retries}, expected at least 1")


def _is_refusal(error: httpx.HTTPError) -> bool:
    """Return whether the same request would be refused again: it is malformed or not allowed."""
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code in _REFUSALS


def _decoded(content: bytes):
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")


async def get(url):
    """GET ``url`` and return the reply, which must be JSON."""
    response = await _client().get(url)
    response.raise_for_status()
    return json.loads(response.content)


def get_rollout_num_engines(args) -> int:
    """Return the number of engines that serve the policy."""
    engines = getattr(args, "rollout_num_engines", None)
    if engines is not None:
        return int(engines)
    gpus = getattr(args, "rollout_num_gpus", None) or 0
    return max(1, gpus // (getattr(args, "rollout_num_gpus_per_engine", None) or 1)) if gpus > 0 else 0
