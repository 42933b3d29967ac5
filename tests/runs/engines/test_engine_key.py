"""A real SGLang server: every route asks for the key, which stands in no log and on no command line."""

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.leftovers import members
from slipstream.rollout.system.key import Key, new_key
from tests.runs.engines.conftest import Server, version_of
from tests.runs.exposure import beyond_loopback, command_lines, is_private, listening, unix_sockets

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))

BEYOND = [
    ("GET", "/health"),
    ("GET", "/health_generate"),
    ("GET", "/metrics"),
    ("OPTIONS", "/generate"),
    ("GET", "/no_such_route"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
]
"""Requests that SGLang's own key does not concern."""


def status(server: Server, method: str, path: str, key: Key | None) -> int:
    headers = {"Content-Type": "application/json"} | ({"Authorization": key.header} if key else {})
    body = b"{}" if method in ("POST", "PUT", "PATCH") else None
    request = urllib.request.Request(server.address.url + path, body, headers, method=method)
    try:
        with OPENER.open(request, timeout=60) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture(scope="module")
def routes(server: Server) -> list[tuple[str, str]]:
    """Every route that the server tells of."""
    headers = {"Authorization": server.address.key.header}
    with OPENER.open(urllib.request.Request(f"{server.address.url}/openapi.json", headers=headers)) as reply:
        paths = json.load(reply)["paths"]
    routes = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    return [(method, re.sub(r"{[^}]*}", "0", path)) for method, path in routes]


@pytest.mark.parametrize("key", [None, new_key()], ids=["without a key", "with another key"])
def test_every_route_refuses_a_request_without_the_key_which_has_no_effect(
    server: Server, routes: list[tuple[str, str]], key: Key | None
):
    asked = {path for _, path in routes}
    assert {"/generate", "/pause_generation", "/update_weights_from_disk", "/flush_cache"} <= asked
    assert {"/slipstream/replica", "/slipstream/replica/begin", "/v1/chat/completions"} <= asked
    statuses = {(method, path): status(server, method, path, key) for method, path in routes + BEYOND}
    assert {route: code for route, code in statuses.items() if code != 401} == {}
    completion, sampling = GrowingCompletion(), SamplingConfig(max_new_tokens=4)
    [version, _] = server.ask(
        version_of,
        lambda client: client.generate([1, 2, 3], sampling, completion, version=0),
    )
    assert version == 0
    assert 1 <= len(completion.tokens) <= 4, "it was not paused"


def test_the_server_serves_requests_with_the_key(server: Server):
    key = server.address.key
    assert status(server, "GET", "/health", key) == 200
    assert status(server, "GET", "/slipstream/replica", key) == 200
    assert status(server, "GET", "/no_such_route", key) == 404


def test_the_key_stands_in_no_log_and_on_no_command_line(server: Server):
    log = server.process._log_path.read_text()
    assert "'api_key': '<hidden>'" in log, "SGLang writes its arguments there"
    processes = members(server.process.pid)
    assert "slipstream.rollout.engine.launch" in command_lines(processes)
    for text in (log, command_lines(processes)):
        assert server.address.key not in text
    for pid in processes:
        assert server.address.key.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    assert "401 Client Error" not in log, "the server's calls of its own routes have the key"


def test_the_server_and_its_processes_listen_on_loopback_and_in_private_folders_only(server: Server):
    processes = members(server.process.pid)
    sockets = listening(processes)
    assert len(sockets) > 2
    assert beyond_loopback(sockets) == []
    paths = unix_sockets(processes)
    assert paths
    assert [path for path in paths if not is_private(path)] == []
