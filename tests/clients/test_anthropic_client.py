"""The ordinary calls of Anthropic's official client, and those of coding agents."""

import anthropic
import pytest

from tests.clients.test_errors import user
from tests.clients.tools import CALLS, PARAMETERS

TOOLS = [{"name": "weather", "description": "The weather of a city", "input_schema": PARAMETERS}]
EPHEMERAL = {"type": "ephemeral"}


@pytest.fixture
def client(gateway):
    with anthropic.Anthropic(base_url=gateway.url, api_key="key-anna", max_retries=0) as client:
        yield client


def test_a_message(client):
    raw = client.messages.with_raw_response.create(model="m", max_tokens=64, messages=user("#say Hällo"))
    message = raw.parse()
    assert [block.text for block in message.content] == ["Hällo"]
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", len("Hällo".encode()) + 1)
    assert message.session_id == raw.headers["x-session-id"]


def test_a_stream(client, gateway):
    with client.messages.stream(
        model="m", max_tokens=64, messages=user("#chunk=1 #say Grüße 😀 ENDx"), stop_sequences=["END"]
    ) as stream:
        assert "".join(stream.text_stream) == "Grüße 😀 "
        message = stream.get_final_message()
    assert message.usage.input_tokens > 0
    assert message.session_id == stream.response.headers["x-session-id"]
    assert gateway.control()["answers"][-1]["message"]["content"] == "Grüße 😀 "


@pytest.mark.parametrize("streamed", [False, True])
def test_tools(client, gateway, streamed):
    settings = {"model": "m", "max_tokens": 500, "messages": user(f"#chunk=7 #say {CALLS}"), "tools": TOOLS}
    if streamed:
        with client.messages.stream(**settings) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**settings)
    calls = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use"
    assert [call.input for call in calls] == [{"city": "Köln"}, {"city": "Rom"}]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "dry"} for call in calls]
    again = client.messages.create(
        model="m",
        max_tokens=64,
        tools=TOOLS,
        messages=[
            *settings["messages"],
            {"role": "assistant", "content": [block.model_dump() for block in calls]},
            {"role": "user", "content": results},
        ],
    )
    assert again.content[0].text == "ok"
    messages = gateway.control()["arrivals"][-1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]


def test_requests_of_coding_agents(client):
    agent = {
        "model": "claude-sonnet-4-5",
        "system": [{"type": "text", "text": "You write code.", "cache_control": EPHEMERAL}],
        "tools": [{**TOOLS[0], "cache_control": EPHEMERAL}],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "#say done", "cache_control": EPHEMERAL}],
            }
        ],
    }
    counted = client.messages.count_tokens(**agent).input_tokens
    with client.messages.stream(
        **agent, max_tokens=32_000, metadata={"user_id": "u"}, thinking={"type": "disabled"}
    ) as stream:
        message = stream.get_final_message()
    assert message.content[0].text == "done"
    assert message.usage.input_tokens == counted
    assert message.model == "claude-sonnet-4-5"


def test_errors_are_the_clients_own_classes(client, gateway):
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2047 maximum"):
        client.messages.create(model="m", max_tokens=9, messages=user("x" * 3000))
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2047 maximum"):
        list(client.messages.create(model="m", max_tokens=9, messages=user("x" * 3000), stream=True))
    with pytest.raises(anthropic.BadRequestError, match="the script rejects it"):
        list(client.messages.create(model="m", max_tokens=9, messages=user("#reject"), stream=True))
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(model="m", max_tokens=9, messages=user("a"))
    gateway.control(full_for_s=2)
    try:
        with pytest.raises(anthropic.InternalServerError, match="Overloaded"):
            client.messages.create(model="m", max_tokens=9, messages=user("a"))
    finally:
        gateway.control(full_for_s=None)
