"""The application around the endpoints: what it says where no endpoint answers."""

import pytest
from starlette.testclient import TestClient

from slipstream.rollout.gateway.serving.app import create_admin_app
from slipstream.rollout.gateway.serving.metrics import ServingMetrics


class Broken:
    """A source that has lost its mind."""

    @property
    def version(self) -> int:
        raise RuntimeError("secret")

    def retry_after_s(self) -> None:
        return None


@pytest.fixture
def client():
    app = create_admin_app(Broken(), ServingMetrics(), lambda: 0)  # pyright: ignore[reportArgumentType]
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def test_a_mistake_of_ours_is_told_without_its_content(client):
    reply = client.get("/state")
    assert reply.status_code == 500
    assert reply.json()["error"] == {
        "message": "The server had an error while processing your request: the gateway has failed",
        "type": "server_error",
        "param": None,
        "code": None,
    }


@pytest.mark.parametrize(("method", "status"), [("GET", 404), ("OPTIONS", 404), ("HEAD", 404)])
def test_what_has_no_route_is_not_found(client, method, status):
    reply = client.request(method, "/nowhere")
    assert reply.status_code == status
    assert reply.headers["content-type"] == "application/json"


def test_a_method_that_a_path_does_not_have_is_refused_with_those_that_it_has(client):
    reply = client.post("/metrics")
    assert (reply.status_code, reply.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
    reply = client.options("/metrics")
    assert (reply.status_code, reply.content) == (204, b"")
