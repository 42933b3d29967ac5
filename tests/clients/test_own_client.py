"""The client whose sessions train: opened, used by other clients, rewarded, listed, forgotten."""

import asyncio

import anthropic
import httpx
import openai
import pytest

from slipstream.client import Client, GatewayRefused
from slipstream.rollout.gateway.serving.session_routes import PIECE

SAY = [{"role": "user", "content": "#say yes"}]


@pytest.fixture(scope="module")
def client(gateway):
    with Client(f"{gateway.url}/v1", "key-anna") as client:
        yield client


def ask(session, messages=SAY):
    with openai.OpenAI(base_url=session.base_url, api_key=session.api_key) as policy:
        return policy.chat.completions.create(model="m", messages=messages)


def test_a_session_is_used_by_any_client_and_rewarded(client, gateway):
    with client.session(task="sums", level=3) as session:
        answer = ask(session)
        with anthropic.Anthropic(
            base_url=session.base_url.removesuffix("/v1"), api_key=session.api_key
        ) as policy:
            policy.messages.create(
                model="m", max_tokens=20, messages=[{"role": "user", "content": "#say no"}]
            )
        given = session.reward(0.75, name="tests")
    assert given["status"] == "counted"
    assert [(turn["turn"], turn["value"]) for turn in given["turns"]] == [(0, 0.75), (1, 0.75)]
    one = session.reward(0.5, response_id=answer.id, name="style")
    assert [turn["turn"] for turn in one["turns"]] == [0]
    first, second = session.turns()
    assert first["rewards"] == {"tests": 0.75, "style": 0.5} and second["rewards"] == {"tests": 0.75}
    assert first["response_id"] in answer.id and first["versions"] == [3, 4]
    [listed] = [each for each in client.sessions() if each["session"] == session.name]
    assert listed["tags"] == {"task": "sums", "level": 3} and listed["turns"] == [first, second]
    assert all(turn["is_rewarded"] for _, turn in gateway.recorded().of(session.name))


def test_a_group_is_held_until_each_session_has_a_reward(client):
    sessions = client.group("What is 2 + 2?", 3, task="sums")
    for session in sessions:
        assert session.prompt == "What is 2 + 2?"
        ask(session)
    told = [session.reward(value) for session, value in zip(sessions, (1, 0, 1), strict=True)]
    assert [each["status"] for each in told] == ["held", "held", "counted"]
    assert [each.get("waits_for") for each in told] == [2, 1, None]
    with pytest.raises(GatewayRefused, match="409: the group"):
        sessions[0].reward(1)


@pytest.mark.parametrize("opens", ["session", "group"])
def test_a_connection_that_breaks_while_sessions_are_opened_opens_them_once(client, monkeypatch, opens):
    """The gateway opens them, and its reply is lost."""
    send, broken = client._http.request, []

    def breaking(*args, **kwargs):
        reply = send(*args, **kwargs)
        if not broken:
            broken.append(reply.json()["sessions"])
            raise httpx.ReadError("the connection is gone")
        return reply

    before = {each["session"] for each in client.sessions()}
    monkeypatch.setattr(client._http, "request", breaking)
    monkeypatch.setattr("slipstream.client.FIRST_PAUSE_S", 0.0)
    sessions = [client.session()] if opens == "session" else client.group("What?", 3)
    names = [session.name for session in sessions]
    assert broken == [names]
    assert {each["session"] for each in client.sessions()} - before == {*names}


def test_sessions_that_are_opened_again_are_named_when_they_are_durable(gateway):
    """The first reply is held back by the disk, and its client does not wait for it."""
    body, headers = {"count": 2, "key": "slow"}, {"authorization": "Bearer key-anna"}
    gateway.control(hold_log=True)
    try:
        for _ in range(2):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{gateway.url}/sessions", json=body, headers=headers, timeout=0.5)
    finally:
        gateway.control(release_log=True)
    again = httpx.post(f"{gateway.url}/sessions", json=body, headers=headers, timeout=60)
    named = httpx.post(
        f"{gateway.url}/sessions",
        json={"count": 2},
        headers=headers | {"idempotency-key": "slow"},
        timeout=60,
    )
    assert again.json() == named.json() and len(again.json()["sessions"]) == 2
    other = httpx.post(f"{gateway.url}/sessions", json={**body, "count": 3}, headers=headers, timeout=60)
    assert other.status_code == 409 and "was used to open other sessions" in other.text


def test_a_list_of_many_sessions_is_whole(client):
    names = [session.name for session in client.group("What?", 2 * PIECE + 1)]
    assert [each["session"] for each in client.sessions()][-len(names) :] == names


def test_a_key_lists_no_sessions_of_others(gateway):
    with Client(gateway.url, "key-side") as other:
        assert {each["session"] for each in other.sessions()} <= {"the-one"}


def test_a_function_is_an_episode(client):
    @client.episode
    def solve(session, text: str) -> float | None:
        ask(session, [{"role": "user", "content": f"#say {text}"}])
        return 0.25 if text == "yes" else None

    @client.episode
    async def later(session, text: str) -> float:
        return await asyncio.to_thread(lambda: 0.5 if ask(session) else 0.0)

    assert solve("yes") == 0.25 and solve("no") is None
    assert asyncio.run(later("yes")) == 0.5
    episodes = [each for each in client.sessions() if "episode" in each["tags"]]
    assert [(each["tags"]["episode"], [turn["rewards"] for turn in each["turns"]]) for each in episodes] == [
        ("solve", [{"": 0.25}]),
        ("solve", [{}]),
        ("later", [{"": 0.5}]),
    ]


def test_what_a_session_was_is_forgotten(client):
    session = client.session()
    ask(session)
    session.forget()
    with pytest.raises(GatewayRefused) as refused:
        session.turns()
    assert refused.value.status == 404


def test_what_is_wrong_is_said(client, gateway, monkeypatch):
    with pytest.raises(GatewayRefused, match="400: value: expected a finite number of float32"):
        client.session().reward(1e39)
    with pytest.raises(GatewayRefused, match=r"404: session .* has no main turn"):
        client.session().reward(1)
    with Client(gateway.url, "key-berta") as other, pytest.raises(GatewayRefused, match="404"):
        other.forget(client.session().name)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ValueError, match=r"`url` .* and `api_key`"):
        Client()
